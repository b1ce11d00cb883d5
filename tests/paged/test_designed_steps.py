"""Which steps a profile is made of: what they cover, what they need, and what cannot be designed."""

import pytest
from hypothesis import given, strategies as st

from paged.errors import InvalidConfig
from paged.study.profiling import designed


@given(
    max_sequences=st.integers(4, 80),
    blocks=st.integers(4, 60),
    block_size=st.integers(1, 32),
    beyond=st.integers(1, 300),
)
def test_a_design_keeps_to_its_limits_and_holds_out_no_extreme(max_sequences, blocks, block_size, beyond):
    budget, context = max_sequences + beyond, blocks * block_size
    design = designed(
        max_sequences=max_sequences, max_context=context, max_tokens_per_step=budget, block_size=block_size
    )
    assert len(design.streams) == max_sequences - 1
    assert max(design.streams) == design.streams[0] == context
    for scene in design.scenes:
        for stream, tokens in zip(design.streams, scene.contexts):
            assert tokens % block_size == 0
            assert block_size <= tokens <= stream
        for chunk in scene.chunks:
            assert chunk.cached % block_size == 0
            assert chunk.new >= 1
            assert len(scene.contexts) + chunk.new <= budget
    fitted = [scene for scene in design.scenes if not scene.is_held_out]
    held_out = [scene for scene in design.scenes if scene.is_held_out]
    assert sum(fitted[-1].contexts) == sum(design.streams)
    rows = {len(scene.contexts) for scene in design.scenes}
    assert rows >= {0, 1, max_sequences - 1}
    for kind in (lambda scene: not scene.contexts, lambda scene: scene.contexts):
        assert any(map(kind, held_out))
        assert any(map(kind, fitted))


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"max_sequences": 3}, "max_sequences is 3"),
        ({"max_context": 63}, "max_context is 63; four blocks, 64 tokens"),
        ({"max_tokens_per_step": 32}, "max_tokens_per_step is 32; it has to be above the 32 sequences"),
        ({"block_size": 0}, "block_size is 0"),
    ],
)
def test_what_cannot_be_designed_is_refused(limits, words):
    usual = {"max_sequences": 32, "max_context": 256, "max_tokens_per_step": 128}
    with pytest.raises(InvalidConfig, match=words):
        designed(**{**usual, **limits})
