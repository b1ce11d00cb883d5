"""`paged capacity`: the figures that are known from elsewhere, what fits, and what wrong input gets."""

import io
import json
import re

import pytest
from rich.console import Console

from paged import InvalidConfig
from paged.hardware import Roofline, StepWork, capacity_of, device_named, model_named

EXAMPLE = ("capacity", "llama-2-70b", "--dtype", "bf16", "--batch", 16, "--length", 1024)


def found(model, device="a100-80g", *, batch=16, length=1024, **options):
    place = Roofline(model=model_named(model), device=device_named(device), **options)
    return place, capacity_of(place, batch=batch, length=length)


def test_llama_2_70b_takes_138_gb_and_a_token_an_eighth_of_what_all_heads_would_keep(paged):
    status, out, err = paged(*EXAMPLE, "--json")
    figures = json.loads(out)
    assert (status, err) == (0, "")
    assert 138e9 * 0.999 <= figures["weight_bytes"] <= 140e9
    assert figures["kv_bytes_per_token_of_all_heads"] == 2 * 8192 * 80 * 2
    assert figures["kv_bytes_of_all_heads"] == pytest.approx(42.9e9, rel=0.002)
    assert figures["kv_bytes"] * 8 == figures["kv_bytes_of_all_heads"]
    assert (figures["fits"], figures["num_blocks"], figures["fewest_devices"]) == (False, 0, 2)


def test_without_a_terminal_each_figure_is_a_line_and_says_what_it_is_of(paged):
    status, out, err = paged(*EXAMPLE)
    assert (status, err) == (0, "")
    lines = dict(line.split(": ", 1) for line in out.splitlines())
    assert lines["weights"].startswith("138 GB")
    assert lines["KV of a token"] == "328 kB with its 8 KV heads; 2.62 MB if every head had its own K and V"
    assert lines["KV of 16 × 1,024"] == "5.37 GB with its 8 KV heads; 42.9 GB if every head had its own K and V"
    assert "does not fit; 2 × a100-80g would do" in lines["each device"]


