"""The oracle of hits: numbers that one can check by hand, ours agree with it, and whoever forgets is told so."""

import pytest
from hypothesis import given, strategies as st

from paged import BlockManager, Scheduler
from paged.testing import expected_hits, hit_violations
from paged.testing.strategies import prompts

A, B = [0, 1, 2, 3, 4], [0, 1, 2, 3, 9]


@pytest.mark.parametrize(
    ("options", "hits"),
    [
        ({}, [0, 4, 4, 4]),
        # Three blocks hold either of them, and both begin with the same two.
        ({"num_blocks": 3}, [0, 4, 4, 4]),
        ({"namespaces": ["a", "b", "a", "a"]}, [0, 0, 4, 4]),
        # Python takes them for equal, and a cache may not.
        ({"namespaces": [1, True, 1, 1.0]}, [0, 0, 4, 0]),
    ],
)
def test_hits_are_whole_blocks_of_what_came_before(options, hits):
    assert expected_hits([A, B, A, B], block_size=2, **options) == hits


def test_what_was_used_least_recently_is_forgotten_its_end_first():
    # Four blocks: A takes three and B three others; one block of A is left, its first.
    assert expected_hits([A, [7] * 5, A], block_size=2, num_blocks=4) == [0, 0, 2]
    assert expected_hits([A, [7] * 5, A], block_size=2, num_blocks=6) == [0, 0, 4]


def test_outputs_are_cached_all_but_the_last_token():
    assert expected_hits([[0, 1], [0, 1, 2, 3, 4]], block_size=2, outputs=[[2, 3, 4], [0]]) == [0, 4]
    assert expected_hits([[0, 1], [0, 1, 2, 3, 4]], block_size=2, outputs=[[2, 3], [0]]) == [0, 2]


@st.composite
def pools(draw):
    """(prompts, blocks, block size): each prompt has room with one more token, not all together."""
    them = draw(st.lists(prompts(), min_size=2, max_size=8))
    block_size = draw(st.sampled_from([1, 2, 4]))
    largest = max(-(-(len(prompt) + 1) // block_size) for prompt in them)
    return them, largest + draw(st.integers(0, 6)), block_size


IN_CHUNKS = {"max_tokens_per_step": 4, "max_chunk": 3}


@given(pool=pools())
def test_our_manager_and_scheduler_have_exactly_the_hits_that_are_expected(pool):
    them, num_blocks, block_size = pool
    assert hit_violations(BlockManager(num_blocks, block_size), them) == []
    for options in ({"policy": "vllm"}, {"policy": "fastgen"}, {"policy": "paged"}, IN_CHUNKS):
        assert hit_violations(Scheduler(BlockManager(num_blocks, block_size), **options), them) == []


class Forgets(BlockManager):
    """Takes one block less than the cache holds."""

    def add(self, tokens, *, namespace=None):
        row = super().add(tokens, namespace=namespace)
        self.truncate(row, max(0, len(self.table(row)) - 1))
        return row


def test_who_forgets_is_told_so():
    them = [A, [7] * 5, A, [7] * 5, [8] * 3, A]
    for num_blocks in (4, 6, 20):
        assert hit_violations(BlockManager(num_blocks, 2), them) == []
    assert any(hit_violations(Forgets(num_blocks, 2), them) for num_blocks in (4, 6, 20))


def test_a_scheduler_without_a_cache_is_told_so():
    found = hit_violations(Scheduler(BlockManager(20, 2, prefix_caching=False)), [A, B])
    assert found == ["prompt 1, [0, 1, 2, 3, 9]: 0 tokens were hits; 4 had to be"]


class Stops(Scheduler):
    """Computes prompts, and ends none."""

    def update(self, batch, token_ids, counts=None, now=0.0):
        return []


def test_a_scheduler_that_ends_no_prompt_is_told_so():
    assert hit_violations(Stops(BlockManager(20, 2)), [A, B]) == [f"prompt 0, {A}: not served after 120 steps"]
