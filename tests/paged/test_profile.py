"""A profile finds the prices that steps were made of, says how far it is off elsewhere, and survives a file; its steps are designed."""

import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st

from paged.study.hardware import Profile, ProfiledModel, StepWork, Tiling, model_named
from paged.study.hardware.profile import non_negative_least_squares
from paged.study.profiling import designed
from paged.study.report.facts import facts, sentence
from paged.study.simulator import Device, Load, Scenario, run

from .files_of_others import PRICES, TILED  # noqa: TID252

NAMES = PRICES.__struct_fields__[:9]


def timed_steps(num_steps=200, profile=PRICES, noise=0.0, seed=0):
    """Steps of decodes and chunks, as five columns, and how long each takes."""
    random = np.random.default_rng(seed)
    rows = random.integers(1, 64, num_steps)
    chunk = random.integers(0, 2, num_steps) * random.integers(1, 512, num_steps)
    context = rows * random.integers(10, 2000, num_steps)
    work = StepWork(
        computed_tokens=rows + chunk,
        sampled_rows=rows,
        context_tokens=context + chunk,
        attended_pairs=context + chunk * (chunk + 1) / 2,
        moved_tokens=random.integers(0, 2, num_steps) * 16 * random.integers(0, 20, num_steps),
        tiles=-(-(rows + chunk) // 32),
        sampling_tiles=-(-rows // 32),
        tile_context=64 * random.integers(1, 30, num_steps),
    )
    return work, profile.seconds(work) * (1 + noise * random.standard_normal(num_steps))


def test_a_step_by_itself_takes_to_the_last_bit_what_it_takes_among_others():
    work, seconds = timed_steps(profile=TILED)
    columns = {name: np.broadcast_to(getattr(work, name), 200) for name in work.__struct_fields__}
    for i in range(0, 200, 7):
        alone = StepWork(**{name: column[i].item() for name, column in columns.items()})
        assert TILED.seconds(alone) == seconds[i]


@pytest.mark.parametrize("truth", [PRICES, TILED], ids=["packed", "in tiles"])
def test_the_prices_that_steps_were_made_of_are_found_and_come_back_from_a_file(truth, tmp_path):
    found = Profile.fit(*timed_steps(profile=truth), tiling=truth.tiling, about="made up")
    assert [getattr(found, name) for name in NAMES] == pytest.approx([getattr(truth, name) for name in NAMES], rel=1e-6)
    assert (found.tiling, found.steps, found.held_out.steps, found.about) == (truth.tiling, 150, 50, "made up")
    assert found.held_out.p90 < 1e-6
    found.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == found


def test_the_held_out_error_is_that_of_steps_it_was_not_fitted_to():
    work, seconds = timed_steps(noise=0.05)
    found = Profile.fit(work, seconds)
    # Of normal noise of 5 % half lies within 3.4 %, nine tenths within 8.2 %.
    assert 0.02 < found.held_out.median < 0.05
    assert 0.06 < found.held_out.p90 < 0.11
    assert abs(found.held_out.total) < 0.03
    # What is held out has no part in the fit.
    spoilt = seconds.copy()
    spoilt[3::4] *= 2
    other = Profile.fit(work, spoilt)
    assert [getattr(other, name) for name in NAMES] == [getattr(found, name) for name in NAMES]
    assert other.held_out.total == pytest.approx(-0.5, abs=0.02)


def test_a_fit_may_hold_out_what_its_caller_says():
    work, seconds = timed_steps()
    held_out = np.arange(200) >= 150
    found = Profile.fit(work, np.where(held_out, 3 * seconds, seconds), held_out=held_out)
    assert (found.steps, found.held_out.steps) == (150, 50)
    assert found.held_out.median == pytest.approx(2 / 3)
    error = found.error(work, seconds * 1.25)
    assert (error.median, error.p90, error.total) == pytest.approx((0.2, 0.2, -0.2), rel=1e-4)


def test_one_step_that_waited_for_another_program_does_little_harm():
    work, seconds = timed_steps()
    seconds[0] *= 100
    assert Profile.fit(work, seconds).held_out.median < 0.02


@given(seed=st.integers(0, 10_000), columns=st.integers(1, 4))
def test_the_fit_is_the_best_of_all_that_have_no_negative_price(seed, columns):
    random = np.random.default_rng(seed)
    matrix, target = random.standard_normal((9, columns)), random.standard_normal(9)
    best = float(target @ target)
    for chosen in itertools.chain.from_iterable(
        itertools.combinations(range(columns), size) for size in range(1, columns + 1)
    ):
        part = matrix[:, chosen]
        prices = np.linalg.lstsq(part, target, rcond=None)[0]
        if prices.min() >= 0:
            best = min(best, float(((part @ prices - target) ** 2).sum()))
    found = non_negative_least_squares(matrix, target)
    assert found.min() >= 0
    assert float(((matrix @ found - target) ** 2).sum()) == pytest.approx(best, rel=1e-6, abs=1e-9)


def test_an_amount_that_no_step_has_gets_price_0():
    work, _ = timed_steps()
    still = msgspec.structs.replace(work, moved_tokens=np.zeros(200))
    found = Profile.fit(still, PRICES.seconds(still))
    assert (found.seconds_per_moved_token, found.costs(16).seconds_per_swapped_block) == (0, 0)
    assert found.held_out.p90 < 1e-6


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
    for scenes in (held_out, fitted):
        assert {bool(scene.contexts) for scene in scenes} == {False, True}


PROFILE = Profile(
    seconds_per_step=1e-3, seconds_per_computed_token=1e-5, seconds_per_sampled_row=0, seconds_per_context_token=0,
    seconds_per_attended_pair=0, seconds_per_moved_token=1e-6, seconds_per_tile=5e-3,
    tiling=Tiling(places=32, piece=64),
    model=ProfiledModel(name="mine", layers=30, heads=9, kv_heads=3, head_dim=64, vocab=49152), about="two cores",
)  # fmt: skip
SMALL = ["--max-sequences", 4, "--max-context", 64, "--max-tokens-per-step", 8, "--rounds", 1]
TINY = ["--limit", 12, "--length-scale", 0.02, "--blocks", 64, "--block-size", 8]


@pytest.fixture
def saved(tmp_path):
    """Save a profile with changes, and return its path as text."""

    def save(**changes):
        path = tmp_path / "profile.json"
        msgspec.structs.replace(PROFILE, **changes).save(path)
        return str(path)

    return save


def test_a_profile_is_written_told_and_simulated_by(printed, document, tmp_path):
    path = tmp_path / "here.json"
    head, *lines = printed("profile", *SMALL, "--backend", "torch_gather", "--out", path).splitlines()
    assert head.split()[:3] == ["steps", "fitted", "held"]
    assert [line.split()[0] for line in lines[:4]] == ["decode", "prefill", "mixed", "all"]
    assert any(line.startswith("a ") and line.endswith(" µs") for line in lines)
    assert f"written to: {path}" in lines
    found = Profile.load(path)
    assert (found.tiling, found.model.name) == (Tiling(places=32, piece=64), "embedded")
    assert found.held_out.steps == sum(error.steps for error in found.by_kind.values())
    assert "batch-invariant" in found.about
    assert found.seconds_per_moved_token > 0
    (result,) = document("simulate", "azure", *TINY, "--profile", path, "--host-blocks", 8)
    assert (result["profile"], result["finished"]) == (str(path), 12)


def test_json_has_every_timed_step_and_a_terminal_a_table(printed, document, tmp_path, terminal):
    asked = ("profile", *SMALL, "--fast", "--out", tmp_path / "fast.json")
    found = document(*asked, "--rounds", 2)
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
    said = f"mine ({scenario.device.profile}), by a profile of 0 timed steps: two cores"
    assert said in dict(facts([outcome])).values()
    assert "fitted to steps that were timed" in sentence([outcome])
    # No step has more than 32 tokens, and each takes its own price and a tile's.
    assert result.busy_s == pytest.approx(result.steps * 6e-3)


def test_a_profile_with_a_model_takes_memory_from_the_device(saved):
    device = Device(profile=saved(), model="smollm-135m", device="a100-40g")
    assert Scenario(load=Load(trace="azure"), device=device).num_blocks() > 10_000
    assert isinstance(device.cost_model(), Profile)
    assert device.roofline().model == model_named("smollm-135m")
