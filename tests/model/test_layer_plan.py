"""Pages for layers of several kinds: what a plan holds, at most 3 % beyond what must be kept for real models, and where each unit lies."""

import math
import re
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from paged.errors import NoPagePlan
from paged.model.layer_plan import LENGTHS, MOST_PAGES, MOST_WASTE, LayerPlan, Layers, Part, packing, plan_layers
from paged.model.places import ALIGNED, located, places_of
from paged.study.hardware import layers_named, published_layers

from ..shown import assert_refused, shown_in  # noqa: TID252

FULL, WINDOW = Layers(kind="full", count=2, entry=(8, 8)), Layers(kind="window", count=1, entry=(8, 8), reach=32)
NARROW = Layers(kind="full", count=1, entry=(4, 4))
STATE = Layers(kind="state", count=2, parts=(Part(units=3, unit_bytes=100),))


def by_kind(plan: LayerPlan) -> dict:
    return {group.kind: group for group in plan.groups}


def test_a_full_layer_holds_the_blocks_of_all_tokens_and_a_window_those_that_its_next_token_sees():
    groups = by_kind(plan_layers([FULL, WINDOW], block_size=16, page_bytes=256))
    assert (groups["full"].pages, groups["window"].pages) == (2, 1)
    assert [groups["full"].pages_held(length) for length in (1, 16, 17, 80)] == [2, 2, 4, 10]
    # Token 80 sees tokens 49 to 80: blocks 3 and 4. Token 81 sees 50 to 81, and its own block.
    assert [groups["window"].pages_held(length) for length in (1, 16, 80, 81)] == [1, 1, 2, 3]


def test_a_chunk_holds_the_blocks_since_its_start_and_none_at_its_end():
    chunks = plan_layers([Layers(kind="chunk", count=1, entry=(16,), reach=64)], block_size=16).groups[0]
    assert [chunks.pages_held(length) for length in (1, 63, 64, 65, 128)] == [1, 4, 0, 1, 0]


def test_a_state_takes_the_same_pages_at_every_length():
    plan = plan_layers([FULL, STATE], block_size=16, page_bytes=300)
    state = by_kind(plan)["state"]
    assert (state.pages, state.used_bytes, state.pages_held(1), state.pages_held(10_000)) == (2, 600, 2, 2)
    assert plan.kept_bytes(100) == 600 + 2 * 16 * 100


def test_groups_that_keep_all_tokens_have_names_of_their_own_by_the_tokens_of_an_entry():
    strided = [Layers(kind="full", count=1, entry=(64,), stride=stride) for stride in (1, 24, 128)]
    plan = plan_layers(strided, block_size=16)
    # A block has whole entries: 48 is the least common multiple of 16 and 24.
    assert {group.name: group.block_tokens for group in plan.groups} == {
        "full": 16,
        "full, 24 tokens an entry": 48,
        "full, 128 tokens an entry": 128,
    }


def test_a_window_keeps_whole_entries_of_several_tokens():
    window = Layers(kind="window", count=1, entry=(10,), stride=4, reach=8)
    # Token 9 sees tokens 2 to 9: entries 0 and 1; entry 2 has no last token yet.
    assert [window.kept_bytes(length) for length in (1, 8, 9, 11)] == [0, 20, 20, 10]


