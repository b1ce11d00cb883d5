"""Batches that are ended in the wrong way, or with what does not fit them: refused, and they can still be ended."""

import numpy as np
import pytest

from paged import PagedError
from paged.errors import BatchEnded, BatchOutOfOrder, ForeignBatch, InvalidRequest, RequestInFlight, WrongTokens


@pytest.fixture
def two_out(make_scheduler):
    """A scheduler with two batches outstanding, 4 tokens each."""
    scheduler = make_scheduler(8, 4, {"a": 4, "b": 4}, max_tokens_per_step=4)
    return scheduler, scheduler.schedule(), scheduler.schedule()


def test_a_batch_cannot_be_ended_twice(two_out, unchanged):
    scheduler, first, second = two_out
    scheduler.update(first, [7])
    with unchanged(scheduler):
        for call in (lambda: scheduler.update(first, [7]), lambda: scheduler.cancel(first)):
            with pytest.raises(BatchEnded):
                call()
    scheduler.cancel(second)
    with unchanged(scheduler):
        for call in (lambda: scheduler.update(second, [7]), lambda: scheduler.cancel(second, moved=True)):
            with pytest.raises(BatchEnded):
                call()


def test_updates_go_oldest_first_and_cancels_latest_first(two_out, unchanged):
    scheduler, first, second = two_out
    with unchanged(scheduler):
        with pytest.raises(BatchOutOfOrder):
            scheduler.update(second, [7])
        with pytest.raises(BatchOutOfOrder):
            scheduler.cancel(first)
    scheduler.cancel(second)
    scheduler.cancel(first)
    assert scheduler.manager.device.num_used == 0


def test_another_schedulers_batch_is_refused(two_out, make_scheduler, unchanged):
    scheduler, first, second = two_out
    other = make_scheduler(8, 4, {"a": 4})
    mine = other.schedule()
    with unchanged(other):
        for call in (lambda: other.update(first, [7]), lambda: other.cancel(second)):
            with pytest.raises(ForeignBatch):
                call()
    other.update(mine, [7])
    scheduler.update(first, [7])
    scheduler.update(second, [7])


def test_tokens_outside_the_vocabulary_are_refused_in_update(make_scheduler):
    scheduler = make_scheduler(8, 4, {"a": 4}, vocabulary_size=5000)
    batch = scheduler.schedule()
    with pytest.raises(WrongTokens, match="5000|5,000"):
        scheduler.update(batch, [5000])
    scheduler.update(batch, [4999])


def test_tokens_are_not_appended_to_a_request_in_flight_nor_to_one_that_ended(make_scheduler, step, unchanged):
    scheduler = make_scheduler(8, 4, {"a": (4, 2)})
    batch = scheduler.schedule()
    with unchanged(scheduler), pytest.raises(RequestInFlight, match='"a"'):
        scheduler.append("a", [5])
    scheduler.update(batch, [7])
    for bad in ([-1], [1.5], ["a"]):
        with pytest.raises(PagedError):
            scheduler.append("a", bad)
    step(scheduler)
    with pytest.raises(PagedError):
        scheduler.append("a", [5])


def test_loaded_is_refused_for_a_request_that_loads_nothing_and_for_more_than_was_asked(
    make_scheduler, request_of, unchanged
):
    scheduler = make_scheduler(8, 4, {"plain": 4})
    scheduler.add(request_of("loads", 12, num_computed=8))
    with pytest.raises(PagedError):
        scheduler.loaded("plain", 4)
    batch = scheduler.schedule()
    scheduler.update(batch, [7])
    with unchanged(scheduler):
        for count in (-1, 9):
            with pytest.raises(PagedError):
                scheduler.loaded("loads", count)
    scheduler.loaded("loads", 8)
    with pytest.raises(PagedError):
        scheduler.loaded("loads", 8)


@pytest.mark.parametrize("moved", ["no", None, 2])
def test_whether_moves_ran_is_true_or_false(two_out, moved):
    scheduler, _, second = two_out
    with pytest.raises(InvalidRequest, match="moved has to be True or False"):
        scheduler.cancel(second, moved=moved)
    scheduler.cancel(second, moved=np.bool_(False))


@pytest.mark.parametrize("row", ["x", None, 1.0, -1, 10**30])
def test_what_is_no_row_serves_no_request(make_scheduler, row):
    assert make_scheduler(8, 4).id_of(row) is None


def test_any_kind_of_integer_names_a_sequence_and_a_count(make_scheduler, request_of):
    scheduler = make_scheduler(20, 4)
    scheduler.add(request_of("a", 18, num_computed=12))
    scheduler.update(scheduler.schedule(), [])
    scheduler.append("a", [5], sequence=np.uint8(0))
    for sequence in (1, -1, True, None, "0"):
        with pytest.raises(InvalidRequest, match="no live sequence"):
            scheduler.append("a", [5], sequence=sequence)
    scheduler.loaded("a", np.uint32(12))
    assert scheduler.schedule().num_tokens.tolist() == [7]


@pytest.mark.parametrize("no_batch", [None, 0, "batch", []])
def test_what_is_no_batch_ends_nothing(two_out, no_batch, unchanged):
    scheduler, first, second = two_out
    with unchanged(scheduler):
        for call in (lambda: scheduler.update(no_batch, [7]), lambda: scheduler.cancel(no_batch)):
            with pytest.raises(InvalidRequest, match="a Batch is needed"):
                call()
    scheduler.cancel(second)
    scheduler.cancel(first)


def test_an_empty_batch_may_be_cancelled_by_its_scheduler_and_by_no_other(make_scheduler):
    ours, other = make_scheduler(4, 4), make_scheduler(4, 4)
    batch = ours.schedule()
    assert batch.is_empty
    ours.cancel(batch)
    ours.cancel(batch)
    for end in (other.cancel, lambda foreign: other.update(foreign, [])):
        with pytest.raises(ForeignBatch):
            end(batch)
    assert ours.update(batch, []) is not None
