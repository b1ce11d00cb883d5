"""`paged bench attention`: what is timed is what is said, figures follow from one another, and what wrong input gets."""

import msgspec
import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from paged.attention import LayerOptions, get_backend
from paged.cli import bench_attention
from paged.study.bench import Measured
from paged.study.bench.attention import AttentionBench, AttentionTimes, HeadShape, Load, chosen_backends

TINY = ["--shapes", "4/2/16", "--block-sizes", 4, "--sequences", 3, "--context", 10, "--prompt", 3, "--rounds", 3]
SHAPE = HeadShape(4, 2, 16)
LOAD = Load(dtype="float32", sequences=3, context=10, prompt=3)


def test_figures_follow_from_times_and_come_back_from_json(paged):
    status, out, err = paged("bench", "attention", *TINY, "--backends", "torch_gather,reference", "--json")
    results = msgspec.json.decode(out, type=list[AttentionTimes])
    assert (status, err) == (0, "")
    assert [result.backend for result in results] == ["torch_gather", "reference"]
    for result in results:
        assert (result.shape, result.block_size, result.load) == (SHAPE, 4, LOAD)
        for ms in (result.decode_ms, result.prefill_ms, result.mixed_ms):
            assert 0 < ms.least <= ms.median <= ms.most
        # 3 sequences of 10 tokens, K and V, 2 heads of 16 floats.
        assert result.decode_bytes_per_s * result.decode_ms.median / 1e3 == pytest.approx(3 * 10 * 2 * 2 * 16 * 4)
        assert result.share_of_copy == pytest.approx(result.decode_bytes_per_s / result.copy_bytes_per_s)
        # Tokens 8, 9 and 10 of each of 3 sequences, 4 heads of 16: two products, an addition and a multiplication each.
        assert result.prefill_flops_per_s * result.prefill_ms.median / 1e3 == pytest.approx(3 * 27 * 4 * 16 * 4)


def test_backends_shapes_and_block_sizes_are_crossed_and_shown_step_by_step(paged):
    sizes = ["--sequences", 2, "--context", 4, "--rounds", 1, "--backends", "torch_gather,reference"]
    status, out, err = paged("bench", "attention", "--shapes", "2/1/8,4/4/8", "--block-sizes", "2,4", *sizes)
    assert (status, err) == (0, "")
    head, *lines = out.splitlines()
    assert head.split() == ["heads", "block", "step", "backend", "ms", "range", "rate"]
    found = [tuple(line.split()[:4]) for line in lines[:24]]
    assert len(set(found)) == 24
    assert found[:3] == [
        ("2/1/8", "2", "decode", "torch_gather"),
        ("2/1/8", "2", "decode", "reference"),
        ("2/1/8", "2", "prefill", "torch_gather"),
    ]
    assert lines[24] == "steps: float32, 2 sequences of 4 tokens, 4 of them new in prompts"


def test_steps_are_the_last_tokens_of_sequences_whose_blocks_lie_anywhere():
    bench = AttentionBench([], SHAPE, 4, LOAD, torch.float32)
    lengths = {name: np.diff(step.query_start_loc).tolist() for name, step in bench.steps.items()}
    assert lengths == {"decode": [1, 1, 1], "prefill": [3, 3, 3], "mixed": [1, 1, 3]}
    mixed = bench.steps["mixed"]
    assert mixed.positions.tolist() == [9, 9, 7, 8, 9]
    assert mixed.seq_lens.tolist() == [10, 10, 10]
    assert sorted(mixed.block_tables.ravel().tolist()) == list(range(9))
    assert mixed.slot_mapping.tolist() == [
        int(mixed.slots_of(i, 10)[p]) for i, p in zip((0, 1, 2, 2, 2), mixed.positions)
    ]
    assert not bench.pool.keys(0)[bench.pool.scratch_block].any()


def test_backends_compute_the_same_on_them():
    bench = AttentionBench([], SHAPE, 4, LOAD, torch.float32)
    options = LayerOptions(0.25)
    for step in bench.steps.values():
        queries = torch.randn(step.num_tokens, 4, 16)
        results = [
            backend.attend(queries, bench.pool, 1, backend.prepare(step, bench.pool), options)
            for backend in (get_backend("torch_gather"), get_backend("reference"))
        ]
        assert torch.allclose(*results, atol=1e-5)


@pytest.mark.parametrize("invariant", [True, False])
def test_unasked_all_are_chosen_but_the_reference_in_the_mode_that_is_wanted(invariant):
    chosen = chosen_backends(None, SHAPE, 4, torch.float32, invariant=invariant)
    assert {"torch_gather"} <= {backend.name for backend in chosen} <= {"native", "torch_gather"}
    assert all(backend.is_invariant for backend in chosen) or not invariant


def test_a_shape_that_one_cannot_do_is_left_to_the_others():
    (only,) = chosen_backends(None, HeadShape(2, 1, 512), 4, torch.float32, invariant=True)
    assert only.name == "torch_gather"


def test_an_interrupt_shows_what_had_ended(paged, monkeypatch):
    from paged.study.bench import attention

    timed, done = attention.attention_times, []

    def second_is_interrupted(*arguments, **options):
        if done:
            raise KeyboardInterrupt
        done.append(timed(*arguments, **options))
        return done[0]

    monkeypatch.setattr(attention, "attention_times", second_is_interrupted)
    status, out, err = paged("bench", "attention", *TINY, "--shapes", "4/2/16,2/1/8", "--json")
    assert status == 130
    assert msgspec.json.decode(out, type=list[AttentionTimes]) == done[0]
    assert err == "paged: interrupted; 1 of 2 measurements had ended\n"


def test_a_figure_is_written_with_its_range_where_that_shows():
    assert f"{Measured.of([2.0, 1.0, 4.0]):.1f}" == "2.0 (1.0 to 4.0)"
    assert f"{Measured.of([2.01, 2.02]):.1f}" == "2.0"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--dtype", "int8"], '--dtype is "int8"; it takes float32 or bfloat16'),
        (["--backends", "nativ"], "unknown attention backend 'nativ'"),
        (["--shapes", "9/4/64"], "9 query heads cannot share 4 heads of K and V evenly"),
        (["--shapes", "9/3"], 'such as 9/3/64, with commas between; got "9/3"'),
        (["--shapes", "9/3/0"], 'got "9/3/0"'),
        (["--shapes", "4/2/16,x"], 'got "x"'),
        (["--block-sizes", "16,0"], '--block-sizes takes a whole number of at least 1 between commas; got "0"'),
        (["--context", "8", "--prompt", "9"], "prompt is 9; of a context of 8 tokens at most all can be new"),
        (["--sequences", "0"], "--sequences"),
        (["--rounds", "0"], "--rounds"),
        (["--sequences", "100000", "--context", "100000"], "are free on cpu"),
        (["--backends", "native", "--shapes", "4/2/512"], 'backend "native" cannot do'),
    ],
    ids=" ".join,
)
def test_wrong_input_is_one_line_and_status_2(paged, arguments, words):
    status, out, err = paged("bench", "attention", *arguments)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1 and err.startswith("paged: ")
    assert words in err


def test_prompts_are_no_longer_than_a_context_unless_somebody_says_so(paged):
    status, out, _ = paged(
        "bench", "attention", *TINY[:6], "--context", 8, "--rounds", 1, "--backends", "torch_gather", "--json"
    )
    (result,) = msgspec.json.decode(out, type=list[AttentionTimes])
    assert (status, result.load.prompt) == (0, 8)
    assert bench_attention._MOST_NEW == 256
