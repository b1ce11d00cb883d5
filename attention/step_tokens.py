"""What one forward pass attends to: its tokens, where their K and V go, and the tables of the sequences they belong to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepTokens:
    """T tokens of n sequences, those of one sequence together, in order.

    positions     int64 [T]
    slot_mapping  int64 [T]; where K and V of each token go
    query_start_loc
                  int64 [n + 1]; sequence i's tokens are query_start_loc[i] to query_start_loc[i + 1] - 1
    seq_lens  int64 [n]; tokens of each sequence after this step, its tokens of this step included
    block_tables  int [n, columns]; entries behind a sequence's blocks are never read
    block_size    tokens a block
    num_padded    places after the T tokens that are computed for the sake of a fixed shape, and whose results nobody uses
    """

    positions: Ints
    slot_mapping: Ints
    query_start_loc: Ints
    seq_lens: Ints
    block_tables: NDArray[np.int32]
    block_size: int
    num_padded: int = 0

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.positions)

    @property
    def num_sequences(self) -> int:
        """n."""
        return len(self.seq_lens)

    def history(self, i: int) -> Ints:
        """int64: slots of sequence i's tokens from before this step, in order of their positions."""
        length = int(self.seq_lens[i] - (self.query_start_loc[i + 1] - self.query_start_loc[i]))
        return self.slots_of(i, length)

    def slots_of(self, i: int, length: int) -> Ints:
        """int64 [length]: slots of sequence i's first tokens by its block table."""
        slots: Ints = self.slots_by_column(length, np.array([i]))[0]
        return slots

    def slots_by_column(self, width: int, chosen: Ints | None = None) -> Ints:
        """int64 [sequences, at most width]: slots of the first `width` tokens of every sequence, or of those chosen, by its block
        table; behind a sequence's own tokens, and where its table ends, anything or nothing."""
        columns = self.block_tables[:, : -(-width // self.block_size)]
        blocks = (columns if chosen is None else columns[chosen]).astype(np.int64)
        slots: Ints = blocks[:, :, None] * self.block_size + np.arange(self.block_size)
        return slots.reshape(len(blocks), blocks.shape[1] * self.block_size)[:, :width]

    def contexts(self) -> Iterator[tuple[Ints, Ints]]:
        """For each token, slots and positions of all that it sees, in order: its sequence's history, and of this step what comes before
        it and itself."""
        for i in range(self.num_sequences):
            first, stop = int(self.query_start_loc[i]), int(self.query_start_loc[i + 1])
            history = self.history(i)
            for token in range(first, stop):
                own = slice(first, token + 1)
                slots = np.concatenate([history, self.slot_mapping[own]])
                yield slots, np.concatenate([np.arange(len(history)), self.positions[own]])

    def slot_tensor(self, device: torch.device) -> Tensor:
        """The slot mapping as a tensor, int64 [T]."""
        return torch.from_numpy(self.slot_mapping).to(device)

    def part(self, first: int, stop: int, num_padded: int = 0) -> StepTokens:
        """Tokens `first` to `stop` - 1 alone, which come after those before them."""
        begin = int(np.searchsorted(self.query_start_loc, first, "right")) - 1
        end = int(np.searchsorted(self.query_start_loc, stop, "left"))
        starts = np.clip(self.query_start_loc[begin : end + 1], first, stop) - first
        # The last sequence may go on behind the part.
        seq_lens = self.seq_lens[begin:end].copy()
        seq_lens[-1] -= self.query_start_loc[end] - stop
        return StepTokens(
            self.positions[first:stop],
            self.slot_mapping[first:stop],
            starts,
            seq_lens,
            self.block_tables[begin:end],
            self.block_size,
            num_padded,
        )
