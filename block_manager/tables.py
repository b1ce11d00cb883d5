"""The state of every sequence, as a structure of arrays: row `i` of each column belongs to one sequence.

    tokens of a row   | computed       | launched         | known, not launched |
                      0          num_computed       num_launched          num_tokens
    its block table   | b0 | b1 | b2 | b3 | reserved |
                                                  num_blocks

The watermarks: *known* tokens have values; *launched* ones are computed, or in batches that have not ended; *computed*
ones are confirmed. A row may be launched past its known tokens: an earlier batch samples the next one.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged.base.arguments import MOST_KEPT_AT, Tokens, int64_array, is_integer
from paged.errors import DuplicateRow, RowSwapped, UnknownRow

from .layout import MOST_EVEN

Rows = NDArray[np.int64]

# Without it a stride could be a power of two in bytes: all rows would then share the same few cache sets.
_STRIDE_PADDING = 16
# Tokens that a row has room for at first.
_FIRST_STRIDE = 4096
NUM_WANTED = 3 + MOST_KEPT_AT + MOST_EVEN
"""How many lengths of its prompt a row notes at which others may begin."""


class Tables:
    """The columns. They grow by doubling: keep no reference to one across a call that may open a row.

    tokens        int32 [rows, stride]           token ids, of the prompt and appended ones
    blocks        int32 [tables, rows, columns]  block tables: the full group's, then each side's (`Layout`); stale from
                                                 num_blocks on, and a side's before its first
    num_blocks    int64 [rows]                   blocks in the table
    first         int64 [tables, rows]           columns in front that a window or chunk gave back
    reserved      int64 [rows]                   of num_blocks, never taken back by a cancel (lookahead, preallocation)
    num_tokens    int64 [rows]                   tokens known
    num_launched  int64 [rows]                   tokens that are computed or in batches that have not ended
    num_computed  int64 [rows]                   tokens whose KV is confirmed, or shared with a row in flight
    uid           int64 [rows]                   number of the sequence that has the row, never reused; 0: none has it
    last_token    int32 [rows]                   tokens[row, num_tokens - 1], in one cache line for many rows
    slot_base     int64 [rows]                   slot less position: (blocks[0, row, c] - c) * block_size, c last column
    is_swapped    bool [rows]                    a tail of the row lies on the host
    shares_tail   bool [rows]                    forked: its partial block may be shared
    wanted        int64 [NUM_WANTED, rows]       counts of blocks after which prompts may begin; 0: none (`SideContent`)
    keeps_to      int64 [tables, rows]           columns before which what a side passes may be kept
    moves_state   bool [rows]                    its next share may have to write its states elsewhere
    branches      bool [rows]                    other content goes on behind its hit, too
    looks_up      bool [rows]                    its next full block is looked up, then shared or begun as a run
    next_event    int64 [rows]                   computed tokens that end an open run's next node to report; 0: none
    """

    def __init__(self, block_size: int, num_rows: int = 64, num_columns: int = 64, num_tables: int = 1) -> None:
        self.block_size, self._num_tables = block_size, num_tables
        stride = min(num_columns * block_size, _FIRST_STRIDE) + _STRIDE_PADDING
        self.tokens: Tokens = np.empty((num_rows, stride), np.int32)
        self.blocks: NDArray[np.int32] = np.zeros((num_tables, num_rows, num_columns), np.int32)
        self.first, self.keeps_to = np.zeros((2, num_tables, num_rows), np.int64)
        self.wanted = np.zeros((NUM_WANTED, num_rows), np.int64)
        self.num_rows = num_rows
        # Columns of one type are one array, which is cleared at once when a row ends.
        self._numbers, self._marks = np.zeros((8, num_rows), np.int64), np.zeros((5, num_rows), np.bool_)
        self.last_token = np.zeros(num_rows, np.int32)
        self._name_columns()
        self._free_rows = list(range(num_rows))
        self._uids = count(1)
        # Called when columns have become other arrays.
        self.after_growth: list[Callable[[], None]] = []

    def _name_columns(self) -> None:
        self.uid, self.num_blocks, self.reserved, self.slot_base, self.next_event, *lengths = list(self._numbers)
        self.num_tokens, self.num_launched, self.num_computed = lengths
        self.is_swapped, self.shares_tail, self.looks_up, self.moves_state, self.branches = list(self._marks)

    @property
    def live_rows(self) -> Rows:
        """Rows that a sequence holds, rising."""
        return self.uid.nonzero()[0]

    def open(self, tokens: Tokens) -> int:
        """Give the lowest unused row to a sequence that knows these tokens. Its table is empty."""
        num_tokens = len(tokens)
        # Before any change: this may raise MemoryError.
        self.ensure_tokens(num_tokens)
        if not self._free_rows:
            self._grow_rows()
        row = heapq.heappop(self._free_rows)
        self.uid[row] = next(self._uids)
        self.tokens[row, :num_tokens] = tokens
        self.num_tokens[row] = num_tokens
        if num_tokens:
            self.last_token[row] = tokens[-1]
        return row

    def close(self, row: int) -> None:
        """Take the row back, whose blocks are released."""
        self._numbers[:, row] = 0
        self._marks[:, row] = False
        if self._num_tables > 1:
            self.first[:, row] = self.keeps_to[:, row] = self.wanted[:, row] = 0
        heapq.heappush(self._free_rows, row)

    def set_num_blocks(self, rows: int | Rows, num_blocks: int | NDArray[np.int64]) -> None:
        self.num_blocks[rows] = num_blocks
        self.slot_base[rows] = self.slot_base_of(rows)

    def slot_base_of(self, rows: int | Rows) -> NDArray[np.int64]:
        """The value that `slot_base` must have, int64 like `rows`. For an empty table it has no meaning."""
        last = np.maximum(self.num_blocks[rows] - 1, 0)
        base: NDArray[np.int64] = (self.blocks[0, rows, last] - last) * np.int64(self.block_size)
        return base

    def ensure_tokens(self, num_tokens: int) -> None:
        have = self.tokens.shape[1]
        if num_tokens > have:
            shape = self.num_rows, max(num_tokens, 2 * have) + _STRIDE_PADDING
            self.tokens = self._copied(self.tokens, self.num_tokens, shape)
            self._tell_growth()

    def ensure_columns(self, num_columns: int) -> None:
        have = self.blocks.shape[2]
        if num_columns > have:
            shape = self._num_tables, self.num_rows, max(num_columns, 2 * have)
            self.blocks = self._copied(self.blocks, self.num_blocks, shape)
            self._tell_growth()

    def put(self, table: int, rows: Any, columns: Any, blocks: Any) -> None:
        """Write blocks of a side into its table."""
        self.blocks[table][rows, columns] = blocks

    def set_first(self, table: int, rows: Any, columns: Any) -> None:
        # One index after the other costs a third of both at once.
        self.first[table][rows] = columns

    def let_move(self, rows: Any, moves: bool) -> None:
        """Note that the next shares of these rows may have to write their states elsewhere, or not."""
        self.moves_state[rows] = moves

    def want(self, row: int, num_blocks: list[int], place: int = 0) -> None:
        """Note these numbers of blocks in `wanted`, from index `place` on."""
        self.wanted[place : place + len(num_blocks), row] = num_blocks
        self.keeps_to[:, row] = self.wanted[:, row].max()

    def has_kept(self, table: int, row: int) -> None:
        """Note that the side has kept what is wanted: what it passes from now on it need not keep."""
        self.keeps_to[table, row] = 0

    def content_end(self, row: int) -> int:
        """Number of the row's tokens that are launched and known: these may be content."""
        return min(self.num_tokens.item(row), self.num_launched.item(row))

    def set_progress(self, row: int, num_launched: int, num_computed: int) -> None:
        self.num_launched[row], self.num_computed[row] = num_launched, num_computed

    def fall_back(self, row: int, num_tokens: int) -> None:
        """Lower the row's launched and computed tokens to at most `num_tokens`."""
        if num_tokens < self.num_launched[row]:
            self.num_launched[row] = num_tokens
            self.num_computed[row] = min(self.num_computed.item(row), num_tokens)

    def _tell_growth(self) -> None:
        for renew in self.after_growth:
            renew()

    def full_blocks(self, row: int) -> int:
        """Number of the row's blocks in which every token is confirmed."""
        return int(self.num_computed[row]) // self.block_size

    def block_bytes(self, row: int, column: int) -> bytes:
        start = column * self.block_size
        return self.tokens[row, start : start + self.block_size].tobytes()

    def checked(self, rows: int | Sequence[int] | Rows, *, allow_swapped: bool = False) -> Rows:
        """Return `rows` as int64 [n]. Raises UnknownRow, DuplicateRow, or, unless `allow_swapped`, RowSwapped."""
        integers = int64_array(rows)
        if integers is None:
            raise UnknownRow(rows)
        array = np.atleast_1d(integers)
        if not array.size:
            return array
        is_known = (array >= 0) & (array < self.num_rows)
        # A number that is no row reads row 0 instead. No sort: it would cost twice what all of this costs.
        is_known &= self.uid[array * is_known] > 0
        if not is_known.all():
            raise UnknownRow(int(array[is_known.argmin()]))
        counts = np.bincount(array)
        if counts.max() > 1:
            raise DuplicateRow(int((counts > 1).argmax()))
        if not allow_swapped and (is_swapped := self.is_swapped[array]).any():
            raise RowSwapped(int(array[is_swapped.argmax()]))
        return array

    def one(self, row: int, *, allow_swapped: bool = False) -> int:
        """Return `row` if it is one live row. Raises as `checked`."""
        if not is_integer(row):
            raise UnknownRow(row)
        return self.checked(row, allow_swapped=allow_swapped).item()

    def _grow_rows(self) -> None:
        """Double the rows. Makes all arrays before it replaces one, because the last may raise MemoryError."""
        old, new = self.num_rows, 2 * self.num_rows
        names = "_numbers", "_marks", "last_token", "first", "wanted", "keeps_to"
        old_columns = {name: getattr(self, name) for name in names}
        columns = {name: np.concatenate([each, np.zeros_like(each)], -1) for name, each in old_columns.items()}
        columns["tokens"] = self._copied(self.tokens, self.num_tokens, (new, self.tokens.shape[1]))
        columns["blocks"] = self._copied(self.blocks, self.num_blocks, (self._num_tables, new, self.blocks.shape[2]))
        # Not through `vars`: after that Python finds attributes of this object more slowly.
        for name, column in columns.items():
            setattr(self, name, column)
        self._name_columns()
        self.num_rows, self._free_rows = new, list(range(old, new))
        self._tell_growth()

    def _copied(self, old: NDArray[np.int32], lengths: NDArray[np.int64], shape: tuple[int, ...]) -> NDArray[np.int32]:
        """Copy what live rows have of `old` into a new array of this shape. The rest of its memory is never touched."""
        grown: NDArray[np.int32] = np.zeros(shape, np.int32)
        for row in self.live_rows.tolist():
            grown[..., row, : lengths[row]] = old[..., row, : lengths[row]]
        return grown
