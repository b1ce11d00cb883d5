"""The attention input of one forward pass: its tokens, the slots of their K and V, and the tables of their sequences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class StepTokens:
    """T tokens of n sequences, those of one sequence together, in order.

    positions     int64 [T]
    slot_mapping  int64 [T] or [T, k]; where K and V of each token go, -1: nowhere
    query_start_loc
                  int64 [n + 1]; sequence i's tokens are query_start_loc[i] to query_start_loc[i + 1] - 1
    seq_lens  int64 [n]; tokens of each sequence after this step, its tokens of this step included
    block_tables  int [n, columns], or [n, columns, k] where a block has k pages; entries behind a sequence's blocks, and before what its
                  tokens of this step see, are never read
    block_size    tokens a block
    num_padded    places after the T tokens that are computed for the sake of a fixed shape, and whose results are not used
    tables        of a model with groups of layers, each group's block tables, int32 [n, columns, k], None for a group without attention;
                  slot_mapping and block_tables have nothing then, and those of a group come with `of_group`
    written_from  int64 [groups, n], beside tables: the first position whose K and V each sequence writes; None: it writes all. What lies before
                  is there already, and is only computed again
    states        of a model with state layers, the pages that each sequence's state is read from and written to, int32 [n, k] both; a row of -1
                  is read of a sequence that has no state yet
    """

    positions: Ints
    slot_mapping: Ints
    query_start_loc: Ints
    seq_lens: Ints
    block_tables: NDArray[np.int32]
    block_size: int
    num_padded: int = 0
    tables: tuple[NDArray[np.int32] | None, ...] | None = None
    states: tuple[NDArray[np.int32], NDArray[np.int32]] | None = None
    written_from: Ints | None = None

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.positions)

    @property
    def num_sequences(self) -> int:
        """n."""
        return len(self.seq_lens)

    def sequence_of(self, token: int) -> int:
        """The sequence whose token of this step, by its place, this is."""
        return int(np.searchsorted(self.query_start_loc, token, "right")) - 1

    def slots_of(self, i: int, length: int, part: int = 0) -> Ints:
        """int64 [length]: slots of sequence i's first tokens by its block table, on this page of each block."""
        columns = np.arange(-(-length // self.block_size))[None]
        slots: Ints = self.rows_in(np.array([i]), columns, part, self.block_size, 1)[0, :length]
        return slots

    def table(self, part: int = 0) -> NDArray[np.int32]:
        """int [n, columns]: this page of each block."""
        return self.block_tables if self.block_tables.ndim == 2 else self.block_tables[:, :, part]

    def rows_in(self, chosen: Ints, columns: Ints, part: int, of_page: int, of_token: int) -> Ints:
        """int64 [b, c * block_size]: rows of the tokens in these columns, int64 [b or 1, c], of the chosen sequences' tables, int64 [b], where pages
        are so many rows apart, and tokens of a block so many; anything where a table ends."""
        table = self.table(part)
        within = np.minimum(columns, table.shape[1] - 1)
        pages = table[chosen[:, None], within].astype(np.int64)
        rows: Ints = pages[:, :, None] * of_page + np.arange(self.block_size) * of_token
        return rows.reshape(len(pages), pages.shape[1] * self.block_size)

    def contexts(self, part: int = 0) -> Iterator[Ints]:
        """For each token the slots of all tokens up to itself, in order, by its sequence's table."""
        for i in range(self.num_sequences):
            slots = self.slots_of(i, int(self.seq_lens[i]), part)
            own = slice(int(self.query_start_loc[i]), int(self.query_start_loc[i + 1]))
            for position in self.positions[own].tolist():
                yield slots[: position + 1]

    def slot_tensor(self, device: torch.device) -> Tensor:
        """The slot mapping as a tensor, int64 [T] or [T, k]."""
        return torch.from_numpy(self.slot_mapping).to(device)

    @classmethod
    def of_groups(
        cls,
        positions: Ints,
        query_start_loc: Ints,
        seq_lens: Ints,
        tables: tuple[NDArray[np.int32] | None, ...],
        block_size: int,
        states: tuple[NDArray[np.int32], NDArray[np.int32]] | None = None,
        written_from: Ints | None = None,
    ) -> StepTokens:
        """A step of a model with groups of layers."""
        nothing = np.zeros((len(positions), 0), np.int64), np.zeros((len(seq_lens), 0), np.int32)
        step = cls(positions, nothing[0], query_start_loc, seq_lens, nothing[1], block_size)
        return replace(step, tables=tables, states=states, written_from=written_from)

    def of_group(self, group: int) -> StepTokens:
        """The same tokens as a group of layers sees them: its tables say where they go, nowhere where an entry is -1, and before `written_from`."""
        if self.tables is None:
            return self
        tables = self.tables[group]
        assert tables is not None, "a layer that attends is in a group with tables"
        owners = np.arange(self.num_sequences).repeat(np.diff(self.query_start_loc))
        pages = tables[owners, self.positions // self.block_size].astype(np.int64)
        goes_nowhere = pages < 0
        if self.written_from is not None:
            goes_nowhere |= (self.positions < self.written_from[group, owners])[:, None]
        slots = np.where(goes_nowhere, -1, pages * self.block_size + (self.positions % self.block_size)[:, None])
        return replace(self, slot_mapping=slots, block_tables=tables, tables=None, written_from=None)

    def part(self, first: int, stop: int, num_padded: int = 0) -> StepTokens:
        """Tokens `first` to `stop` - 1 alone, which come after those before them."""
        begin = self.sequence_of(first)
        end = int(np.searchsorted(self.query_start_loc, stop, "left"))
        starts = np.clip(self.query_start_loc[begin : end + 1], first, stop) - first
        # The last sequence may go on behind the part.
        seq_lens = self.seq_lens[begin:end].copy()
        seq_lens[-1] -= self.query_start_loc[end] - stop
        states = None
        if self.states is not None:
            read, write = (each[begin:end] for each in self.states)
            if self.query_start_loc[begin] < first:
                # The part before wrote the state of the first one.
                read = np.concatenate([write[:1], read[1:]])
            states = read, write
        return StepTokens(
            self.positions[first:stop],
            self.slot_mapping[first:stop],
            starts,
            seq_lens,
            self.block_tables[begin:end],
            self.block_size,
            num_padded,
            None if self.tables is None else tuple(each if each is None else each[begin:end] for each in self.tables),
            states,
            None if self.written_from is None else self.written_from[:, begin:end],
        )
