"""The state machine of a KV manager: Hypothesis chooses the operations, the rig compares, a failure shrinks to a short program."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from paged.testing.content import typed
from paged.testing.manager_rig import ManagerRig, ManagerWorld, build_manager
from paged.testing.protocol import Capabilities
from paged.testing.rig_machine import RigMachine
from paged.testing.strategies import NAMESPACES, manager_worlds, picks, prompts, tails, where

MAX_ROWS = 6
LASTS = st.sampled_from([None, None, 1, 2, 3])
"""Ticks that a pin or a retention lasts."""


class ManagerMachine(RigMachine):
    """Subclass it and override `build` and `capabilities` to test another manager."""

    build: ClassVar[Any] = staticmethod(build_manager)
    capabilities: ClassVar[Capabilities] = Capabilities()

    rig: ManagerRig

    @initialize(world=manager_worlds(), opening=st.lists(prompts(), min_size=2, max_size=4))
    def begin(self, world: ManagerWorld, opening: list[list[int]]) -> None:
        """A pool that has seen some sequences already."""
        if not self.capabilities.host_tier:
            world = replace(world, host_blocks=0)
        if not self.capabilities.prefix_cache:
            world = replace(world, prefix_caching=False)
        if not (self.capabilities.host_content and world.keeps_content_on_host):
            world = replace(world, host_caching=False, least_load=0)
        if not self.capabilities.events:
            world = replace(world, event_stride=0)
        self.rig = ManagerRig(world, type(self).build)
        for number, tokens in enumerate(opening):
            self.serve(tokens, None, "free" if number % 2 else "confirm")
        if world.keeps_content_on_host:
            self.come_back(opening[0], opening[1], 0, "start")

    @where(lambda self: len(self.rig.rows) < MAX_ROWS)
    @rule(tokens=prompts(), namespace=st.sampled_from(NAMESPACES))
    def add(self, tokens: list[int], namespace: object) -> None:
        self.rig.add(tokens, namespace)

    @where(lambda self: self.capabilities.private_rows and len(self.rig.rows) < MAX_ROWS)
    @rule(tokens=prompts(), reads=st.booleans(), starts=st.booleans())
    def add_private(self, tokens: list[int], reads: bool, starts: bool) -> None:
        """A row that does not write the cache, or does not read it."""
        row = self.rig.add(tokens, None, reads, not reads)
        if starts and self.rig.left(row):
            self.rig.allocate([row], [self.rig.left(row)])

    @where(lambda self: len(self.rig.rows) < MAX_ROWS)
    @rule(tokens=prompts(), namespace=st.sampled_from(NAMESPACES), how=st.sampled_from(["start", "confirm", "free"]))
    def serve(self, tokens: list[int], namespace: object, how: str) -> None:
        """The common life of a sequence, in one rule, so that pools fill up and content comes and goes."""
        row = self.rig.add(tokens[: self.rig.world.num_blocks * self.rig.world.block_size] or [0], namespace)
        self.rig.allocate([row], [self.rig.left(row)])
        while how != "start" and row not in self.rig.idle_rows:
            self.rig.confirm()
        if how == "free":
            self.rig.free([row])

    @where(lambda self: len(self.rig.rows) < MAX_ROWS - 1)
    @rule(tokens=prompts(), more=tails())
    def arrive_together(self, tokens: list[int], more: list[int]) -> None:
        """Two prompts with one beginning in one batch: the second shares what the first is computing."""
        for prompt in (tokens, tokens + more):
            row = self.rig.add(prompt, None)
            self.rig.allocate([row], [self.rig.left(row)])

    @rule(tokens=prompts(), salt=st.integers(0, 2), forks=st.booleans(), num_ended=st.integers(0, 2))
    def arrive_in_three_batches(self, tokens: list[int], salt: int, forks: bool, num_ended: int) -> None:
        """A prompt; in the next batch one that goes on after it, and computes its beginning again; and when the first has been
        computed, the same twice: one row computes the rest once more, and one shares that. So the second batch ends with content that
        others are still computing together; its row may be forked then, and goes on."""
        if self.rig.idle_rows:
            self.rig.free(self.rig.idle_rows)
        if self.rig.batches[0][1] or self.rig.naive.device.available < 5:
            return
        size, namespace = self.rig.world.block_size, ("after", salt)
        prompt = (tokens * 2 * size)[: 2 * size]
        self.serve(prompt[:size], namespace, "start")
        self.rig.seal()
        self.serve(prompt, namespace, "start")
        row = self.rig.batches[-1][1][-1]
        self.rig.seal()
        self.rig.confirm()
        self.serve(prompt, namespace, "start")
        self.serve([*prompt, tokens[0]], namespace, "start")
        self.rig.seal()
        self.rig.confirm()
        if forks and self.capabilities.fork:
            self.rig.fork(row)
        if num_ended:
            self.rig.confirm()
        if num_ended > 1:
            self.rig.append(row, tokens[:1])
            self.rig.allocate([row], [1])
            self.rig.confirm()

    @where(lambda self: self.capabilities.fork and len(self.rig.rows) < MAX_ROWS - 1)
    @rule(tokens=tails(), more=tails(), namespace=st.sampled_from(NAMESPACES))
    def fork_early(self, tokens: list[int], more: list[int], namespace: object) -> None:
        """A short prompt, often shorter than a block, is forked when it has been computed, and its fork goes on."""
        row = self.rig.add(tokens, namespace)
        self.rig.allocate([row], [self.rig.left(row)])
        while row not in self.rig.idle_rows:
            self.rig.confirm()
        child = self.rig.fork(row)
        self.rig.append(child, more)
        if child in self.rig.startable_rows:
            self.rig.allocate([child], [self.rig.left(child)])

    @where(lambda self: self.rig.idle_rows)
    @rule(pick=picks, tokens=tails())
    def append(self, pick: int, tokens: list[int]) -> None:
        self.rig.append(chosen(self.rig.idle_rows, pick), tokens)

    @where(lambda self: self.rig.startable_rows)
    @rule(pick=picks, counts=st.lists(st.integers(1, 6), min_size=1, max_size=3))
    def allocate(self, pick: int, counts: list[int]) -> None:
        rows = rotated(self.rig.startable_rows, pick)[: len(counts)]
        self.rig.allocate(rows, [min(count, self.rig.left(row)) for row, count in zip(rows, counts, strict=False)])

    @where(lambda self: self.rig.startable_rows)
    @rule(pick=picks)
    def decode(self, pick: int) -> None:
        """Every row that can goes on by what it knows, in one call, as a step of decoding does."""
        rows = rotated(self.rig.startable_rows, pick)
        self.rig.allocate(rows, [self.rig.left(row) for row in rows])

    @where(lambda self: self.rig.batches[-1][1])
    @rule()
    def seal(self) -> None:
        self.rig.seal()

    @where(lambda self: self.rig.batches[0][1])
    @rule()
    def confirm(self) -> None:
        self.rig.confirm()

    @where(lambda self: self.capabilities.cancel and self.rig.batches[0][1])
    @rule()
    def cancel(self) -> None:
        self.rig.cancel()

    @where(lambda self: self.rig.device_rows)
    @rule(pick=picks)
    def extend_hit(self, pick: int) -> None:
        self.rig.extend_hit(chosen(self.rig.device_rows, pick))

    @where(lambda self: self.capabilities.reserve and self.rig.device_rows)
    @rule(pick=picks, extra=st.integers(0, 3))
    def reserve(self, pick: int, extra: int) -> None:
        row = chosen(self.rig.device_rows, pick)
        self.rig.reserve([row], [len(self.rig.naive.rows[row].table) + extra])

    @where(lambda self: self.capabilities.truncate and self.rig.idle_rows)
    @rule(pick=picks, num_blocks=st.integers(0, 8))
    def truncate(self, pick: int, num_blocks: int) -> None:
        row = chosen(self.rig.idle_rows, pick)
        self.rig.truncate(row, num_blocks % (len(self.rig.naive.rows[row].table) + 1))

    @where(lambda self: self.capabilities.fork and self.rig.device_rows and len(self.rig.rows) < MAX_ROWS)
    @rule(pick=picks)
    def fork(self, pick: int) -> None:
        self.rig.fork(chosen(self.rig.device_rows, pick))

    @where(lambda self: self.capabilities.fork and self.rig.partial_rows and len(self.rig.rows) < MAX_ROWS)
    @rule(pick=picks, ours=tails(longest=2), theirs=tails(longest=2))
    def branch(self, pick: int, ours: list[int], theirs: list[int]) -> None:
        """A fork at work: both go on in one batch, each by tokens of its own."""
        row = chosen(self.rig.partial_rows, pick)
        child = self.rig.fork(row)
        self.rig.append(row, ours)
        self.rig.append(child, theirs)
        self.rig.allocate([row, child], [self.rig.left(row), self.rig.left(child)])

    @where(lambda self: self.rig.idle_rows)
    @rule(pick=picks, both=st.booleans())
    def free(self, pick: int, both: bool) -> None:
        self.rig.free(rotated(self.rig.idle_rows, pick)[: 1 + both])

    @where(lambda self: self.capabilities.host_tier and self.rig.swappable_rows)
    @rule(pick=picks, keep=st.sampled_from([0, 0, 1, 2]), both=st.booleans())
    def swap_out(self, pick: int, keep: int, both: bool) -> None:
        rows = rotated(self.rig.swappable_rows, pick)[: 1 + both]
        self.rig.swap_out(rows, min(keep, *(self.rig.blocks_to_keep(row) for row in rows)))

    @where(lambda self: self.capabilities.host_tier and self.rig.swappable_rows and len(self.rig.rows) < MAX_ROWS)
    @rule(pick=picks, salt=st.integers(0, 2), both=st.booleans())
    def swap_under_pressure(self, pick: int, salt: int, both: bool) -> None:
        """Rows go to the host, somebody else's content takes all the room that there is, and they are copied back."""
        rows = rotated(self.rig.swappable_rows, pick)[: 1 + both]
        self.rig.swap_out(rows)
        room = self.rig.naive.device.available * self.rig.world.block_size
        if room:
            self.serve([0] * room, ("filler", salt), "free")
        if all(self.rig.naive.rows[row].is_swapped for row in rows):
            self.rig.swap_in(rows)

    @where(lambda self: self.rig.world.keeps_content_on_host and len(self.rig.rows) < MAX_ROWS - 1)
    @rule(tokens=prompts(), more=tails(), salt=st.integers(0, 2), how=st.sampled_from(["start", "confirm", "free"]))
    def come_back(self, tokens: list[int], more: list[int], salt: int, how: str) -> None:
        """A prompt is served, other content pushes it out to the host, and one that begins like it comes."""
        longest = self.rig.world.num_blocks * self.rig.world.block_size
        tokens = (tokens * longest)[: max(len(tokens), 2 * self.rig.world.block_size + 1)]
        self.serve(tokens[: longest - 1], None, "free")
        self.serve([0] * (self.rig.naive.device.available * self.rig.world.block_size), ("filler", salt), "free")
        self.serve(tokens + more, None, how)

    @where(lambda self: self.rig.world.keeps_content_on_host and len(self.rig.rows) < MAX_ROWS - 1)
    @rule(tokens=prompts(), others=prompts())
    def visit(self, tokens: list[int], others: list[int]) -> None:
        longest = self.rig.world.num_blocks * self.rig.world.block_size
        self.rig.visit(tokens, (others * longest)[: self.rig.naive.device.available * self.rig.world.block_size] or [0])

    @where(lambda self: self.rig.swapped_rows)
    @rule(pick=picks, both=st.booleans())
    def swap_in(self, pick: int, both: bool) -> None:
        self.rig.swap_in(rotated(self.rig.swapped_rows, pick)[: 1 + both])

    @where(lambda self: self.capabilities.retention and len(self.rig.naive.pins) < 2)
    @rule(tokens=prompts(), lasts=LASTS)
    def pin(self, tokens: list[int], lasts: int | None) -> None:
        self.rig.pin(tokens, None, lasts)

    @where(lambda self: self.rig.pins)
    @rule(pick=picks)
    def unpin(self, pick: int) -> None:
        self.rig.unpin(sorted(self.rig.pins)[pick % len(self.rig.pins)])

    @where(lambda self: self.capabilities.retention and self.rig.naive.device.resident)
    @rule(pick=picks, priority=st.integers(1, 3), lasts=LASTS)
    def retain(self, pick: int, priority: int, lasts: int | None) -> None:
        nodes = sorted((node for node in self.rig.naive.device.resident if node[0] == typed(None)), key=str)
        if nodes:
            self.rig.retain(list(nodes[pick % len(nodes)][1]), None, priority, lasts)

    @where(lambda self: self.rig.naive.ends)
    @rule(ticks=st.integers(1, 3))
    def expire(self, ticks: int) -> None:
        self.rig.expire(ticks)

    @rule()
    def reset_cache(self) -> None:
        self.rig.reset_cache()

    @where(lambda self: self.rig.rows)
    @rule(pick=picks)
    def misuse(self, pick: int) -> None:
        row = chosen(self.rig.rows, pick)
        self.rig.misuse("free", [row, 77])
        self.rig.misuse("free", [row, row])
        self.rig.misuse("truncate", row, 99)
        if row not in self.rig.idle_rows:
            for verb, arguments in MISUSES_IN_FLIGHT[pick % len(MISUSES_IN_FLIGHT)]:
                self.rig.misuse(verb, row, *arguments)
        elif row in self.rig.startable_rows:
            self.rig.misuse("allocate", [row], [self.rig.left(row) + 1])
            self.rig.misuse("allocate", [row], [0])
            self.rig.misuse("confirm", [row])


MISUSES_IN_FLIGHT: list[list[tuple[str, tuple[object, ...]]]] = [
    [("free", ()), ("fork", ())],
    [("swap_out", ()), ("truncate", (0,))],
    [("append", ([0],)), ("allocate", (1,))],
]
"""What the row of a batch that has not ended refuses."""


def chosen(rows: list[int], pick: int) -> int:
    """One of the rows."""
    return rows[pick % len(rows)]


def rotated(rows: list[int], pick: int) -> list[int]:
    """All of the rows, beginning with one of them."""
    start = pick % len(rows) if rows else 0
    return rows[start:] + rows[:start]
