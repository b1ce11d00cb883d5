"""Calls with values that make no sense: each is refused with the value, the limit and what would do."""
# ruff: noqa: F401  # the calls of the file take them from here

from math import inf, nan

import numpy as np
import pytest
from msgspec.structs import replace

import paged
from paged import BlockManager, PagedError, Request, Scheduler
from paged.base.arguments import token_array
from paged.model.layer_plan import Layers, Part, plan_layers
from paged.model.model_shape import Mixers
from paged.sampling import seed_of
from paged.serving.kv_config import KvEventsConfig
from paged.study import hardware, simulator, tgi, traces
from paged.study.hardware import Roofline, StepWork, device_named, model_named
from paged.study.hardware.device import Link, link_of
from paged.study.profiling import designed
from paged.study.simulator import Device, Load, Scenario, SessionRun, Targets, Tiers, plans
from paged.study.simulator.stretch import skip
from paged.study.traces import Begun, Trace, open_sessions
from paged.testing.snapshots import snapshot

from ..shown import assert_refused, shown_in  # noqa: TID252
from .files_of_others import TINY, offered  # noqa: TID252


def roofline(model="llama-2-13b", device="a100-40g", **options):
    return Roofline(model=model_named(model), device=device_named(device), **options)


def scheduler(**limits):
    """A scheduler on a manager of its own, which one that is refused has not claimed."""
    manager = BlockManager(8, 4)
    try:
        return Scheduler(manager, **limits)
    except PagedError:
        assert Scheduler(manager).check() == []
        raise


class Unspeakable:
    """Says that it is an integer, and cannot say which."""

    def __index__(self):
        raise ValueError("which?")


def added(**fields):
    """Add such a request; a scheduler that refuses it is as before."""
    empty = scheduler()
    try:
        empty.add(Request(**{"id": "a", "prompt": [1, 2, 3]} | fields))
    finally:
        assert not empty.has_unfinished and empty.counts()["submitted"] == 0 and empty.manager.device.num_used == 0


def of_requests(num_blocks, lengths, **limits):
    found = Scheduler(BlockManager(num_blocks, 4, prefix_caching=False), **limits)
    for id, length in lengths.items():
        found.add(Request(id=id, prompt=[1] * length, max_tokens=9))
    return found


def ended(tokens, counts=None):
    """End a batch of two rows that sample and a chunk that does not; one that this is refused for can still be ended."""
    ours = of_requests(16, {"a": 4, "b": 4, "chunk": 20}, max_tokens_per_step=16)
    batch, before = ours.schedule(), (snapshot(ours.manager), ours.stats())
    try:
        ours.update(batch, tokens, counts)
    finally:
        assert (snapshot(ours.manager), ours.stats()) == before
        assert [output.token_ids for output in ours.update(batch, [5, 6])] == [[5], [6]]


def drafted(drafts):
    """Such drafts for a scheduler in which "a" decodes and another request waits: refused, they change nothing."""
    ours = of_requests(20, {"a": 5, "waits": 4}, max_sequences=1, vocabulary_size=2000)
    ours.update(ours.schedule(), [70])
    before = snapshot(ours.manager), ours.stats()
    try:
        ours.schedule(drafts=drafts)
    finally:
        assert (snapshot(ours.manager), ours.stats()) == before


def skipped(tokens, **options):
    """Such tokens for steps at once of two rows that decode; refused, they change nothing."""
    ours = of_requests(64, {"a": 5, "b": 5}, vocabulary_size=5000)
    ours.update(ours.schedule(), [5, 6])
    before = snapshot(ours.manager), ours.stats()
    try:
        skip(ours, tokens, **options)
    finally:
        assert (snapshot(ours.manager), ours.stats()) == before


def steps(count):
    """So many steps of a token each."""
    return StepWork(computed_tokens=np.ones(count))


NINE = Tiers(device_blocks=9)


def played(tiers=NINE, begun=None, **options):
    """A run of a session that ships."""
    return SessionRun([Begun(open_sessions("agents")[0], 0)] if begun is None else begun, tiers, None, **options)


FORMULA = Device()
trace = Trace.from_lengths([0, 1, 4, 9, 9], [10, 20, 30, 40, 50], [1, 2, 3, 4, 5])


def planned(find="rate", *, policy="paged", device=FORMULA, load="azure", clients=None, **options):
    """A plan of a small pool."""
    scenario = Scenario(load=Load(trace=load, limit=5, clients=clients), device=device, policy=policy, blocks=60)
    return plans(find, [scenario], Targets(ttft_s=1), **options)


@pytest.mark.parametrize(("call", "shown"), shown_in("paged/fixtures/refused_calls.txt", ">>>"))
def test_a_call_that_makes_no_sense_is_refused_with_the_reason(monkeypatch, call, shown):
    # A plan is refused before anything is simulated.
    monkeypatch.setattr(Scenario, "simulation", None)
    assert_refused(call, shown, offered(paged, hardware, simulator, traces) | globals())
