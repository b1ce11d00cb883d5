"""An index of the blocks that each replica has, for a router: one look-up of a block answers for all replicas.

    block      0    1    2    3    4    5        a mask a block: who has it
    replica 0  ■    ■    ■    ■    ■    ·        depth 5
    replica 1  ■    ■    ·    ·    ·    ·        depth 2

A replica that has a block has those before it, so a few look-ups find the depths of all replicas together. After lost
or wrong events a depth may be wrong: then the replica computes more of the prompt, which costs time.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from itertools import repeat
from operator import or_
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged.base.arguments import checked_integer, token_array
from paged.block_manager import Cleared, Event, Removed, RestartPoint, Stored
from paged.block_manager.content_key import namespace_digest, root_prefix
from paged.errors import InvalidConfig, UnknownReplica

DEVICE, HOST, RESTART = range(3)
"""A block's place: a tier, or RESTART, where a prompt can begin behind the block."""
_TIERS = {"device": DEVICE, "host": HOST}
_LEAST_SWEPT = 100_000
"""Blocks of replicas that are gone, at least, for a sweep."""
_AT_ONCE = 64
_MOST_AT_ONCE, _MOST_LOOK_UPS = 64, 80
"""Look-ups for a prompt's depths: in 10 million blocks each costs cache misses (benchmarks/routing_cost.py)."""
_HINT_BITS = 18, 22
"""Bits of a key that select in a table of a second-level cache's size, and the next ones, in a larger table."""
_HINT_MASKS = (1 << _HINT_BITS[0]) - 1, (1 << _HINT_BITS[1]) - 1

Keys = NDArray[np.uint64]
"""The keys of a prompt's blocks, uint64 [blocks]."""
NO_KEYS: Keys = np.empty(0, np.uint64)


