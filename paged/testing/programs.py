"""Random programs for a scheduler, without Hypothesis, and a soak of thousands of random requests on a tiny pool.

All chance comes from one seeded generator, so a seed is a program.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace

from paged.testing.reserving import DRAWN
from paged.testing.saved import kept
from paged.testing.scheduler_rig import SchedulerRig
from paged.testing.violation import Call, Violation
from paged.testing.world import Builder, World, build_scheduler

PATTERNS = ([0], [0, 1], [0, 0, 1], [1])
"""Prompts are stretches of these, so that most of them share a prefix with another."""
COUNTS: tuple[tuple[int, ...], ...] = ((), (), (), (), (1, 0), (2,), (3, 1), (0,), (1, 2, 0))
"""How many tokens the sampling rows of a batch get; empty: one each."""
MAX_LIVE = 8


def random_world(chance: random.Random) -> World:
    """A tiny world in which sharing, eviction and preemption are hard to avoid."""
    world = World(
        num_blocks=chance.randint(2, 12),
        block_size=chance.choice([1, 2, 4]),
        host_blocks=chance.choice([0, 0, 2, 4, 8]),
        prefix_caching=chance.random() < 0.85,
        host_caching=chance.random() < 0.6,
        policy=chance.choice(DRAWN),
        max_tokens_per_step=chance.choice([2, 4, 8, 32]),
        max_sequences=chance.choice([1, 2, 4, 8]),
        max_chunk=chance.choice([None, 1, 2, 3, 4]),
        max_model_len=chance.choice([None, None, None, 10]),
        max_waiting=chance.choice([None, None, None, 4]),
        max_outstanding=chance.choice([4, 4, 3, 1]),
        resumes_known=chance.random() < 0.3,
        vocabulary=chance.choice([2, 3]),
        event_stride=chance.choice([0, 0, 1, 3]),
        drafts=chance.choice([0, 0, 1, 4]),
        steps_ahead=chance.choice([0, 0, 1, 1, 2]),
        watermark=chance.choice([None, None, 0.2, 0.4]),
        preemption=chance.choice([None, None, "swap"]),
        max_preemptions=chance.choice([None, None, 1, 2]),
        known_outputs=chance.choice([None, 0, 2]),
    )
    return replace(world, max_lead=4.0 * world.event_stride) if world.policy == "paged-cached" else world


class RandomEngine:
    """An engine and its clients, driven by chance: what happens next is drawn from what can happen now."""

    def __init__(self, rig: SchedulerRig, chance: random.Random, *, trouble: float | None = None) -> None:
        """`trouble`: the share of calls that are neither a new request nor a whole step; drawn if None."""
        self.rig = rig
        self.chance = chance
        self.trouble = chance.choice([0.05, 0.3, 0.8]) if trouble is None else trouble
        # Prompts that fill much of the pool, or so many small ones that they outgrow it together.
        self.share = chance.choice([0.2, 0.4, 1.0])
        self.goes_wild = chance.random() < 0.3
        # Or one that lets sequences wait for tokens and loads while the others go on.
        self.is_patient = chance.random() < 0.7
        # Requests of one burst arrive in a row, mostly with the same beginning.
        self.burst = self.leaving = self.num_failing = 0
        self.prompt: list[int] = []
        # Or one whose steps fail, mostly where they copy, with what was scheduled behind them.
        self.is_unlucky = rig.world.host_blocks > 0 and chance.random() < 0.5
        self.coming: list[str] = []

    def do(self) -> None:
        """Make one call."""
        verb, arguments = self.next_call()
        getattr(self.rig, verb)(*arguments)

    def next_call(self) -> Call:
        """One call that makes sense now."""
        rig, chance = self.rig, self.chance
        while self.coming:
            if (call := self._call_of(self.coming.pop(0))) is not None:
                return call
        if not rig.has_work or self.burst or (len(rig.live) < MAX_LIVE and chance.random() < 0.2):
            self.burst = self.burst - 1 if self.burst else chance.choice([0, 0, 1, 2])
            return "add", (self.request(),)
        if rig.loads and chance.random() < 0.2:
            return "loaded", (chance.choice(sorted(rig.loads)), chance.randint(0, 8))
        if rig.saving and len(rig.calls) % 5 == 0:
            # Not drawn, as below, so that all else is drawn as it was.
            return "saved", (min(rig.saving),)
        if rig.flights and len(rig.flights[-1].batch.moves) and chance.random() < 0.3:
            # A step that fails before it has copied anything.
            return "cancel", (False,)
        if len(rig.flights) > 1 and chance.random() < 0.5:
            gave_way = [id for id, _ in rig.flights[-1].batch.preempted]
            if any(rig.in_flight(id) for id in gave_way):
                # A request preempted while batches compute for it gets no token of those.
                return "update", ((0,),)
        if self.is_unlucky and rig.has_work and not rig.flights and chance.random() < 0.3:
            self.coming = ["fail"]
            return "schedule", ()
        if self.num_failing and rig.flights:
            # Those behind one that failed fail with it.
            self.num_failing -= 1
            return "cancel", (False,)
        self.num_failing = chance.randint(1, 3) if len(rig.flights) > 1 and chance.random() < 0.05 else 0
        counts = chance.choice(COUNTS) if self.goes_wild else ()
        if chance.random() >= self.trouble:
            if self.is_patient:
                return "step", (counts,)
            most = min(rig.world.steps_ahead + 1, rig.world.max_outstanding)
            return ("update", (counts,)) if len(rig.flights) >= most else ("schedule", ())
        if self.leaving and rig.flights and (in_flight := [id for id in rig.live if rig.in_flight(id)]):
            # Several of one batch go before it ends.
            self.leaving -= 1
            return "abort", (chance.choice(in_flight),)
        verb = chance.choices(["schedule", "run", "update", "cancel", "abort", "append"], [6, 2, 5, 3, 1, 1])[0]
        if verb == "schedule" and len(rig.flights) < 4:
            return "schedule", ()
        if verb == "abort":
            self.leaving = chance.choice([0, 1, 2])
            is_live = rig.live and chance.random() < 0.8
            return "abort", (chance.choice(rig.live) if is_live else f"r{chance.randrange(rig.num_added + 1)}",)
        if verb == "append" and rig.live:
            id = chance.choice(rig.live)
            tokens = [chance.randrange(2) for _ in range(chance.randint(1, 3))]
            return "append", (id, tokens, chance.randrange(len(rig.books[id].sequences)))
        if verb == "run" and rig.flights:
            return "run", (chance.randrange(len(rig.flights)),)
        if verb == "cancel" and rig.flights:
            return "cancel", (chance.random() < 0.5,)
        return "update", (counts,)

    def _call_of(self, verb: str) -> Call | None:
        """One call of several that were to come; None: it makes no sense any more."""
        rig, chance = self.rig, self.chance
        if verb == "fail":
            if rig.flights and len(rig.flights[-1].batch.moves):
                # Some go before the step fails, so that others return behind it; the rest need more room afterwards.
                more = chance.randint(0, 2)
                self.coming = ["abort"] * chance.randint(0, 2) + ["schedule"] * more + ["cancel"] * (more + 1)
                self.coming += ["append"] * chance.choice([0, 0, 2, 4])
            return None
        if verb == "abort":
            in_flight = [id for id in rig.live if rig.in_flight(id)]
            return ("abort", (chance.choice(in_flight),)) if in_flight else None
        if verb == "append":
            free = [id for id in rig.live if not rig.in_flight(id)]
            return ("append", (chance.choice(free), [0] * chance.randint(1, 5))) if free else None
        if verb == "cancel":
            return ("cancel", (False,)) if rig.flights else None
        return verb, ()

    def request(self) -> object:
        """A request that mostly fits the world, with a prompt that others begin with, too."""
        from paged import Request, Retention

        rig, chance = self.rig, self.chance
        number = rig.num_added if chance.random() < 0.9 or not rig.num_added else chance.randrange(rig.num_added)
        id = f"r{number}"
        if (taken := rig.taken_ids) and chance.random() < 0.5:
            id = chance.choice(taken)
        longest = rig.world.longest
        length = chance.randint(1, max(1, int((longest - 1) * self.share))) if chance.random() < 0.96 else longest + 1
        pattern = chance.choice(PATTERNS)
        prompt = (pattern * length)[: max(0, length - chance.randint(0, 3))]
        prompt += [chance.randrange(2) for _ in range(length - len(prompt))]
        if self.prompt and chance.random() < 0.5:
            prompt = self.prompt[: longest - 1 if chance.random() < 0.8 else chance.randint(1, longest)]
        self.prompt = prompt
        num_sequences = min(chance.choice([1, 1, 1, 1, 1, 1, 2, 3]), rig.world.max_sequences)
        max_tokens = chance.choice([1, 2, 4, max(1, longest // 3), max(1, longest // 2), longest])
        has_stops = chance.random() < 0.4
        return Request(
            id=id,
            prompt=prompt,
            max_tokens=max_tokens,
            min_tokens=min(max_tokens, chance.choice([0, 0, 0, 2, 5])),
            eos_token_id=chance.choice([None, 0]) if has_stops else None,
            stop_token_ids=chance.choice([(), (1,)]) if has_stops else (),
            priority=chance.choice([0, 0, 0, 1, -1]),
            num_sequences=num_sequences,
            num_computed=chance.choice([0] * 14 + [3, 7]) if num_sequences == 1 else 0,
            salt=chance.choice([None] * 7 + ["a"]),
            reads_cache=num_sequences > 1 or chance.random() < 0.93,
            writes_cache=num_sequences > 1 or chance.random() < 0.93,
            retention=Retention(priority=chance.randint(1, 3), lasts=chance.choice([None, 5.0, 30.0]))
            if chance.random() < 0.2
            else None,
            adapter=chance.choice([None] * 7 + ["a"]),
            extra_key=chance.choice([None] * 12 + [1, True]),
            expected_tokens=chance.choice([None, None, 1, -(-max_tokens // 2), max_tokens]),
            saves=num_sequences == 1 and rig.world.may_save and rig.num_added % 6 == 4,
        )


def random_program(seed: int, num_calls: int, build: Builder = build_scheduler) -> SchedulerRig:
    """A rig in a world of the seed's, after so many calls of it. Raises Violation."""
    chance = random.Random(seed)
    rig = SchedulerRig(random_world(chance), build)
    engine = RandomEngine(rig, chance)
    for _ in range(num_calls):
        engine.do()
    return rig


