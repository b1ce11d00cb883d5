"""The state machine of a KV manager: Hypothesis chooses the operations, and the rig compares after each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from paged.testing.content import typed
from paged.testing.manager_rig import ManagerRig, ManagerWorld, build_manager
from paged.testing.protocol import Capabilities, flag_of
from paged.testing.rig_machine import RigMachine, cut_to
from paged.testing.strategies import NAMESPACES, manager_worlds, picks, prompts, tails, where

MAX_ROWS = 6
LASTS = st.sampled_from([None, None, 1, 2, 3])
"""Ticks that a retention lasts."""
MAX_OUT = 3
"""Batches that are out at once, beside the one that is being composed."""


class ManagerMachine(RigMachine):
    """Subclass it and override `build` and `capabilities` to test another manager."""

    build: ClassVar[Any] = staticmethod(build_manager)
    capabilities: ClassVar[Capabilities] = Capabilities()

    rig: ManagerRig

    @initialize(world=manager_worlds(), opening=st.lists(prompts(), min_size=2, max_size=4))
    def begin(self, world: ManagerWorld, opening: list[list[int]]) -> None:
        """A pool that has seen some sequences already."""
        world = cut_to(self.capabilities, world)
        if not world.keeps_content_on_host:
            world = replace(world, host_caching=False, least_load=0)
        self.rig = ManagerRig(world, type(self).build)
        for number, tokens in enumerate(opening):
            self.serve(tokens, None, "free" if number % 2 else "confirm")
        if world.keeps_content_on_host:
            self.come_back(opening[0], opening[1], 0, "start")

    def start(self, row: int) -> None:
        """Place all that the row knows, if that is possible now."""
        if row in self.rig.startable_rows:
            self.rig.allocate([row], [self.rig.left(row)])

    def fill(self, salt: int, how: str) -> None:
        """Serve other content that takes all the room."""
        self.serve([0] * (self.rig.naive.device.available * self.rig.world.block_size), ("filler", salt), how)

    @where(lambda self: len(self.rig.rows) < MAX_ROWS)
    @rule(tokens=prompts(), namespace=st.sampled_from(NAMESPACES))
    def add(self, tokens: list[int], namespace: object) -> None:
        self.rig.add(tokens, namespace)

    @where(lambda self: self.capabilities.private_rows and len(self.rig.rows) < MAX_ROWS)
    @rule(tokens=prompts(), reads=st.booleans(), starts=st.booleans())
    def add_private(self, tokens: list[int], reads: bool, starts: bool) -> None:
        """A row that does not write the cache, or does not read it."""
        row = self.rig.add(tokens, None, reads, not reads)
        if starts:
            self.start(row)

    @where(lambda self: len(self.rig.rows) < MAX_ROWS)
    @rule(tokens=prompts(), namespace=st.sampled_from(NAMESPACES), how=st.sampled_from(["start", "confirm", "free"]))
    def serve(self, tokens: list[int], namespace: object, how: str) -> None:
        """The common life of a sequence, in one rule, so that pools fill up and content comes and goes."""
        row = self.rig.add(tokens[: self.rig.world.num_blocks * self.rig.world.block_size] or [0], namespace)
        self.start(row)
        while how != "start" and row not in self.rig.idle_rows:
            self.rig.confirm()
        if how == "free":
            self.rig.free([row])

    @where(lambda self: len(self.rig.rows) < MAX_ROWS - 1)
    @rule(tokens=prompts(), more=tails())
    def arrive_together(self, tokens: list[int], more: list[int]) -> None:
        """Two prompts that begin alike, in one batch: the second shares what the first is computing."""
        for prompt in (tokens, tokens + more):
            row = self.rig.add(prompt, None)
            self.start(row)

    @where(lambda self: self.capabilities.rows_in_flight and len(self.rig.rows) < MAX_ROWS - 1)
    @rule(tokens=prompts(), more=tails(), coming=tails(longest=2), how=st.sampled_from(["out", "confirm", "cancel"]))
    def go_ahead(self, tokens: list[int], more: list[int], coming: list[int], how: str) -> None:
        """A prompt is in one batch, its first output in the next, and another prompt shares what both compute."""
        row = self.rig.add(tokens, None)
        for values in ([], coming):
            if self.rig.num_out < MAX_OUT and row in self.rig.placeable_rows and (self.rig.left(row) or values):
                self.rig.allocate([row], [self.rig.left(row)], [values])
                self.rig.seal()
        self.rig.append(row, coming)
        sharer = self.rig.add(tokens + coming + more, None)
        self.start(sharer)
        if how != "out" and self.rig.naive.batches:
            getattr(self.rig, how)()

    @where(lambda self: self.capabilities.rows_in_flight and self.capabilities.private_rows)
    @rule(
        tokens=prompts(), salt=st.integers(0, 2), shares=st.booleans(), forks=st.booleans(), num_ended=st.integers(0, 2)
    )
    def overtake(self, tokens: list[int], salt: int, shares: bool, forks: bool, num_ended: int) -> None:
        """A batch computes content that was cached and then evicted; the next batch computes it, too, and a third row
        may share that. So the first batch ends with content that a later one has pending."""
        while self.rig.naive.batches:
            self.rig.confirm()
        if self.rig.idle_rows:
            self.rig.free(self.rig.idle_rows)
        size = self.rig.world.block_size
        if self.rig.naive.device.available < 5:
            return
        prompt = (tokens * 2 * size)[: 2 * size]
        self.serve(prompt, None, "free")
        row = self.rig.add(prompt, None, False, True)
        self.start(row)
        self.rig.seal()
        self.fill(salt, "start")
        self.rig.free([self.rig.rows[-1]])
        self.serve(prompt, None, "start")
        if shares:
            self.serve([*prompt, tokens[0]], None, "start")
        if forks and self.capabilities.fork:
            self.rig.fork(row)
        self.rig.seal()
        for _ in range(num_ended):
            self.rig.confirm()

    @where(lambda self: self.capabilities.fork and len(self.rig.rows) < MAX_ROWS - 1)
    @rule(tokens=tails(), more=tails(), namespace=st.sampled_from(NAMESPACES))
    def fork_early(self, tokens: list[int], more: list[int], namespace: object) -> None:
        """A short prompt, often shorter than a block, is computed and forked, and the fork goes on."""
        row = self.rig.add(tokens, namespace)
        self.start(row)
        while row not in self.rig.idle_rows:
            self.rig.confirm()
        child = self.rig.fork(row)
        self.rig.append(child, more)
        self.start(child)

    @where(lambda self: self.rig.free_rows)
    @rule(pick=picks, tokens=tails())
    def append(self, pick: int, tokens: list[int]) -> None:
        self.rig.append(chosen(self.rig.free_rows, pick), tokens)

    @where(lambda self: self.rig.placeable_rows)
    @rule(
        pick=picks,
        counts=st.lists(st.integers(1, 6), min_size=1, max_size=3),
        coming=st.lists(tails(longest=3), max_size=3),
    )
    def allocate(self, pick: int, counts: list[int], coming: list[list[int]]) -> None:
        """A few tokens of some rows; of a row whose known tokens are all placed, perhaps some that it learns later."""
        rows = rotated(self.rig.placeable_rows, pick)[: len(counts)]
        known = [min(count, self.rig.left(row)) for row, count in zip(rows, counts, strict=False)]
        ahead = coming if self.capabilities.rows_in_flight else []
        later = [
            ahead[place] if place < len(ahead) and known[place] == self.rig.left(row) else []
            for place, row in enumerate(rows)
        ]
        places = [place for place in range(len(rows)) if known[place] + len(later[place])]
        if places:
            self.rig.allocate(
                [rows[place] for place in places],
                [known[place] for place in places],
                [later[place] for place in places],
            )

    @where(lambda self: self.rig.startable_rows)
    @rule(pick=picks)
    def decode(self, pick: int) -> None:
        """Every row that can computes what it knows, in one call, as a step of decoding does."""
        rows = rotated(self.rig.startable_rows, pick)
        self.rig.allocate(rows, [self.rig.left(row) for row in rows])

    @where(lambda self: self.capabilities.rows_in_flight and self.rig.num_out < MAX_OUT and self.rig.device_rows)
    @rule(pick=picks, values=st.lists(st.integers(0, 1), min_size=MAX_ROWS, max_size=MAX_ROWS))
    def step_ahead(self, pick: int, values: list[int]) -> None:
        """The next batch comes before the last one has ended: rows without known tokens left go on by a sampled one."""
        if self.rig.naive.has_composed:
            self.rig.seal()
        rows = rotated(self.rig.placeable_rows, pick)
        later = [[] if self.rig.left(row) else [value] for row, value in zip(rows, values, strict=False)]
        self.rig.allocate(rows, [self.rig.left(row) for row in rows], later)

    @where(lambda self: self.rig.naive.has_composed and self.rig.num_out < MAX_OUT)
    @rule()
    def seal(self) -> None:
        self.rig.seal()

    @where(lambda self: self.rig.naive.batches)
    @rule()
    def confirm(self) -> None:
        self.rig.confirm()

    @where(lambda self: self.capabilities.cancel and self.rig.naive.batches)
    @rule()
    def cancel(self) -> None:
        self.rig.cancel()

    @where(lambda self: self.rig.extends_hits and self.rig.device_rows)
    @rule(pick=picks)
    def extend_hit(self, pick: int) -> None:
        self.rig.extend_hit(chosen(self.rig.device_rows, pick))

    @where(lambda self: self.capabilities.reserve and self.rig.device_rows)
    @rule(pick=picks, extra=st.integers(0, 3))
    def reserve(self, pick: int, extra: int) -> None:
        row = chosen(self.rig.device_rows, pick)
        self.rig.reserve([row], [len(self.rig.naive.rows[row].table) + extra])

    @where(lambda self: self.capabilities.truncate and self.rig.free_rows)
    @rule(pick=picks, num_blocks=st.integers(0, 8))
    def truncate(self, pick: int, num_blocks: int) -> None:
        row = chosen(self.rig.free_rows, pick)
        self.rig.truncate(row, num_blocks % (len(self.rig.naive.rows[row].table) + 1))

    @where(lambda self: self.capabilities.truncate and self.capabilities.rows_in_flight and self.rig.flying_rows)
    @rule(pick=picks, num_blocks=st.integers(0, 8), then=st.sampled_from(["cancel", "confirm"]))
    def cut_short(self, pick: int, num_blocks: int, then: str) -> None:
        """A row gives up blocks that a batch computes, and the batch ends."""
        row = chosen(self.rig.flying_rows, pick)
        self.rig.truncate(row, num_blocks % (len(self.rig.naive.rows[row].table) + 1))
        if then == "confirm" or self.capabilities.cancel:
            getattr(self.rig, then)()

    @where(lambda self: self.capabilities.fork and self.rig.device_rows and len(self.rig.rows) < MAX_ROWS)
    @rule(pick=picks)
    def fork(self, pick: int) -> None:
        self.rig.fork(chosen(self.rig.device_rows, pick))

    @where(
        lambda self: self.capabilities.fork and self.capabilities.rows_in_flight and len(self.rig.rows) < MAX_ROWS - 1
    )
    @rule(token=st.integers(0, 1), more=tails(), salt=st.integers(0, 2), ends=st.booleans(), stays=st.booleans())
    def outlive(self, token: int, more: list[int], salt: int, ends: bool, stays: bool) -> None:
        """A row that knows one token fills its block with tokens that it learns later. It is forked before it learns
        them, so that the fork holds a partial block that becomes content. The row may be freed; its fork goes on."""
        row = self.rig.add([token], ("outlive", salt))
        later = [token] * (self.rig.world.block_size - 1)
        self.rig.allocate([row], [1], [later])
        child = self.rig.fork(row)
        self.rig.seal()
        if ends:
            self.rig.confirm()
        elif later:
            self.rig.append(row, later)
        if not stays:
            self.rig.free([row])
        self.rig.append(child, more)
        self.start(child)

    @where(lambda self: self.capabilities.fork and self.rig.partial_rows and len(self.rig.rows) < MAX_ROWS)
    @rule(pick=picks, ours=tails(longest=2), theirs=tails(longest=2))
    def branch(self, pick: int, ours: list[int], theirs: list[int]) -> None:
        """A row is forked, and both go on in one batch, each by tokens of its own."""
        row = chosen(self.rig.partial_rows, pick)
        child = self.rig.fork(row)
        self.rig.append(row, ours)
        self.rig.append(child, theirs)
        self.rig.allocate([row, child], [self.rig.left(row), self.rig.left(child)])

    @where(lambda self: self.rig.free_rows)
    @rule(pick=picks, both=st.booleans())
    def free(self, pick: int, both: bool) -> None:
        self.rig.free(rotated(self.rig.free_rows, pick)[: 1 + both])

    @where(lambda self: self.capabilities.host_tier and self.rig.free_rows)
    @rule(pick=picks, keep=st.sampled_from([0, 0, 1, 2]), both=st.booleans())
    def swap_out(self, pick: int, keep: int, both: bool) -> None:
        rows = rotated(self.rig.free_rows, pick)[: 1 + both]
        self.rig.swap_out(rows, min(keep, *(self.rig.blocks_to_keep(row) for row in rows)))

    @where(lambda self: self.capabilities.host_tier and self.rig.flying_rows)
    @rule(
        pick=picks,
        keep=st.sampled_from([0, 0, 1]),
        then=st.sampled_from(["cancel", "confirm", "swap_in", "nothing"]),
        more=st.just([]) | tails(),
    )
    def swap_in_flight(self, pick: int, keep: int, then: str, more: list[int]) -> None:
        """A row goes to the host while batches compute it; they end, or it comes back before that."""
        row = chosen(self.rig.flying_rows, pick)
        if more and self.rig.num_out < MAX_OUT:
            self.rig.seal()
            self.rig.append(row, more)
            self.start(row)
        self.rig.swap_out([row], min(keep, self.rig.blocks_to_keep(row)))
        if then == "swap_in" and self.rig.naive.rows[row].is_swapped:
            self.rig.swap_in([row])
        elif then == "confirm" or (then == "cancel" and self.capabilities.cancel):
            getattr(self.rig, then)()

    @where(
        lambda self: (
            self.capabilities.host_tier
            and self.capabilities.rows_in_flight
            and self.capabilities.cancel
            and self.rig.partial_rows
        )
    )
    @rule(pick=picks, token=st.integers(0, 1))
    def fill_and_leave(self, pick: int, token: int) -> None:
        """A row goes to the host while a batch fills its last block; the batch fails, and the block never gets full."""
        row = chosen(self.rig.partial_rows, pick)
        self.rig.append(row, [token] * self.rig.world.block_size)
        self.start(row)
        self.rig.swap_out([row], 0)
        if self.rig.naive.batches:
            self.rig.cancel()

    @where(lambda self: self.capabilities.host_tier and self.rig.free_rows and len(self.rig.rows) < MAX_ROWS)
    @rule(pick=picks, salt=st.integers(0, 2), both=st.booleans())
    def swap_under_pressure(self, pick: int, salt: int, both: bool) -> None:
        """Rows go to the host, content of another sequence takes all the room, and the rows are copied back."""
        rows = rotated(self.rig.free_rows, pick)[: 1 + both]
        self.rig.swap_out(rows)
        if self.rig.naive.device.available:
            self.fill(salt, "free")
        if all(self.rig.naive.rows[row].is_swapped for row in rows):
            self.rig.swap_in(rows)

    @where(lambda self: self.rig.world.keeps_content_on_host and len(self.rig.rows) < MAX_ROWS - 1)
    @rule(tokens=prompts(), more=tails(), salt=st.integers(0, 2), how=st.sampled_from(["start", "confirm", "free"]))
    def come_back(self, tokens: list[int], more: list[int], salt: int, how: str) -> None:
        """A prompt is served, other content evicts it to the host, and a prompt comes that begins like it."""
        longest = self.rig.world.num_blocks * self.rig.world.block_size
        tokens = (tokens * longest)[: max(len(tokens), 2 * self.rig.world.block_size + 1)]
        self.serve(tokens[: longest - 1], None, "free")
        self.fill(salt, "free")
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

    @where(lambda self: self.capabilities.rows_in_flight and len(self.rig.rows) < MAX_ROWS)
    @rule(tokens=prompts(), others=prompts(), how=st.sampled_from(["confirm", "cancel"]))
    def reset_in_flight(self, tokens: list[int], others: list[int], how: str) -> None:
        """Rows are freed in flight and the cache is reset: when the batch ends, their blocks hold something else."""
        self.serve(tokens, None, "start")
        self.rig.seal()
        self.rig.free(self.rig.rows)
        self.rig.reset_cache()
        if how == "confirm" or not self.capabilities.cancel:
            self.serve(others, None, "start")
            self.rig.confirm()
        else:
            self.rig.cancel()
            self.serve(others, None, "free")

    @where(lambda self: self.rig.rows)
    @rule(pick=picks)
    def misuse(self, pick: int) -> None:
        row = chosen(self.rig.rows, pick)
        calls: list[tuple[Any, ...]] = [("free", [row, 77]), ("free", [row, row]), ("truncate", row, 99)]
        if row in self.rig.placeable_rows:
            calls += [("allocate", [row], [self.rig.left(row) + 1]), ("allocate", [row], [0])]
        else:
            calls.append(("allocate", [row], [1]))
        if row not in self.rig.free_rows:
            in_flight = MISUSES_IN_FLIGHT[pick % len(MISUSES_IN_FLIGHT)]
            calls += [(verb, row, *arguments) for verb, arguments in in_flight]
        if not self.rig.naive.batches:
            calls += [("confirm",), ("cancel",)]
        for verb, *arguments in calls:
            flag = flag_of(verb)
            if flag is None or getattr(self.capabilities, flag):
                self.rig.misuse(verb, *arguments)


MISUSES_IN_FLIGHT: list[list[tuple[str, tuple[object, ...]]]] = [
    [("free", ()), ("fork", ())],
    [("swap_out", ()), ("truncate", (0,))],
    [("append", ([0],))],
]
"""Calls on a row in flight, which a manager without `rows_in_flight` has to refuse."""


def chosen(rows: list[int], pick: int) -> int:
    """One of the rows."""
    return rows[pick % len(rows)]


def rotated(rows: list[int], pick: int) -> list[int]:
    """All of the rows, beginning with one of them."""
    start = pick % len(rows) if rows else 0
    return rows[start:] + rows[:start]
