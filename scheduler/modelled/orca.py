"""What Orca reserves: a contiguous region a sequence, for its whole context or for an output whose length is known, exactly or nearly.

Knows what a request says of its length. Does not know how regions are laid out; regions.py does.
"""

from __future__ import annotations

from paged.base.words import counted
from paged.block_manager import Memory
from paged.errors import NeverFits

from ..request import RequestState
from ..reservations import Drawn, Reservation, Totals
from ..state import State
from .regions import Regions


class InRegions(Drawn):
    """Blocks for `total_of` tokens are drawn when a sequence enters, and have to lie in one free region."""

    def __init__(self, total_of: Totals, num_blocks: int) -> None:
        super().__init__(total_of)
        self._regions = Regions(num_blocks)

    def capacity(self, manager: Memory, num_sequences: int) -> int:
        return self._regions.largest(num_sequences) * manager.block_size

    def has_place(self, state: State, request: RequestState) -> bool:
        return self._regions.fits(self._sizes(state, request))

    def refusal(self, state: State, request: RequestState) -> NeverFits | None:
        num, num_blocks = request.num_live, state.manager.num_blocks
        each, largest = state.blocks_for(request.prompt_len + 1), self._regions.largest(num)
        if each <= largest:
            return None
        message = (
            f'request "{request.id}" needs {counted(num, "contiguous region")} of {counted(each, "block")} for its {counted(request.prompt_len, "prompt token")} and '
            f"a first output; regions are powers of two, and the pool of {num_blocks:,} blocks has so many of {largest:,} "
            f"at most. Raise num_blocks to {num << (each - 1).bit_length():,}."
        )
        return NeverFits(message, needed=each, limit=largest, unit="blocks")

    def take(self, state: State, request: RequestState, sequence: int) -> None:
        self._regions.take(request.rows[sequence], self.blocks_drawn(state, request, sequence))
        super().take(state, request, sequence)

    def give_back(self, row: int) -> None:
        self._regions.give_back(row)

    def reason(self, state: State, request: RequestState, num_free: int) -> str | None:
        if self.has_place(state, request):
            return None
        sizes = self._sizes(state, request)
        return (
            f"it needs {counted(len(sizes), 'contiguous region')} of {counted(max(sizes), 'block')}, rounded up to a power of two; the largest that is free "
            f"has {self._regions.largest_free}, though {num_free} blocks are free in all."
        )

    def violations(self, state: State) -> list[str]:
        found, rows = self._regions.check(), set(state.manager.tables.live_rows.tolist())
        if self._regions.owners != rows:
            found.append(f"8: rows {sorted(self._regions.owners ^ rows)} have a region or live, not both.")
        return found

    def _sizes(self, state: State, request: RequestState) -> list[int]:
        live = [sequence for sequence, tokens in enumerate(request.tokens) if tokens is not None]
        return [self.blocks_drawn(state, request, sequence) for sequence in live]


def context(state: State, request: RequestState, sequence: int) -> int:
    """The longest sequence that model and pool allow."""
    return max(request.max_total[sequence], state.max_total_of(len(request.rows)))


def expected(state: State, request: RequestState, sequence: int) -> int:
    """Prompt and expected_tokens."""
    return _total_with(request, sequence, _hint_of(state, request, sequence))


def expected_pow2(state: State, request: RequestState, sequence: int) -> int:
    """Prompt and expected_tokens, rounded up to a power of two."""
    hint = _hint_of(state, request, sequence)
    return _total_with(request, sequence, None if hint is None else 1 << (hint - 1).bit_length())


def _hint_of(state: State, request: RequestState, sequence: int) -> int | None:
    """The request's expected_tokens; None where there are none, or they are reached."""
    outputs = request.request.expected_tokens
    num_known = Reservation.total_of(state.reservation, state, request, sequence)
    is_reached = outputs is not None and num_known - request.prompt_len - request.appended[sequence] >= outputs
    return None if is_reached else outputs


def _total_with(request: RequestState, sequence: int, outputs: int | None) -> int:
    most = request.max_total[sequence]
    return most if outputs is None else min(most, request.prompt_len + request.appended[sequence] + outputs)