TINY = World(num_blocks=12, block_size=2, host_blocks=6, max_tokens_per_step=16, max_sequences=6, max_chunk=4)
"""A pool that two or three requests fill."""


@dataclass(frozen=True)
class SoakReport:
    """The result of a soak: `num_free` and `num_cached` blocks at its end, and how often each event occurred."""

    num_requests: int
    num_calls: int
    num_free: int
    num_cached: int
    events: Counter[str]


def soak(num_requests: int, *, seed: int = 0, world: World = TINY, build: Builder = build_scheduler) -> SoakReport:
    """Submit `num_requests` requests at random, then drain, and forget the cache: every block has to be free again.

    Raises Violation as soon as anything is wrong; every oracle looks after each call. PAGED_FAILURES saves it, as in
    `run_machine`.
    """
    rig = SchedulerRig(world, build)
    engine = RandomEngine(rig, random.Random(seed), trouble=0.3)
    with kept(build):
        while rig.num_added < num_requests:
            engine.do()
        rig.drain()
        num_cached = int(rig.manager.device.num_cached)
        rig.manager.reset_cache()
        num_free = int(rig.manager.device.num_free)
        if num_free != world.num_blocks:
            raise Violation([f"12: {num_free} of {world.num_blocks} blocks are free in the end"], rig.program)
    return SoakReport(rig.num_added, len(rig.calls), num_free, num_cached, rig.events)
