"""A short way to put another engine's block allocator in front of the kit: seven methods of yours, the rest is derived.

`ManagerAdapter` numbers the rows, keeps what each knows and has in flight, refuses misuse by type, and finds out by
`match` which content is there. So it is not tested that your allocator refuses misuse, or takes several rows as one.
The adapter does not truncate, reserve, take a batch back or share what is still being computed, and leaves rows alone
that are in flight. `machines.AdapterMachine` is its state machine; docs/testing.md shows one whole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paged.base.arguments import token_array
from paged.block_manager import Moves
from paged.errors import (
    DuplicateRow,
    InvalidConfig,
    InvalidTokens,
    NothingInFlight,
    OutOfBlocks,
    RowInFlight,
    RowSwapped,
    UnknownRow,
)
from paged.testing.conformance import BrokenPromise
from paged.testing.content import typed
from paged.testing.protocol import Capabilities

_LACKS = (
    *("sharing_in_flight", "rows_in_flight", "fork", "host_tier", "host_content", "events", "retention"),
    *("private_rows", "truncate", "reserve", "groups", "external_tokens", "cancel"),
)


class Found(NamedTuple):
    """What `lookup` returns."""

    num_tokens: int
    blocks: NDArray[np.int64]


@dataclass
class Held:
    """One row: the allocator's own sequence, what it knows, and how many tokens are computed and in flight."""

    sequence: Any
    tokens: list[int]
    namespace: object
    computed: int = 0
    scheduled: int = 0
    has_computed: bool = False
    is_swapped: bool = False


@dataclass(frozen=True)
class _Tier:
    num_blocks: int
    num_free: int
    num_cached: int
    ref_counts: NDArray[Any]

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free - self.num_cached


class _Columns:
    def __init__(self, rows: dict[int, Held], host_blocks: Callable[[Held], list[int]]) -> None:
        self._rows, self._host_blocks = rows, host_blocks
        self.live = np.array(sorted(rows), np.int64)
        self.num_tokens, self.num_computed, self.num_scheduled = np.zeros((3, max(rows, default=-1) + 1), np.int64)
        for row, held in rows.items():
            self.num_tokens[row], self.num_computed[row] = len(held.tokens), held.computed
            self.num_scheduled[row] = held.scheduled

    def num_on_host(self, row: int) -> int:
        return len(self._host_blocks(self._rows[row]))