def test_the_page_shows_what_the_command_prints(paged, repository):
    page = (repository / "docs" / "hardware.md").read_text()
    command, shown = re.search(r"^```\n\$ paged (.*?)\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL).groups()
    assert paged(*command.split()) == (0, shown, "")


def test_the_page_s_own_model_is_one(paged, repository, tmp_path):
    page = (repository / "docs" / "hardware.md").read_text()
    path = tmp_path / "mine.json"
    path.write_text(re.search(r"^```json\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL).group(1))
    status, out, err = paged("capacity", path, "--device", "h100", "--json")
    assert (status, err, json.loads(out)["model"]) == (0, "", "mine")


def test_in_a_terminal_of_80_columns_nothing_is_cut(paged, monkeypatch):
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, color_system=None, width=80)
    monkeypatch.setattr("paged.cli.show.console", lambda: terminal)
    assert paged(*EXAMPLE) == (0, "", "")
    drawn = screen.getvalue()
    assert "…" not in drawn
    assert max(map(len, drawn.splitlines())) <= 80
    assert "42.9 GB" in " ".join(drawn.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["llama2-70b"], "Did you mean llama-2-70b?"),
        (["llama-2-7b", "--device", "a100"], "Did you mean a100-40g?"),
        (["llama-2-7b", "--dtype", "bf17"], 'a100-80g has no rate for dtype "bf17"'),
        (["llama-2-7b", "--length", 4097], "llama-2-7b takes at most 4,096 tokens"),
        (["llama-2-7b", "--length", 0], "--length"),
        (["llama-2-7b", "--batch", -1], "--batch"),
        (["llama-2-7b", "--memory-share", "nan"], "memory_share is nan"),
        (["llama-2-7b", "--device", "cpu", "--tensor-parallel", 2], "cpu has no interconnect"),
        (["nowhere.json"], "nowhere.json: No such file"),
        ([], "MODEL"),
    ],
)
def test_wrong_input_gets_one_line_and_status_2(paged, arguments, words):
    status, out, err = paged("capacity", *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("paged: ")
    assert err.count("\n") == 1
    assert words in err


def test_a_torn_file_gets_one_line_with_its_name_and_field(paged, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text('{"name": "mine", "hidden": "wide"}')
    status, out, err = paged("capacity", path)
    assert (status, out) == (2, "")
    assert f"{path}, field hidden: " in err


@pytest.mark.parametrize(
    ("model", "device", "options"),
    [
        ("llama-3-8b", "a100-80g", {}),
        ("llama-2-70b", "h100", {"tensor_parallel": 4}),
        ("deepseek-v2", "h200", {"tensor_parallel": 8}),
        ("smollm-135m", "cpu", {"dtype": "fp32"}),
    ],
)
def test_so_many_sequences_fit_and_one_more_does_not(model, device, options):
    place, figures = found(model, device, **options)
    assert figures.fits
    # More rows take more logits, so room is asked for with as many.
    most = found(model, device, batch=figures.max_sequences, **options)[1].max_sequences
    assert found(model, device, batch=most, **options)[1].fits
    assert not found(model, device, batch=figures.max_sequences + 1, **options)[1].fits
    assert figures.num_blocks == place.num_blocks(16, max_sequences=16)


def test_the_fewest_devices_do_and_half_of_them_do_not():
    fewest = found("llama-3-70b", "a100-40g", batch=64)[1].fewest_devices
    assert found("llama-3-70b", "a100-40g", batch=64, tensor_parallel=fewest)[1].fits
    assert not found("llama-3-70b", "a100-40g", batch=64, tensor_parallel=fewest // 2)[1].fits


def test_a_device_that_works_alone_has_no_fewest_number():
    assert found("deepseek-v2", "cpu", batch=4096, length=2048)[1].fewest_devices is None


def test_hundreds_of_lpus_hold_a_70b_model_with_contexts_split():
    options = {"dtype": "fp16", "split_context": True}
    place = Roofline(model=model_named("llama-2-70b"), device=device_named("groq-lpu"), tensor_parallel=1024, **options)
    assert capacity_of(place, batch=4, length=1024, max_tokens_per_step=256).fits
    assert capacity_of(place, batch=4, length=1024, max_tokens_per_step=256).fewest_devices == 1024


@pytest.mark.parametrize(
    ("model", "device", "options"),
    [
        ("llama-2-70b", "a100-80g", {}),
        ("opt-13b", "h100", {}),
        ("llama-2-70b", "groq-lpu", {"dtype": "fp16", "tensor_parallel": 1024}),
    ],
)
def test_decode_turns_compute_bound_at_the_number_that_is_named(model, device, options):
    place, figures = found(model, device, **options)
    assert figures.prefill.bound == "compute"

    def is_compute_bound(rows):
        work = StepWork(computed_tokens=rows, sampled_rows=rows, context_tokens=rows * 1024, attended_pairs=rows * 1024)
        return place.flops(work) / place.bytes_read(work) >= figures.ridge

    rows = figures.decode.compute_bound_from
    if rows is None:
        assert not is_compute_bound(1 << 20)
    else:
        assert is_compute_bound(rows)
        assert not is_compute_bound(rows - 1)


def test_k_and_v_of_every_head_keep_decode_memory_bound_however_many_there_are():
    # 13B keeps 819,200 bytes a token: at 1,024 tokens a sequence does 31 operations for each byte that is its own.
    _, figures = found("llama-2-13b")
    assert figures.decode.compute_bound_from is None
    assert figures.decode.bound == "memory"
    assert figures.decode.reachable_flops == pytest.approx(figures.decode.flops_per_byte * 2.039e12)


def test_the_shortest_compute_bound_prompt_is_about_the_knee():
    _, figures = found("llama-2-70b")
    assert figures.knee_tokens < figures.prefill.compute_bound_from < 1.1 * figures.knee_tokens


@pytest.mark.parametrize("name", ["batch", "block_size", "max_tokens_per_step"])
def test_a_number_below_one_is_refused_with_its_name(name):
    place = Roofline(model=model_named("llama-2-7b"), device=device_named("h100"))
    with pytest.raises(InvalidConfig, match=f"{name} is 0"):
        capacity_of(place, **{"batch": 1, "length": 8, name: 0})
