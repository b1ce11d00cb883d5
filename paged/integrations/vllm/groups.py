"""vLLM's KV cache groups as layer groups of our memory: a page of our pool is a block id of vLLM.

    vLLM  full | window | window | window | state | state      each with a table of block ids out of one pool
    ours  full | window, 3 pages a block  | state, 2 pages     first page of a block: the first of its groups, and so on

Layers of one kind and reach share one of our tables, so their blocks are drawn, held and evicted together. If blocks of vLLM's
groups differ in size, our block has the least common multiple of their tokens, and takes more pages of a group with smaller
blocks. vLLM's layers write a state to the block that they read. If our row goes on in another block, the state is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import lcm
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from paged.base.growing import rising_from
from paged.block_manager import BlockManager, LayerGroup
from paged.integrations.engine_tables import EngineTables
from paged.scheduler import Batch

_STATES = LayerGroup("state")
# By exact type: subclasses keep something else.
_KINDS: dict[type, Callable[[Any], LayerGroup]] = {
    FullAttentionSpec: lambda spec: LayerGroup("full"),
    MLAAttentionSpec: lambda spec: LayerGroup("full"),
    SlidingWindowSpec: lambda spec: LayerGroup("window", spec.sliding_window + spec.extra_retained_tokens),
    ChunkedLocalAttentionSpec: lambda spec: LayerGroup("chunk", spec.attention_chunk_size),
    MambaSpec: lambda spec: _STATES,
}
CARRIED = ", ".join(sorted(kind.__name__ for kind in _KINDS))
"""The kinds of groups that are carried, by the names of vLLM's specifications."""
# Tokens of a block where all layers keep states, so that no group says how many.
BETWEEN_STATES = 16
# Block 0 is vLLM's null block.
FIRST_BLOCK = 1


class Part(NamedTuple):
    """A vLLM group within ours: its block ids are `pages` pages of each block of `group`, from `first` on."""

    group: int
    first: int
    pages: int
    is_state: bool


class Groups(NamedTuple):
    """What a model's layers keep. `parts`: one for each vLLM group. `zeroes`: the runner clears new blocks, and needs their ids."""

    block_size: int
    layers: tuple[LayerGroup, ...]
    parts: tuple[Part, ...]
    zeroes: bool

    @property
    def is_plain(self) -> bool:
        """Whether all layers keep all tokens, and our block is one of vLLM's."""
        return self.layers == (LayerGroup("full"),)

    def __str__(self) -> str:
        return ", ".join(f"{group.name}: {group.pages}" for group in self.layers)


def specs_of(memory: Any) -> list[Any]:
    """Return the specification of each group of a KVCacheConfig. Layers that differ only in their sizes are of one kind."""
    specs = [group.kv_cache_spec for group in memory.kv_cache_groups]
    return [next(iter(getattr(spec, "kv_cache_specs", {}).values()), spec) for spec in specs]


def others_in(memory: Any) -> list[str]:
    """Return the groups that are not carried, by the names of their specifications."""
    specs = [group.kv_cache_spec for group in memory.kv_cache_groups]
    each = [layer for spec in specs for layer in getattr(spec, "kv_cache_specs", {"": spec}).values()]
    names = {type(spec).__name__ for spec in each if type(spec) not in _KINDS}
    names |= {f"{type(spec).__name__} that looks ahead" for spec in each if getattr(spec, "non_causal", False)}
    hosted = any(getattr(group, "host_resident", False) for group in memory.kv_cache_groups)
    return [*sorted(names), *["a group on the host"] * hosted, *["no group at all"] * (not memory.kv_cache_groups)]


def states_in(memory: Any) -> list[Any]:
    """Return the specifications of groups whose layers keep a state."""
    return [spec for spec in specs_of(memory) if type(spec) is MambaSpec]


def groups_of(memory: Any) -> Groups:
    """Return the layer groups of a KVCacheConfig whose groups are all carried."""
    kinds = [(_KINDS[type(spec)](spec), spec.block_size) for spec in specs_of(memory)]
    sizes = [size for kind, size in kinds if kind != _STATES]
    size = lcm(*sizes) if sizes else BETWEEN_STATES
    order, pages = list(dict.fromkeys(kind for kind, _ in kinds)), dict[LayerGroup, int]()
    parts = []
    for kind, its_size in kinds:
        its_pages = 1 if kind == _STATES else size // its_size
        parts.append(Part(order.index(kind), pages.get(kind, 0), its_pages, kind == _STATES))
        pages[kind] = pages.get(kind, 0) + its_pages
    layers = tuple([LayerGroup(kind.kind, kind.reach, pages[kind]) for kind in order])
    return Groups(size, layers, tuple(parts), bool(memory.needs_kv_cache_zeroing))


