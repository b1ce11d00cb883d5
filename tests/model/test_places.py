"""Where units lie: within their pages, none on another, on as many pages as the plan counts, for every published model."""

from itertools import pairwise

import pytest

from paged.errors import InvalidConfig
from paged.model.layer_plan import Layers, Part, plan_layers
from paged.model.places import ALIGNED, located, places_of
from paged.study.hardware import layers_named, published_layers

FULL = Layers(kind="full", count=1, entry=(4, 4))


def test_units_lie_side_by_side_in_the_order_of_layers():
    plan = plan_layers([FULL] * 3, block_size=16, page_bytes=256)
    assert plan.groups[0].pages == 2
    assert places_of(plan.groups[0], 256) == [
        (((0, 0),), ((0, 64),)),
        (((0, 128),), ((0, 192),)),
        (((1, 0),), ((1, 64),)),
    ]


@pytest.mark.parametrize("name", sorted(published_layers()))
def test_every_unit_of_a_published_model_has_a_place_of_its_own_on_the_pages_of_the_plan(name):
    plan = plan_layers(layers_named(name).layers)
    for group in plan.groups:
        places = places_of(group, plan.page_bytes)
        shapes = [each for each in group.layers for _ in range(each.count)]
        assert len(places) == len(shapes) == group.num_layers
        taken = []
        for shape, pieces in zip(shapes, places, strict=True):
            units = [(size, number // shape.count) for size, number in shape.units(group.block_tokens)]
            for (size, number), its in zip(units, pieces, strict=True):
                assert len(its) == number
                taken += [(place.part, place.offset, place.offset + size) for place in its]
        taken.sort()
        assert {part for part, _, _ in taken} == set(range(group.pages))
        assert all(stop <= plan.page_bytes and start % ALIGNED == 0 for _, start, stop in taken)
        assert not [1 for (p, _, stop), (q, start, _) in pairwise(taken) if p == q and start < stop]


def test_a_layer_of_the_model_is_found_in_its_group():
    window = Layers(kind="window", count=1, entry=(4, 4), reach=32)
    wide = Layers(kind="full", count=2, entry=(8, 8))
    layers = [window, FULL, window, wide]
    plan = plan_layers(layers, block_size=16)
    assert [group.kind for group in plan.groups] == ["window", "full"]
    assert located(layers, plan) == [(0, 0), (1, 0), (0, 1), (1, 1), (1, 2)]


ODD_STATE = Layers(kind="state", count=1, parts=(Part(units=2, unit_bytes=40),))


@pytest.mark.parametrize(
    ("layers", "block_size", "message"),
    [
        (
            Layers(kind="full", count=1, entry=(3,)),
            1,
            r"a unit has 3 bytes; .* multiples of 16, .* Take block_size=16\.",
        ),
        (Layers(kind="full", count=1, entry=(40, 8)), 3, r"full layers: a unit has 120 bytes; .* Take block_size=6\."),
        (ODD_STATE, 16, r"a unit has 40 bytes; .* No option changes those of a state\."),
    ],
)
def test_a_unit_that_would_begin_anywhere_is_refused(layers, block_size, message):
    plan = plan_layers([layers], block_size=block_size)
    with pytest.raises(InvalidConfig, match=message):
        places_of(plan.groups[0], plan.page_bytes)


def test_the_block_size_that_a_refusal_names_will_do():
    plan = plan_layers([Layers(kind="full", count=1, entry=(40, 8))], block_size=6)
    assert places_of(plan.groups[0], plan.page_bytes)
