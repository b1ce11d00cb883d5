"""What the groups of a model keep, in pages: counted by hand, and against a count block by block."""

import numpy as np
import pytest

from paged.block_manager import LayerGroup
from paged.block_manager.layout import PLAIN, Layout
from paged.errors import UnsupportedByLayers
from paged.testing import naive_layers

FULL, WINDOW, STATE = LayerGroup("full", pages=2), LayerGroup("window", 6), LayerGroup("state", pages=3)


@pytest.mark.parametrize(
    ("groups", "is_plain"), [(PLAIN, True), ([FULL], False), ([WINDOW], False), ([LayerGroup("full"), STATE], False)]
)
def test_only_one_full_group_of_one_page_is_plain(groups, is_plain):
    assert Layout(groups, 4).is_plain is is_plain


@pytest.mark.parametrize("reach", range(1, 12))
@pytest.mark.parametrize("kind", ["window", "chunk"])
def test_what_a_row_holds_at_most_is_what_the_naive_model_says(kind, reach):
    for block_size in (1, 2, 4, 5):
        groups = [LayerGroup("full"), LayerGroup(kind, reach)]
        said = [Layout(groups, block_size).pages_for(tokens) for tokens in range(40)]
        assert said == [naive_layers.pages_for(groups, tokens, block_size) for tokens in range(40)]


@pytest.mark.parametrize(
    # Without full attention positions cost nothing.
    ("groups", "num_pages", "num_blocks"),
    [([FULL], 8, 8), ([WINDOW], 8, 8 * 1024), ([WINDOW], 10**6, 2**20)],
)
def test_as_many_positions_as_pages_hold(groups, num_pages, num_blocks):
    assert Layout(groups, 4).num_main_blocks(num_pages) == num_blocks


@pytest.mark.parametrize(
    ("tokens", "pages"),
    # The window's 5 tokens before the next one lie in 2 blocks, begin in a third, and a fourth is being filled.
    [(0, 0), (1, 6), (4, 6), (5, 9), (16, 15), (17, 17), (40, 27)],
)
def test_the_pages_of_a_sequence_grow_with_the_full_group_alone_at_last(tokens, pages):
    # A block takes 2 pages of the full group and 1 of the window; a row has 3 more for its state.
    hybrid = Layout([WINDOW, FULL, STATE], 4)
    assert hybrid.pages_for(tokens) == pages
    beside = pages - -(-tokens // hybrid.block_size) * hybrid.full_pages
    slots = beside * hybrid.block_size // hybrid.full_pages
    assert hybrid.side_slots(np.array([tokens, 0])).tolist() == [slots, 0]


@pytest.mark.parametrize(
    "groups", [PLAIN, [FULL], [WINDOW], [STATE], [WINDOW, STATE], [FULL, LayerGroup("chunk", 5), STATE]]
)
@pytest.mark.parametrize("keeps", [False, True])
def test_the_longest_sequence_fits_and_one_block_more_does_not(groups, keeps):
    layout = Layout(groups, 4, keeps=keeps)
    for num_pages in range(3, 30):
        tokens, room = layout.tokens_in(num_pages), num_pages - layout.spare_pages
        assert tokens % 4 == 0
        assert layout.pages_for(tokens) <= max(room, 0)
        if tokens < layout.num_main_blocks(num_pages) * 4:
            assert layout.pages_for(tokens + 1) > room


@pytest.mark.parametrize("reach", range(1, 12))
@pytest.mark.parametrize("kind", ["window", "chunk"])
@pytest.mark.parametrize("keeps", [False, True])
def test_the_first_column_is_that_of_the_first_token_that_is_attended_to(kind, reach, keeps):
    (side,) = Layout([LayerGroup(kind, reach)], 4, keeps=keeps).sides
    counts = np.arange(40)
    found = side.first_column(counts)
    for computed in counts.tolist():
        # Kept content can be begun at from the end of the last full block.
        stands = computed // 4 * 4 if keeps else computed
        attended = [
            p for p in range(stands + 1) if (stands - p < reach if kind == "window" else p // reach == stands // reach)
        ]
        assert found[computed] == side.first_column(computed) == attended[0] // 4


@pytest.mark.parametrize("reach", range(1, 12))
@pytest.mark.parametrize("kind", ["window", "chunk"])
def test_a_row_that_computes_a_block_at_a_time_never_holds_more_than_is_counted(kind, reach):
    (side,) = Layout([LayerGroup(kind, reach)], 4).sides
    for computed in range(60):
        for ahead in range(1, 5):
            held = -(-(computed + ahead) // 4) - side.first_column(computed)
            assert held <= side.most


@pytest.mark.parametrize(
    ("groups", "named"),
    [
        ([LayerGroup("window", 3), STATE, LayerGroup("window", 5), FULL], "state and window layers"),
        ([FULL], "full layers of 2 pages a block"),
    ],
)
def test_a_refusal_names_the_kinds_once_and_in_order(groups, named):
    with pytest.raises(UnsupportedByLayers, match=f"^a leap is not possible with {named}.$"):
        Layout(groups, 4).refuse("a leap")


def test_even_restarts_take_a_sixteenth_of_the_full_blocks_and_there_are_six_at_most():
    layout = Layout([LayerGroup("full", pages=4), LayerGroup("state", pages=101)], 64)
    lengths = 403, 404, 2424, 2827, 2828, 5656
    assert [len(layout.even_restarts(num)) for num in lengths] == [0, 1, 6, 6, 3, 3]
    assert layout.even_restarts(2828) == [808, 1616, 2424]
    # At no less than 4,096 tokens.
    assert Layout([FULL, LayerGroup("state")], 16).even_restarts(600) == [256, 512]
    for groups in ([FULL], [FULL, WINDOW], [STATE]):
        assert Layout(groups, 64).even_restarts(10**6) == []
