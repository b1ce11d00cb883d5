"""The device of a scheduler rig: runs the batches that are out, in order, on memory of contexts in place of numbers.

    schedule       batch 4 goes out      batch 5 goes out
    run            moves of 4, forward pass of 4, moves of 5, ...
    update         what batch 4 sampled is known to the engine

A batch runs from what it carries: its moves, its slots, and block tables that are kept from reported changes alone.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from paged.testing.content import POISON
from paged.testing.flight import Flight, Mirror
from paged.testing.shadow_groups import ShadowGroups
from paged.testing.shadow_kv import ShadowKV
from paged.testing.world import World


class RigDevice:
    """`flights` are the batches that are out, oldest first. What runs something returns what is wrong, as sentences."""

    def __init__(self, world: World, manager: Any, events: Counter[str]) -> None:
        """`events` counts what the batches copy."""
        self._world, self._manager, self._events = world, manager, events
        self.shadow: Any = ShadowKV(world.num_blocks, world.block_size, world.host_blocks)
        if world.groups:
            self.shadow = ShadowGroups(world.groups, world.num_blocks, world.block_size, world.host_blocks)
        self.flights: list[Flight] = []
        # Moves that a later batch still has to bring: of a cancelled batch (None), or for forks, source by destination.
        self.carried: list[dict[int, int] | None] = []
        # The number of the latest batch that was cancelled after its moves had run.
        self.last_moved = 0
        self._mirror: Mirror = {}

    def run(self, index: int) -> list[str]:
        """Run outstanding batch `index`, after those before it: of each the moves, then the forward pass."""
        found: list[str] = []
        for flight in self.flights[: index + 1]:
            found = found or self._move(flight)
            if not found and not flight.has_run:
                found = self._compute(flight)
        return found

    def stop_within(self, flight: Flight) -> list[str]:
        """Make the moves of the latest batch, which is out no more, and half of its forward pass: anything may stand in
        its slots, but for what came later."""
        found = self._move(flight)
        flight.apply_changes(self._mirror)
        self.last_moved = max(self.last_moved, flight.number)
        if self._world.groups:
            self.shadow.spoil(flight.batch, flight.views, flight.rewritten)
        else:
            slots = flight.batch.slot_mapping
            is_its_own = ~np.isin(slots // self._world.block_size, list(flight.rewritten))
            self.shadow.device.reshape(-1)[slots[is_its_own]] = POISON
        return found

    def load(self, block: int, contents: Any) -> None:
        """Write content that comes from elsewhere to the first slots of a block."""
        self.shadow.device[block, : len(contents)] = contents
        for flight in self.flights:
            flight.rewritten.add(block)

    def carry(self, sources: list[int], copies: list[int]) -> None:
        """Add copies for a fork to the latest carried group, or as a new one if one touches what another writes."""
        pairs = dict(self.carried[-1] or {}) if self.carried else {}
        pairs |= {copy: pairs.get(source, source) for source, copy in zip(sources, copies, strict=True)}
        if self.carried and self.carried[-1] is not None and not pairs.keys() & set(pairs.values()):
            self.carried[-1] = pairs
        else:
            self.carried.append(dict(zip(copies, sources, strict=True)))

    def poison_free(self) -> None:
        """Poison blocks without content, as a debug build would, unless a decision is still to be executed."""
        if not self.carried and all(flight.has_run for flight in self.flights):
            self.shadow.poison((self._manager.device.states == 0).nonzero()[0].tolist())

    def words(self, flight: Flight, place: int, count: int) -> list[int]:
        """The `count` tokens that the model says after what a place attended to."""
        return self._words(flight.attended[place].tolist(), flight.keys[place][1], count)

    def coming(self, namespace: object, tokens: list[int], sequence: int, count: int) -> list[int]:
        """The `count` tokens that the model says after these."""
        return self._words(self.shadow.contents.path(namespace, tokens).tolist(), sequence, count)

    def _words(self, held: list[int], sequence: int, count: int) -> list[int]:
        words: list[int] = []
        for _ in range(count):
            words.append(self.shadow.contents.next_token(held, sequence, self._world.vocabulary))
            held.append(self.shadow.contents.extend(held[-1], words[-1]))
        return words

    def _move(self, flight: Flight) -> list[str]:
        """Make the moves of a batch, once."""
        if flight.has_moved:
            return []
        flight.has_moved = True
        moves, events = flight.batch.moves, self._events
        for earlier in self.flights:
            if earlier.number < flight.number:
                earlier.rewritten |= {*moves.host_to_device[:, 1].tolist(), *moves.device_to_device[:, 1].tolist()}
        events["copy on write"] += len(moves.device_to_device)
        events["swapped out"] += len(moves.device_to_host)
        events["swapped in"] += len(moves.host_to_device)
        if self._world.keeps_content_on_host and hasattr(self._manager, "stats"):
            figures = self._manager.stats()
            events["content offloaded"] += figures.offloaded_blocks > 0
            events["content loaded"] += figures.loaded_blocks > 0
        return list(self.shadow.move(moves))

    def _compute(self, flight: Flight) -> list[str]:
        """Run the forward pass, and tell later batches the tokens that it samples."""
        flight.apply_changes(self._mirror)
        found, tables = flight.mirrored(self._mirror, self._world.block_size)
        if not found:
            seen = flight.views if self._world.groups else tables
            found, flight.attended = self.shadow.run(flight.batch, seen, flight.known)
        if found:
            return found
        flight.has_run = True
        later = self.flights[self.flights.index(flight) + 1 :]
        for place in flight.batch.samples.nonzero()[0].tolist():
            flight.right[place] = self._right(flight, place)
            token = flight.sampled[place] = flight.right[place][0]
            for other in later:
                other.learn((flight.number, place), token)
        return []

    def _right(self, flight: Flight, place: int) -> list[int]:
        """The drafts of a place that the model says, too, up to the first that it does not, and what it says there."""
        held, drafts, right = flight.attended[place].tolist(), flight.drafted(place), list[int]()
        for behind in range(len(drafts), -1, -1):
            context = held[: len(held) - behind]
            right.append(self.shadow.contents.next_token(context, flight.keys[place][1], self._world.vocabulary))
            if behind and right[-1] != drafts[len(drafts) - behind]:
                break
        return right
