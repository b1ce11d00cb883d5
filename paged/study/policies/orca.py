"""Orca's reservation: a contiguous region for each sequence, for its whole context or for a known output length, exact or rounded up.

pool of 12      | 8               | 4       |
one of 3 taken  | 8               | 4 taken |       a region of 3 takes 4: sizes are powers of two
one of 1 taken  | 1 | 1 | 2 | 4   | 4 taken |       the 8 is halved until a piece is just large enough
"""

from bisect import bisect_left, insort
from collections.abc import Sequence

from paged.base.growing import rounded_up
from paged.base.words import counted
from paged.block_manager import Memory
from paged.errors import NeverFits
from paged.scheduler.request import RequestState
from paged.scheduler.reservations import Books, Reservation, Totals, expected


class InRegions(Reservation):
    """A sequence draws blocks for `total_of` tokens when it enters; they have to lie in one free region."""

    def __init__(self, total_of: Totals, num_blocks: int) -> None:
        super().__init__(total_of)
        self._regions = Regions(num_blocks)

    def capacity(self, manager: Memory, num_sequences: int) -> int:
        return self._regions.largest(num_sequences) * manager.block_size

    def refusal(self, books: Books, request: RequestState) -> NeverFits | None:
        num, num_blocks = request.num_live, books.manager.num_blocks
        each, largest = books.blocks_for(request.prompt_len + 1), self._regions.largest(num)
        if each <= largest:
            return None
        message = (
            f'request "{request.id}" needs {counted(num, "contiguous region")} of {counted(each, "block")} for its {counted(request.prompt_len, "prompt token")} and '
            f"a first output; regions are powers of two, and the pool of {num_blocks:,} blocks has so many of {largest:,} "
            f"at most. Raise num_blocks to {num * rounded_up(each):,}."
        )
        return NeverFits(message, needed=each, limit=largest, unit="blocks")

    def take(self, books: Books, request: RequestState, sequence: int) -> None:
        self._regions.take(request.rows[sequence], self.blocks_drawn(books, request, sequence))
        super().take(books, request, sequence)

    def give_back(self, row: int) -> None:
        self._regions.give_back(row)

    def reason(self, books: Books, request: RequestState, num_free: int) -> str | None:
        live = [sequence for sequence, tokens in enumerate(request.tokens) if tokens is not None]
        sizes = [self.blocks_drawn(books, request, sequence) for sequence in live]
        if self._regions.fits(sizes):
            return None
        return (
            f"it needs {counted(len(sizes), 'contiguous region')} of {counted(max(sizes), 'block')}, rounded up to a power of two; the largest that is free "
            f"has {self._regions.largest_free}, though {num_free} blocks are free in all."
        )

    def violations(self, books: Books) -> list[str]:
        found, rows = self._regions.check(), set(books.manager.tables.live_rows.tolist())
        if self._regions.owners != rows:
            found.append(f"8: rows {sorted(self._regions.owners ^ rows)} have a region or live, not both.")
        return found


def context(books: Books, request: RequestState, sequence: int) -> int:
    """Return the longest sequence that model and pool allow, in tokens."""
    return max(request.max_total[sequence], books.max_total_of(len(request.rows)))


def expected_pow2(books: Books, request: RequestState, sequence: int) -> int:
    """Return the tokens of prompt and expected output, the output rounded up to a power of two."""
    return expected(books, request, sequence, rounded_up)


class Regions:
    """The free stretches among `num_blocks` blocks. `take` splits the first of the smallest pieces that are large enough. A region that is given
    back joins its buddy, the other half of the piece that both came from (Knuth, volume 1, 2.5)."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        # By the logarithm of their size: first blocks of free pieces, rising.
        self._free: list[list[int]] = [[] for _ in range(num_blocks.bit_length())]
        self._held: dict[int, tuple[int, int]] = {}
        start = 0
        for order in reversed(range(len(self._free))):
            if num_blocks >> order & 1:
                self._free[order].append(start)
                start += 1 << order

    def largest(self, count: int = 1) -> int:
        """Return the blocks of the largest region of which the empty pool has `count`; 0 if the pool has fewer blocks."""
        return 1 << ((self._num_blocks // count).bit_length() - 1) if count <= self._num_blocks else 0

    @property
    def largest_free(self) -> int:
        """Blocks of the largest free region; 0 if none is free."""
        return next((1 << order for order in reversed(range(len(self._free))) if self._free[order]), 0)

    @property
    def owners(self) -> set[int]:
        """Owners that hold a region."""
        return set(self._held)

    def fits(self, sizes: Sequence[int]) -> bool:
        """Whether regions of all these sizes (blocks, at least 1 each) are free together."""
        if len(sizes) == 1:
            return any(self._free[_order(sizes[0]) :])
        wanted = [0] * len(self._free)
        for size in sizes:
            if _order(size) >= len(wanted):
                return False
            wanted[_order(size)] += 1
        pieces = 0
        for order in reversed(range(len(wanted))):
            pieces = 2 * pieces + len(self._free[order]) - wanted[order]
            if pieces < 0:
                return False
        return True

    def take(self, owner: int, size: int) -> None:
        """Give an owner without a region one of at least `size` blocks; such a region has to be free."""
        order = _order(size)
        found = next(larger for larger in range(order, len(self._free)) if self._free[larger])
        start = self._free[found].pop(0)
        for halved in reversed(range(order, found)):
            insort(self._free[halved], start + (1 << halved))
        self._held[owner] = (start, order)

    def give_back(self, owner: int) -> None:
        """Free the owner's region, if it holds one."""
        if owner not in self._held:
            return
        start, order = self._held.pop(owner)
        while True:
            pieces, buddy = self._free[order], start ^ (1 << order)
            place = bisect_left(pieces, buddy)
            if place == len(pieces) or pieces[place] != buddy:
                insort(pieces, start)
                return
            del pieces[place]
            start, order = min(start, buddy), order + 1

    def check(self) -> list[str]:
        """Return every violation: pieces that overlap, or that do not add up to the pool."""
        pieces = [(start, 1 << order) for order, starts in enumerate(self._free) for start in starts]
        pieces += [(start, 1 << order) for start, order in self._held.values()]
        end, found = 0, []
        for start, size in sorted(pieces):
            if start != end:
                found.append(f"8: a region begins at block {start}; the one before it ends at {end}.")
            end = start + size
        return found if end == self._num_blocks else [*found, f"8: regions end at {end} of {self._num_blocks} blocks."]


def _order(size: int) -> int:
    return (size - 1).bit_length()
