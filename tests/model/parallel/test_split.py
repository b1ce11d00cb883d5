"""A model split over ranks gives the logits of the whole one, and what a rank has is a part: here each rank is a thread."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from threading import Lock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from paged.errors import BrokenCheckpoint
from paged.model.capacity import trial_memory, trial_step
from paged.model.loading import load_model
from paged.model.native.packed import NativeLinear
from paged.model.parallel.loading import Wanted, load_part
from paged.model.parallel.split import Part, Sizes
from paged.model.parallel.sums import Sums, store_at, store_of_first
from paged.model.runner import runner_for

from ...shown import assert_refused, shown_in  # noqa: TID252

CPU = torch.device("cpu")
LIMIT_S = 60.0
FEW = {"num_key_value_heads": 1}
MODELS = {
    **{name: (name, {}, 2) for name in ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text")},
    "llama, one KV head": ("llama", FEW, 2),
    "llama, four ranks": ("llama", {}, 4),
    "llama, tied": ("llama", {"tie_word_embeddings": True}, 2),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}, 2),
    "llama, uneven columns": ("llama", {"intermediate_size": 88, "vocab_size": 97}, 4),
}


def parts_of(folder, ranks, dtype="float32"):
    """What each rank has of the model."""
    store, reads = store_of_first(), Lock()

    def load(rank):
        # Building a module is no work for two threads.
        reads.acquire()

        def join(_digest):
            reads.release()
            return Sums(store_at(store.port, LIMIT_S), Part(rank, ranks), CPU, LIMIT_S)

        return load_part(Wanted(folder, Part(rank, ranks), dtype, CPU), join)

    return store, on_each(load, ranks)


def on_each(work, ranks):
    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(work, range(ranks)))


def said(model, ids, cuts=(), backend="auto"):
    """float32 [tokens, vocabulary]: logits after each token of a sequence, whose prompt is cut there."""
    pool, tables = trial_memory(model, 1, len(ids))
    pool.poison(torch.arange(pool.num_blocks))
    runner, found = runner_for(model, pool, backend=backend), []
    for first, last in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        step = trial_step(pool, np.arange(first, last), np.array([0, last - first]), np.array([last]), tables)
        found.append(runner.forward(step, ids[first:last], np.ones(last - first, np.bool_)))
    return torch.cat(found)


def ids_of(length):
    return np.random.default_rng(2).integers(3, 97, length).astype(np.int32)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_one_process_and_the_same_bits_however_a_prompt_is_cut(checkpoint, tmp_path, name):
    architecture, changes, ranks = MODELS[name]
    # Biases of random models are zeros.
    folder, ids = harmed(checkpoint(architecture, **changes), tmp_path, draw_biases), ids_of(40)
    whole = said(load_model(folder), ids)
    store, parts = parts_of(folder, ranks)
    split, *_ = on_each(lambda rank: said(parts[rank], ids), ranks)
    assert (split - whole).abs().max() <= 1e-4 * whole.abs().max()
    in_pieces, *_ = on_each(lambda rank: said(parts[rank], ids, cuts=(1, 14, 15, 39)), ranks)
    assert torch.equal(in_pieces, split)
    del store


@pytest.mark.parametrize(
    ("dtype", "backend", "bound"),
    [("bfloat16", "auto", 2**-5), ("float32", "reference", 1e-4)],
    ids=["in bfloat16", "by modules of transformers"],
)
def test_within_its_rounding_a_split_model_answers_as_the_whole_one_in_c(checkpoint, dtype, backend, bound):
    folder, ids = checkpoint("qwen3"), ids_of(40)
    whole = said(load_model(folder, dtype=dtype), ids)
    store, parts = parts_of(folder, 2, dtype)
    split, other = on_each(lambda rank: said(parts[rank], ids, backend=backend), 2)
    assert (split - whole).abs().max() <= bound * whole.abs().max()
    # By modules each rank has all logits, in C the first one.
    assert torch.equal(split, other) or backend == "auto"
    del store


def test_each_weight_but_norms_and_each_head_is_one_ranks_alone(checkpoint):
    folder = checkpoint("llama")
    store, parts = parts_of(folder, 2)
    whole = load_model(folder)
    assert sum(map(num_weights, parts)) == num_weights(whole)
    # Columns between gate and down are 32 and 48, words 48 and 49.
    assert min(map(num_weights, parts)) > 0.4 * num_weights(whole)
    assert [each.num_heads for each in parts] == [whole.num_heads // 2] * 2
    assert [each.num_kv_heads for each in parts] == [whole.num_kv_heads // 2] * 2
    assert [each.vocabulary_size for each in parts] == [97, 97]
    del store


def test_a_sum_is_taken_in_the_order_of_the_ranks_on_each_of_them():
    # In float32 the 1 is lost in the first of these orders, and not in the second.
    values = [1.0, 2.0**24, -(2.0**24)]
    parts = [torch.tensor([each]) for each in values]
    in_order, backwards = (parts[0] + parts[1]) + parts[2], (parts[2] + parts[1]) + parts[0]
    assert (in_order.item(), backwards.item()) == (0.0, 1.0)
    store = store_of_first()

    def add(rank):
        sums = Sums(store_at(store.port, LIMIT_S), Part(rank, 3), CPU, LIMIT_S)
        to = torch.zeros(1)
        sums.add_to(to, parts[rank].clone())
        return sums.added(parts[rank]).item(), to.item()

    assert on_each(add, 3) == [(0.0, 0.0)] * 3


@pytest.mark.parametrize("size", [1, 7, 96, 97])
@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_spans_are_next_to_each_other_and_cover_everything_once(size, ranks):
    spans = [Part(rank, ranks).span(size) for rank in range(ranks)]
    assert [spans[0][0], spans[-1][1]] == [0, size]
    assert all(before[1] == behind[0] for before, behind in pairwise(spans))
    lengths = [stop - first for first, stop in spans]
    assert max(lengths) - min(lengths) <= 1


def test_where_there_are_fewer_kv_heads_than_ranks_a_rank_has_the_one_that_its_heads_read():
    # 8 heads of 2 KV heads on 4 ranks: heads 0 to 3 read the first one.
    assert [Part(rank, 4).kv_span(2) for rank in range(4)] == [(0, 1), (0, 1), (1, 2), (1, 2)]


def test_degrees_divide_heads_and_divide_or_repeat_kv_heads():
    assert Sizes(heads=9, kv_heads=3, head_dim=64, intermediate=1536, vocabulary=49152).degrees() == [3, 9]
    assert Sizes(heads=32, kv_heads=8, head_dim=64, intermediate=1536, vocabulary=49152).degrees() == [2, 4, 8, 16, 32]


@pytest.mark.parametrize(("call", "shown"), shown_in("model/parallel/refused_weights.txt", ">>>"))
def test_weights_that_are_missing_or_of_another_shape_are_named(checkpoint, tmp_path, call, shown):
    def loaded(harm):
        folder = harmed(checkpoint("llama"), tmp_path, harm)
        load_part(Wanted(folder, Part(1, 2), "float32", CPU), lambda _digest: pytest.fail("they were read"))

    assert_refused(call, shown, {"loaded": loaded, "torch": torch, "doubled": doubled}, BrokenCheckpoint)


def test_the_digest_is_of_the_files_and_of_what_each_rank_reads_whole_and_the_same_on_each(checkpoint, tmp_path):
    class Seen(Exception):
        pass

    def digest_of(folder, rank):
        def note(digest):
            raise Seen(digest)

        with pytest.raises(Seen) as caught:
            load_part(Wanted(folder, Part(rank, 2), "float32", CPU), note)
        return str(caught.value)

    folder = checkpoint("llama")
    own = digest_of(folder, 0)
    assert own == digest_of(folder, 1)
    # Norms are compared even if the times of two files are the same.
    time = (folder / "model.safetensors").stat().st_mtime_ns
    other = harmed(folder, tmp_path / "norm", lambda weights: weights["model.norm.weight"].mul_(2))
    os.utime(other / "model.safetensors", ns=(time, time))
    assert own != digest_of(other, 1)
    # What is split differs in the time alone.
    other = harmed(folder, tmp_path / "q", lambda weights: weights["model.layers.0.self_attn.q_proj.weight"].mul_(2))
    os.utime(other / "model.safetensors", ns=(time, time + 1))
    assert own != digest_of(other, 1)


def num_weights(model):
    """Of linear layers and the embedding, without what packing adds."""
    linear = [each for each in model.module.modules() if isinstance(each, NativeLinear)]
    tables = [each.weight for each in model.module.modules() if isinstance(each, torch.nn.Embedding)]
    return sum(each.in_features * each.out_features for each in linear) + sum(each.numel() for each in tables)


def doubled(weights, name, along):
    weights[name] = torch.cat([weights[name]] * 2, along)


def draw_biases(weights):
    drawn = torch.Generator().manual_seed(3)
    for name, weight in weights.items():
        if name.endswith("bias"):
            weight.normal_(0, 1, generator=drawn)


def harmed(folder: Path, to: Path, harm):
    shutil.copytree(folder, to, dirs_exist_ok=True)
    weights = load_file(to / "model.safetensors")
    harm(weights)
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    return to
