"""The memory layer's figures, plain numbers with units. Knows what is counted. Does not know who reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class HitFigures(NamedTuple):
    """The lookups' figures of MemoryStats."""

    queries: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    pending_hit_tokens: int = 0
    host_hit_tokens: int = 0


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """One moment's figures.

    Blocks by state, a tier each; `usage` is used ÷ all device blocks; `fragmentation` is the share of slots in used device
    blocks that hold no computed token (0 with no used block). Lookups: `queries` counts admissions that looked, `query_tokens`
    their tokens, `hit_tokens` what they found; `pending_hit_tokens` is the part of it that another row of the same batch was
    still computing, `host_hit_tokens` the part that came from the host, `device_hit_tokens` the rest. With the prefix cache off all
    stay 0. Blocks of content copied to the host when they left the device, and back on a hit: `offloaded_blocks`, `loaded_blocks`.
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
    host_hit_tokens: int
    offloaded_blocks: int
    loaded_blocks: int

    @property
    def device_hit_tokens(self) -> int:
        """Hit tokens that were on the device, computed."""
        return self.hit_tokens - self.pending_hit_tokens - self.host_hit_tokens

    @property
    def hit_rate(self) -> float:
        """hit_tokens ÷ query_tokens; 0 before the first query."""
        return self.hit_tokens / self.query_tokens if self.query_tokens else 0.0
