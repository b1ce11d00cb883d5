"""KV memory without tensors: each slot of each block holds the content that a real slot would have been computed from.

Runs a batch as an engine does: its moves in order, then every write of the batch, then every read. A slot that does not
hold the prefix of the sequence that reads it is reported. A `LateDevice` in front of it lags behind the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paged.testing.content import POISON, Contents

Slots = NDArray[np.int64]


class Share(NamedTuple):
    """What a batch computes of the row at `place`: of `expected`, its tokens' contents, all from `start` on."""

    place: int
    who: str
    start: int
    expected: Slots


def shares_of(
    batch: Any, contents: Contents, known: Callable[[str, int], tuple[object, Sequence[int]]]
) -> tuple[list[str], list[Share]]:
    """Return what is wrong with a batch's lengths, positions and tokens, and its shares; see `ShadowKV.run`."""
    found: list[str] = []
    shares = []
    for index, row in enumerate(batch.rows.tolist()):
        first, last = int(batch.query_start_loc[index]), int(batch.query_start_loc[index + 1])
        length = int(batch.seq_lens[index])
        start = length - (last - first)
        who = f"{batch.ids[index]}/{batch.sequences[index]} in row {row}"
        namespace, tokens = known(batch.ids[index], int(batch.sequences[index]))
        if length > len(tokens):
            found.append(f"{who}: context length {length}; its sequence has {len(tokens)} tokens")
            continue
        shares.append(Share(index, who, start, contents.path(namespace, tokens[:length])))
        if batch.positions[first:last].tolist() != list(range(start, length)):
            found.append(
                f"{who}: positions {batch.positions[first:last].tolist()} do not end at context length {length}"
            )
        comes_later = (batch.source_batches[first:last] >= 0).tolist()
        wanted = [-1 if later else token for later, token in zip(comes_later, tokens[start:length], strict=True)]
        if batch.token_ids[first:last].tolist() != wanted:
            found.append(
                f"{who}: token ids {batch.token_ids[first:last].tolist()} are not its tokens {list(tokens[:length])}"
            )
    return found, shares


