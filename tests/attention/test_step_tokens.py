"""What a step says of its tokens: slots by block tables, histories, and what is left of it when it is cut.

Two sequences in blocks of 4: three tokens of "a" behind five, two tokens of "b" behind none.

    a   | 7: 0 1 2 3 | 2: 4 5 6 7 |     b   | 5: 0 1 |
                         | step   |              step
"""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from paged.attention import StepTokens


@pytest.fixture
def step():
    return StepTokens(
        positions=np.array([5, 6, 7, 0, 1]), slot_mapping=np.array([9, 10, 11, 20, 21]),
        query_start_loc=np.array([0, 3, 5]), seq_lens=np.array([8, 2]),
        block_tables=np.array([[7, 2, -1], [5, -1, -1]], np.int32), block_size=4,
    )  # fmt: skip


def test_slots_follow_the_table_and_a_full_block_takes_no_other_one_with_it(step):
    assert step.slots_of(0, 7).tolist() == [28, 29, 30, 31, 8, 9, 10]
    assert (step.slots_of(0, 4).tolist(), step.slots_of(0, 0).tolist()) == ([28, 29, 30, 31], [])


def test_slots_do_not_overflow_where_block_ids_are_large(step):
    step.block_tables[1, 0] = 2**31 - 1
    assert step.slots_of(1, 1).tolist() == [4 * (2**31 - 1)]


def test_a_part_leaves_the_step_as_it_was_and_has_padding_of_its_own(step):
    assert (step.part(0, 2).num_padded, step.part(0, 2, 30).num_padded) == (0, 30)
    assert (step.seq_lens.tolist(), step.query_start_loc.tolist()) == ([8, 2], [0, 3, 5])


@st.composite
def steps_and_cuts(draw):
    """A step of sequences with (tokens before, tokens in it), and the first and last token of a part that is not empty."""
    spans = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), min_size=1, max_size=6))
    total = sum(count for _, count in spans)
    first = draw(st.integers(0, total - 1))
    return spans, draw(st.integers(1, 4)), first, draw(st.integers(first + 1, total))


@settings(max_examples=100, derandomize=True)
@given(steps_and_cuts())
def test_a_part_is_the_step_in_which_only_its_tokens_come(case):
    spans, block_size, first, stop = case
    tables = np.random.default_rng(0).permutation(len(spans) * 15).reshape(len(spans), 15).astype(np.int32)
    tokens = [(i, done + offset) for i, (done, count) in enumerate(spans) for offset in range(count)]

    def slot(i, position):
        return int(tables[i, position // block_size]) * block_size + position % block_size

    positions, slots = (np.array(column) for column in zip(*((position, slot(i, position)) for i, position in tokens)))
    starts = np.cumsum([0, *(count for _, count in spans)])
    step = StepTokens(positions, slots, starts, np.array([sum(span) for span in spans]), tables, block_size)
    part = step.part(first, stop)
    # By sequence, how many tokens there are with those of the part.
    lengths = {i: position + 1 for i, position in tokens[first:stop]}
    assert (part.num_sequences, part.seq_lens.tolist()) == (len(lengths), list(lengths.values()))
    seen = [slots.tolist() for slots in part.contexts()]
    assert seen == [[slot(i, before) for before in range(position + 1)] for i, position in tokens[first:stop]]
    assert part.num_tokens == stop - first


def test_what_is_there_already_goes_nowhere_in_its_group_and_in_each_part():
    tables = (np.array([[[7], [2]], [[5], [6]]], np.int32), np.array([[[-1], [3]], [[1], [4]]], np.int32))
    at = np.array([5, 6, 7, 0, 1]), np.array([0, 3, 5]), np.array([8, 2])
    step = StepTokens.of_groups(*at, tables, 4, written_from=np.array([[7, 1], [0, 0]]))
    assert step.of_group(0).slot_mapping[:, 0].tolist() == [-1, -1, 11, -1, 21]
    assert step.of_group(1).slot_mapping[:, 0].tolist() == [13, 14, 15, 4, 5]
    assert step.part(1, 5).of_group(0).slot_mapping[:, 0].tolist() == [-1, 11, -1, 21]
    assert step.part(4, 5).of_group(0).slot_mapping[:, 0].tolist() == [21]
