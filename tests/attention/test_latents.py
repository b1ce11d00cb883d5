"""Memory for the K and V that latents expand to."""

from weakref import WeakSet

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from paged.attention import EntryPlace, KVPlace, Latents, LayeredPool, LayerOptions, StepTokens, get_backend, latents  # noqa: E402


def test_memory_that_is_too_small_is_freed_before_larger_memory_is_made(monkeypatch):
    alive, before = WeakSet(), []

    class Counted(LayeredPool):
        def __init__(self, *places, **sizes):
            before.append(len(alive))
            super().__init__(*places, **sizes)
            alive.add(self)

    monkeypatch.setattr(latents, "LayeredPool", Counted)
    latent = EntryPlace(0, 0, 1, 4)
    pool = LayeredPool({0: KVPlace(0, latent, latent)}, num_blocks=32, page_bytes=16 * 4 * 4, block_size=16)
    room = {}
    for length in (10, 400):
        last, table = np.array([length - 1]), np.arange(32, dtype=np.int32)[None]
        step = StepTokens(last, last, np.array([0, 1]), np.array([length]), table, 16)
        whole = Latents(step, pool, get_backend("torch_gather"), room)
        whole.attend(torch.zeros(1, 1, 4), pool.layer(0), LayerOptions(1.0), lambda keys, values: (keys, values))
    assert before == [0, 0]