class RunnerTables:
    """The state of each group's tables in the runner. In a new table, blocks that a window has passed are the null block. In a table that only grew
    they stay, since the runner no longer reads them."""

    def __init__(self, manager: BlockManager, groups: Groups, most_tokens: int) -> None:
        """`most_tokens`: of a sequence; the runner's tables have no columns beyond them."""
        self._manager, self._groups, self._most_tokens = manager, groups, most_tokens
        self.tables = EngineTables(manager, FIRST_BLOCK)
        self._states = [number for number, group in enumerate(groups.layers) if group.kind == "state"]

    def copies_of(self, batch: Batch) -> list[Any]:
        """Return the copies to make before a step: those that were decided, and those of states that their rows must not overwrite. Such a row goes on
        in the copy, so its tables are sent again."""
        pairs = batch.moves.device_to_device.tolist()
        for number in self._states:
            assert batch.groups is not None, "a model with states has groups"
            read, write = batch.groups[number].read, batch.groups[number].write
            moves = ((read != write) & (read >= 0)).any(axis=1)
            if moves.any():
                self.tables.mark_wrong(batch.rows[moves])
                pairs += zip(read[moves].ravel().tolist(), write[moves].ravel().tolist())
        return [KVCacheBlockCopy(source + FIRST_BLOCK, target + FIRST_BLOCK) for source, target in pairs]

    def new_in(self, batch: Batch) -> list[int] | None:
        """Return the block ids that a step begins to fill, of layers that keep tokens; None: the runner needs none."""
        if not self._groups.zeroes:
            return None
        size = self._manager.block_size
        begins, ends = -(-(batch.seq_lens - batch.num_tokens) // size), -(-batch.seq_lens // size)
        counts = ends - begins
        rows, columns = batch.rows.repeat(counts), rising_from(begins, counts)
        kept = [number for number in range(len(self._groups.layers)) if number not in self._states]
        found = [self._ids(batch, number, rows, columns).ravel() for number in kept]
        return np.concatenate(found).tolist() if found and len(rows) else None

    def changes(self, batch: Batch) -> Iterator[tuple[int, tuple[list[int], ...], bool]]:
        """Yield each row of the batch whose tables differ from the runner's: its place, by vLLM group the block ids to put at the end of its tables, and
        whether to replace the tables by them."""
        if self._groups.is_plain:
            for place, table, is_whole in self.tables.changes(batch):
                yield place, (table,), is_whole
            return
        due = self.tables.take_due(batch)
        if due is None:
            return
        counts = due.stops - due.starts
        rows, columns = due.rows.repeat(counts), rising_from(due.starts, counts)
        ids = [
            self._ids(batch, number, *((due.rows, 0 * due.rows) if number in self._states else (rows, columns)))
            for number in range(len(self._groups.layers))
        ]
        bounds = [0, *counts.cumsum().tolist()]
        for i, (place, is_whole) in enumerate(zip(due.places.tolist(), due.is_wrong.tolist())):
            tables = []
            for group, first, pages, is_state in self._groups.parts:
                # A state has one block for all tokens.
                its = slice(i, i + is_whole) if is_state else slice(bounds[i], bounds[i + 1])
                found = ids[group][its, first : first + pages].ravel()
                if not is_state:
                    columns_in_all = -(-self._most_tokens * pages // self._manager.block_size)
                    found = found[: max(columns_in_all - due.starts.item(i) * pages, 0)]
                tables.append(found.tolist())
            yield place, tuple(tables), is_whole

    def _ids(self, batch: Batch, number: int, rows: NDArray[np.int64], columns: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return vLLM's ids of the pages of these blocks of a group, int32 [n, pages]; the null block if there is none."""
        pages = (
            batch.block_tables[rows, columns][:, None]
            if batch.groups is None
            else batch.groups[number].at(rows, columns)
        )
        return pages + np.int32(FIRST_BLOCK)
