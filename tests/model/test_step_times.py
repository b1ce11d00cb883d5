"""Designed steps on an engine: each is timed in every round, and a clock that goes by prices gives these prices back."""

import pytest

from paged import Engine
from paged.errors import InvalidConfig, UnevenRounds
from paged.study.hardware import Profile
from paged.study.profiling import KINDS, StepTimes, designed, engine_for
from paged.study.simulator import work_of
from paged.testing.tiny_model import tiny_model

from ..shown import assert_refused, shown_in  # noqa: TID252

PRICES = {"step": 1e-3, "computed_token": 2e-5, "sampled_row": 1e-5, "context_token": 3e-6, "attended_pair": 0}
PRICES |= {"moved_token": 0, "tile": 5e-3, "sampling_tile": 1e-3, "tile_position": 3e-5}
TRUTH = Profile(**{f"seconds_per_{name}": price for name, price in PRICES.items()})
DESIGN = designed(max_sequences=8, max_context=64, max_tokens_per_step=80, block_size=4)


class PricedClock:
    """Stands still but for the batches that an engine runs, each of which takes what the truth says, times `scale`."""

    def __init__(self):
        self.now = 0.0
        self.scale = 1.0

    def __call__(self):
        return self.now

    def watch(self, engine, design):
        note = engine.on_batch

        def noting(batch):
            work = work_of(batch, design.block_size, engine.runner.tiling)
            self.now += self.scale * float(TRUTH.seconds(work))
            note(batch)

        engine.on_batch = noting


def timed(design=DESIGN, **options):
    clock = PricedClock()
    engine = engine_for(tiny_model(32), design, **{"backend": "torch_gather", **options})
    times = StepTimes(engine, design, clock=clock)
    clock.watch(engine, design)
    return times, clock


@pytest.fixture(scope="module")
def three_rounds():
    times, clock = timed()
    times.warm_up()
    for scale in (1.0, 0.5, 1.5):
        clock.scale = scale
        times.round()
    return times


def test_every_step_is_timed_once_a_round_and_its_median_is_fitted(three_rounds):
    assert three_rounds.num_rounds == 3
    for step in three_rounds.steps:
        assert len(step.seconds) == 3
        assert step.median == pytest.approx(float(TRUTH.seconds(step.work)))
        assert step.spread == pytest.approx(1.0)


def test_a_clock_that_goes_by_prices_gives_a_profile_with_those_prices(three_rounds):
    found = three_rounds.profile("made up")
    assert {name: getattr(found, f"seconds_per_{name}") for name in PRICES} == pytest.approx(PRICES, abs=1e-9)
    assert found.held_out.p90 < 1e-9
    assert (set(found.by_kind), found.steps + found.held_out.steps) == (set(KINDS), len(three_rounds.steps))
    assert (found.tiling.places, found.tiling.piece, found.about) == (32, 64, "made up")
    model = found.model
    assert (model.layers, model.heads, model.kv_heads, model.head_dim, model.vocab) == (2, 2, 1, 8, 32)


def test_the_steps_cover_what_the_design_says(three_rounds):
    steps = three_rounds.steps
    assert max(step.work.computed_tokens for step in steps) == DESIGN.max_tokens_per_step
    assert max(step.work.sampled_rows for step in steps) == DESIGN.max_sequences
    assert max(step.work.context_tokens for step in steps if step.kind == "decode") > sum(DESIGN.streams)
    assert {(step.kind, step.is_held_out) for step in steps} == {
        (kind, each) for kind in KINDS for each in (True, False)
    }


def test_contexts_come_from_the_cache_and_nobody_is_preempted(three_rounds):
    stats = three_rounds.engine.scheduler.stats()
    assert stats.preemptions_recompute == stats.preemptions_swap == 0
    # Of a scene's rows and newcomers nothing is computed but what is new.
    new = sum(len(scene.contexts) * 3 + sum(chunk.new for chunk in scene.chunks) for scene in DESIGN.scenes)
    decoded = sum(len(scene.contexts) * len(scene.chunks) for scene in DESIGN.scenes)
    assert stats.computed_tokens == 4 * (sum(DESIGN.streams) + new + decoded)


def test_packed_steps_have_no_tiles():
    times, _ = timed(batch_invariant=False)
    times.round()
    found = times.profile()
    assert found.tiling is None
    assert found.seconds_per_tile == found.seconds_per_sampling_tile == found.seconds_per_tile_position == 0
    assert found.seconds_per_computed_token == pytest.approx(2e-5)


@pytest.mark.parametrize(("sequences", "context", "budget", "block_size"), [(4, 4, 5, 1), (5, 128, 120, 7)])
def test_designs_of_any_size_run_in_rounds_that_are_alike(sequences, context, budget, block_size):
    design = designed(max_sequences=sequences, max_context=context, max_tokens_per_step=budget, block_size=block_size)
    times, _ = timed(design)
    times.round()
    times.round()
    assert times.profile().held_out.steps > 3


def test_without_whole_rounds_there_is_no_profile(monkeypatch):
    def out_of_memory(step):
        raise MemoryError

    times, _ = timed()
    with pytest.raises(InvalidConfig, match="no steps were timed"):
        times.profile()
    monkeypatch.setattr(times.engine.worker, "logits", out_of_memory)
    with pytest.raises(UnevenRounds, match="step 1 of the design did not run, or failed"):
        times.round()


def timed_on(*, is_used=False, **options):
    """The design's steps on an engine that has what it wants, but for these options."""
    usual = {"num_blocks": DESIGN.num_blocks, "block_size": 4, "max_sequences": 8, "max_tokens_per_step": 80}
    engine = Engine(tiny_model(32), **{**usual, **options})
    if is_used:
        engine.add_request([1, 2, 3])
    return StepTimes(engine, DESIGN)


@pytest.mark.parametrize(("call", "shown"), shown_in("model/refused_designs.txt", ">>>"))
def test_an_engine_that_has_less_than_the_design_wants_or_was_used_is_refused(call, shown):
    assert_refused(call, shown, globals())
