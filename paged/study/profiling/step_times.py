"""The times of the designed batches' steps on the real engine, round after round.

Every round runs the same steps. A step's time is the median over the rounds, and their range is its spread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from paged import Batch, SamplingParams
from paged.errors import InvalidConfig, UnevenRounds
from paged.study.hardware import Profile, ProfiledModel, StepWork
from paged.study.profiling.design import DECODES, Design, Scene
from paged.study.simulator.stretch import work_of

if TYPE_CHECKING:
    from paged.engine.engine import Engine
    from paged.model.loading import LoadedModel

KINDS = ("decode", "prefill", "mixed")
_HOST_BLOCKS = 64


class TimedStep(msgspec.Struct, frozen=True):
    """A step of the design.

    seconds  of each round
    kind     "decode" (rows with one token), "prefill" (rows with several), "mixed"
    """

    work: StepWork
    kind: str
    is_held_out: bool
    seconds: list[float]

    @property
    def median(self) -> float:
        """The median over the rounds."""
        return float(np.median(self.seconds))

    @property
    def spread(self) -> float:
        """The slowest round less the fastest, as a share of the median."""
        return (max(self.seconds) - min(self.seconds)) / self.median


def engine_for(
    model: LoadedModel,
    design: Design,
    *,
    backend: str = "auto",
    batch_invariant: bool = True,
    kv_cache_dtype: str = "auto",
) -> Engine:
    """Make an engine on which a design can be timed. Raises as Engine does."""
    from paged.engine.engine import Engine

    return Engine(
        model,
        num_blocks=design.num_blocks,
        # So that copies can be timed.
        host_blocks=_HOST_BLOCKS,
        block_size=design.block_size,
        # It takes decodes, then chunks, and admits at once what fits: so the design alone decides what a step has.
        policy="fastgen",
        max_tokens_per_step=design.max_tokens_per_step,
        max_sequences=design.max_sequences,
        backend=backend,
        batch_invariant=batch_invariant,
        kv_cache_dtype=kv_cache_dtype,
    )


class StepTimes:
    """The timed steps of a design on a new engine, which has at least what the design needs.

    Raises InvalidConfig for an engine that has less, or that has had requests.
    """

    def __init__(self, engine: Engine, design: Design, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.engine = engine
        self.design = design
        self.steps: list[TimedStep] = []
        self.num_rounds = 0
        self._clock = clock
        self._check_engine()
        self.tiling = engine.runner.tiling
        self._seconds_per_moved_token = self._time_of_moves()
        self._batches: list[Batch] = []
        engine.on_batch = self._batches.append
        self._place = 0
        self._num_requests = 0

    def _check_engine(self) -> None:
        engine, design = self.engine, self.design
        limits = engine.scheduler.limits
        if engine.scheduler.counts()["submitted"]:
            raise InvalidConfig("the engine has had requests; a profile begins with a new one")
        wanted = {
            "num_blocks": (engine.manager.num_blocks, design.num_blocks),
            "max_tokens_per_step": (limits.max_tokens_per_step, design.max_tokens_per_step),
            "max_sequences": (limits.max_sequences, design.max_sequences),
        }
        for name, (given, least) in wanted.items():
            if given < least:
                raise InvalidConfig(f"{name} of the engine is {given:,}; the design wants {least:,}")
        if engine.manager.block_size != design.block_size or not engine.manager.prefix_caching:
            raise InvalidConfig(
                f"the design is for an engine with prefix caching and blocks of {design.block_size} tokens"
            )
        if limits.max_model_len is not None and limits.max_model_len < design.longest:
            raise InvalidConfig(
                f"the design has sequences of {design.longest:,} tokens; the model takes {limits.max_model_len:,}. "
                f"Lower max_context or max_tokens_per_step"
            )

    def _time_of_moves(self) -> float:
        """Return the seconds to copy a token's K and V from the host; 0 without host blocks."""
        manager = self.engine.manager
        if not manager.num_host_blocks:
            return 0.0
        from paged.model.costs import measured_costs

        return measured_costs(self.engine.runner, self._clock).seconds_per_swapped_block / manager.block_size

    def warm_up(self) -> None:
        """Run a round that is not counted: the first one pays for what is made once."""
        self.round()
        self.num_rounds = 0
        for step in self.steps:
            step.seconds.clear()

    def round(self) -> None:
        """Time every step once more. Raises UnevenRounds."""
        design, engine = self.design, self.engine
        vocabulary = engine.model.vocabulary_size
        # Every round has the same tokens, so that blocks that are equal by chance are equal in all of them.
        random = np.random.default_rng(0)
        self._place = 0
        engine.manager.reset_cache()
        streams = [random.integers(0, vocabulary, length).tolist() for length in design.streams]
        for stream in streams:
            self._add(stream, 1, writes_cache=True)
        while engine.has_unfinished:
            self._step(is_held_out=False)
        for scene in design.scenes:
            self._run(scene, streams, random)
        self.num_rounds += 1

    def _run(self, scene: Scene, streams: list[list[int]], random: np.random.Generator) -> None:
        engine = self.engine
        vocabulary = engine.model.vocabulary_size
        last = random.integers(0, vocabulary, len(scene.contexts)).tolist()
        rows = [
            self._add([*streams[row][:context], last[row]], self.design.longest_output + 1, writes_cache=False)
            for row, context in enumerate(scene.contexts)
        ]
        for _ in range(1 + DECODES if rows else 0):
            self._step(is_held_out=scene.is_held_out)
        for chunk in scene.chunks:
            new = random.integers(0, vocabulary, chunk.new).tolist()
            self._add([*streams[0][: chunk.cached], *new], 1, writes_cache=False)
            self._step(is_held_out=scene.is_held_out)
        for request_id in rows:
            engine.abort(request_id)
        if engine.has_unfinished:
            raise UnevenRounds("a newcomer of the design was not done in one step")

    def _add(self, prompt: list[int], max_tokens: int, *, writes_cache: bool) -> str:
        self._num_requests += 1
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        return self.engine.add_request(prompt, params, id=str(self._num_requests), writes_cache=writes_cache)

    def _step(self, *, is_held_out: bool) -> None:
        self._batches.clear()
        began = self._clock()
        self.engine.step()
        seconds = self._clock() - began
        if not self._batches:
            raise UnevenRounds(f"step {self._place + 1} of the design did not run, or failed")
        batch = self._batches[0]
        work = work_of(batch, self.design.block_size, self.tiling)
        if self._place == len(self.steps):
            if self.num_rounds:
                raise UnevenRounds(f"a round has more steps than the {len(self.steps)} of the first one")
            self.steps.append(TimedStep(work, kind_of(batch), is_held_out, []))
        step = self.steps[self._place]
        if msgspec.structs.astuple(work) != msgspec.structs.astuple(step.work):
            raise UnevenRounds(f"step {self._place + 1} of a round is not the first round's: {work}, not {step.work}")
        step.seconds.append(seconds)
        self._place += 1

    def profile(self, about: str = "", *, name: str | None = None) -> Profile:
        """Fit a profile to the medians of the steps that are not held out. `name` is the model's; None: that of its folder. Raises InvalidConfig
        before the first round."""
        if not self.num_rounds:
            raise InvalidConfig("no steps were timed; a profile needs a round at least")
        work = StepWork.of_steps([step.work for step in self.steps])
        timed = np.array([step.median for step in self.steps])
        held_out = np.array([step.is_held_out for step in self.steps])
        fitted = Profile.fit(work, timed, tiling=self.tiling, held_out=held_out, about=about)
        kinds = np.array([step.kind for step in self.steps])
        by_kind = {
            kind: fitted.error(work.picked(chosen), timed[chosen])
            for kind in KINDS
            if (chosen := held_out & (kinds == kind)).any()
        }
        model = self.engine.model
        of = ProfiledModel(
            name=name or model.path.name,
            layers=model.num_layers,
            heads=model.num_heads,
            kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            vocab=model.vocabulary_size,
        )
        return msgspec.structs.replace(
            fitted, seconds_per_moved_token=self._seconds_per_moved_token, by_kind=by_kind, model=of
        )


def kind_of(batch: Batch) -> str:
    """Return "decode", "prefill" or "mixed"; a row with one token decodes, or costs as much."""
    is_single = batch.num_tokens == 1
    if is_single.all():
        return "decode"
    return "mixed" if is_single.any() else "prefill"
