"""Any value at any place: it is taken, or refused by an error of ours, and the engine goes on."""

from contextlib import suppress
from inspect import signature

import pytest

import paged
from paged import Engine, EngineConfig, PagedError, SamplingParams

from ..strange import STRANGE, given, parameters_of  # noqa: TID252

STRUCTS = {
    paged.BeamSearchParams: {"beam_width": 2},
    paged.ContrastiveSearchParams: {},
    paged.Costs: {},
    EngineConfig: {},
    paged.LayerGroup: {"kind": "full"},
    paged.Policy: {"name": "named"},
    paged.Request: {"id": "a", "prompt": [1]},
    paged.Retention: {},
    SamplingParams: {},
    paged.StructuredOutputsParams: {"regex": "a"},
}
OTHERS = {
    "prompt": [1, 2],
    "request_id": "a",
    "request_ids": ["a"],
    "params": SamplingParams(max_tokens=2),
    "session_id": "s",
}


@pytest.fixture(scope="module")
def engine():
    return Engine(num_blocks=64)


@pytest.mark.parametrize(("call", "parameter"), parameters_of(Engine))
def test_an_engine_takes_a_strange_value_or_says_what_it_takes(engine, call, parameter):
    for number, value in enumerate(STRANGE):
        engine.add_request([1, 2, 3], SamplingParams(max_tokens=2), id=f"{call} {parameter} {number}")
        method = getattr(engine, call)
        with suppress(PagedError):
            method(**given(method, OTHERS, parameter, value))
        while engine.has_unfinished:
            engine.step()
        assert not engine.check(), value


@pytest.mark.parametrize(("kind", "field"), [(kind, field) for kind in STRUCTS for field in signature(kind).parameters])
def test_a_struct_takes_a_strange_value_or_says_what_it_takes(kind, field):
    for value in STRANGE:
        with suppress(PagedError):
            kind(**STRUCTS[kind] | {field: value})


@pytest.mark.parametrize("field", signature(paged.Request).parameters)
def test_a_scheduler_takes_a_request_with_a_strange_value_or_says_what_it_takes(field):
    for number, value in enumerate(STRANGE):
        scheduler = paged.Scheduler(paged.BlockManager(16, 4))
        request = paged.Request(**{"id": f"{number}", "prompt": [1, 2]} | {field: value})
        try:
            scheduler.add(request)
        except PagedError:
            assert not scheduler.waiting_ids()
        scheduler.schedule()
        assert not scheduler.check(), value
