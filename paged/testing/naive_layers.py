"""What layers of several kinds keep of a sequence, in plain Python: the rules for worlds, shadow and invariants.

A group is anything with `kind`, `reach` and `pages`, such as a `paged.LayerGroup`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

Groups = Sequence[Any]


def has_states(groups: Groups) -> bool:
    """Whether any of these layers has a state: a row can then stand at its last token or at 0 only."""
    return any(group.kind == "state" for group in groups)


def front(group: Any, num_tokens: int) -> int:
    """The first position that a token behind so many others attends to, in a group that is no state."""
    if group.kind == "full":
        return 0
    return max(0, num_tokens - group.reach + 1) if group.kind == "window" else num_tokens - num_tokens % group.reach


def _reached(group: Any, block_size: int) -> int:
    """Blocks that a window or chunk reaches back over from the end of a block."""
    span: int = group.reach - (group.kind == "window")
    return -(-span // block_size)


def pages_for(groups: Groups, num_tokens: int, block_size: int) -> int:
    """Pages that a sequence of so many tokens needs at most while its tokens come a block at a time."""
    blocks, pages = -(-num_tokens // block_size), 0
    for group in groups:
        most = blocks
        if group.kind == "state":
            most = min(blocks, 1)
        elif group.kind != "full":
            # Those that it reaches back over, one more that it begins in, and the one that is being filled.
            most = min(blocks, _reached(group, block_size) + 2)
        pages += most * group.pages
    return pages


def full_pages(groups: Groups) -> int:
    """Pages of a block of the full group; 0 without one."""
    return sum(group.pages for group in groups if group.kind == "full")


def spare_pages(groups: Groups, keeps: bool) -> int:
    """Pages that a sequence needs on top for a while, if content is kept: one state is read, another written."""
    return sum(group.pages for group in groups if group.kind == "state") if keeps else 0


def longest_in(groups: Groups, num_pages: int, block_size: int, most: int) -> int:
    """Tokens of the longest sequence that so many pages hold, in whole blocks, up to `most` tokens."""
    blocks = 0
    while blocks * block_size < most and pages_for(groups, (blocks + 1) * block_size, block_size) <= num_pages:
        blocks += 1
    return blocks * block_size


@dataclass
class NaiveRow:
    """One sequence: its watermarks, the blocks of its table, how many more are on the host, and how many of each window
    or chunk were released in front."""

    num_known: int
    launched: int = 0
    computed: int = 0
    blocks: int = 0
    reserved: int = 0
    on_host: int = 0
    is_swapped: bool = False
    gone: dict[int, int] = field(default_factory=dict)


class NaiveLayers:
    """What a manager without a prefix cache holds for layers of several kinds: how many pages are free, and which
    columns of each group are there. Methods are those of `paged.BlockManager`; where it has to refuse, they return how
    many pages are too few."""

    def __init__(self, groups: Groups, num_pages: int, block_size: int, host_pages: int = 0) -> None:
        self.groups, self.num_pages, self.size = tuple(groups), num_pages, block_size
        self.host_pages = host_pages
        self.rows: dict[int, NaiveRow] = {}
        # Batches that are out, oldest first: of each row the first token and the one behind the last.
        self.batches: list[dict[int, tuple[int, int]]] = []

    @property
    def num_free(self) -> int:
        """Pages that no row holds."""
        held = 0
        for number, group in enumerate(self.groups):
            held += group.pages * sum(sum(self.there(row, number)) for row in self.rows)
        return self.num_pages - held

    @property
    def num_free_on_host(self) -> int:
        """Host pages that no row holds."""
        return self.host_pages - sum(map(self.pages_on_host, self.rows))

    def pages_on_host(self, row: int) -> int:
        """Pages of a row's last columns that lie on the host: of a state once all its columns do."""
        state, pages = self.rows[row], 0
        stop = state.blocks + state.on_host
        for number, group in enumerate(self.groups):
            columns = stop - max(state.blocks, state.gone.get(number, 0))
            if group.kind == "state":
                columns = int(stop > 0 and not state.blocks)
            pages += columns * group.pages
        return pages

    def there(self, row: int, number: int) -> list[bool]:
        """Which columns of a row a group has. A state has one."""
        state = self.rows[row]
        if self.groups[number].kind == "state":
            return [state.blocks > 0]
        return [column >= state.gone.get(number, 0) for column in range(state.blocks)]

    def lacking(self, wanted: Mapping[int, int]) -> int:
        """Pages that rows draw to have so many blocks."""
        pages = 0
        for row, blocks in wanted.items():
            have = self.rows[row].blocks
            if blocks > have:
                pages += sum(g.pages * ((have == 0) if g.kind == "state" else blocks - have) for g in self.groups)
        return pages

    def grow(self, wanted: Mapping[int, int]) -> int:
        """Give rows so many blocks. Return the pages that this takes if they are too few, else 0."""
        pages = self.lacking(wanted)
        if pages > self.num_free:
            return pages
        for row, blocks in wanted.items():
            self.rows[row].blocks = max(self.rows[row].blocks, blocks)
        return 0

    def allocate(self, counts: Mapping[int, int]) -> int:
        """`grow` for the tokens of a new batch."""
        ends = {row: self.rows[row].launched + count for row, count in counts.items()}
        short = self.grow({row: -(-end // self.size) for row, end in ends.items()})
        if not short:
            self.batches.append({row: (self.rows[row].launched, end) for row, end in ends.items()})
            for row, end in ends.items():
                self.rows[row].launched = end
        return short

    def confirm(self) -> None:
        """Confirm the oldest batch: blocks before the fronts are released."""
        for row, (_, end) in self.batches.pop(0).items():
            state = self.rows[row]
            state.computed = max(state.computed, min(end, state.launched))
            for number, group in enumerate(self.groups):
                if group.kind in ("window", "chunk"):
                    gone = front(group, state.computed) // self.size
                    state.gone[number] = min(gone, state.blocks + state.on_host)

    def cancel(self) -> None:
        """Cancel the latest batch: rows stand where it began, at 0 if it may have overwritten a state."""
        for row, (start, _) in self.batches.pop().items():
            if start and has_states(self.groups):
                self._cut(row, 0)
                continue
            state = self.rows[row]
            state.launched = min(state.launched, start)
            self._keep(row, max(-(-state.launched // self.size), state.reserved))

    def can_stand(self, row: int, length: int) -> bool:
        """Whether a row can go on from so many of its tokens."""
        state = self.rows[row]
        if not length:
            return True
        if has_states(self.groups) and length < state.launched:
            return False
        return all(front(self.groups[number], length) // self.size >= gone for number, gone in state.gone.items())

    def truncate(self, row: int, blocks: int) -> bool:
        """Release the row's blocks from a column on. Return False, changing nothing, where it cannot stand there."""
        if not self.can_stand(row, min(blocks * self.size, self.rows[row].launched)):
            return False
        if blocks < self.rows[row].blocks or self.rows[row].is_swapped:
            self._cut(row, blocks)
        return True

    def swap_out(self, row: int, keep: int) -> int:
        """Move the row's blocks from column `keep` on to the host. Return the pages wanted if too few, else 0."""
        state = self.rows[row]
        before = replace(state)
        stop = min(-(-state.launched // self.size), state.blocks)
        held, free = self.pages_on_host(row), self.num_free_on_host
        state.on_host += max(0, stop - keep)
        state.blocks, state.reserved, state.is_swapped = min(keep, stop), 0, True
        short = self.pages_on_host(row) - held
        if short <= free:
            return 0
        self.rows[row] = before
        return short

    def swap_in(self, row: int) -> int:
        """Move all of the row back to the device. Return the pages that this takes if they are too few, else 0."""
        state, pages = self.rows[row], self.pages_on_host(row)
        if pages > self.num_free:
            return pages
        state.blocks, state.on_host, state.is_swapped = state.blocks + state.on_host, 0, False
        return 0

    def reserve(self, row: int, blocks: int) -> int:
        """`grow`; a cancel leaves these blocks."""
        short = self.grow({row: blocks})
        if not short:
            self.rows[row].reserved = max(self.rows[row].reserved, blocks)
        return short

    def free(self, row: int) -> None:
        """End the row, in flight or not."""
        del self.rows[row]
        for batch in self.batches:
            batch.pop(row, None)

    def _cut(self, row: int, blocks: int) -> None:
        state, length = self.rows[row], blocks * self.size
        state.launched, state.computed = min(state.launched, length), min(state.computed, length)
        state.reserved = min(state.reserved, blocks)
        self._keep(row, blocks)
        for batch in self.batches:
            if row in batch:
                start, end = batch[row]
                batch[row] = min(start, length), min(end, length)

    def _keep(self, row: int, blocks: int) -> None:
        state = self.rows[row]
        state.on_host = max(0, min(state.on_host, blocks - state.blocks))
        state.is_swapped = state.on_host > 0
        state.blocks = min(state.blocks, blocks)
        state.gone = {number: min(gone, state.blocks + state.on_host) for number, gone in state.gone.items()}


LEAST_DISTANCE = 4096
"""Tokens between even restarts, at least."""


def even_restarts(groups: Groups, num_blocks: int, size: int) -> list[int]:
    """The blocks after which windows and states are kept although no prompt is known to begin there, in models with
    full layers and states.

    Their distance is the least one of LEAST_DISTANCE tokens or more at which they take a sixteenth of the full blocks,
    doubled until there are six at most.
    """
    full, others = full_pages(groups), [group for group in groups if group.kind != "full"]
    if not full or not has_states(groups):
        return []
    takes = sum(group.pages * (1 if group.kind == "state" else _reached(group, size)) for group in others)
    distance = max(-(-16 * takes // full), -(-LEAST_DISTANCE // size))
    while num_blocks // distance > 6:
        distance *= 2
    return list(range(distance, num_blocks + 1, distance))
