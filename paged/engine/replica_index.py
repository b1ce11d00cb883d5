"""An index of the blocks that each replica has, for a router: one look-up of a block answers for all replicas.

    block      0    1    2    3    4    5        a mask a block: who has it
    replica 0  ■    ■    ■    ■    ■    ·        depth 5
    replica 1  ■    ■    ·    ·    ·    ·        depth 2

A replica that has a block has those before it, so bisection finds the depths, for all replicas together. Where its
events were lost or wrong, a depth may be wrong: then the replica computes more of the prompt, which costs time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np

from paged.base.arguments import token_array
from paged.block_manager import Cleared, Event, Removed, RestartPoint, Stored
from paged.block_manager.content_key import namespace_digest, root_prefix
from paged.errors import InvalidConfig, UnknownReplica

DEVICE, HOST, RESTART = range(3)
"""Where a block is: in a tier, or among the ends of blocks behind which a prompt can begin."""
_TIERS = {"device": DEVICE, "host": HOST}
_LEAST_SWEPT = 100_000
"""Blocks of replicas that are gone, before they are looked for."""
_AT_ONCE = 64
_RESOLUTION = 9
"""Depths are exact to a part in 2 ** 9 of the prompt, and rather too low: more look-ups would cost more than they tell (benchmarks/routing_cost.py)."""

Keys = Sequence[int]


class Depth(NamedTuple):
    """Leading blocks that a replica has: on its device, and behind those on its host."""

    device: int
    host: int


def prompt_keys(tokens: Any, block_size: int, namespace: Any = None) -> list[int]:
    """The keys of a prompt's full blocks, at most len(tokens) - 1 tokens of it: the last 64 bits of `BlockManager.block_hashes`.

    `tokens` are integers or int32 [n]; the namespace of a request with any of these is (salt, adapter, extra_key), else None.
    Takes about 1 µs a block. Raises InvalidTokens or InvalidNamespace.
    """
    array, digest, size = token_array(tokens), namespace_digest(root_prefix(namespace)), 4 * block_size
    data = memoryview(array.astype(np.int32, copy=False).tobytes())
    digests = []
    for start in range(0, max(0, len(array) - 1) // block_size * size, size):
        chained = sha256(digest)
        chained.update(data[start : start + size])
        digest = chained.digest()
        digests.append(digest)
    return np.frombuffer(b"".join(digests), ">u8").reshape(-1, 4)[:, 3].tolist()


def key_of(digest: bytes) -> int:
    """The key of a block with this chained SHA-256."""
    return int.from_bytes(digest[-8:], "big")


class ReplicaIndex:
    """Masks by block and tier, of which bit i is that of the replica in slot i.

    A slot is given up with what it had, so that forgetting a replica takes no time; its bits go with a later sweep, and then it is used again.
    """

    def __init__(self) -> None:
        self.by_restart_points: set[str] = set()
        self._slots: dict[str, int] = {}
        self._live = 0
        self._next = 0
        # Slots that have no bits, and those whose bits are to be swept.
        self._free: list[int] = []
        self._gone: list[int] = []
        self._masks: tuple[dict[int, int], ...] = ({}, {}, {})
        self._num: dict[int, int] = {}
        self._num_gone = 0

    def __len__(self) -> int:
        """Blocks that any replica has on the device."""
        return len(self._masks[DEVICE])

    def __contains__(self, replica: str) -> bool:
        return replica in self._slots

    @property
    def replicas(self) -> list[str]:
        """All replicas, in the order in which they came."""
        return list(self._slots)

    def add(self, replica: str, *, restart_points: bool = False) -> None:
        """Begin with a replica that has nothing. `restart_points`: its layers are of several kinds, and it tells where prompts can begin.
        Raises InvalidConfig for one that is there."""
        if replica in self._slots:
            raise InvalidConfig(f"there is a replica {replica!r} already")
        if restart_points:
            self.by_restart_points.add(replica)
        self._take_slot(replica)

    def remove(self, replica: str) -> None:
        """Forget a replica. Raises UnknownReplica."""
        self._give_slot(replica)
        self.by_restart_points.discard(replica)
        del self._slots[replica]

    def clear(self, replica: str) -> None:
        """Forget what a replica has. Raises UnknownReplica."""
        self._give_slot(replica)
        self._take_slot(replica)

    def store(self, replica: str, keys: Iterable[int], place: int = DEVICE) -> None:
        """Note that a replica has these blocks in a place from now on: DEVICE, HOST or RESTART. Raises UnknownReplica."""
        slot, masks, num = self._slot(replica), self._masks[place], 0
        bit = 1 << slot
        if place == RESTART:
            self.by_restart_points.add(replica)
        for key in keys:
            before = masks.get(key, 0)
            if not before & bit:
                # One integer serves all blocks that one replica alone has.
                masks[key] = before | bit if before else bit
                num += 1
        self._num[slot] += num

    def drop(self, replica: str, keys: Iterable[int], place: int = DEVICE) -> None:
        """Note that a replica has these blocks in a place no more. Raises UnknownReplica."""
        slot, masks = self._slot(replica), self._masks[place]
        bit = 1 << slot
        for key in keys:
            before = masks.get(key, 0)
            if before & bit:
                self._num[slot] -= 1
                if before == bit:
                    del masks[key]
                else:
                    masks[key] = before ^ bit

    def apply(self, replica: str, events: Iterable[Event]) -> None:
        """Apply the events of a replica's memory (`BlockManager.take_events`), in order. Raises UnknownReplica."""
        for event in events:
            if isinstance(event, Stored):
                self.store(replica, map(key_of, event.hashes), _TIERS[event.tier])
            elif isinstance(event, Removed):
                self.drop(replica, map(key_of, event.hashes), _TIERS[event.tier])
            elif isinstance(event, RestartPoint):
                change = self.store if event.is_stored else self.drop
                change(replica, (key_of(event.hash),), RESTART)
            elif isinstance(event, Cleared):
                self.clear(replica)

    def depths(self, keys: Keys) -> dict[str, Depth]:
        """How much of a prompt each replica has, in blocks; those that have nothing are left out. Of prompts of over 512 blocks it may be up
        to a 512th more.

        Of a replica that tells restart points it is the deepest of them, not the deepest block.
        """
        device, host, restart = self._masks
        found = self._by_depth(keys, device)
        behind = self._by_depth(keys, device, host) if host else found
        by_slot = {slot: name for name, slot in self._slots.items()} if found or behind else {}
        depths: dict[str, Depth] = {}
        for mask, depth in behind:
            for slot in _bits(mask):
                depths[by_slot[slot]] = Depth(0, depth)
        for mask, depth in found:
            for slot in _bits(mask):
                name = by_slot[slot]
                depths[name] = Depth(depth, depths[name].host - depth if name in depths else 0)
        if self.by_restart_points:
            self._shorten(keys, depths, restart)
        return depths

    def _by_depth(
        self, keys: Keys, first: dict[int, int], second: dict[int, int] | None = None
    ) -> list[tuple[int, int]]:
        """Masks of replicas that have the same depth, and the depth; those that have nothing are left out."""
        get, also, live = first.get, None if second is None else second.get, self._live

        def having(at: int) -> int:
            key = keys[at]
            mask = get(key, 0) if also is None else get(key, 0) | also(key, 0)
            return mask & live

        found: list[tuple[int, int]] = []
        if not keys or not (some := having(0)):
            return found
        least = max(1, len(keys) >> _RESOLUTION)
        if last := having(len(keys) - 1) & some:
            found.append((last, len(keys)))
        # Depths of those in `some` and not in `last` are from `low` to `high` - 1.
        open_parts = [(1, some, len(keys), last)]
        while open_parts:
            low, some, high, last = open_parts.pop()
            if not (some := some & ~last):
                continue
            if high - low <= least:
                found.append((some, low))
                continue
            middle = (low + high) // 2
            deep = having(middle - 1) & some
            open_parts += (low, some, middle, deep), (middle, deep, high, 0)
        return found

    def _shorten(self, keys: Keys, depths: dict[str, Depth], restart: dict[int, int]) -> None:
        """Set the depths of replicas whose layers are of several kinds to their deepest restart points."""
        blocks = {self._slots[name]: depths.pop(name).device for name in self.by_restart_points & depths.keys()}
        by_slot = {slot: name for name, slot in self._slots.items() if slot in blocks}
        left = sum(1 << slot for slot in blocks)
        for stop in range(max(blocks.values(), default=0), 0, -_AT_ONCE):
            start = max(0, stop - _AT_ONCE)
            masks = list(map(restart.get, keys[start:stop]))
            if not any(masks):
                continue
            for depth in range(stop, start, -1):
                for slot in _bits((masks[depth - 1 - start] or 0) & left):
                    if depth <= blocks[slot]:
                        depths[by_slot[slot]] = Depth(depth, 0)
                        left ^= 1 << slot
            if not left:
                break

    def _slot(self, replica: str) -> int:
        try:
            return self._slots[replica]
        except KeyError:
            raise UnknownReplica(replica, self._slots) from None

    def _take_slot(self, replica: str) -> None:
        if not self._free:
            self._free.append(self._next)
            self._next += 1
        slot = self._slots[replica] = self._free.pop()
        self._live |= 1 << slot
        self._num[slot] = 0

    def _give_slot(self, replica: str) -> None:
        slot = self._slot(replica)
        self._live ^= 1 << slot
        num = self._num.pop(slot)
        (self._gone if num else self._free).append(slot)
        self._num_gone += num
        if self._num_gone > max(_LEAST_SWEPT, sum(self._num.values())):
            self._sweep()

    def _sweep(self) -> None:
        """Forget the blocks of slots that were given up."""
        live = self._live
        for masks in self._masks:
            for key in [key for key, mask in masks.items() if mask & ~live]:
                if mask := masks[key] & live:
                    masks[key] = mask
                else:
                    del masks[key]
        self._free += self._gone
        self._gone, self._num_gone = [], 0


def _bits(mask: int) -> Iterable[int]:
    """The places of the ones in a mask, lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
