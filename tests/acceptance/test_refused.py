"""What is refused, with the reason: nothing has changed then, and batches that are out can still be ended."""
# ruff: noqa: F401  # the calls of the file take them from here

import copy
import pickle
from math import inf, nan
from types import SimpleNamespace

import numpy as np
import pytest

import paged.study
from paged import BlockManager, Drafts, LayerGroup, Policy, Request, Scheduler, register_policy
from paged.errors import PagedError
from paged.testing.snapshots import snapshot

from .. import shown as table  # noqa: TID252
from ..strange import STRANGE, given, parameters_of  # noqa: TID252

STATE = [LayerGroup("full"), LayerGroup("state", pages=3)]
WINDOW = [LayerGroup("full"), LayerGroup("window", 4)]
CHUNK = [LayerGroup("full"), LayerGroup("chunk", 4)]
SEVERAL = {
    "a": {}, "ended": {"max_tokens": 1}, "saves": {"saves": True}, "group": {"num_sequences": 2},
    "loads": {"prompt": range(12), "num_computed": 8}, "reads": {"writes_cache": False}, "writes": {"reads_cache": False},
}  # fmt: skip


def memory():
    """Row 0 has computed three tokens, row 1 is in a batch that is out, and rows 2 and 3 have tokens to compute."""
    manager = BlockManager(8, 4, host_blocks=8)
    manager.allocate(manager.add([1, 2, 3]), 3)
    manager.confirm()
    for tokens in (range(6), range(10, 16), [30]):
        manager.add(tokens)
    manager.allocate([1], [5])
    return manager


def cache():
    """No row, and eight tokens that are kept until 20; it is 7."""
    manager = BlockManager(8, 4)
    row = manager.add(range(8))
    manager.allocate(row, 8)
    manager.confirm()
    manager.free(row)
    manager.retain(range(8), until=20)
    manager.expire(7)
    return manager


def layers():
    """Row 0 has computed six tokens, and row 1 awaits its third one."""
    manager = BlockManager(40, 4, groups=STATE)
    manager.allocate(manager.add(range(6)), 6)
    manager.confirm()
    manager.allocate([manager.add([1, 2])], 3, unknown=1)
    return manager


def served(requests, num_blocks=40, **limits):
    """These requests have run one step; another one waits."""
    scheduler = Scheduler(BlockManager(num_blocks, 4), **limits)
    for number, (id, fields) in enumerate(requests.items()):
        scheduler.add(Request(**{"id": id, "prompt": [number] * 6} | fields))
    batch = scheduler.schedule()
    scheduler.update(batch, [7] * int(batch.samples.sum()))
    scheduler.add(Request(id="waits", prompt=[1]))
    return scheduler


SUBJECTS = {
    "manager": memory,
    "idle": cache,
    "layers": layers,
    "scheduler": lambda: served(SEVERAL),
    "out": lambda: served({"a": {}, "b": {}}, max_sequences=2, max_outstanding=3),
    "full": lambda: served({"a": {}}, num_blocks=2),
    "single": lambda: served({"a": {}}, max_sequences=1),
    "reserving": lambda: served({"a": {}}, policy="orca-max", max_model_len=32),
}


def state_of(subject):
    if isinstance(subject, BlockManager):
        return snapshot(subject), subject.check()
    return state_of(subject.manager), subject.counts(), subject.waiting_ids(), subject.running_ids(), subject.check()


@pytest.mark.parametrize(("call", "shown"), table.shown_in("acceptance/refused.txt", ">>>"))
def test_what_is_refused_says_why_and_changes_nothing(call, shown):
    subjects = {name: build() for name, build in SUBJECTS.items() if name in call}
    batches = {}
    if out := subjects.get("out"):
        batches["foreign"] = served({"a": {}}).schedule()
        out.cancel(done := out.schedule())
        batches |= {"done": done} | {name: out.schedule() for name in ("first", "second", "third")}
    before = [state_of(subject) for subject in subjects.values()]
    table.assert_refused(call, shown, globals() | subjects | batches)
    assert [state_of(subject) for subject in subjects.values()] == before
    if out:
        for name in ("first", "second", "third"):
            out.update(batches[name], [7, 7])


OTHERS = {
    "rows": [0], "row": 0, "sequence": 0, "tokens": [1, 2, 3], "ends": [7], "counts": 1, "num_tokens": 1, "request_id": "a", "ids": ["a"],
    "session_id": "s", "level": 1, "until": 9.0, "num_blocks": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("subject", "call", "parameter"),
    [(name, *each) for name in ("manager", "layers", "scheduler") for each in parameters_of(type(SUBJECTS[name]()))],
)
def test_a_strange_value_is_taken_or_refused_by_a_typed_error_and_then_nothing_has_changed(subject, call, parameter):
    found = SUBJECTS[subject]()
    for value in STRANGE:
        before, method = state_of(found), getattr(found, call)
        try:
            method(**given(method, OTHERS, parameter, value))
        except PagedError:
            assert state_of(found) == before, value
        else:
            assert not found.check(), value
            found = SUBJECTS[subject]()
