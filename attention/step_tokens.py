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
    """T tokens of n sequences; those of one sequence are together, in order.

    positions     int64 [T]
    slot_mapping  int64 [T] or [T, k]; where K and V of each token go, -1: nowhere
    query_start_loc
                  int64 [n + 1]; sequence i's tokens are query_start_loc[i] to query_start_loc[i + 1] - 1
    seq_lens      int64 [n]; tokens of each sequence after this step
    block_tables  int [n, columns], or [n, columns, k] if a block has k pages; only what tokens of this step see is read
    block_size    tokens of a block
    num_padded    places behind the T tokens that only give the step a fixed shape; their results are not used
    tables        with layer groups: block tables of each, int32 [n, columns, k], None for a group without attention.
                  slot_mapping and block_tables are empty then; `of_group` makes those of a group
    written_from  with tables: int64 [groups, n], the first position whose K and V each sequence writes; None: it writes
                  all. K and V before it are in the pool already, and only computed again
    states        with state layers: the pages that each state is read from and written to, int32 [n, k] both. A row of
                  -1 in the first: the sequence has no state yet
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
        """Return the sequence that a token belongs to; `token` is its place in the step."""
        return int(np.searchsorted(self.query_start_loc, token, "right")) - 1

    def slots_of(self, i: int, length: int, part: int = 0) -> Ints:
        """Return the slots of sequence i's first tokens on page `part` of its blocks: int64 [length]."""
        columns = np.arange(-(-length // self.block_size))[None]
        slots: Ints = self.rows_in(np.array([i]), columns, part, self.block_size, 1)[0, :length]
        return slots

    def table(self, part: int = 0) -> NDArray[np.int32]:
        """Return page `part` of each block: int [n, columns]."""
        return self.block_tables if self.block_tables.ndim == 2 else self.block_tables[:, :, part]

    def rows_in(self, chosen: Ints, columns: Ints, part: int, of_page: int, of_token: int) -> Ints:
        """Return the rows, page * of_page + token * of_token, of the tokens in these columns, int64 [b or 1, c], of the
        chosen sequences, int64 [b]: int64 [b, c * block_size]; behind a table's end arbitrary."""
        table = self.table(part)
        within = np.minimum(columns, table.shape[1] - 1)
        pages = table[chosen[:, None], within].astype(np.int64)
        rows: Ints = pages[:, :, None] * of_page + np.arange(self.block_size) * of_token
        return rows.reshape(len(pages), pages.shape[1] * self.block_size)

    def contexts(self, part: int = 0) -> Iterator[Ints]:
        """Yield for each token the slots of all tokens of its sequence up to itself, in order."""
        for i in range(self.num_sequences):
            slots = self.slots_of(i, int(self.seq_lens[i]), part)
            own = slice(int(self.query_start_loc[i]), int(self.query_start_loc[i + 1]))
            for position in self.positions[own].tolist():
                yield slots[: position + 1]

    def slot_tensor(self, device: torch.device) -> Tensor:
        """Return the slot mapping as a tensor, int64 [T] or [T, k]."""
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
        """Make a step of a model with layer groups."""
        nothing = np.zeros((len(positions), 0), np.int64), np.zeros((len(seq_lens), 0), np.int32)
        step = cls(positions, nothing[0], query_start_loc, seq_lens, nothing[1], block_size)
        return replace(step, tables=tables, states=states, written_from=written_from)

    def of_group(self, group: int) -> StepTokens:
        """Return the step with a group's tables and their slots: -1 where an entry is -1, and before `written_from`."""
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
        """Return tokens `first` to `stop` - 1 as a step of their own, which runs after the tokens before them."""
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
                # The part before has written the first sequence's state.
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
