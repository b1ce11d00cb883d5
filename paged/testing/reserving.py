"""The policies by name: the longest sequence under each, and how often each is drawn."""

from __future__ import annotations

PREALLOCATES = ("static", "orca-max", "orca-pow2", "orca-oracle", "tgi")
"""A row gets all the blocks that it reserves when it is admitted."""
RESERVES = (*PREALLOCATES, "trtllm-guaranteed-no-evict")
"""Each sequence of a request needs room for all its blocks, also for those that it shares."""
RESERVES_ALL = ("static", "orca-max", "tgi", "trtllm-guaranteed-no-evict")
"""All that a request may ever need is reserved when it is admitted, whatever its `expected_tokens`."""
IN_REGIONS = ("orca-max", "orca-pow2", "orca-oracle")
"""A sequence lies in one piece, and pieces are powers of two blocks."""
DRAWN = (
    *(("paged",) * 9),
    "paged-cached",
    *("static", "orca-max", "orca-pow2", "orca-oracle", "tgi", "vllm", "vllm"),
    *("trtllm-guaranteed-no-evict", "trtllm-max-utilization", "fastgen", "sarathi"),
)
"""Names for worlds that are drawn: half of them are ours."""
DRAWN_FOR_ENGINES = tuple(name for name in DRAWN if name not in IN_REGIONS)
"""The same where examples are few and have to preempt often."""


def most_blocks(policy: str, num_blocks: int, num_sequences: int = 1) -> int:
    """Blocks that each of so many sequences can have if the pool has no others, as far as is known before they run."""
    if policy not in RESERVES:
        return num_blocks
    each = num_blocks // num_sequences
    if policy not in IN_REGIONS:
        return each
    return max((2**k for k in range(num_blocks) if 2**k <= each), default=0)
