"""The memory layer's figures, plain numbers with units."""

from __future__ import annotations

from dataclasses import dataclass

from .layout import LayerGroup

WINDOW = 1_000
"""Lookups that the recent hit rate looks back on."""


@dataclass(frozen=True, slots=True)
class GroupStats:
    """A layer group at one moment, in pages.

    used         held by rows and batches
    cached       with content, and nobody's
    passed       given back in front so far by a window or chunk, from the table of each row by itself
    lost_tokens  found of prompts in the full group, behind hits that this group ended: it allowed least
    """

    group: LayerGroup
    used: int
    cached: int
    passed: int
    lost_tokens: int


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """One moment's figures.

    Blocks by state, for each tier; `usage` is used ÷ all device blocks; `fragmentation` is the share of slots in used
    device blocks that hold no computed token (0 with no used block).

    `queries` counts admissions that looked, `query_tokens` their tokens, `hit_tokens` what they found. Of these another
    row of the batch was still computing `pending_hit_tokens`, `host_hit_tokens` came from the host, `device_hit_tokens`
    are the rest. All are 0 without a prefix cache. The `recent` figures are of the last WINDOW lookups.

    `evicted_blocks` of content left the device; `idle_steps` sums the steps (batches composed) that each was unused,
    `lifetime_steps` those since its run of content began. `offloaded_blocks` of content were copied to the host when
    they left the device, `loaded_blocks` back on a hit. `groups`: of a model whose layers are of several kinds; else empty.
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
    recent_query_tokens: int
    recent_hit_tokens: int
    evicted_blocks: int
    idle_steps: int
    lifetime_steps: int
    offloaded_blocks: int
    loaded_blocks: int
    groups: tuple[GroupStats, ...] = ()

    @property
    def device_hit_tokens(self) -> int:
        """Hit tokens that were on the device, computed."""
        return self.hit_tokens - self.pending_hit_tokens - self.host_hit_tokens

    @property
    def recent_hit_rate(self) -> float:
        """recent_hit_tokens ÷ recent_query_tokens; 0 before the first query."""
        return self.recent_hit_tokens / self.recent_query_tokens if self.recent_query_tokens else 0.0

    @property
    def mean_idle_steps(self) -> float:
        """Steps that an evicted block had been unused for, on average; 0 before the first eviction."""
        return self.idle_steps / self.evicted_blocks if self.evicted_blocks else 0.0

    @property
    def mean_lifetime_steps(self) -> float:
        """Steps from the beginning of an evicted block's content to its eviction, on average; 0 before the first."""
        return self.lifetime_steps / self.evicted_blocks if self.evicted_blocks else 0.0

    @property
    def hit_rate(self) -> float:
        """hit_tokens ÷ query_tokens; 0 before the first query."""
        return self.hit_tokens / self.query_tokens if self.query_tokens else 0.0
