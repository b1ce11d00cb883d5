"""How long a sequence may become, as the front tells it from what the engine said of itself."""

import msgspec
import pytest

from .samples import READY  # noqa: TID252


@pytest.mark.parametrize(("length", "longest"), [(1, 41), (40, 41), (41, 100)])
def test_a_sequence_stays_on_the_side_of_the_limit_where_it_began(length, longest):
    limited = msgspec.structs.replace(READY, block_size=4, num_blocks=32, max_model_len=100, rotary_limit=40)
    assert limited.longest(length) == longest