class ShadowKV:
    """Two tiers, device and host, int64 [blocks, block_size]: the content of every slot, POISON without."""

    def __init__(self, num_blocks: int, block_size: int, host_blocks: int = 0) -> None:
        self.block_size = block_size
        self.contents = Contents()
        self.device: Slots = np.full((num_blocks, block_size), POISON, np.int64)
        self.host: Slots = np.full((host_blocks, block_size), POISON, np.int64)

    def move(self, moves: Any) -> list[str]:
        """Make a batch's moves in their order: device to host, host to device, device to device; each kind at once.

        Return violations: ids outside a tier, a destination named twice, a block that one kind both reads and writes.
        """
        found = self.copy("device_to_host", pairs_of(moves, "device_to_host"))
        found += self.copy("host_to_device", pairs_of(moves, "host_to_device"))
        return found + self.copy("device_to_device", pairs_of(moves, "device_to_device"))

    def copy(self, kind: str, pairs: ArrayLike) -> list[str]:
        """Copy whole blocks, (source, destination) a row of `pairs`. The copies of one call run at the same time."""
        source_tier, target_tier = self._tiers(kind)
        pairs = np.asarray(pairs, np.int64).reshape(-1, 2)
        sources, targets = pairs[:, 0], pairs[:, 1]
        found = [f"{kind}: no such source block {b}" for b in outside(sources, len(source_tier))]
        found += [f"{kind}: no such destination block {b}" for b in outside(targets, len(target_tier))]
        if found:
            return found
        if len(set(targets.tolist())) < len(targets):
            found.append(f"{kind}: a destination is written twice: {targets.tolist()}")
        if kind == "device_to_device" and set(sources.tolist()) & set(targets.tolist()):
            found.append(f"{kind}: a block is source and destination: {pairs.tolist()}")
        target_tier[targets] = source_tier[sources]
        return found

    def write(self, slots: Slots, contents: Slots) -> list[str]:
        """Write K and V of one batch. Return violations: slots outside the pool, or one slot written twice."""
        found = [f"write outside the pool: slot {s}" for s in outside(slots, self.device.size)]
        if not found:
            if len(set(slots.tolist())) < len(slots):
                found.append(f"two tokens of one batch are written to the same slot: {sorted(slots.tolist())}")
            self.device.reshape(-1)[slots] = contents
        return found

    def read(self, table: NDArray[np.integer], length: int) -> Slots:
        """The slots of positions 0..length-1 through a block table, int64 [length]."""
        positions = np.arange(length)
        return self.device[table[positions // self.block_size], positions % self.block_size]

    def mismatches(self, table: NDArray[np.integer], expected: Slots, who: str) -> list[str]:
        """Every position whose slot does not hold what the sequence put there, in words."""
        if found := self._uncovered(table, len(expected), who):
            return found
        held = self.read(table, len(expected))
        return [
            f"{who}: position {p} (block {table[p // self.block_size]}) should hold {self.contents.describe(int(expected[p]))}"
            f" but holds {self.contents.describe(int(held[p]))}"
            for p in (held != expected).nonzero()[0].tolist()
        ]

    def poison(self, blocks: Iterable[int], tier: str = "device") -> None:
        """Poison blocks that hold nothing: a read of them gets POISON, as it would get NaN in a real pool."""
        (self.device if tier == "device" else self.host)[list(blocks)] = POISON

    def run(
        self,
        batch: Any,
        tables: Mapping[int, NDArray[np.integer]],
        known: Callable[[str, int], tuple[object, Sequence[int]]],
    ) -> tuple[list[str], dict[int, Slots]]:
        """Run the forward pass of a scheduler's batch, whose moves are made: write everything, then let every row
        attend.

        `tables` are the rows' block tables when the batch runs. `known(id, sequence)` gives the namespace and all
        tokens of a sequence, also those that earlier batches sampled, from the caller's own books. Return the
        violations, and for each row index of the batch the contents that it attended to, by position.
        """
        found, shares = shares_of(batch, self.contents, known)
        for share in shares:
            found += self._uncovered(tables[int(batch.rows[share.place])], len(share.expected), share.who)
        if found:
            return found, {}
        slots, contents = batch.slot_mapping, np.full(len(batch.slot_mapping), POISON, np.int64)
        attended: dict[int, Any] = {}
        for place, who, begin, expected in shares:
            start, stop = int(batch.query_start_loc[place]), int(batch.query_start_loc[place + 1])
            positions, table = batch.positions[start:stop], tables[int(batch.rows[place])]
            through_table = table[positions // self.block_size] * self.block_size
            if (through_table + positions % self.block_size).tolist() != slots[start:stop].tolist():
                found.append(f"{who}: slot mapping {slots[start:stop].tolist()} is not what its block table says")
            contents[start:stop] = expected[begin:]
        found += self.write(slots, contents)
        if found:
            return found, attended
        for place, who, _, expected in shares:
            table = tables[int(batch.rows[place])]
            found += self.mismatches(table, expected, who)
            if not found:
                attended[place] = self.read(table, len(expected))
        return found, attended

    def _uncovered(self, table: NDArray[np.integer], num_tokens: int, who: str) -> list[str]:
        """What is wrong with a block table for so many tokens: too few blocks, or some that do not exist."""
        named = table[: -(-num_tokens // self.block_size)].tolist()
        if len(named) * self.block_size >= num_tokens and all(0 <= block < len(self.device) for block in named):
            return []
        return [f"{who}: block table {named} does not cover {num_tokens} tokens"]

    def _tiers(self, kind: str) -> tuple[Slots, Slots]:
        tiers = {"device": self.device, "host": self.host}
        source, target = kind.split("_to_")
        return tiers[source], tiers[target]


def pairs_of(moves: Any, kind: str) -> NDArray[np.int64]:
    """The moves of one kind, int64 [n, 2]."""
    return np.asarray(getattr(moves, kind), np.int64).reshape(-1, 2)


def outside(ids: NDArray[np.integer], limit: int) -> list[int]:
    """Ids that are not in 0..limit-1."""
    return [i for i in ids.tolist() if not 0 <= i < limit]


class _Write(NamedTuple):
    """What a batch computes of one row: the last of `contents`, into `slots`; it reads all of them through `table`."""

    batch: int
    slots: Slots
    table: NDArray[Any]
    contents: Slots
    who: str


class _Poison(NamedTuple):
    """Blocks of either tier that nothing may be read from any more."""

    device: set[int]
    host: set[int]


class LateDevice:
    """A queue before a `ShadowKV`, done in the order of the calls. Methods that do some of it return violations.

        asked:  move | write (batch 4) | poison | move | write (batch 5)
        done:                          ^ at the latest when batch 4 is confirmed, all before it is done

    A batch that is cancelled writes garbage, if it had not run yet; its moves are done.
    """

    def __init__(self, shadow: ShadowKV, lag: int) -> None:
        """`lag`: moves and writes that may be waiting when a call returns."""
        self._shadow = shadow
        self._lag = lag
        self._queue: list[Any] = []
        self._poisoned = _Poison(set(), set())

    @property
    def is_idle(self) -> bool:
        """Whether all that it was asked has been done, but for poison."""
        return all(isinstance(each, _Poison) for each in self._queue)

    def move(self, moves: Any) -> list[str]:
        """The copies of one call. They are not copied here: an engine keeps the arrays that it was given, too."""
        return self._ask(moves) if len(moves) else []

    def write(self, batch: int, slots: Slots, table: NDArray[Any], contents: Slots, who: str) -> list[str]:
        """Write the last n of `contents` to int64 [n] slots, one row's share of a batch, and read all by its table."""
        return self._ask(_Write(batch, slots, table, contents, who))

    def poison(self, device: set[int], host: set[int]) -> list[str]:
        """Poison the blocks, all that hold nothing now: calls before this one may write them, and no call read them."""
        new = _Poison(device - self._poisoned.device, host - self._poisoned.host)
        self._poisoned = _Poison(device, host)
        if new.device or new.host:
            return self._ask(new)
        return []

    def run_through(self, batch: int) -> list[str]:
        """The batch has run: all that was asked up to its last write is done."""
        last = max((i for i, each in enumerate(self._queue) if getattr(each, "batch", None) == batch), default=-1)
        return self._do(last + 1)

    def cancel(self, batch: int) -> list[str]:
        """The batch, the latest one, did not run: all is done but for its writes, which are garbage."""
        for place, each in enumerate(self._queue):
            if isinstance(each, _Write) and each.batch == batch:
                self._queue[place] = each._replace(table=each.table[:0], contents=np.full(len(each.slots), POISON))
        return self.finish()

    def finish(self) -> list[str]:
        """Do all that was asked."""
        return self._do(len(self._queue))

    def _ask(self, what: Any) -> list[str]:
        self._queue.append(what)
        return self._do(len(self._queue) - self._lag)

    def _do(self, count: int) -> list[str]:
        found: list[str] = []
        for _ in range(count):
            found += self._done(self._queue.pop(0))
        return found

    def _done(self, what: Any) -> list[str]:
        shadow = self._shadow
        if isinstance(what, _Poison):
            shadow.poison(what.device)
            shadow.poison(what.host, "host")
            return []
        if not isinstance(what, _Write):
            return shadow.move(what)
        found = shadow.write(what.slots, what.contents[len(what.contents) - len(what.slots) :])
        if len(what.table) and not found:
            found = shadow.mismatches(what.table, what.contents, what.who)
        return found
