"""Policies are data: each named system is one line that combines small strategies.

Knows the strategies' names, which of them go together and what each system combines; where each comes from stands in
docs/policies.md. Does not know how a strategy works: strategies.py names the class of each.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from paged.errors import InvalidConfig, UnknownPolicy

from .arguments import UNLIMITED, is_number

_STRATEGIES = {
    "order": ("priority", "fcfs", "fair"),
    "batching": ("continuous", "whole"),
    "reservation": ("prompt", "max", "expected", "pow2", "context", "longest"),
    "foresight": ("none", "predicted", "expected"),
    "layout": ("blocks", "counted", "region"),
    "composition": ("decodes_first", "in_order", "apart", "lockstep"),
    "padding": ("none", "left"),
    "victim": ("latest", "fewest_blocks"),
    "take": ("tail", "whole"),
    "preemption": ("recompute", "swap", "cheapest"),
}
# What a strategy makes no sense without.
_GOES_WITH = (
    (("composition", "lockstep"), ("batching", ("whole",))),
    (("padding", "left"), ("composition", ("lockstep",))),
    (("reservation", "longest"), ("batching", ("whole",))),
    (("reservation", "longest"), ("layout", ("blocks",))),
    (("layout", "counted"), ("reservation", ("max", "expected", "pow2", "context"))),
    (("layout", "region"), ("reservation", ("max", "expected", "pow2", "context"))),
    (("foresight", "predicted"), ("reservation", ("prompt",))),
    (("foresight", "expected"), ("reservation", ("prompt",))),
    (("foresight", "predicted"), ("batching", ("continuous",))),
    (("foresight", "expected"), ("batching", ("continuous",))),
    (("layout", "region"), ("batching", ("continuous",))),
    # A region is given back as it was taken, in one piece.
    (("layout", "region"), ("take", ("whole",))),
    (("layout", "region"), ("preemption", ("recompute",))),
)


def _is_share(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """One combination of strategies.

    name             how it is called
    summary          one sentence for people
    order            "priority": smaller Request.priority first, then arrival; "fcfs": arrival alone; "fair": by priority, and then first
                     those of the tenant (Request.tenant) that was given least for its weight
    batching         "continuous": requests join and leave at every step; "whole": a batch is admitted together and runs until
                     its last request has ended
    reservation      what a request asks for before it enters, for each sequence: "prompt": the blocks of its prompt; "max": of prompt
                     and max_tokens; "expected": of prompt and Request.expected_tokens; "pow2": of prompt and these, rounded up to a
                     power of two; "context": of the longest sequence that model and pool allow; "longest": of the longest prompt and
                     the largest max_tokens of its batch. Without expected_tokens, or once they are reached, max_tokens stands in
    foresight        whether admission asks for room at the moment at which those who are in will need most: "none": today's use decides;
                     "predicted": outputs become as long as others were; "expected": as long as Request.expected_tokens says, and as
                     others were where it says nothing
    known_outputs    outputs that have to have ended before their lengths alone count: it begins with so many assumed ones, evenly spread over the
                     logarithms of all lengths, and with the most careful quantile
    quantile         share of outputs that "predicted" takes to end within its guess, where it begins and with 16 rows: 0 is bold, 1 careful.
                     With more rows errors cancel, and it is nearer to 0.25; with fewer farther from it
    waste_target     share of computed tokens that were recomputed or swapped at which the quantile is as said; more makes it careful, less
                     bold. None: that says nothing
    stall_target     share of ended sequences whose request may have stood still for more than `stall_limit` steps at a time, because blocks were
                     taken from it; each makes the quantile careful, each other one a little bolder. None: that says nothing
    quantile_range   between which it moves
    max_passes       how often a waiting request that does not fit is passed by one of the next four
    layout           how more than the prompt is reserved: "blocks": drawn when it enters; "counted": kept by count and drawn when tokens
                     need it; "region": drawn, and a region of a power of two blocks has to be free (see modelled/regions.py)
    composition      "decodes_first": decodes, then chunks of prompts (Dynamic SplitFuse); "in_order": by order alone; "apart": a step
                     computes prompts or decodes, never both; "lockstep": all rows of a batch compute the same positions
    padding          where "lockstep" begins: "none": with as many tokens as the shortest prompt has, and longer ones go on token by
                     token; "left": with the longest prompt, as if shorter ones were padded
    chunked          prompts may be split over steps to fill the token budget
    watermark        share of the pool that admission and return leave available, never asked for while nothing runs; with foresight and n
                     rows, more than 16, √(16 ÷ n) of that
    waiting_served_ratio
                     under "apart", newcomers interrupt decoding when at least so many times the running requests can enter together
    max_waiting_steps
                     or when so many steps in a row have decoded; None: they wait for the ratio
    victim           who gives blocks up first among the running: "latest" in order, or the one with "fewest_blocks"
    take             what a preemption takes: "tail", the missing blocks off the victim's tail; "whole", all
    preemption       what becomes of it: "recompute", "swap", or "cheapest" of the two by cost
    max_preemptions  after so many a request re-enters only with its worst case reserved; None: no bound
    default_budget   tokens a step that the named system uses unless told otherwise; None: it has no such limit. Only told: the
                     scheduler's is max_tokens_per_step
    """

    name: str
    summary: str = ""
    order: Literal["priority", "fcfs", "fair"] = "priority"
    batching: Literal["continuous", "whole"] = "continuous"
    reservation: Literal["prompt", "max", "expected", "pow2", "context", "longest"] = "prompt"
    foresight: Literal["none", "predicted", "expected"] = "none"
    known_outputs: int = 64
    quantile: float = 0.5
    waste_target: float | None = None
    stall_target: float | None = None
    stall_limit: int = 5
    quantile_range: tuple[float, float] = (0.1, 0.8)
    max_passes: int = 0
    layout: Literal["blocks", "counted", "region"] = "blocks"
    composition: Literal["decodes_first", "in_order", "apart", "lockstep"] = "decodes_first"
    padding: Literal["none", "left"] = "none"
    chunked: bool = True
    watermark: float = 0.0
    waiting_served_ratio: float = 0.0
    max_waiting_steps: int | None = None
    victim: Literal["latest", "fewest_blocks"] = "latest"
    take: Literal["tail", "whole"] = "whole"
    preemption: Literal["recompute", "swap", "cheapest"] = "recompute"
    max_preemptions: int | None = None
    default_budget: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise InvalidConfig(f"a policy's name has to be a non-empty string; got {self.name!r}.")
        for field, known in _STRATEGIES.items():
            strategy = getattr(self, field)
            if not isinstance(strategy, str) or strategy not in known:
                raise self._wrong(f"{field} has to be one of {', '.join(known)}; got {getattr(self, field)!r}.")
        for (field, strategy), (other, needed) in _GOES_WITH:
            if getattr(self, field) == strategy and getattr(self, other) not in needed:
                raise self._wrong(
                    f"{field} {strategy} goes with {other} {' or '.join(needed)}; got {getattr(self, other)}."
                )
        if not isinstance(self.chunked, bool):
            raise self._wrong(f"chunked has to be True or False; got {self.chunked!r}.")
        if isinstance(self.watermark, bool) or not isinstance(self.watermark, (int, float)):
            raise self._wrong(f"watermark has to be a share of the pool; got {self.watermark!r}.")
        if not 0 <= self.watermark < 1:
            raise self._wrong(f"watermark has to be in [0, 1); got {self.watermark}.")
        least, most = self._range_checked()
        if not _is_share(self.quantile) or not least <= self.quantile <= most:
            raise self._wrong(f"quantile has to be in quantile_range [{least}, {most}]; got {self.quantile!r}.")
        if self.waste_target is not None and not (_is_share(self.waste_target) and self.waste_target > 0):
            raise self._wrong(f"waste_target has to be in (0, 1], or None; got {self.waste_target!r}.")
        if self.stall_target is not None and not (_is_share(self.stall_target) and 0 < self.stall_target < 1):
            raise self._wrong(f"stall_target has to be in (0, 1), or None; got {self.stall_target!r}.")
        for field in ("known_outputs", "max_passes", "stall_limit"):
            value = getattr(self, field)
            if type(value) is not int or value < 0:
                raise self._wrong(f"{field} has to be at least 0; got {value!r}.")
        ratio = self.waiting_served_ratio
        if not is_number(ratio) or not 0 <= ratio <= UNLIMITED:
            raise self._wrong(
                f"waiting_served_ratio has to be a finite number of at least 0, at most 2^62; got {ratio!r}."
            )
        for field in ("max_waiting_steps", "max_preemptions", "default_budget"):
            value = getattr(self, field)
            if value is not None and (type(value) is not int or value < 1):
                raise self._wrong(f"{field} has to be at least 1; got {value!r}.")

    def _range_checked(self) -> tuple[float, float]:
        try:
            least, most = self.quantile_range
        except (TypeError, ValueError):
            raise self._wrong(f"quantile_range has to be two shares; got {self.quantile_range!r}.") from None
        if not (_is_share(least) and _is_share(most) and least <= most):
            raise self._wrong(f"quantile_range has to be two shares from 0 to 1, rising; got {self.quantile_range!r}.")
        return least, most

    def _wrong(self, what: str) -> InvalidConfig:
        return InvalidConfig(f"policy {self.name}: {what}")


# fmt: off
POLICIES: dict[str, Policy] = {policy.name: policy for policy in (
    Policy(name="static", summary="llama generate: a whole batch in lockstep, each row preallocated to the longest, until the last has ended", batching="whole", reservation="longest", composition="lockstep", chunked=False),
    Policy(name="orca-max", summary="iteration-level batches; a contiguous region of the model's whole context each", reservation="context", layout="region", composition="in_order", chunked=False),
    Policy(name="orca-pow2", summary="the same with the output's length rounded up to a power of two", reservation="pow2", layout="region", composition="in_order", chunked=False),
    Policy(name="orca-oracle", summary="the same with the output's length known before", reservation="expected", layout="region", composition="in_order", chunked=False),
    Policy(name="tgi", summary="prompt and max_tokens drawn at once; newcomers interrupt decoding when enough wait, or after 20 steps", reservation="max", composition="apart", chunked=False, waiting_served_ratio=1.2, max_waiting_steps=20, default_budget=4096),
    Policy(name="vllm", summary="blocks on demand, running before waiting in order, the latest recomputed", composition="in_order", watermark=0.01, default_budget=2048),
    Policy(name="trtllm-guaranteed-no-evict", summary="blocks on demand, and the prompt and max_tokens of all fit: none is ever preempted", reservation="max", layout="counted", chunked=False, default_budget=8192),
    Policy(name="trtllm-max-utilization", summary="a request that fits now comes in, prompts whole; the latest is paused and recomputed", chunked=False, default_budget=8192),
    Policy(name="fastgen", summary="Dynamic SplitFuse: decodes first, then chunks of prompts up to the budget; the latest recomputed", default_budget=768),
    Policy(name="sarathi", summary="stall-free: decodes, then prompts that were begun, then new ones in small chunks; vLLM's memory", watermark=0.01, default_budget=512),
    Policy(name="paged", summary="Dynamic SplitFuse; admission looks ahead by what outputs became; only the missing blocks off the latest tail by the cheaper way, bounded preemptions", foresight="predicted", quantile=0.55, waste_target=0.01, stall_target=0.01, quantile_range=(0.2, 0.8), max_passes=4, watermark=0.02, take="tail", preemption="cheapest", max_preemptions=3),
    Policy(name="paged-fair", summary="the same, and tenants get shares of the tokens by their weights when they compete", order="fair", foresight="predicted", quantile=0.55, waste_target=0.01, stall_target=0.01, quantile_range=(0.2, 0.8), max_passes=4, watermark=0.02, take="tail", preemption="cheapest", max_preemptions=3),
)}
# fmt: on


def policy_named(policy: str | Policy) -> Policy:
    """The policy of that name, or the policy itself. Raises UnknownPolicy with the list of known ones."""
    if isinstance(policy, Policy):
        return policy
    if not isinstance(policy, str) or policy not in POLICIES:
        raise UnknownPolicy(str(policy), POLICIES)
    return POLICIES[policy]


class Costs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What giving blocks up costs, in seconds; only the ratio decides.

    A block that is swapped travels twice (out and in), one of content that comes back on a hit once more. Recomputing tokens from position a to b costs
    `seconds_per_token` · (b - a) · (1 + (a + b) / 2 / attention_knee): beyond the knee (tokens) attention outweighs the linear
    layers. The defaults resemble an 8B model on one A100: 2 MiB a block over 25 GB/s, 8,000 prompt tokens a second.
    """

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

    def load(self, num_blocks: int) -> float:
        """Seconds to copy so many blocks from the host."""
        return num_blocks * self.seconds_per_swapped_block

    def recompute(self, start: int, stop: int) -> float:
        """Seconds to compute positions `start` to `stop` - 1 again."""
        return self.seconds_per_token * (stop - start) * (1 + (start + stop) / 2 / self.attention_knee)
