"""A scheduler alone changes its memory, one call at a time changes a scheduler, and what counts one memory is not copied."""

import copy
import pickle
import threading

import numpy as np
import pytest

from paged import BlockManager, Request, Scheduler
from paged.errors import CannotCopy, MemoryClaimed, SchedulerInUse

CHANGES = {
    "add": ([1, 2],), "append": (0, [1]), "allocate": ([0], [1]), "reserve": ([0], [3]), "truncate": (0, 0),
    "free": (0,), "fork": (0,), "swap_out": ([0],), "swap_in": ([0],), "next_batch": (), "confirm": (),
    "cancel": (), "take_moves": (), "extend_hit": (0,), "load_where": (lambda start, end: False,),
}  # fmt: skip


@pytest.fixture
def scheduler():
    """With a request "a" of 6 tokens that has run one step."""
    scheduler = Scheduler(BlockManager(8, 4, host_blocks=4))
    scheduler.add(Request(id="a", prompt=[1, 2, 3, 4, 5, 6], max_tokens=9))
    scheduler.update(scheduler.schedule(), [7])
    return scheduler


@pytest.mark.parametrize("name", CHANGES)
def test_who_changes_a_scheduler_s_memory_is_told_whose_it_is(scheduler, name, unchanged):
    with unchanged(scheduler), pytest.raises(MemoryClaimed, match=f"^{name}: a scheduler has this memory") as caught:
        getattr(scheduler.manager, name)(*CHANGES[name])
    assert (caught.value.call, scheduler.check()) == (name, [])


def test_reading_a_scheduler_s_memory_and_keeping_content_in_it_stays_open_to_all(scheduler):
    manager = scheduler.manager
    assert (manager.lookup([1, 2, 3, 4, 9]).num_tokens, manager.retain([1, 2, 3, 4])) == (4, 4)
    assert len(manager.take_events()) == 1
    assert manager.reset_cache() is False
    assert manager.stats().used == 2


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


def test_a_call_from_within_a_call_is_refused(scheduler):
    def ask():
        with pytest.raises(SchedulerInUse, match="schedule: update is running on the same scheduler in this thread"):
            scheduler.schedule()

    scheduler.update(scheduler.schedule(), Asks(ask))
    assert scheduler.check() == []


@pytest.mark.parametrize("taken", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_manager_is_neither_copied_nor_pickled_because_both_would_hand_out_the_same_blocks(
    taken, make_manager, fill, unchanged
):
    manager = make_manager(8, 4)
    fill(manager, range(6))
    with (
        unchanged(manager),
        pytest.raises(
            CannotCopy, match="BlockManager cannot be copied .* Make another one of the same sizes"
        ) as caught,
    ):
        taken(manager)
    assert caught.value.kind == "BlockManager"


@pytest.mark.parametrize("taken", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_scheduler_is_neither_copied_nor_pickled(taken, make_scheduler):
    scheduler = make_scheduler(8, 4, {"a": 3})
    with pytest.raises(CannotCopy, match="Scheduler cannot be copied"):
        taken(scheduler)


def test_events_go_to_another_process_without_the_index_that_they_were_made_from(make_manager, fill):
    manager = make_manager(8, 4)
    manager.take_events()
    fill(manager, range(6))
    (stored,) = manager.take_events()
    manager.reset_cache()
    fill(manager, range(10, 16))
    events = manager.take_events()
    (there,) = pickle.loads(pickle.dumps(events))
    (here,) = events
    assert type(there) is type(stored)
    assert (there.tier, there.hashes, there.parent, there.namespace) == (
        here.tier,
        here.hashes,
        here.parent,
        here.namespace,
    )
    assert there.tokens.tolist() == here.tokens.tolist() == [10, 11, 12, 13]


def test_a_batch_and_its_outputs_go_to_another_process():
    scheduler = Scheduler(BlockManager(8, 4))
    scheduler.add(Request(id="a", prompt=[1, 2, 3], max_tokens=1))
    batch = scheduler.schedule()
    there = pickle.loads(pickle.dumps(batch))
    assert (there.token_ids.tolist(), there.slot_mapping.tolist()) == ([1, 2, 3], batch.slot_mapping.tolist())
    (output,) = scheduler.update(batch, [7], [1])
    (copied,) = pickle.loads(pickle.dumps([output]))
    assert copied == output
