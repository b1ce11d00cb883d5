"""KV memory of layers of several kinds without tensors: pages for any group, and what lies in each slot.

A slot of an attention group's page holds the prefix that a real K or V would have been computed from, with its group
and its part of the block. A page of a state holds the prefix that the state has seen. So a read shows a wrong token, a
page of another row, a block of another group, two parts exchanged, and a state that is too old or too new.

    shadow = ShadowGroups(groups, num_pages, block_size)
    views = views_of(batch, groups)                # when it is scheduled: the next `schedule` may change its tables
    found, _ = shadow.run(batch, views, known)     # when it runs, before or after others have been scheduled
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paged.testing.content import POISON
from paged.testing.naive_layers import Groups, front
from paged.testing.shadow_kv import ShadowKV, Share, Slots, shares_of

Pages = NDArray[np.integer]
Place = tuple[int, int]
"""A page and a slot in it."""


class View(NamedTuple):
    """The pages of a batch's rows in one group, as `paged.Batch.groups` gives them: of a state those that are read and
    written, int [rows, pages] each; of other groups the tables, int [rows, columns, pages], and the first token that
    each row writes, int [rows]."""

    tables: Pages | None
    read: Pages | None = None
    write: Pages | None = None
    written_from: Slots | None = None


def views_of(batch: Any, groups: Groups) -> list[View]:
    """The pages of a batch's rows, copied, so that later changes of the tables do not show. Without `groups` a batch
    has block tables, whose blocks are pages."""
    if batch.groups is None:
        return [View(batch.block_tables[batch.rows][..., None].copy())]
    return [
        View(None, each.read.copy(), each.write.copy())
        if group.kind == "state"
        else View(each.tables.copy(), written_from=getattr(each, "written_from", None))
        for group, each in zip(groups, batch.groups, strict=True)
    ]


class ShadowGroups:
    """`num_pages` pages, int64 [pages, block_size]: what lies in each slot, POISON where nothing does. `host_pages`
    more to swap to."""

    def __init__(self, groups: Groups, num_pages: int, block_size: int, host_pages: int = 0) -> None:
        self.groups, self.block_size = tuple(groups), block_size
        self._memory = ShadowKV(num_pages, block_size, host_pages)
        self.contents, self.pages, self.host = self._memory.contents, self._memory.device, self._memory.host
        # Parts of blocks are numbered over all groups: `_first[g]` is the first one of group g.
        widths = [group.pages for group in self.groups]
        self._first = [sum(widths[:number]) for number in range(len(widths))]
        self._num_parts = sum(widths)

    def run(
        self, batch: Any, views: Sequence[View], known: Callable[[str, int], tuple[object, Sequence[int]]]
    ) -> tuple[list[str], dict[int, Slots]]:
        """Run a batch's forward pass, as `ShadowKV.run`: read states, write everything, let every row attend."""
        found, shares = shares_of(batch, self.contents, known)
        if found:
            return found, {}
        for share in shares:
            found += self._stale_states(share, views)
        writes: dict[Place, tuple[int, str]] = {}
        for share in shares:
            for place, value in self._writes(share, views):
                if not 0 <= place[0] < len(self.pages):
                    found.append(f"{share.who}: writes to page {place[0]}; there are {len(self.pages)}")
                elif place in writes:
                    found.append(f"{share.who}: writes slot {place[1]} of page {place[0]}, as {writes[place][1]} does")
                writes[place] = value, share.who
        found += self._overwritten_states(shares, views, writes, getattr(batch, "num_drafts", None))
        if found:
            return found, {}
        for place, (value, _) in writes.items():
            self.pages[place] = value
        for share in shares:
            found += self._mismatches(share, views)
        return found, {} if found else {share.place: share.expected for share in shares}

    def move(self, moves: Any) -> list[str]:
        """Copy pages, as `ShadowKV.move`."""
        return self._memory.move(moves)

    def spoil(self, batch: Any, views: Sequence[View], but: Collection[int] = ()) -> None:
        """Stop the forward pass half way: where it writes may be anything, `but` not in pages written later."""
        for place in self.written(batch, views):
            if place[0] not in but:
                self.pages[place] = POISON

    def written(self, batch: Any, views: Sequence[View]) -> Iterator[Place]:
        """Where the forward pass of a batch writes."""
        for number, end in enumerate(batch.seq_lens.tolist()):
            share = Share(number, "", end - int(batch.num_tokens[number]), np.full(end, POISON))
            yield from (place for place, _ in self._writes(share, views))

    def lacking(self, namespace: object, tokens: Sequence[int], pages: Slots | None = None) -> list[str]:
        """What the groups read behind these tokens and no page holds, of the device if no `pages` are given."""
        pages = self.pages if pages is None else pages
        path, found = self.contents.path(namespace, tokens).tolist(), []
        for number, group in enumerate(self.groups):
            first = len(path) - 1 if group.kind == "state" else front(group, len(path))
            for position, part in itertools.product(range(first, len(path)), range(group.pages)):
                wanted = self.value(path[position], number, part)
                if not (pages[:, position % self.block_size] == wanted).any():
                    found.append(self._told(wanted))
        return found

    def poison(self, pages: Iterable[int]) -> None:
        """Poison free pages: a read of them gets POISON."""
        self.pages[list(pages)] = POISON

    def value(self, content: int, group: int, part: int) -> int:
        return content if content == POISON else content * self._num_parts + self._first[group] + part

    def _writes(self, share: Share, views: Sequence[View]) -> Iterator[tuple[Place, int]]:
        """Each slot that a row writes in a batch, and what it writes there."""
        for number, view in enumerate(views):
            if view.write is not None:
                for part, page in enumerate(view.write[share.place].tolist()):
                    for slot in range(self.block_size):
                        yield (page, slot), self.value(int(share.expected[-1]), number, part)
                continue
            assert view.tables is not None, "a group has tables, or is a state"
            first = share.start if view.written_from is None else max(share.start, int(view.written_from[share.place]))
            for position in range(first, len(share.expected)):
                for part, page in enumerate(_pages_at(view.tables[share.place], position // self.block_size)):
                    value = self.value(int(share.expected[position]), number, part)
                    yield (page, position % self.block_size), value

    def _stale_states(self, share: Share, views: Sequence[View]) -> Iterator[str]:
        """States that a row reads and that have not seen exactly the tokens before its share."""
        for number, view in enumerate(views):
            if view.read is None:
                continue
            for part, page in enumerate(view.read[share.place].tolist()):
                if not share.start:
                    if page >= 0:
                        yield f"{share.who}: reads a state from page {page} before its first token"
                    continue
                wanted = self.value(int(share.expected[share.start - 1]), number, part)
                yield from self._unlike(f"{share.who}: its state {number} at {share.start}", page, 0, wanted)

    def _overwritten_states(
        self,
        shares: Sequence[Share],
        views: Sequence[View],
        writes: dict[Place, tuple[int, str]],
        num_drafts: Slots | None,
    ) -> Iterator[str]:
        """States that one row reads while another one, or another part, writes them: a batch's rows run side by side.
        And states that a row writes over, and goes back to if one of its drafts is wrong."""
        for share in shares:
            for view in views:
                if view.read is None or view.write is None or not share.start:
                    continue
                for page, target in zip(view.read[share.place].tolist(), view.write[share.place].tolist(), strict=True):
                    if page != target and (page, 0) in writes:
                        yield f"{share.who}: reads a state from page {page}, which {writes[page, 0][1]} writes"
                    elif page == target and num_drafts is not None and num_drafts[share.place]:
                        yield f"{share.who}: writes over the state on page {page}, with {num_drafts[share.place]} drafts"

    def _mismatches(self, share: Share, views: Sequence[View]) -> Iterator[str]:
        """Every position that a row attends to and whose slots do not hold what it put there."""
        for number, (group, view) in enumerate(zip(self.groups, views, strict=True)):
            if view.tables is None:
                continue
            for position in range(front(group, share.start), len(share.expected)):
                column, slot = divmod(position, self.block_size)
                for part, page in enumerate(_pages_at(view.tables[share.place], column)):
                    who = f"{share.who}: position {position} of its {group.kind} group {number}"
                    yield from self._unlike(who, page, slot, self.value(int(share.expected[position]), number, part))

    def _unlike(self, who: str, page: int, slot: int, wanted: int) -> Iterator[str]:
        held = int(self.pages[page, slot]) if 0 <= page < len(self.pages) else POISON
        if held != wanted or page < 0:
            yield f"{who} (page {page}) should hold {self._told(wanted)} but holds {self._told(held)}"

    def what(self, value: int) -> tuple[int, Place]:
        """The content of a slot, and of which group and which part of a block it is."""
        content, number = divmod(value, self._num_parts)
        group = max(g for g, first in enumerate(self._first) if first <= number)
        return (POISON, (POISON, POISON)) if value == POISON else (content, (group, number - self._first[group]))

    def _told(self, value: int) -> str:
        if value == POISON:
            return "poison"
        content, (group, part) = self.what(value)
        return f"part {part} of group {group} at {self.contents.describe(content)}"


def _pages_at(table: Pages, column: int) -> list[int]:
    """The pages of a block; -1 behind the end of the table."""
    return [-1] * table.shape[1] if column >= len(table) else list(table[column].tolist())
