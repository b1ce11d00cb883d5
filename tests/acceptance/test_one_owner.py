"""A scheduler alone changes its memory, one call at a time changes a scheduler, and what counts one memory is not copied."""

import pickle
import threading

import numpy as np
import pytest

from paged import BlockManager, Request, Scheduler
from paged.errors import SchedulerInUse


@pytest.fixture
def scheduler():
    """With a request "a" of 6 tokens that has run one step."""
    scheduler = Scheduler(BlockManager(8, 4, host_blocks=4))
    scheduler.add(Request(id="a", prompt=[1, 2, 3, 4, 5, 6], max_tokens=9))
    scheduler.update(scheduler.schedule(), [7])
    return scheduler


CALLS = {
    "add": (Request(id="b", prompt=[1]),), "schedule": (), "update": (None, []), "cancel": (None,), "abort": ("a",),
    "finish": ("a",), "fork": ("a",), "append": ("a", [1]), "loaded": ("a", 1),
}  # fmt: skip


class Asks:
    """Tokens that call somebody while the scheduler reads them."""

    def __init__(self, ask):
        self._ask = ask

    def __len__(self):
        return 1

    def __array__(self, dtype=None, copy=None):
        self._ask()
        return np.array([8], dtype)


def test_a_call_from_within_a_call_is_refused(scheduler):
    def ask():
        with pytest.raises(SchedulerInUse, match="schedule: update is running on the same scheduler in this thread"):
            scheduler.schedule()

    scheduler.update(scheduler.schedule(), Asks(ask))
    assert scheduler.check() == []


@pytest.mark.parametrize("name", CALLS)
def test_a_call_of_another_thread_is_refused_and_the_first_goes_on(scheduler, name):
    refused = []

    def ask():
        def call():
            try:
                getattr(scheduler, name)(*CALLS[name])
            except SchedulerInUse as error:
                refused.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    (output,) = scheduler.update(scheduler.schedule(), Asks(ask))
    assert [(error.call, error.running, error.thread) for error in refused] == [(name, "update", "MainThread")]
    assert (output.token_ids, scheduler.check()) == ([8], [])
    scheduler.update(scheduler.schedule(), [9])
    assert scheduler.tokens_of("a").tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_events_go_to_another_process_without_the_index_that_they_were_made_from(make_manager, fill):
    manager = make_manager(8, 4)
    fill(manager, range(10, 16))
    events = manager.take_events()
    (there,), (here,) = pickle.loads(pickle.dumps(events)), events
    assert there.tokens.tolist() == here.tokens.tolist() == [10, 11, 12, 13]
    for name in ("tier", "hashes", "parent", "namespace"):
        assert getattr(there, name) == getattr(here, name)


def test_a_batch_and_its_outputs_go_to_another_process():
    scheduler = Scheduler(BlockManager(8, 4))
    scheduler.add(Request(id="a", prompt=[1, 2, 3], max_tokens=1))
    batch = scheduler.schedule()
    there = pickle.loads(pickle.dumps(batch))
    assert (there.token_ids.tolist(), there.slot_mapping.tolist()) == ([1, 2, 3], batch.slot_mapping.tolist())
    (output,) = scheduler.update(batch, [7], [1])
    (copied,) = pickle.loads(pickle.dumps([output]))
    assert copied == output
