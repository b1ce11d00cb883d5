"""What can be copied, and what cannot because it counts one memory."""

import copy
import pickle

import pytest

from paged import BlockManager, Request, Scheduler
from paged.errors import CannotCopy


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


def test_what_contains_a_manager_is_not_copied_either():
    with pytest.raises(CannotCopy):
        copy.deepcopy({"memory": [BlockManager(8, 4)]})


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
    assert there.token_ids.tolist() == [1, 2, 3]
    assert there.slot_mapping.tolist() == batch.slot_mapping.tolist()
    (output,) = scheduler.update(batch, [7], [1])
    (copied,) = pickle.loads(pickle.dumps([output]))
    assert copied == output