def prompt_keys(tokens: Any, block_size: int, namespace: Any = None) -> Keys:
    """Return the keys of a prompt's full blocks, of at most len(tokens) - 1 tokens: the last 64 bits of `block_hashes`.

    `tokens` are integers or int32 [n]; `namespace` is a request's (salt, adapter, extra_key), None if it has none of
    them. Takes about 1 µs a block. Raises InvalidTokens, InvalidNamespace, or InvalidConfig for a wrong block size.
    """
    array, digest = token_array(tokens), namespace_digest(root_prefix(namespace))
    size = 4 * checked_integer("block_size", block_size, 1)
    data = memoryview(array.astype(np.int32, copy=False).tobytes())
    digests = []
    for start in range(0, max(0, len(array) - 1) // block_size * size, size):
        chained = sha256(digest)
        chained.update(data[start : start + size])
        digest = chained.digest()
        digests.append(digest)
    return np.frombuffer(b"".join(digests), ">u8").reshape(-1, 4)[:, 3].astype(np.uint64)


def key_of(digest: bytes) -> int:
    """Return the key of a block with this chained SHA-256."""
    return int.from_bytes(digest[-8:], "big")


class ReplicaIndex:
    """Masks by block and tier; bit i is the replica's in slot i. A forgotten replica gives up its slot, which takes no
    time; a later sweep clears its bits, and then the slot is used again."""

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}
        # By bit.
        self._names: dict[int, str] = {}
        # Slots in use, and those of replicas that report restart points, as masks.
        self._live = 0
        self._restarting = 0
        self._next = 0
        # Slots without bits, and slots whose bits are to be swept.
        self._free: list[int] = []
        self._gone: list[int] = []
        self._masks: tuple[dict[int, int], ...] = ({}, {}, {})
        # By each of two parts of a key, how many restart points have it: so most other blocks need no look-up.
        self._hints = [np.zeros(1 << bits, np.int16) for bits in _HINT_BITS]
        self._num: dict[int, int] = {}
        self._num_gone = 0

    def __len__(self) -> int:
        """Return the number of blocks that any replica has on the device."""
        return len(self._masks[DEVICE])

    def __contains__(self, replica: str) -> bool:
        return replica in self._slots

    def add(self, replica: str, *, restart_points: bool = False) -> None:
        """Add a replica that has nothing. `restart_points`: its layers are of several kinds, and it reports where
        prompts can begin. Raises InvalidConfig if it is there already."""
        if replica in self._slots:
            raise InvalidConfig(f"there is a replica {replica!r} already.")
        self._take_slot(replica, restart_points)

    def remove(self, replica: str) -> None:
        """Forget a replica. Raises UnknownReplica."""
        self._give_slot(replica)
        del self._slots[replica]

    def clear(self, replica: str) -> None:
        """Forget what a replica has. Raises UnknownReplica."""
        restart_points = bool(self._restarting >> self._slot(replica) & 1)
        self._give_slot(replica)
        self._take_slot(replica, restart_points)

    def store(self, replica: str, keys: Iterable[int] | Keys, place: int = DEVICE) -> None:
        """Note that a replica has these blocks now in a place: DEVICE, HOST or RESTART. Raises UnknownReplica."""
        slot, masks, num = self._slot(replica), self._masks[place], 0
        bit = with_it = 1 << slot
        without = 0
        if place == RESTART:
            self._restarting |= bit
        for key in _integers(keys):
            before = masks.get(key, 0)
            if not before & bit:
                # Consecutive blocks with the same replicas share one integer.
                if before is not without:
                    without, with_it = before, before | bit
                masks[key] = with_it
                num += 1
                if not before and place == RESTART:
                    self._hint(key, 1)
        self._num[slot] += num

    def drop(self, replica: str, keys: Iterable[int] | Keys, place: int = DEVICE) -> None:
        """Note that a replica no longer has these blocks in a place. Raises UnknownReplica."""
        slot, masks, num = self._slot(replica), self._masks[place], 0
        bit = 1 << slot
        for key in _integers(keys):
            before = masks.get(key, 0)
            if before & bit:
                num += 1
                if before != bit:
                    masks[key] = before ^ bit
                else:
                    del masks[key]
                    if place == RESTART:
                        self._hint(key, -1)
        self._num[slot] -= num

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

    def depths(self, keys: Keys) -> dict[str, int]:
        """Return how many leading blocks of a prompt each replica has, on its device or host; those without are left
        out. A replica with restart points counts with its deepest one whose block it has, not with its deepest block.

        Exact for restart points and few depths; of many, those below the deepest may be too low by a 64th of the
        prompt.
        """
        [some] = self._having(keys[:1].tolist()) or [0]
        some &= self._live
        found = self._found(keys, by_block) if (by_block := some & ~self._restarting) else []
        if restarting := some & self._restarting:
            found += self._deepest(RESTART, keys, self._hinted(keys), restarting)
        return self._by_name(found)

    def deepest(self, keys: Keys) -> dict[str, int]:
        """Return how deep the last of these blocks is that each replica has on its device. One look-up a block."""
        masks = self._masks[DEVICE]
        if masks.keys().isdisjoint(keys.tolist()):
            return {}
        return self._by_name(self._deepest(DEVICE, keys, np.arange(len(keys)), self._live))

    def _found(self, keys: Keys, some: int) -> list[tuple[int, int]]:
        """Return depths, each with a mask of its replicas, of the replicas `some`, which have the first block."""
        # Look up evenly spaced blocks at once, then the middle of each gap, the deepest first.
        # A gap: the replicas `some` have the block at `low`, and not the one at `high`.
        step = -(-len(keys) // min(some.bit_count() + 1, _MOST_AT_ONCE))
        found, gaps, low = [], [], 0
        at = range(step, len(keys), step)
        for high, mask in zip(at, self._having(keys[at.start :: step].tolist()), strict=True):
            if some != (deeper := some & mask):
                gaps.append((low, high, some ^ deeper))
                some = deeper
            low = high
        if some:
            gaps.append((low, len(keys), some))
        left, (device, host, _) = _MOST_LOOK_UPS - len(at), self._masks
        while gaps and left:
            low, high, some = gaps.pop()
            if high - low == 1:
                found.append((low + 1, some))
                continue
            left -= 1
            middle = (low + high) // 2
            key = keys.item(middle)
            deeper = some & (device.get(key, 0) | host.get(key, 0))
            if some != deeper:
                gaps.append((low, middle, some ^ deeper))
            if deeper:
                gaps.append((middle, high, deeper))
        return found + [(low + 1, some) for low, _, some in gaps]

    def _having(self, keys: list[int]) -> list[int]:
        """Return who has each of these blocks on the device or the host, as masks."""
        device, host, _ = self._masks
        masks = list(map(device.get, keys, repeat(0)))
        return list(map(or_, masks, map(host.get, keys, repeat(0)))) if host else masks

    def _deepest(self, place: int, keys: Keys, at: NDArray[np.int64], left: int) -> list[tuple[int, int]]:
        """Return depths, each with a mask of its replicas: the deepest of the blocks `at` that each of the replicas
        `left` has in a place. A restart point counts with its block."""
        masks, found = self._masks[place], list[tuple[int, int]]()
        for stop in range(len(at), 0, -_AT_ONCE):
            places = at[max(0, stop - _AT_ONCE) : stop][::-1]
            its = keys[places].tolist()
            having = list(map(masks.get, its, repeat(0)))
            for index, key, mask in zip(places.tolist(), its, having, strict=True) if any(having) else ():
                some = mask & left
                if some and place == RESTART:
                    some &= self._having([key])[0]
                if some:
                    found.append((index + 1, some))
                    left ^= some
            if not left:
                break
        return found

    def _hinted(self, keys: Keys) -> NDArray[np.int64]:
        """Return the blocks that may be restart points."""
        (first, second), (low, high) = self._hints, _HINT_MASKS
        [hinted] = first.take((keys & low).view(np.int64)).nonzero()
        return hinted[second.take((keys[hinted] >> _HINT_BITS[0] & high).view(np.int64)) != 0]

    def _hint(self, key: int, change: int) -> None:
        (first, second), (low, high) = self._hints, _HINT_MASKS
        first[key & low] += change
        second[key >> _HINT_BITS[0] & high] += change

    def _by_name(self, found: list[tuple[int, int]]) -> dict[str, int]:
        names, depths = self._names, {}
        for depth, mask in found:
            while mask:
                bit = mask if mask in names else mask & -mask
                depths[names[bit]] = depth
                mask ^= bit
        return depths

    def _slot(self, replica: str) -> int:
        try:
            return self._slots[replica]
        except KeyError:
            raise UnknownReplica(replica, self._slots) from None

    def _take_slot(self, replica: str, restart_points: bool) -> None:
        if not self._free:
            self._free.append(self._next)
            self._next += 1
        slot = self._slots[replica] = self._free.pop()
        self._names[1 << slot] = replica
        self._live |= 1 << slot
        self._restarting |= restart_points << slot
        self._num[slot] = 0

    def _give_slot(self, replica: str) -> None:
        slot = self._slot(replica)
        self._live ^= 1 << slot
        self._restarting &= self._live
        del self._names[1 << slot]
        num = self._num.pop(slot)
        (self._gone if num else self._free).append(slot)
        self._num_gone += num
        if self._num_gone > max(_LEAST_SWEPT, sum(self._num.values())):
            self._sweep()

    def _sweep(self) -> None:
        """Clear the bits of slots that were given up."""
        live = self._live
        for place, masks in enumerate(self._masks):
            for key in [key for key, mask in masks.items() if mask & ~live]:
                if mask := masks[key] & live:
                    masks[key] = mask
                else:
                    del masks[key]
                    if place == RESTART:
                        self._hint(key, -1)
        self._free += self._gone
        self._gone, self._num_gone = [], 0


def _integers(keys: Iterable[int] | Keys) -> Iterable[int]:
    return keys.tolist() if isinstance(keys, np.ndarray) else keys