@pytest.mark.parametrize(
    ("units", "page_bytes", "pages"),
    [
        ([(6, 3)], 10, 3),
        ([(7, 2), (3, 2)], 10, 2),
        # K and V of the 39 layers with a window of MiMo-V2-Flash, in units of 8 KiB.
        ([(6, 39), (4, 39)], 45, 9),
    ],
)
def test_units_lie_within_pages(units, page_bytes, pages):
    assert sum(times for _, times in packing(units, page_bytes)) == pages


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30)), min_size=1, max_size=3), st.integers(40, 200))
def test_pages_hold_every_unit_whole_and_no_more_are_taken_than_one_a_unit(units, page_bytes):
    units = sorted(units, reverse=True)
    pages = sum(times for _, times in packing(units, page_bytes))
    assert math.ceil(sum(size * number for size, number in units) / page_bytes) <= pages
    assert pages <= sum(math.ceil(number / (page_bytes // size)) for size, number in units)


@pytest.mark.parametrize("name", sorted(published_layers()))
def test_a_published_model_holds_at_most_3_percent_beyond_what_its_layers_need_each_unit_at_its_place(name):
    plan = plan_layers(layers_named(name).layers)
    assert plan.block_size in (16, 32)
    # Its sizes are not sure, and one of its kinds of entry stands for 128 tokens.
    assert plan.waste <= (1.06 if name == "deepseek-v4-flash" else 1.03)
    for length in (*LENGTHS, 1000, 5001):
        assert plan.held_bytes(length) >= plan.kept_bytes(length)
    for group in plan.groups:
        assert_each_unit_has_a_place_of_its_own(group, plan.page_bytes)


def assert_each_unit_has_a_place_of_its_own(group, page_bytes):
    """Within the pages of a block, and on all of them."""
    places, taken = places_of(group, page_bytes), []
    shapes = [each for each in group.layers for _ in range(each.count)]
    for shape, pieces in zip(shapes, places, strict=True):
        units = [(size, number // shape.count) for size, number in shape.units(group.block_tokens)]
        for (size, number), its in zip(units, pieces, strict=True):
            assert len(its) == number
            taken += [(place.part, place.offset, place.offset + size) for place in its]
    taken.sort()
    assert {part for part, _, _ in taken} == set(range(group.pages))
    assert all(stop <= page_bytes and start % ALIGNED == 0 for _, start, stop in taken)
    assert not [1 for (p, _, stop), (q, start, _) in pairwise(taken) if p == q and start < stop]


def test_a_block_has_32_tokens_where_16_take_many_pages_or_waste_more():
    plans = {
        name: plan_layers(layers_named(name).layers)
        for name in ("gemma-3-27b", "qwen3.5-397b-a17b", "gpt-oss-20b", "llama-3-8b")
    }
    assert [plan.block_size for plan in plans.values()] == [32, 32, 16, 16]
    # One of one kind of layers has one page a block, and wastes nothing.
    its = plans["llama-3-8b"]
    assert (its.page_bytes, its.pages_of_block, its.waste) == (16 * 131_072, 1, 1.0)
    assert plan_layers(layers_named("gemma-3-27b").layers, block_size=16).pages_of_block > MOST_PAGES
    assert plan_layers(layers_named("qwen3.5-397b-a17b").layers, block_size=16).waste > MOST_WASTE


def test_the_code_of_the_page_on_models_runs(repository):
    page = (repository / "docs" / "hardware.md").read_text(encoding="utf-8")
    exec(re.search(r"^```python\n(from paged.model.layer_plan.*?)^```", page, re.DOTALL | re.MULTILINE)[1], {})


def test_a_layer_of_the_model_is_found_in_its_group():
    window = Layers(kind="window", count=1, entry=(4, 4), reach=32)
    wide = Layers(kind="full", count=2, entry=(8, 8))
    layers = [window, NARROW, window, wide]
    plan = plan_layers(layers, block_size=16)
    assert [group.kind for group in plan.groups] == ["window", "full"]
    assert located(layers, plan) == [(0, 0), (1, 0), (0, 1), (1, 1), (1, 2)]


def placed(block_size=16, **layers):
    plan = plan_layers([Layers(**layers)], block_size=block_size)
    return places_of(plan.groups[0], plan.page_bytes)


@pytest.mark.parametrize(("call", "shown"), shown_in("model/refused_plans.txt", ">>>"))
def test_a_page_that_holds_no_unit_and_a_unit_that_would_begin_anywhere_are_refused_with_what_would_do(call, shown):
    error = assert_refused(call, shown, globals())
    if isinstance(error, NoPagePlan):
        assert (error.page_bytes, error.needed, error.block_size) == (255, 256, 16)
    assert placed(kind="full", count=1, entry=(40, 8), block_size=6)
