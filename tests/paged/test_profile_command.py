"""`paged profile`: the file that it writes, what it prints, what simulates by it, and what wrong input gets."""

import io
import json

import msgspec
import pytest
from rich.console import Console

from paged import BlockManager
from paged.errors import BadHardwareFile, InvalidConfig
from paged.study.hardware import Profile, ProfiledModel, Tiling, model_named
from paged.study.report.facts import facts, sentence
from paged.study.simulator import Device, Load, Scenario, run

PROFILE = Profile(
    seconds_per_step=1e-3,
    seconds_per_computed_token=1e-5,
    seconds_per_sampled_row=0,
    seconds_per_context_token=0,
    seconds_per_attended_pair=0,
    seconds_per_moved_token=1e-6,
    seconds_per_tile=5e-3,
    tiling=Tiling(places=32, piece=64),
    model=ProfiledModel(name="mine", layers=30, heads=9, kv_heads=3, head_dim=64, vocab=49152),
    about="two cores",
)
SMALL = ["--max-sequences", 4, "--max-context", 64, "--max-tokens-per-step", 8, "--rounds", 2]
TINY = ["--limit", 12, "--length-scale", 0.02, "--blocks", 64, "--block-size", 8]


@pytest.fixture
def saved(tmp_path):
    """Save a profile with changes, and return its path as text."""

    def save(**changes):
        path = tmp_path / "profile.json"
        msgspec.structs.replace(PROFILE, **changes).save(path)
        return str(path)

    return save


@pytest.mark.parametrize(("backend", "tiling"), [("native", None), ("torch_gather", Tiling(places=32, piece=64))])
def test_a_profile_is_written_told_and_simulated_by(paged, tmp_path, backend, tiling):
    pytest.importorskip("torch")
    path = tmp_path / "here.json"
    status, out, err = paged("profile", *SMALL, "--backend", backend, "--out", path)
    assert (status, err) == (0, "")
    head, *lines = out.splitlines()
    assert head.split()[:3] == ["steps", "fitted", "held"]
    assert [line.split()[0] for line in lines[:4]] == ["decode", "prefill", "mixed", "all"]
    assert any(line.startswith("a ") and line.endswith(" µs") for line in lines)
    assert f"written to: {path}" in lines
    found = Profile.load(path)
    assert (found.tiling, found.model.name) == (tiling, "embedded")
    assert found.held_out.steps == sum(error.steps for error in found.by_kind.values())
    assert "batch-invariant" in found.about
    assert found.seconds_per_moved_token > 0
    status, out, err = paged("simulate", "azure", *TINY, "--profile", path, "--host-blocks", 8, "--json")
    (result,) = json.loads(out)
    assert (status, err, result["profile"], result["finished"]) == (0, "", str(path), 12)


def test_json_has_every_timed_step(paged, tmp_path):
    pytest.importorskip("torch")
    status, out, err = paged("profile", *SMALL, "--fast", "--out", tmp_path / "fast.json", "--json")
    document = json.loads(out)
    assert (status, err, document["tiling"]) == (0, "", None)
    held_out = [step for step in document["by_step"] if step["is_held_out"]]
    assert len(held_out) == document["held_out"]["steps"]
    assert len(document["by_step"]) - len(held_out) == document["steps"]
    assert all(len(step["seconds"]) == document["rounds"] == 2 for step in document["by_step"])


def test_in_a_terminal_it_is_a_table(paged, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=110)
    monkeypatch.setattr("paged.cli.show.console", lambda: terminal)
    status, out, err = paged("profile", *SMALL, "--out", tmp_path / "shown.json")
    assert (status, out, err) == (0, "", "")
    drawn = screen.getvalue()
    for words in ("median error", "decode", "held out", "what a step takes", "taken on"):
        assert words in drawn


