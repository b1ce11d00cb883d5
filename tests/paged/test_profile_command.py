"""`paged profile`: the file that it writes, what it prints, and what simulates by it."""

import msgspec
import pytest

from paged import BlockManager
from paged.errors import InvalidConfig
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
def test_a_profile_is_written_told_and_simulated_by(printed, document, tmp_path, backend, tiling):
    pytest.importorskip("torch")
    path = tmp_path / "here.json"
    head, *lines = printed("profile", *SMALL, "--backend", backend, "--out", path).splitlines()
    assert head.split()[:3] == ["steps", "fitted", "held"]
    assert [line.split()[0] for line in lines[:4]] == ["decode", "prefill", "mixed", "all"]
    assert any(line.startswith("a ") and line.endswith(" µs") for line in lines)
    assert f"written to: {path}" in lines
    found = Profile.load(path)
    assert (found.tiling, found.model.name) == (tiling, "embedded")
    assert found.held_out.steps == sum(error.steps for error in found.by_kind.values())
    assert "batch-invariant" in found.about
    assert found.seconds_per_moved_token > 0
    (result,) = document("simulate", "azure", *TINY, "--profile", path, "--host-blocks", 8)
    assert (result["profile"], result["finished"]) == (str(path), 12)


def test_json_has_every_timed_step_and_a_terminal_a_table(printed, document, tmp_path, terminal):
    pytest.importorskip("torch")
    asked = ("profile", *SMALL, "--fast", "--out", tmp_path / "fast.json")
    found = document(*asked)
    assert found["tiling"] is None
    held_out = [step for step in found["by_step"] if step["is_held_out"]]
    assert len(held_out) == found["held_out"]["steps"]
    assert len(found["by_step"]) - len(held_out) == found["steps"]
    assert all(len(step["seconds"]) == found["rounds"] == 2 for step in found["by_step"])
    screen = terminal(110)
    assert printed(*asked) == ""
    for words in ("median error", "decode", "held out", "what a step takes", "taken on"):
        assert words in screen.getvalue()


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


def test_a_profile_with_a_model_takes_memory_from_the_device_and_is_of_that_model_and_one_device(saved):
    device = Device(profile=saved(), model="smollm-135m", device="a100-40g")
    assert Scenario(load=Load(trace="azure"), device=device).num_blocks() > 10_000
    assert isinstance(device.cost_model(), Profile)
    assert device.roofline().model == model_named("smollm-135m")
    with pytest.raises(InvalidConfig, match="taken of mine, which is no llama-2-13b: layers 30, not 40"):
        msgspec.structs.replace(device, model="llama-2-13b").cost_model()
    with pytest.raises(InvalidConfig, match="tensor_parallel is 3"):
        msgspec.structs.replace(device, tensor_parallel=3).cost_model()


def test_swapping_is_not_free_where_nobody_timed_it(saved):
    untimed = Device(profile=saved(seconds_per_moved_token=0))
    scenario = Scenario(load=Load(trace="azure"), device=untimed, blocks=8, host_blocks=8)
    with pytest.raises(InvalidConfig, match="swapping would be free; host_blocks is 8"):
        scenario.scheduler()
    assert isinstance(msgspec.structs.replace(scenario, host_blocks=0).scheduler().manager, BlockManager)
