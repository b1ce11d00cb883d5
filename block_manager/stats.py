"""The memory layer's figures, plain numbers with units. Knows what is counted. Does not know who reads it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """One moment's figures.

    Blocks by state, a tier each; `usage` is used ÷ all device blocks; `fragmentation` is the share of slots in used device
    blocks that hold no computed token (0 with no used block). Lookups: `queries` counts admissions that looked, `query_tokens`
    their tokens, `hit_tokens` what they found; `pending_hit_tokens` is the part of it that another row of the same batch was
    still computing. With the prefix cache off all four stay 0.
    """

    num_blocks: int
    free: int
    cached: int
    used: int
    host_blocks: int
    host_free: int
    host_cached: int
    host_used: int
    usage: float
    fragmentation: float
    queries: int
    query_tokens: int
    hit_tokens: int
    pending_hit_tokens: int

    @property
    def hit_rate(self) -> float:
        """hit_tokens ÷ query_tokens; 0 before the first query."""
        return self.hit_tokens / self.query_tokens if self.query_tokens else 0.0