def test_a_simulation_by_a_profile_takes_what_its_prices_say(saved):
    load = Load(trace="azure", limit=5, prompts=0.02, outputs=0.02)
    scenario = Scenario(load=load, device=Device(profile=saved(seconds_per_computed_token=0)), blocks=64)
    outcome = run(scenario)
    result = outcome.result
    assert (
        f"mine ({scenario.device.profile}), by a profile of 0 timed steps: two cores" in dict(facts([outcome])).values()
    )
    assert "fitted to steps that were timed" in sentence([outcome])
    # No step has more than 32 tokens, and each takes its own price and a tile's.
    assert result.busy_s == pytest.approx(result.steps * 6e-3)


def test_a_profile_with_a_model_takes_memory_from_the_device(saved):
    scenario = Scenario(
        load=Load(trace="azure"), device=Device(profile=saved(), model="smollm-135m", device="a100-40g")
    )
    roofline = scenario.device.roofline()
    assert scenario.num_blocks() > 10_000
    assert isinstance(scenario.device.cost_model(), Profile)
    assert roofline.model == model_named("smollm-135m")


def test_a_profile_of_another_model_than_the_one_simulated_is_refused(saved):
    device = Device(profile=saved(), model="llama-2-13b", device="a100-80g")
    with pytest.raises(InvalidConfig, match="taken of mine, which is no llama-2-13b: layers 30, not 40"):
        device.cost_model()


def test_a_profile_is_not_split_over_devices(saved):
    device = Device(profile=saved(), model="smollm-135m", device="a100-80g", tensor_parallel=3)
    with pytest.raises(InvalidConfig, match="tensor_parallel is 3"):
        device.cost_model()


def test_swapping_is_not_free_where_nobody_timed_it(saved):
    scenario = Scenario(
        load=Load(trace="azure"), device=Device(profile=saved(seconds_per_moved_token=0)), blocks=8, host_blocks=8
    )
    with pytest.raises(InvalidConfig, match="swapping would be free; host_blocks is 8"):
        scenario.scheduler()
    assert isinstance(msgspec.structs.replace(scenario, host_blocks=0).scheduler().manager, BlockManager)


def test_a_profile_of_another_version_is_refused(tmp_path):
    path = tmp_path / "old.json"
    path.write_text(json.dumps({**msgspec.to_builtins(PROFILE), "format": 99}))
    with pytest.raises(BadHardwareFile, match="a profile of format 99; this paged reads 1"):
        Device(profile=str(path)).cost_model()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["profile", "--out", "/nowhere/at/all.json"], "/nowhere/at/all.json: cannot be written"),
        (["profile", "--model", "a", "--shape", "smollm-135m"], "--model and --shape"),
        (["profile", "--shape", "smolm-135m"], "Did you mean smollm-135m?"),
        (["profile", "--shape", "nowhere.json"], "nowhere.json"),
        (["profile", "--max-sequences", "3"], "max_sequences is 3"),
        (["profile", "--max-sequences", "64", "--max-tokens-per-step", "64"], "has to be above the 64 sequences"),
        (["profile", "--max-context", "10"], "max_context is 10"),
        (["profile", "--rounds", "0"], "--rounds"),
        (["simulate", "azure", "--profile", "nowhere.json"], "nowhere.json: No such file"),
        (["simulate", "azure", "--profile", "pyproject.toml"], "pyproject.toml: no JSON"),
    ],
)
def test_wrong_input_is_one_line_and_status_2(paged, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text("name = 1\n")
    status, out, err = paged(*arguments)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert words in err
    assert not (tmp_path / "profile.json").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "nowhere"], "nowhere: no such folder"),
        (["--max-context", "1000"], "the model takes 1,024. Lower max_context"),
        (["--shape", "deepseek-v2"], "random weights are made for Llama's shape alone"),
        (["--dtype", "int8"], "known ones are auto, float32"),
    ],
)
def test_what_is_wrong_with_the_model_is_said(paged, tmp_path, arguments, words):
    pytest.importorskip("torch")
    status, out, err = paged("profile", "--out", tmp_path / "none.json", *arguments)
    assert (status, out) == (2, "")
    assert words in err
    assert not (tmp_path / "none.json").exists()
