"""Bad input: a typed error that names the value and the limit, before anything changes."""

import numpy as np
import pytest

from paged import PagedError, Request
from paged.errors import (
    DuplicateRequest,
    DuplicateRow,
    InvalidRequest,
    InvalidTokens,
    NeverFits,
    NothingInFlight,
    RowInFlight,
    UnknownRequest,
    UnknownRow,
)


@pytest.mark.parametrize("tokens", [[], np.empty(0, np.int32), range(0)])
def test_no_tokens_are_refused(make_manager, tokens, unchanged):
    manager = make_manager(4, 4)
    with unchanged(manager), pytest.raises(InvalidTokens):
        manager.add(tokens)


@pytest.mark.parametrize("row", [-1, 1, 7, 10**9])
def test_an_unknown_row_is_refused_everywhere(make_manager, fill, row, unchanged):
    manager = make_manager(8, 4, host_blocks=8)
    fill(manager, [1, 2, 3])
    with unchanged(manager):
        for call in (
            lambda: manager.free([row]),
            lambda: manager.allocate([row], [1]),
            lambda: manager.append(row, [1]),
            lambda: manager.truncate(row, 0),
            lambda: manager.reserve([row], [1]),
            lambda: manager.fork(row),
            lambda: manager.swap_out([row]),
            lambda: manager.swap_in([row]),
            lambda: manager.table(row),
            lambda: manager.slots(row, 0, 1),
            lambda: manager.block_hashes(row),
        ):
            with pytest.raises(UnknownRow):
                call()


def test_the_same_row_twice_in_one_call_is_refused_everywhere(unchanged, filled):
    manager, row = filled(8, 4, [1, 2, 3], host_blocks=8)
    manager.append(row, [4, 5])
    with unchanged(manager):
        for call in (
            lambda: manager.free([row, row]),
            lambda: manager.allocate([row, row], [1, 1]),
            lambda: manager.reserve([row, row], [2, 2]),
            lambda: manager.swap_out([row, row]),
        ):
            with pytest.raises(DuplicateRow):
                call()


def test_a_row_is_placed_once_in_a_batch_and_may_do_all_else_while_that_is_out(make_manager, unchanged):
    manager = make_manager(8, 4, host_blocks=8)
    row = manager.add(range(6))
    manager.allocate([row], [5])
    with unchanged(manager), pytest.raises(RowInFlight):
        manager.allocate([row], [1])
    manager.next_batch()
    child = manager.fork(row)
    manager.append(row, [1])
    manager.truncate(row, 1)
    manager.swap_out([child])
    manager.free([row])
    manager.confirm()
    manager.free([child])
    assert (manager.device.num_used, manager.host.num_used) == (0, 0)


def test_with_no_batch_out_nothing_can_be_confirmed_or_cancelled(make_manager, fill, unchanged):
    manager = make_manager(8, 4)
    fill(manager, range(6))
    with unchanged(manager):
        for call in (manager.confirm, manager.cancel):
            with pytest.raises(NothingInFlight):
                call()


def test_a_batch_is_confirmed_when_its_tokens_are_known(make_manager, unchanged):
    manager = make_manager(4, 4)
    row = manager.add([1, 2])
    manager.allocate(row, 3, unknown=1)
    with unchanged(manager), pytest.raises(InvalidTokens, match="up to 3, and 2 are known"):
        manager.confirm()
    manager.append(row, [7])
    manager.confirm()
    assert int(manager.rows.num_computed[row]) == 3


def test_calls_without_rows_begin_no_batch_and_change_nothing(make_manager, unchanged):
    manager = make_manager(4, 4, host_blocks=2)
    with unchanged(manager):
        for call in (manager.allocate, manager.reserve):
            call([], [])
            call(np.empty(0, np.int64), 1)
        for call in (manager.free, manager.swap_out, manager.swap_in):
            call([])
    with pytest.raises(NothingInFlight):
        manager.confirm()


@pytest.mark.parametrize("count", [0, -1, 7])
def test_no_row_can_have_fewer_tokens_in_flight_than_1_or_more_than_it_knows(make_manager, count, unchanged):
    manager = make_manager(8, 4)
    row = manager.add(range(6))
    with unchanged(manager), pytest.raises(PagedError):
        manager.allocate([row], [count])


def test_one_bad_row_in_a_call_of_many_changes_nothing(make_manager, unchanged):
    manager = make_manager(8, 4)
    good, flying = manager.add(range(6)), manager.add(range(20, 27))
    manager.allocate([flying], [6])
    with unchanged(manager):
        with pytest.raises(RowInFlight):
            manager.allocate([good, flying], [6, 1])
        with pytest.raises(UnknownRow):
            manager.allocate([good, 77], [6, 1])
        with pytest.raises(UnknownRow):
            manager.free([good, 77])
    manager.cancel()


def test_token_ids_outside_the_vocabulary_are_refused_with_the_limit(make_scheduler):
    scheduler = make_scheduler(8, 4, vocabulary_size=100)
    scheduler.add(Request(id="fits", prompt=[0, 99]))
    with pytest.raises(InvalidRequest, match="100"):
        scheduler.add(Request(id="a", prompt=[5, 100]))
    assert scheduler.waiting_ids() == ["fits"]


def test_int32_arrays_and_lists_are_the_same_prompt(make_scheduler, step):
    scheduler = make_scheduler(8, 4)
    prompt = np.array([3, 1, 2], np.int32)
    scheduler.add(Request(id="array", prompt=prompt))
    scheduler.add(Request(id="list", prompt=[3, 1, 2]))
    prompt[:] = 9  # what the caller does to its own array later is not our business
    assert step(scheduler).batch.token_ids.tolist() == [3, 1, 2, 3, 1, 2]


def test_the_id_of_a_living_request_is_refused_and_free_again_when_it_has_ended(make_scheduler, request_of, step):
    scheduler = make_scheduler(8, 4, {"a": (3, 2)})
    with pytest.raises(DuplicateRequest, match='"a"'):
        scheduler.add(request_of("a", 4))
    step(scheduler)
    with pytest.raises(DuplicateRequest):
        scheduler.add(request_of("a", 4))
    step(scheduler)
    scheduler.add(request_of("a", 4))
    assert step(scheduler).tokens == {"a": 4}


def test_an_unknown_request_is_refused_everywhere(make_scheduler, unchanged):
    scheduler = make_scheduler(8, 4, {"a": 3})
    with unchanged(scheduler):
        for call in (
            lambda: scheduler.abort("b"),
            lambda: scheduler.append("b", [1]),
            lambda: scheduler.loaded("b", 4),
            lambda: scheduler.explain("b"),
            lambda: scheduler.status("b"),
        ):
            with pytest.raises(UnknownRequest, match='"b"'):
                call()


def test_a_prompt_over_the_pool_says_what_would_do(make_scheduler, request_of):
    scheduler = make_scheduler(96, 16)
    with pytest.raises(NeverFits) as caught:
        scheduler.add(request_of("a", 1600))
    assert (caught.value.blocks_needed, caught.value.num_blocks) == (101, 96)
    for part in ('"a"', "101", "1,600", "96", "1,535"):
        assert part in str(caught.value)
    with pytest.raises(NeverFits):
        scheduler.add(request_of("b", 1536))
    scheduler.add(request_of("c", 1535))
    assert (scheduler.counts()["rejected"], scheduler.waiting_ids()) == (2, ["c"])
