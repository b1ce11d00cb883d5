"""How long a sequence may become, as the front tells it from what the engine said of itself."""

from __future__ import annotations

import pytest

from paged.serving.wire import Ready

READY = Ready(
    block_size=4,
    num_blocks=32,
    host_blocks=0,
    block_bytes=1,
    max_model_len=100,
    max_sequences=1,
    max_tokens_per_step=16,
    vocabulary_size=8,
    policy="paged",
    dtype="float32",
    device="cpu",
    backend="native",
    prefix_caching=True,
    rotary_limit=40,
)


@pytest.mark.parametrize(("length", "longest"), [(1, 41), (40, 41), (41, 100)])
def test_a_sequence_stays_on_the_side_of_the_limit_where_it_began(length, longest):
    assert READY.longest(length) == longest
