"""Compressed entries: what our cache gives transformers' modules is what its own does, and entries of others stay as they are."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4CSACache

from paged.model.capacity import plan_of, trial_memory, trial_step
from paged.model.hook import under_way
from paged.model.runner import runner_for
from paged.model.states.within import Compressor

STRIDE, SIZE = 4, 3


class States:
    """Those of one row, read from one place and written to another, where nothing is before."""

    def __init__(self, compressor):
        self._compressor, self._read, self._write = compressor, {}, {}

    def read(self, unit, piece):
        its = self._compressor.pieces[piece]
        return self._read.get(piece, torch.full((1, *its.shape), torch.nan, dtype=its.dtype)).clone()

    def write(self, unit, piece, state):
        self._write[piece] = state.to(self._compressor.pieces[piece].dtype, copy=True)

    def pass_on(self):
        self._read, self._write = self._write, {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cuts", [[1] * 14, [4, 4, 6], [3, 5, 2, 4], [8, 1, 5], [14]], ids=str)
def test_a_compressor_gives_what_transformers_own_cache_gives_however_tokens_are_cut(cuts, dtype):
    rates = {"compressed_sparse_attention": STRIDE, "heavily_compressed_attention": 8}
    theirs = DeepseekV4CSACache(DeepseekV4Config(num_hidden_layers=2, compress_rates=rates))
    ours, offset = Compressor(0, "layers.0", 0, STRIDE, torch.float32), 0
    states, tokens = States(ours), torch.arange(2 * 14 * 2 * SIZE, dtype=dtype).view(2, 1, 14, 2 * SIZE)
    bias = torch.full((STRIDE, 2 * SIZE), 1 / 3)
    with under_way(SimpleNamespace(states=states)):
        for count in cuts:
            given = tokens[:, :, offset : offset + count]
            for name in ("compressor", "indexer"):
                kv, gate, _ = theirs.store_compression_weights(name, *given)
                found = ours.take(name, tuple(given), offset)
                assert torch.equal(found[0], kv)
                assert torch.equal(found[1], gate)
                if kv.shape[1]:
                    theirs.update_compressor_states(name, kv[:, ::STRIDE])
                    whole = [kv.view(1, -1, STRIDE, 2 * SIZE), gate.view(1, -1, STRIDE, 2 * SIZE) + bias]
                    before = theirs.update_overlap_state(name, *whole, SIZE)
                    last = ours.last(name, tuple(each[:, -1, :, :SIZE] for each in whole), offset)
                    assert [each is None for each in last] == [each is None for each in before]
                    assert all(
                        torch.equal(one, other) for one, other in zip(last, before, strict=True) if one is not None
                    )
            states.pass_on()
            offset += count


def test_entries_that_are_there_already_are_not_written(loaded):
    model = loaded("deepseek_v4")
    pool, tables = trial_memory(model, 1, 12)
    pool.pages.on_device.zero_()
    step = trial_step(pool, np.arange(12), np.array([0, 12]), np.array([12]), tables)
    there = np.array([[4 if group.kind == "full" else 0] for group in plan_of(model).groups])
    runner_for(model, pool).forward(
        replace(step, written_from=there), np.arange(3, 15, dtype=np.int32), np.ones(12, np.bool_)
    )
    for layer, stride in ((1, 4), (2, 2)):
        group, entries = pool.layer(layer).compressed
        pages = step.tables[group][0, :, entries["compressor"].part]
        found = entries["compressor"].blocks[torch.from_numpy(pages).long()].flatten(0, 1)
        is_written = (found != 0).flatten(1).all(1).tolist()[: 12 // stride]
        assert is_written == [number >= 4 // stride for number in range(12 // stride)]
