"""Thousands of random requests through one scheduler on a tiny pool, with aborts, cancels and drafts, every oracle watching.

What may go wrong is the rig's to say: it raises `Violation` with the whole program.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

from paged.testing.programs import RandomEngine
from paged.testing.saved import kept
from paged.testing.scheduler_rig import SchedulerRig
from paged.testing.world import Builder, World, build_scheduler

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

    Raises Violation as soon as anything is wrong; `check()` has run after every call. PAGED_FAILURES saves it, as in `run_machine`.
    """
    rig = SchedulerRig(world, build)
    engine = RandomEngine(rig, random.Random(seed), trouble=0.3)
    with kept(build):
        while rig.num_added < num_requests:
            engine.do()
        rig.drain()
    num_cached = int(rig.manager.device.num_cached)
    rig.manager.reset_cache()
    return SoakReport(rig.num_added, len(rig.calls), int(rig.manager.device.num_free), num_cached, rig.events)
