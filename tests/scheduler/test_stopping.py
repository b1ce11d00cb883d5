"""Where a sequence ends, by row: one token each (finish_codes) and several at once (kept_counts) agree."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from paged.scheduler.request import Request, state_of
from paged.scheduler.rows import RowColumns
from paged.scheduler.status import LENGTH, NOT_FINISHED, STOP
from paged.scheduler.stopping import finish_codes, kept_counts, kept_of

EOS, STOP_ID, PLAIN = 2, 3, 9


def bound(columns: RowColumns, row: int, *, max_tokens: int = 5, **options) -> None:
    """The row serves a request with a prompt of three tokens."""
    request = Request(id=str(row), prompt=[1, 1, 1], max_tokens=max_tokens, **options)
    state = state_of(request, np.array([1, 1, 1], np.int32), b"", (0, 0.0, row), 9)
    state.max_total = (3 + max_tokens,)
    columns.bind(row, state, 0)


def codes(columns: RowColumns, rows: list[int], tokens: list[int], totals: list[int]) -> list[int]:
    found, done = finish_codes(columns, np.array(rows), np.array(tokens, np.int32), np.array(totals))
    assert done.tolist() == found.nonzero()[0].tolist()
    return found.tolist()


def kept_tokens(columns: RowColumns, row: int, tokens: list[int], total: int) -> tuple[int, int]:
    """How many the row keeps, and why it ends after them, beside a row that gets the same again and one that gets none."""
    rows, counts = np.array([row, 0, row]), np.array([len(tokens), 0, len(tokens)])
    packed, first = np.array(2 * tokens, np.int32), np.array([0, len(tokens), len(tokens)])
    kept, found = kept_counts(columns, rows, (packed, first, counts), np.array([total, 3, total]))
    assert (kept[1], found[1], kept[0], found[0]) == (0, NOT_FINISHED, kept[2], found[2])
    return int(kept[0]), int(found[0])


@pytest.fixture
def columns():
    """Row 0: no stop ids. Row 1: EOS. Row 2: EOS and a stop id, and at least two output tokens. Rows 3 and 4: many stop ids."""
    columns = RowColumns()
    bound(columns, 0)
    bound(columns, 1, eos_token_id=EOS)
    bound(columns, 2, eos_token_id=EOS, stop_token_ids=(STOP_ID,), min_tokens=2)
    bound(columns, 3, stop_token_ids=tuple(range(20, 40)))
    bound(columns, 4, stop_token_ids=tuple(range(30, 50)), eos_token_id=EOS)
    return columns


def test_a_plain_token_ends_nothing(columns):
    assert codes(columns, [0, 1, 2], [PLAIN] * 3, [4] * 3) == [NOT_FINISHED] * 3


def test_each_row_has_stop_ids_of_its_own(columns):
    assert codes(columns, [0, 1, 2], [EOS, EOS, EOS], [5] * 3) == [NOT_FINISHED, STOP, STOP]
    assert codes(columns, [0, 1, 2], [STOP_ID] * 3, [5] * 3) == [NOT_FINISHED, NOT_FINISHED, STOP]


def test_rows_of_many_stop_ids_stop_at_each_of_theirs_and_no_other(columns):
    for token, expected in (
        (19, (0, 0)),
        (20, (1, 0)),
        (30, (1, 1)),
        (39, (1, 1)),
        (49, (0, 1)),
        (50, (0, 0)),
        (EOS, (0, 1)),
    ):
        assert codes(columns, [3, 4, 0], [token] * 3, [4] * 3) == [STOP * expected[0], STOP * expected[1], NOT_FINISHED]
    assert kept_tokens(columns, 4, [PLAIN, 29, 30, PLAIN], 3) == (2 + 1, STOP)
    columns.release(3, 0)
    assert codes(columns, [4, 1], [30, EOS], [4] * 2) == [STOP, STOP]


def test_a_stop_id_counts_from_the_last_of_min_tokens_on(columns):
    assert [codes(columns, [2], [EOS], [total]) for total in (4, 5)] == [[NOT_FINISHED], [STOP]]


def test_the_full_length_ends_a_sequence(columns):
    assert [codes(columns, [0], [PLAIN], [total]) for total in (7, 8)] == [[NOT_FINISHED], [LENGTH]]


def test_a_stop_id_in_the_last_place_is_a_stop(columns):
    assert codes(columns, [1], [EOS], [8]) == [STOP]


def test_codes_stand_in_the_order_of_the_rows_asked_for(columns):
    assert codes(columns, [2, 0, 1], [EOS, PLAIN, EOS], [5, 8, 4]) == [STOP, LENGTH, STOP]


def test_without_stop_ids_only_the_length_ends_a_sequence():
    columns = RowColumns()
    bound(columns, 0)
    assert codes(columns, [0], [EOS], [4]) == [NOT_FINISHED]


def test_a_row_that_changed_hands_has_not_the_stop_ids_of_before(columns):
    columns.release(1, 0)
    bound(columns, 1)
    assert codes(columns, [1], [EOS], [4]) == [NOT_FINISHED]


def test_tokens_after_a_stop_are_not_kept(columns):
    assert kept_tokens(columns, 1, [PLAIN, EOS, PLAIN], 3) == (2, STOP)


def test_tokens_beyond_the_full_length_are_not_kept(columns):
    assert kept_tokens(columns, 0, [PLAIN] * 3, 6) == (2, LENGTH)


def test_all_tokens_are_kept_while_nothing_ends(columns):
    assert kept_tokens(columns, 2, [EOS, PLAIN], 3) == (2, NOT_FINISHED)


def test_a_sequence_without_a_row_ends_where_one_with_a_row_would(columns):
    for row, tokens in ((2, [EOS, STOP_ID, PLAIN]), (1, [PLAIN] * 7), (1, [PLAIN])):
        assert kept_of(columns.owner[row], 0, tokens, 3) == kept_tokens(columns, row, tokens, 3)


def test_no_token_ends_nothing(columns):
    assert kept_tokens(columns, 1, [], 3) == (0, NOT_FINISHED)


@settings(max_examples=100, derandomize=True)
@given(st.integers(0, 2), st.lists(st.sampled_from([EOS, STOP_ID, PLAIN]), max_size=7), st.integers(3, 7))
def test_several_tokens_end_where_one_at_a_time_would(row, tokens, total):
    columns = RowColumns()
    bound(columns, 0)
    bound(columns, 1, eos_token_id=EOS)
    bound(columns, 2, eos_token_id=EOS, stop_token_ids=(STOP_ID,), min_tokens=2)
    expected = (len(tokens), NOT_FINISHED)
    for count, token in enumerate(tokens, 1):
        (code,) = codes(columns, [row], [token], [total + count])
        if code:
            expected = (count, code)
            break
    assert kept_tokens(columns, row, tokens, total) == expected
