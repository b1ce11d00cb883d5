"""Views of pages: whatever is read was written at this place, other bytes stay, and what a row does not have reads as zeros."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from paged.attention.kv_pool import EntryPlace, KVPlace, LayeredPool
from paged.attention.layouts.state import State
from paged.attention.pages import Pages
from paged.errors import InvalidPool

PAGES, BLOCK = 9, 2


def place_of(unit, unit_bytes, a_page):
    return unit // a_page, unit % a_page * unit_bytes


def numbers(*shape):
    return torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float32).view(shape)


@pytest.mark.parametrize(
    ("a_page", "gathers"), [(1, 1), (2, 2), (3, 2), (5, 1)], ids=["one", "some, one over", "most", "all"]
)
def test_a_state_comes_back_from_any_pages_in_as_few_gathers_as_its_pages_look_different(a_page, gathers):
    pages = Pages(num_pages=40, page_bytes=a_page * 24 + 8)
    pages.poison(torch.arange(40))
    state = State(
        pages, [place_of(unit, 24, a_page) for unit in range(5)], unit_bytes=24, shape=(5, 2, 3), dtype=torch.float32
    )
    assert len(state._stretches) == gathers
    k = -(-5 // a_page)
    rows = torch.randperm(40, generator=torch.Generator().manual_seed(0))[: 2 * k].view(2, k)
    values = numbers(2, 5, 2, 3)
    before = pages.on_device.clone()
    state.write(rows, values)
    found = state.read(rows.flip(0).int())
    assert torch.equal(found, values.flip(0)) and found.is_contiguous()
    changed = (pages.on_device != before).any(1).nonzero()[:, 0]
    assert set(changed.tolist()) == set(rows.flatten().tolist())


def test_a_row_without_a_state_reads_as_zeros_and_is_not_written():
    pages = Pages(num_pages=2, page_bytes=32)
    state = State(pages, [(0, 0), (0, 16)], unit_bytes=16, shape=(2, 4), dtype=torch.float32)
    state.write(torch.tensor([[-1], [1]]), numbers(2, 2, 4))
    assert state.read(torch.tensor([[1], [-1], [0]])).flatten(1).tolist() == [list(range(9, 17)), [0] * 8, [0] * 8]
    assert not pages.on_device[2].any()


def test_a_piece_that_does_not_divide_into_its_units_and_units_with_room_to_spare_lose_nothing():
    pages = Pages(num_pages=3, page_bytes=64)
    # Seven channels in four units of two, 12 bytes in 16.
    state = State(pages, [(0, 0), (0, 16), (1, 48), (1, 32)], unit_bytes=16, shape=(7, 3), dtype=torch.bfloat16)
    values = numbers(1, 7, 3).bfloat16()
    state.write(torch.tensor([[2, 0]]), values)
    assert torch.equal(state.read(torch.tensor([[2, 0]])), values)
    assert not pages.on_device[2, 32:].any()


@pytest.mark.parametrize(
    ("page_bytes", "unit_bytes", "words"),
    [
        (64, 12, "a unit of 12 bytes has no room for 4 elements of torch.float32, one of 1 units"),
        (64, 18, "units of 18 bytes"),
        (30, 16, "pages of 30 bytes: torch.float32 takes multiples of 4"),
    ],
)
def test_units_that_do_not_hold_the_state_and_pages_of_no_whole_number_of_elements_are_refused(
    page_bytes, unit_bytes, words
):
    pages = Pages(num_pages=1, page_bytes=page_bytes)
    with pytest.raises(InvalidPool, match=words):
        State(pages, [(0, 0)], unit_bytes=unit_bytes, shape=(1, 4), dtype=torch.float32)


@settings(max_examples=60, derandomize=True)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=4),
    spare=st.integers(0, 7),
    parts=st.integers(1, 2),
)
def test_k_and_v_of_layers_that_differ_lie_where_they_are_said_to_whatever_is_left_of_a_page(shapes, spare, parts):
    """Heads, and sizes of K and V, by layer; pages of so many floats more than they need."""
    layers, at = {}, [0, 0]
    for layer, (heads, key_size, value_size) in enumerate(shapes):
        found = []
        for piece, size in enumerate((key_size, value_size)):
            part = (layer + piece) % parts
            found.append(EntryPlace(part, 4 * at[part], heads, size))
            at[part] += BLOCK * heads * size
        layers[layer] = KVPlace(0, *found)
    pool = LayeredPool(layers, num_blocks=PAGES, page_bytes=4 * (max(at) + spare), block_size=BLOCK)
    expected = {}
    # A column for each page of a block.
    mapping = torch.tensor([[7, 17], [0, 8], [3, 11]])
    for layer, (heads, key_size, value_size) in enumerate(shapes):
        keys, values = 100 * layer + numbers(3, heads, key_size), -100 * layer - numbers(3, heads, value_size)
        pool.write_kv(layer, mapping[:, :parts], keys, values)
        expected[layer] = keys, values
    for layer, new in expected.items():
        own = pool.layer(layer)
        for entries, values in zip((own.keys, own.values), new, strict=True):
            slots = mapping[:, entries.part]
            at_rows = entries.row_steps.of(slots, BLOCK)[:, None] + torch.arange(entries.heads) * entries.row_steps.head
            assert torch.equal(entries.rows[at_rows], values)
            assert torch.equal(entries.tokens[entries.token_steps.of(slots, BLOCK)], values)
            assert torch.equal(entries.blocks[slots // BLOCK, slots % BLOCK], values)
            assert entries.blocks[slots // BLOCK].count_nonzero() <= values.numel()


def test_tokens_that_go_nowhere_are_not_written():
    pool = LayeredPool(
        {0: KVPlace(0, EntryPlace(0, 0, 1, 1), EntryPlace(1, 0, 1, 1))}, num_blocks=2, page_bytes=16, block_size=2
    )
    slots = torch.tensor([[0, 2], [-1, -1], [1, 3]])
    pool.write_kv(0, slots, numbers(3, 1, 1), 10 * numbers(3, 1, 1))
    assert (pool.keys(0)[0].flatten().tolist(), pool.values(0)[1].flatten().tolist()) == ([1, 3], [10, 30])
    assert not pool.pages.on_device[:, 8:].any() and not pool.pages.on_device[2].any()
