"""An index of a cache that is built from its events alone, and where it differs from the cache."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from paged.block_manager import BlockManager

Path = tuple[bytes, ...]
TIERS = ("device", "host")


@lru_cache(1 << 16)
def hash_of(path: Path) -> bytes:
    """The chained SHA-256 of content: its encoded namespace, then the token bytes of each block up to it."""
    digest = b""
    for part in path:
        digest = hashlib.sha256(digest + part).digest()
    return digest


class EventReader:
    """The hashes that the events put in each tier, `contents`, and those behind which prompts begin, `restarts`."""

    def __init__(self) -> None:
        self.contents: dict[str, set[bytes]] = {tier: set() for tier in TIERS}
        self.restarts: set[bytes] = set()
        self._parent: dict[bytes, bytes | None] = {}

    def apply(self, events: Iterable[Any]) -> list[str]:
        """Take events in. Returns what is wrong with them, as sentences."""
        found: list[str] = []
        for event in events:
            kind = type(event).__name__
            if kind == "Cleared":
                self.contents, self.restarts = {tier: set() for tier in TIERS}, set()
            elif kind == "RestartPoint":
                if event.is_stored == (event.hash in self.restarts):
                    found.append(f"a restart point at {event.length} tokens was reported to be what it was")
                (self.restarts.add if event.is_stored else self.restarts.discard)(event.hash)
            elif event.tier not in TIERS:
                found.append(f"an event of a tier {event.tier!r}")
            elif kind == "Stored":
                found += self._stored(event)
            elif kind == "Removed":
                found += self._removed(event.tier, event.hashes)
            else:
                found.append(f"an event of kind {kind}")
        return found

    def differences(self, tier: str, contents: Iterable[Path]) -> list[str]:
        """What the tier holds against its events, as sentences."""
        expected = {hash_of(path): path for path in contents}
        shown = self.contents[tier]
        found = [f"no event said that the {tier} stored {expected[key]}" for key in expected.keys() - shown]
        return found + [f"no event said that the {tier} removed {key.hex()[:8]}" for key in shown - expected.keys()]

    def restart_differences(self, paths: Iterable[Path]) -> list[str]:
        """The content behind which prompts begin against its events, as sentences."""
        expected = {hash_of(path): path for path in paths}
        found = [
            f"15: no event said that prompts begin behind {expected[key]}" for key in expected.keys() - self.restarts
        ]
        gone = self.restarts - expected.keys()
        return found + [f"15: no event said that no prompt begins behind {key.hex()[:8]} any more" for key in gone]

    def _stored(self, event: Any) -> list[str]:
        found: list[str] = []
        blocks = np.asarray(event.tokens, np.int32).reshape(len(event.hashes), -1)
        parent = event.parent
        if event.tier == "device" and parent is not None and parent not in self.contents["device"]:
            found.append("an event put content on the device before its parent")
        before = hashlib.sha256(event.namespace).digest() if parent is None else parent
        for key, tokens in zip(event.hashes, blocks, strict=True):
            if key != hashlib.sha256(before + tokens.tobytes()).digest():
                found.append(f"the hash of {tokens.tolist()} is not that of its parent and its tokens")
            if key in self.contents[event.tier]:
                found.append(f"two events put {tokens.tolist()} on the {event.tier}")
            self.contents[event.tier].add(key)
            self._parent[key] = parent
            parent = before = key
        return found

    def _removed(self, tier: str, hashes: Sequence[bytes]) -> list[str]:
        found: list[str] = []
        for key in hashes:
            if key not in self.contents[tier]:
                found.append(f"an event removed {key.hex()[:8]} from the {tier}, and none had put it there")
            self.contents[tier].discard(key)
            if tier == "device" and any(self._parent[other] == key for other in self.contents["device"]):
                found.append("an event removed content from the device before its children")
        return found


class EventWatch:
    """Reads a manager's events every few looks, as a reader from the beginning and as one that starts late."""

    def __init__(self, manager: Any, stride: int, contents: Callable[[str], Iterable[Path]]) -> None:
        """`stride`: looks from one reading to the next; 0: there is no reader. `contents`: what a tier holds now."""
        self._manager = manager
        self._wanted = {"restart_points": True} if isinstance(manager, BlockManager) else {}
        self._stride = stride
        self._contents = contents
        self._num_looks = 0
        self._reader = EventReader()
        self._late: EventReader | None = None

    def look(self, restarts: Callable[[], Iterable[Path]] | None = None) -> list[str]:
        """What is wrong with the events so far. `restarts`: the content behind which prompts begin; None: not known."""
        if not self._stride:
            return []
        self._num_looks += 1
        found: list[str] = []
        if self._num_looks % 7 == 4:
            # At any moment, between two readings, too.
            self._late = EventReader()
            found += self._late.apply(self._manager.events_snapshot())
        if self._num_looks % self._stride:
            return found
        events, paths = self._manager.take_events(**self._wanted), None if restarts is None else list(restarts())
        for reader in (self._reader, self._late):
            if reader is not None:
                found += reader.apply(events) + ([] if paths is None else reader.restart_differences(paths))
                for tier in TIERS:
                    found += reader.differences(tier, self._contents(tier))
        return found
