"""Policies are data: each named system is one line that combines small strategies.

Knows the strategies' names and what each system combines. Does not know how a strategy works: admission.py, composition.py
and preemption.py do.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from block_manager import InvalidConfig
from scheduler.errors import UnknownPolicy

_STRATEGIES = {
    "order": ("priority", "fcfs"),
    "batching": ("continuous", "whole"),
    "reservation": ("prompt", "max"),
    "composition": ("decodes_first", "in_order"),
    "victim": ("latest", "fewest_blocks"),
    "take": ("tail", "whole"),
    "preemption": ("recompute", "swap", "cheapest"),
}


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """One combination of strategies.

    name             how it is called
    summary          one sentence for people
    order            "priority": smaller Request.priority first, then arrival; "fcfs": arrival alone
    batching         "continuous": requests join and leave at every step; "whole": a batch is admitted together and runs until
                     its last request has ended
    reservation      "prompt": admission asks for the prompt's blocks; "max": it draws blocks for prompt and max_tokens
    composition      "decodes_first": decodes, then chunks of prompts (Dynamic SplitFuse); "in_order": by order alone
    chunked          prompts may be split over steps to fill the token budget
    watermark        share of the pool that admission and return leave available, never asked for while nothing runs
    victim           who gives blocks up first among the running: "latest" in order, or the one with "fewest_blocks"
    take             what a preemption takes: "tail", the missing blocks off the victim's tail; "whole", all
    preemption       what becomes of it: "recompute", "swap", or "cheapest" of the two by cost
    max_preemptions  after so many a request re-enters only with its worst case reserved; None: no bound
    """

    name: str
    summary: str = ""
    order: Literal["priority", "fcfs"] = "priority"
    batching: Literal["continuous", "whole"] = "continuous"
    reservation: Literal["prompt", "max"] = "prompt"
    composition: Literal["decodes_first", "in_order"] = "decodes_first"
    chunked: bool = True
    watermark: float = 0.0
    victim: Literal["latest", "fewest_blocks"] = "latest"
    take: Literal["tail", "whole"] = "whole"
    preemption: Literal["recompute", "swap", "cheapest"] = "recompute"
    max_preemptions: int | None = None

    def __post_init__(self) -> None:
        for field, known in _STRATEGIES.items():
            if getattr(self, field) not in known:
                raise InvalidConfig(
                    f"policy {self.name}: {field} has to be one of {', '.join(known)}; got {getattr(self, field)!r}."
                )
        if not isinstance(self.watermark, (int, float)):
            raise InvalidConfig(f"policy {self.name}: watermark has to be a share of the pool; got {self.watermark!r}.")
        if not 0 <= self.watermark < 1:
            raise InvalidConfig(f"policy {self.name}: watermark has to be in [0, 1); got {self.watermark}.")
        if self.max_preemptions is not None and (type(self.max_preemptions) is not int or self.max_preemptions < 1):
            raise InvalidConfig(
                f"policy {self.name}: max_preemptions has to be at least 1; got {self.max_preemptions}."
            )


# fmt: off
POLICIES: dict[str, Policy] = {policy.name: policy for policy in (
    Policy(name="static", summary="llama generate: a whole batch, preallocated to its longest, until the last has ended", batching="whole", reservation="max", composition="in_order", chunked=False),
    Policy(name="vllm", summary="blocks on demand, running before waiting in order, the latest recomputed", composition="in_order", watermark=0.01),
    Policy(name="fastgen", summary="Dynamic SplitFuse: decodes first, then chunks of prompts up to the budget; the latest recomputed", composition="decodes_first"),
    Policy(name="paged", summary="Dynamic SplitFuse, watermark, only the missing blocks off the latest tail by the cheaper way, bounded preemptions", composition="decodes_first", watermark=0.02, take="tail", preemption="cheapest", max_preemptions=3),
)}
# fmt: on


def policy_named(policy: str | Policy) -> Policy:
    """The policy of that name, or the policy itself. Raises UnknownPolicy with the list of known ones."""
    if isinstance(policy, Policy):
        return policy
    if not isinstance(policy, str) or policy not in POLICIES:
        raise UnknownPolicy(str(policy), POLICIES)
    return POLICIES[policy]


class Costs(msgspec.Struct, frozen=True, kw_only=True):
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
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
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
