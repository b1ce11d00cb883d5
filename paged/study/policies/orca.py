"""Orca's reservation: a contiguous region for each sequence, for its whole context or for a known output length, exact or rounded up."""

from __future__ import annotations

from paged.base.growing import rounded_up
from paged.base.words import counted
from paged.block_manager import Memory
from paged.errors import NeverFits
from paged.scheduler.request import RequestState
from paged.scheduler.reservations import Books, Reservation, Totals, expected
from paged.study.policies.regions import Regions


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