class ManagerAdapter(ABC):
    """A `KVManager` made of an allocator that knows sequences and blocks only."""

    capabilities: ClassVar[Capabilities] = Capabilities(**dict.fromkeys(_LACKS, False))

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> None:
        """Raises InvalidConfig for a host tier beside a prefix cache or forks, for which methods are missing."""
        able = self.capabilities
        if able.host_tier and (able.prefix_cache or able.fork):
            raise InvalidConfig(
                f"{type(self).__name__}: host_tier asks an adapter for prefix_cache=False and fork=False."
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_host_blocks = num_host_blocks
        self._rows: dict[int, Held] = {}
        self._batch = 1
        # The rows of each batch that has not ended, by its number, oldest first.
        self._batches: dict[int, list[Held]] = {}
        # Every content that was ever computed: the namespace, typed, and all tokens to the end of a block.
        self._computed: dict[tuple[object, tuple[int, ...]], object] = {}

    @abstractmethod
    def open(self, tokens: list[int], namespace: object) -> Any:
        """Return a new sequence with the blocks of the prompt's cached prefix, at least one token less than all."""

    @abstractmethod
    def grow(self, sequence: Any, tokens: list[int]) -> Iterable[tuple[int, int]] | None:
        """Give the sequence blocks for all of `tokens`: its tokens up to the last one that is about to be computed.
        There is room.

        Return the copies to make first, (block that is read, block that takes its place), if the partial block that is
        about to be written is shared with a fork.
        """

    @abstractmethod
    def commit(self, sequence: Any, tokens: list[int]) -> None:
        """Note that `tokens`, all of the sequence up to there, have been computed."""

    @abstractmethod
    def close(self, sequence: Any) -> None:
        """End the sequence."""

    @abstractmethod
    def blocks(self, sequence: Any) -> Sequence[int]:
        """The sequence's block table: block ids, in order."""

    @property
    @abstractmethod
    def num_free(self) -> int:
        """Free blocks without content."""

    @property
    def num_cached(self) -> int:
        """Free blocks with content that `match` finds."""
        return 0

    @property
    @abstractmethod
    def ref_counts(self) -> NDArray[Any]:
        """int [num_blocks]: how many tables name each block."""

    def match(self, tokens: list[int], namespace: object) -> Sequence[int]:
        """Return the blocks of the cached prefix that `open` would take. Change nothing."""
        return ()

    def split(self, sequence: Any) -> Any:
        """Return one more sequence over all blocks of this one, the partial one, too: for the capability `fork`."""
        raise BrokenPromise(f"{type(self).__name__} can fork, and has no method split(sequence).")

    def leave(self, sequence: Any, keep: int) -> Iterable[tuple[int, int]]:
        """Move the sequence's blocks from place `keep` of its table on to the host, where there is room. For the
        capability `host_tier`.

        Return the copies, (device block, host block).
        """
        raise BrokenPromise(f"{type(self).__name__} has a host tier, and no method leave(sequence, keep).")

    def come_back(self, sequence: Any) -> Iterable[tuple[int, int]]:
        """Move all of the sequence's host blocks back; there is room. Return the copies, (host block, device block)."""
        raise BrokenPromise(f"{type(self).__name__} has a host tier, and no method come_back(sequence).")

    def host_blocks(self, sequence: Any) -> Sequence[int]:
        """The sequence's blocks on the host, which follow those of its table, in order."""
        return ()

    @property
    def host_free(self) -> int:
        """Free host blocks."""
        return self.num_host_blocks

    def forget_cache(self) -> None:  # noqa: B027 - without a prefix cache there is nothing to do
        """Forget all content; nothing is held."""

    @property
    def host_ref_counts(self) -> NDArray[Any]:
        """int [num_host_blocks]: how many tables name each host block."""
        return np.zeros(self.num_host_blocks, np.int64)

    @property
    def device(self) -> _Tier:
        """The device blocks, by `num_free`, `num_cached` and `ref_counts`."""
        return _Tier(self.num_blocks, self.num_free, self.num_cached, self.ref_counts)

    @property
    def host(self) -> _Tier:
        """The host blocks, by `host_free` and `host_ref_counts`: none is cached."""
        return _Tier(self.num_host_blocks, self.host_free, 0, self.host_ref_counts)

    @property
    def rows(self) -> _Columns:
        """What each row knows and has in flight, int64 [rows] each."""
        return _Columns(self._rows, self._host_blocks)

    def next_batch(self) -> int:
        """Begin another batch. Return its number."""
        self._batch += 1
        return self._batch

    def lookup(self, tokens: Any, namespace: Any = None) -> Found:
        """Return the cached prefix of a prompt."""
        blocks = np.array(self._matched(list(tokens), namespace), np.int64)
        return Found(len(blocks) * self.block_size, blocks)

    def add(self, tokens: Any, *, namespace: Any = None) -> int:
        """Open a sequence. Return its row, the lowest that is unused."""
        known: list[int] = token_array(tokens).tolist()
        if not known:
            raise InvalidTokens("a sequence needs at least one token.")
        held = Held(self.open(list(known), namespace), known, namespace)
        held.computed = len(self._blocks(held)) * self.block_size
        return self._numbered(held)

    def append(self, row: int, tokens: Any) -> None:
        """Append known tokens. The allocator gets them when they are about to be computed."""
        self._idle(row).tokens += token_array(tokens).tolist()

    def allocate(self, rows: Any, counts: Any) -> Moves:
        """Put tokens in flight, for all rows or, with too few blocks, for none."""
        wanted = list(zip(self._listed(rows, self._on_device), np.atleast_1d(counts).tolist(), strict=True))
        missing = self._copies_wanted([held for held, _ in wanted])
        for held, count in wanted:
            left = len(held.tokens) - held.computed
            if not 1 <= count <= left:
                raise InvalidTokens(f"{count} tokens wanted in flight; {left} are known and not computed.")
            end = held.computed + count
            missing += max(0, -(-end // self.block_size) - len(self._blocks(held)))
        self._require(missing)
        copies: list[tuple[int, int]] = []
        for held, count in wanted:
            tokens = held.tokens[: held.computed + count]
            copies += self._pairs(f"grow(sequence, {tokens})", self.grow(held.sequence, list(tokens)) or ())
            if (have := len(self._blocks(held))) * self.block_size < len(tokens):
                raise BrokenPromise(
                    f"{type(self).__name__}.grow(sequence, {tokens}) left {have} blocks of {self.block_size} tokens in blocks(sequence)."
                )
            held.scheduled = count
            self._batches.setdefault(self._batch, []).append(held)
        return Moves(device_to_device=_moves(copies))

    def confirm(self) -> int:
        """End the oldest batch, which has been computed. Return its number. Raises NothingInFlight."""
        if not self._batches:
            raise NothingInFlight
        number = next(iter(self._batches))
        if number == self._batch:
            self.next_batch()
        for held in self._batches.pop(number):
            held.computed += held.scheduled
            held.scheduled, held.has_computed = 0, True
            self.commit(held.sequence, held.tokens[: held.computed])
            for end in range(self.block_size, held.computed + 1, self.block_size):
                self._computed[typed(held.namespace), tuple(held.tokens[:end])] = held.namespace
        return number

    def extend_hit(self, row: int) -> int:
        """Open a row again of which nothing was computed, to find what is cached by now. Return the tokens won."""
        held = self._idle(row)
        if held.has_computed:
            return 0
        before = held.computed
        self.close(held.sequence)
        held.sequence = self.open(list(held.tokens), held.namespace)
        held.computed = len(self._blocks(held)) * self.block_size
        return held.computed - before

    def free(self, rows: Any) -> None:
        """End rows."""
        rows = np.atleast_1d(rows).tolist()
        for row, held in zip(rows, self._listed(rows, self._idle), strict=True):
            self.close(held.sequence)
            del self._rows[row]

    def fork(self, row: int) -> int:
        """Open a row over the same blocks, by `split`. Return it."""
        held = self._on_device(row)
        return self._numbered(replace(held, sequence=self.split(held.sequence), tokens=held.tokens[:]))

    def swap_out(self, rows: Any, keep: int = 0) -> Moves:
        """Move blocks from column `keep` on to the host, by `leave`; with too few host blocks of no row."""
        listed = self._listed(rows, self._idle)
        wanted = sum(len(self._blocks(held)[keep:]) for held in listed)
        if wanted > self.host_free:
            raise OutOfBlocks(wanted, self.host_free)
        copies: list[tuple[int, int]] = []
        for held in listed:
            copies += self._pairs(f"leave(sequence, {keep})", self.leave(held.sequence, keep))
            held.is_swapped = True
        return Moves(device_to_host=_moves(copies))

    def swap_in(self, rows: Any) -> Moves:
        """Move all host blocks of the rows back, by `come_back`, for all rows or, with too few blocks, for none."""
        listed = self._listed(rows, self._idle)
        self._require(sum(len(self._host_blocks(held)) for held in listed))
        copies: list[tuple[int, int]] = []
        for held in listed:
            copies += self._pairs("come_back(sequence)", self.come_back(held.sequence))
            held.is_swapped = False
        return Moves(host_to_device=_moves(copies))

    def table(self, row: int) -> NDArray[np.int64]:
        """int64 [n]: the row's blocks."""
        return np.array(self._blocks(self._row(row)), np.int64)

    def slots(self, row: int, start: int, stop: int) -> NDArray[np.int64]:
        """int64 [stop - start]: block * block_size + offset of these positions."""
        positions = np.arange(start, stop)
        blocks = self.table(row)[positions // self.block_size]
        return np.asarray(blocks * self.block_size + positions % self.block_size, np.int64)

    def cached_contents(self) -> set[tuple[bytes, ...]]:
        """Content that was computed, `match` finds, and no row computes again: the namespace, each block's tokens."""
        in_flight: set[int] = set()
        for held in self._rows.values():
            if held.scheduled:
                in_flight.update(self._blocks(held)[held.computed // self.block_size :])
        size, found = 4 * self.block_size, set()
        for (_, tokens), namespace in self._computed.items():
            num_blocks = len(tokens) // self.block_size
            blocks = self._matched([*tokens, 0], namespace)[:num_blocks]
            if len(blocks) == num_blocks and in_flight.isdisjoint(blocks):
                data = np.array(tokens, np.int32).tobytes()
                found.add((repr(namespace).encode(), *(data[i : i + size] for i in range(0, len(data), size))))
        return found

    def reset_cache(self) -> bool:
        """Forget all content, unless a block is used. Return whether it did."""
        if self.device.num_used or self.host.num_used:
            return False
        self.forget_cache()
        return True

    def check(self) -> list[str]:
        """What the allocator finds wrong with itself: nothing, unless you define it."""
        return []

    def snapshot(self) -> Any:
        """Every figure and table, in plain values."""
        rows = {
            row: (held.tokens[:], held.computed, held.scheduled, self.table(row).tolist(), self._host_blocks(held))
            for row, held in self._rows.items()
        }
        counts = [np.asarray(each).tolist() for each in (self.ref_counts, self.host_ref_counts)]
        return rows, self.num_free, self.num_cached, self.host_free, counts, self.cached_contents()

    def _blocks(self, held: Held) -> list[int]:
        return self._ids("blocks(sequence)", self.blocks(held.sequence), self.num_blocks)

    def _host_blocks(self, held: Held) -> list[int]:
        return self._ids("host_blocks(sequence)", self.host_blocks(held.sequence), self.num_host_blocks)

    def _matched(self, tokens: list[int], namespace: object) -> list[int]:
        return self._ids(f"match({tokens}, {namespace!r})", self.match(tokens, namespace), self.num_blocks)

    def _numbered(self, held: Held) -> int:
        """Give it the lowest row that is unused, and return that."""
        row = next(number for number in range(len(self._rows) + 1) if number not in self._rows)
        self._rows[row] = held
        return row

    def _copies_wanted(self, wanted: list[Held]) -> int:
        """How many blocks are wanted for copies of partial blocks that these rows write and others hold, too."""
        shared: dict[int, int] = {}
        missing = 0
        for held in wanted:
            if self.capabilities.fork and held.computed % self.block_size:
                block = self._blocks(held)[held.computed // self.block_size]
                holders = shared.setdefault(block, int(self.ref_counts[block]))
                missing += holders > 1
                shared[block] = holders - 1
        return missing

    def _require(self, missing: int) -> None:
        available = self.num_free + self.num_cached
        if missing > available:
            raise OutOfBlocks(missing, available)

    def _ids(self, call: str, answer: Any, num_blocks: int) -> list[int]:
        """Block ids that the allocator named. Raises BrokenPromise."""
        try:
            ids = [index(each) for each in answer]
        except TypeError:
            ids = [-1]
        if not all(0 <= each < num_blocks for each in ids):
            raise BrokenPromise(
                f"{type(self).__name__}.{call} gave {answer!r}; ManagerAdapter asks for block ids from 0 to {num_blocks - 1}."
            )
        return ids

    def _pairs(self, call: str, answer: Any) -> list[tuple[int, int]]:
        """Copies that the allocator named. Raises BrokenPromise."""
        try:
            return [(index(source), index(target)) for source, target in answer]
        except (TypeError, ValueError):
            raise BrokenPromise(
                f"{type(self).__name__}.{call} gave {answer!r}; ManagerAdapter asks for pairs of block ids."
            ) from None

    def _row(self, row: int) -> Held:
        if row not in self._rows:
            raise UnknownRow(row)
        return self._rows[row]

    def _idle(self, row: int) -> Held:
        held = self._row(row)
        if held.scheduled:
            raise RowInFlight(row)
        return held

    def _on_device(self, row: int) -> Held:
        held = self._idle(row)
        if held.is_swapped:
            raise RowSwapped(row)
        return held

    def _listed(self, rows: Any, one: Any) -> list[Held]:
        numbers = np.atleast_1d(rows).tolist()
        for row in numbers:
            if numbers.count(row) > 1:
                raise DuplicateRow(row)
        return [one(row) for row in numbers]


def _moves(copies: list[tuple[int, int]]) -> NDArray[np.int32]:
    return np.array(copies, np.int32).reshape(-1, 2)
