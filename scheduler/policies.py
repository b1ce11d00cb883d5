"""Policies as data: each named system is one line that combines strategies. docs/policies.md says where each comes
from, strategies.py has the class of each word, and `paged.study` registers more systems."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from paged.base.fields import AtLeast0, AtLeast1, Name, checked_fields
from paged.errors import InvalidConfig, UnknownPolicy

# (field, its words, another field, the words that they need there). A region is released whole.
_GOES_WITH = (
    ("layout", ("counted", "region"), "reservation", ("max", "expected")),
    ("layout", ("region",), "take", ("whole",)),
    ("layout", ("region",), "preemption", ("recompute",)),
    ("foresight", ("predicted", "expected"), "reservation", ("prompt",)),
)
_Share = Annotated[float, Meta(ge=0, le=1)]


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """One combination of strategies.

    name             how it is called
    summary          one sentence for people
    order            "priority": smaller Request.priority first, then arrival; "fcfs": arrival alone; "fair": by
                     priority, then the tenant (Request.tenant) that was given least for its weight; "cached": by
                     priority, then the request that finds most of its tokens cached
    max_lead         order "cached" needs it: a request may pass others that came at most so many seconds before it
    reservation      what each sequence asks for before it enters: "prompt": blocks of its prompt; "max": of prompt and
                     max_tokens; "expected": of prompt and expected_tokens, or max_tokens if unknown or reached
    foresight        the room that a request needs to enter. "none": now; "predicted": for the peak if outputs become
                     as long as earlier ones; "expected": for the peak by Request.expected_tokens, else as predicted
    known_outputs    so many assumed output lengths, log-uniform, stand in at first; each ended output replaces one, and
                     until all are replaced the quantile is higher
    quantile         share of outputs not longer than guessed: 0 is bold, 1 careful; for 16 rows, with more nearer 0.25
    waste_target     share of recomputed and swapped tokens, of all computed ones, that is accepted: more raise the
                     quantile, fewer lower it. None: no effect
    stall_target     share of ended sequences that may have stood still for more than `stall_limit` steps for lack of
                     blocks: each such one raises the quantile, every other lowers it a little. None: no effect
    quantile_range   least and largest quantile
    max_passes       how often a waiting request that does not fit may be passed by one of the next four
    layout           how more than the prompt is reserved: "blocks": drawn at entry; "counted": kept by count, drawn
                     when needed; "region": in one piece, which needs `strategies` (see paged.study)
    composition      "decodes_first": decodes, then chunks of prompts (Dynamic SplitFuse); "in_order": by order alone
    chunked          prompts may be split over steps to fill the token budget
    watermark        share of the pool that stays free when a request enters or returns while others run; with foresight
                     and n > 16 rows, √(16 ÷ n) of it
    victim           which running request gives blocks up first: the "latest" in order, or that with "fewest_blocks"
    take             what a preemption takes: "tail", the missing blocks off the victim's tail; "whole", all
    preemption       what becomes of these blocks: "recompute", "swap", or "cheapest" of the two by cost
    max_preemptions  after so many a request re-enters only with its worst case reserved; None: no bound
    default_budget   the named system's own tokens a step, for information only; None: it has no such limit
    strategies       called once for each scheduler with the policy, its usual `Strategies`, and the blocks of the pool;
                     returns those to use, such as `usual._replace(order=Mine())`. None: the usual ones
    """

    name: Name
    summary: str = ""
    order: Literal["priority", "fcfs", "fair", "cached"] = "priority"
    max_lead: Annotated[float, Meta(ge=0, le=sys.float_info.max)] | None = None
    reservation: Literal["prompt", "max", "expected"] = "prompt"
    foresight: Literal["none", "predicted", "expected"] = "none"
    known_outputs: AtLeast0 = 64
    quantile: _Share = 0.5
    waste_target: Annotated[float, Meta(gt=0, le=1)] | None = None
    stall_target: Annotated[float, Meta(gt=0, lt=1)] | None = None
    stall_limit: AtLeast0 = 5
    quantile_range: tuple[_Share, _Share] = (0.1, 0.8)
    max_passes: AtLeast0 = 0
    layout: Literal["blocks", "counted", "region"] = "blocks"
    composition: Literal["decodes_first", "in_order"] = "decodes_first"
    chunked: bool = True
    watermark: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    victim: Literal["latest", "fewest_blocks"] = "latest"
    take: Literal["tail", "whole"] = "whole"
    preemption: Literal["recompute", "swap", "cheapest"] = "recompute"
    max_preemptions: AtLeast1 | None = None
    default_budget: AtLeast1 | None = None
    strategies: Callable[[Policy, Any, int], Any] | None = None

    def __post_init__(self) -> None:
        checked_fields(Policy, msgspec.structs.asdict(self), self._wrong)
        for field, strategies, other, needed in _GOES_WITH:
            if (strategy := getattr(self, field)) in strategies and (got := getattr(self, other)) not in needed:
                raise self._wrong(f"{field} {strategy} goes with {other} {' or '.join(needed)}; got {got}.")
        if (self.order == "cached") != (self.max_lead is not None):
            raise self._wrong(
                f"order cached needs max_lead, and no other order takes it; got {self.max_lead!r} with order {self.order}."
            )
        least, most = self.quantile_range
        if least > most:
            raise self._wrong(f"quantile_range has to rise; got {self.quantile_range}.")
        if not least <= self.quantile <= most:
            raise self._wrong(f"quantile has to be in quantile_range {self.quantile_range}; got {self.quantile!r}.")
        if self.layout == "region" and self.strategies is None:
            raise self._wrong("layout region needs strategies that hand out regions, such as those of paged.study.")

    def _wrong(self, what: str) -> InvalidConfig:
        return InvalidConfig(f"policy {self.name}: {what}")


# fmt: off
_PAGED = Policy(name="paged", summary="Dynamic SplitFuse; a request enters if all fit at their peak, by guessed outputs; the latest loses only the missing blocks, the cheaper way, and not too often", foresight="predicted", quantile=0.55, waste_target=0.01, stall_target=0.01, quantile_range=(0.2, 0.8), max_passes=4, watermark=0.02, take="tail", preemption="cheapest", max_preemptions=3)

POLICIES: dict[str, Policy] = {policy.name: policy for policy in (
    Policy(name="vllm", summary="blocks on demand, running before waiting in order, the latest recomputed", composition="in_order", watermark=0.01, default_budget=2048),
    Policy(name="trtllm-guaranteed-no-evict", summary="blocks on demand, and the prompt and max_tokens of all fit: none is ever preempted", reservation="max", layout="counted", chunked=False, default_budget=8192),
    Policy(name="trtllm-max-utilization", summary="a request that fits now comes in, prompts whole; the latest is paused and recomputed", chunked=False, default_budget=8192),
    Policy(name="fastgen", summary="Dynamic SplitFuse: decodes first, then chunks of prompts up to the budget; the latest recomputed", default_budget=768),
    Policy(name="sarathi", summary="stall-free: decodes, then prompts that were begun, then new ones in small chunks; vLLM's memory", watermark=0.01, default_budget=512),
    _PAGED,
    msgspec.structs.replace(_PAGED, name="paged-fair", summary="as paged; tenants that compete get shares of the tokens by their weights", order="fair"),
    msgspec.structs.replace(_PAGED, name="paged-cached", summary="as paged; the request with most of its prompt cached enters first, before others that came up to ten minutes earlier", order="cached", max_lead=600.0),
)}
# fmt: on


def register_policy(policy: Policy) -> None:
    """Register a policy under its name, for schedulers and lists. Raises InvalidConfig if the name is taken."""
    if not isinstance(policy, Policy):
        raise InvalidConfig(f"a Policy is needed; got {policy!r}.")
    if policy.name in POLICIES:
        raise InvalidConfig(f"there is a policy {policy.name} already; give this one another name.")
    POLICIES[policy.name] = policy


def policy_named(policy: str | Policy) -> Policy:
    """Return the policy of that name, or the policy itself. Raises UnknownPolicy, which lists the known ones."""
    if isinstance(policy, Policy):
        return policy
    if not isinstance(policy, str) or policy not in POLICIES:
        raise UnknownPolicy(str(policy), POLICIES)
    return POLICIES[policy]


class Costs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What giving blocks up costs, in seconds; only the ratio decides. A swapped block (a page, of layers of several
    kinds) is copied twice, out and in; cached content that a hit loads from the host, once. Recomputing positions a to
    b costs `seconds_per_token` · (b - a) · (1 + (a + b) / 2 / attention_knee): beyond the knee (tokens), attention
    costs more than the linear layers. The defaults resemble an 8B model on one A100: 2 MiB a block over 25 GB/s,
    8,000 prompt tokens a second."""

    seconds_per_swapped_block: Annotated[float, Meta(ge=0)] = 84e-6
    seconds_per_token: Annotated[float, Meta(ge=0)] = 125e-6
    attention_knee: Annotated[float, Meta(gt=0)] = 16_384.0

    def __post_init__(self) -> None:
        checked_fields(Costs, msgspec.structs.asdict(self), lambda what: InvalidConfig(f"costs: {what}"))

    def swap(self, num_blocks: int) -> float:
        """Return the seconds that it takes to swap so many blocks out and in again."""
        return 2 * num_blocks * self.seconds_per_swapped_block

    def recompute(self, start: int, stop: int) -> float:
        """Return the seconds that it takes to compute positions `start` to `stop` - 1 again."""
        return self.seconds_per_token * (stop - start) * (1 + (start + stop) / 2 / self.attention_knee)
