"""Policies as data: each named system is one line that combines strategies. docs/policies.md says where each comes
from, strategies.py has the class of each word, and `paged.study` registers more systems."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from paged.base.arguments import is_number
from paged.errors import InvalidConfig, UnknownPolicy

# Words that need one of certain words in another field. A region is released whole.
_GOES_WITH = (
    ("layout", ("counted", "region"), "reservation", ("max", "expected")),
    ("layout", ("region",), "take", ("whole",)),
    ("layout", ("region",), "preemption", ("recompute",)),
    ("foresight", ("predicted", "expected"), "reservation", ("prompt",)),
)
_COUNTS, _LIMITS = ("known_outputs", "max_passes", "stall_limit"), ("max_preemptions", "default_budget")


def _is_share(value: Any) -> bool:
    return is_number(value) and 0 <= value <= 1


def _is_count(value: Any, least: int = 0, *, or_none: bool = False) -> bool:
    return (or_none and value is None) or (type(value) is int and value >= least)


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """One combination of strategies.

    name             how it is called
    summary          one sentence for people
    order            "priority": smaller Request.priority first, then arrival; "fcfs": arrival alone; "fair": by
                     priority, then the tenant (Request.tenant) that was given least for its weight; "cached": by
                     priority, then the request that finds most of its tokens cached
    max_lead         with order cached, and needed there: seconds by which one may have come later and still pass another
    reservation      what each sequence asks for before it enters: "prompt": blocks of its prompt; "max": of prompt and
                     max_tokens; "expected": of prompt and expected_tokens, or max_tokens if unknown or reached
    foresight        what room admission asks for: "none": today's use; "predicted": the peak if outputs become as long
                     as others did; "expected": as long as Request.expected_tokens says, else as others
    known_outputs    ended outputs from which on their lengths alone count; before, as many assumed ones stand in,
                     log-uniform, and the quantile is more careful
    quantile         share of outputs within the guess for 16 rows: 0 is bold, 1 careful; nearer 0.25 for more rows
    waste_target     recomputed and swapped share of computed tokens at which the quantile stays; more makes it careful,
                     less bold. None: no effect
    stall_target     share of ended sequences that may have stood still for more than `stall_limit` steps for lack of
                     blocks; each makes the quantile careful, each other one a little bolder. None: no effect
    quantile_range   limits of the quantile
    max_passes       how often one of the next four may pass a waiting request that does not fit
    layout           how more than the prompt is reserved: "blocks": drawn at entry; "counted": kept by count, drawn
                     when needed; "region": in one piece, which needs `strategies` (see paged.study)
    composition      "decodes_first": decodes, then chunks of prompts (Dynamic SplitFuse); "in_order": by order alone
    chunked          prompts may be split over steps to fill the token budget
    watermark        share of the pool kept from entry and return while anything runs; with foresight and n > 16 rows,
                     √(16 ÷ n) of that
    victim           which running request gives blocks up first: the "latest" in order, or that with "fewest_blocks"
    take             what a preemption takes: "tail", the missing blocks off the victim's tail; "whole", all
    preemption       what becomes of them: "recompute", "swap", or "cheapest" of the two by cost
    max_preemptions  after so many a request re-enters only with its worst case reserved; None: no bound
    default_budget   the named system's tokens a step, for information only; None: no such limit
    strategies       called once a scheduler with the policy, the `Strategies` of its words, and the blocks of the pool;
                     returns the Strategies to use, such as `usual._replace(order=Mine())`. None: those of its words
    """

    name: str
    summary: str = ""
    order: Literal["priority", "fcfs", "fair", "cached"] = "priority"
    max_lead: float | None = None
    reservation: Literal["prompt", "max", "expected"] = "prompt"
    foresight: Literal["none", "predicted", "expected"] = "none"
    known_outputs: int = 64
    quantile: float = 0.5
    waste_target: float | None = None
    stall_target: float | None = None
    stall_limit: int = 5
    quantile_range: tuple[float, float] = (0.1, 0.8)
    max_passes: int = 0
    layout: Literal["blocks", "counted", "region"] = "blocks"
    composition: Literal["decodes_first", "in_order"] = "decodes_first"
    chunked: bool = True
    watermark: float = 0.0
    victim: Literal["latest", "fewest_blocks"] = "latest"
    take: Literal["tail", "whole"] = "whole"
    preemption: Literal["recompute", "swap", "cheapest"] = "recompute"
    max_preemptions: int | None = None
    default_budget: int | None = None
    strategies: Callable[[Policy, Any, int], Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise InvalidConfig(f"a policy's name has to be a non-empty string; got {self.name!r}.")
        for field, known in _STRATEGIES.items():
            strategy = getattr(self, field)
            if not isinstance(strategy, str) or strategy not in known:
                raise self._wrong(f"{field} has to be one of {', '.join(known)}; got {strategy!r}.")
        for field, strategies, other, needed in _GOES_WITH:
            if (strategy := getattr(self, field)) in strategies and (got := getattr(self, other)) not in needed:
                raise self._wrong(f"{field} {strategy} goes with {other} {' or '.join(needed)}; got {got}.")
        if (self.order == "cached") != (self.max_lead is not None):
            raise self._wrong(
                f"order cached needs max_lead, and no other order takes it; got {self.max_lead!r} with order {self.order}."
            )
        span, lead, waste, stall = self.quantile_range, self.max_lead, self.waste_target, self.stall_target
        is_span = isinstance(span, (tuple, list)) and len(span) == 2 and all(map(_is_share, span))
        for field, is_right, wanted in (
            ("chunked", isinstance(self.chunked, bool), "True or False"),
            ("watermark", _is_share(self.watermark) and self.watermark < 1, "a share of the pool in [0, 1)"),
            ("quantile_range", is_span and span[0] <= span[1], "two shares from 0 to 1, rising"),
            (
                "max_lead",
                lead is None or (is_number(lead) and 0 <= lead < math.inf),
                "a number of seconds of at least 0",
            ),
            ("waste_target", waste is None or (_is_share(waste) and waste > 0), "in (0, 1], or None"),
            ("stall_target", stall is None or (_is_share(stall) and 0 < stall < 1), "in (0, 1), or None"),
            ("strategies", self.strategies is None or callable(self.strategies), "a function, or None"),
            *((name, _is_count(getattr(self, name)), "at least 0") for name in _COUNTS),
            *((name, _is_count(getattr(self, name), 1, or_none=True), "at least 1, or None") for name in _LIMITS),
        ):
            if not is_right:
                raise self._wrong(f"{field} has to be {wanted}; got {getattr(self, field)!r}.")
        least, most = span
        if not (_is_share(self.quantile) and least <= self.quantile <= most):
            raise self._wrong(f"quantile has to be in quantile_range {self.quantile_range}; got {self.quantile!r}.")
        if self.layout == "region" and self.strategies is None:
            raise self._wrong("layout region needs strategies that hand out regions, such as those of paged.study.")

    def _wrong(self, what: str) -> InvalidConfig:
        return InvalidConfig(f"policy {self.name}: {what}")


_STRATEGIES = {name: get_args(hint) for name, hint in get_type_hints(Policy).items() if get_origin(hint) is Literal}
"""The words of each field that names a strategy."""

# fmt: off
_PAGED = Policy(name="paged", summary="Dynamic SplitFuse; admission looks ahead by what outputs became; only the missing blocks off the latest tail by the cheaper way, bounded preemptions", foresight="predicted", quantile=0.55, waste_target=0.01, stall_target=0.01, quantile_range=(0.2, 0.8), max_passes=4, watermark=0.02, take="tail", preemption="cheapest", max_preemptions=3)

POLICIES: dict[str, Policy] = {policy.name: policy for policy in (
    Policy(name="vllm", summary="blocks on demand, running before waiting in order, the latest recomputed", composition="in_order", watermark=0.01, default_budget=2048),
    Policy(name="trtllm-guaranteed-no-evict", summary="blocks on demand, and the prompt and max_tokens of all fit: none is ever preempted", reservation="max", layout="counted", chunked=False, default_budget=8192),
    Policy(name="trtllm-max-utilization", summary="a request that fits now comes in, prompts whole; the latest is paused and recomputed", chunked=False, default_budget=8192),
    Policy(name="fastgen", summary="Dynamic SplitFuse: decodes first, then chunks of prompts up to the budget; the latest recomputed", default_budget=768),
    Policy(name="sarathi", summary="stall-free: decodes, then prompts that were begun, then new ones in small chunks; vLLM's memory", watermark=0.01, default_budget=512),
    _PAGED,
    msgspec.structs.replace(_PAGED, name="paged-fair", summary="the same, and tenants get shares of the tokens by their weights when they compete", order="fair"),
    msgspec.structs.replace(_PAGED, name="paged-cached", summary="the same, and who finds most of its prompt cached comes first, before those that came up to ten minutes earlier", order="cached", max_lead=600.0),
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
    """What giving blocks up costs, in seconds; only the ratio decides. A swapped block (a page, where layers are of
    several kinds) is copied twice (out and in), cached content that comes back on a hit once more. Recomputing
    positions a to b costs `seconds_per_token` · (b - a) · (1 + (a + b) / 2 / attention_knee): beyond the knee (tokens)
    attention outweighs the linear layers. The defaults resemble an 8B model on one A100: 2 MiB a block over 25 GB/s,
    8,000 prompt tokens a second."""

    seconds_per_swapped_block: float = 84e-6
    seconds_per_token: float = 125e-6
    attention_knee: float = 16_384.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not is_number(value) or value < 0:
                raise InvalidConfig(f"costs: {name} has to be a number of at least 0; got {value!r}.")
        if self.attention_knee == 0:
            raise InvalidConfig("costs: attention_knee has to be above 0 tokens; infinity leaves attention out.")

    def swap(self, num_blocks: int) -> float:
        """Seconds to swap so many blocks out and in again."""
        return 2 * num_blocks * self.seconds_per_swapped_block

    def recompute(self, start: int, stop: int) -> float:
        """Seconds to compute positions `start` to `stop` - 1 again."""
        return self.seconds_per_token * (stop - start) * (1 + (start + stop) / 2 / self.attention_knee)
