"""A trace on the real engine by the wall clock: the decisions of each step, its seconds, and the tokens.

    | step 1 | step 2 | idle ... | step 3 |      a step's seconds count from the end of the one before, or from an arrival after idle time

A simulation that plays these seconds has the same clock, to the last bit, and has to decide what the engine decided, entry by entry (`replay`).
Timed by a cost model, its figures have to be near the engine's (`predict`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from paged import Batch, BlockManager, Costs, Limits, Policy, SamplingParams, Scheduler
from paged.errors import InvalidConfig, NeverFits, RecordingFailed
from paged.study.hardware import CostModel, Spans, StepWork, Tiling
from paged.study.limits import at_least
from paged.study.simulator.arrivals import Arrivals
from paged.study.simulator.result import Latencies, Percentiles, Preemptions, SimulationResult
from paged.study.simulator.simulation import Simulation, Step
from paged.study.traces import Trace

if TYPE_CHECKING:
    from paged.engine.engine import Engine

MOST_IDLE_CALLS = 2
"""How often in a row an engine with unfinished requests may run nothing."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """The options of an engine's memory and scheduler."""

    num_blocks: int
    block_size: int
    host_blocks: int
    prefix_caching: bool
    host_caching: bool
    policy: Policy
    limits: Limits
    costs: Costs
    vocabulary: int

    @classmethod
    def of(cls, engine: Engine) -> Setup:
        """Return the setup of an engine."""
        scheduler, manager = engine.scheduler, engine.manager
        return cls(
            num_blocks=manager.num_blocks,
            block_size=manager.block_size,
            host_blocks=manager.num_host_blocks,
            prefix_caching=manager.prefix_caching,
            host_caching=manager.host_caching,
            policy=scheduler.policy,
            # The trace's tokens are in no vocabulary.
            limits=msgspec.structs.replace(scheduler.limits, vocabulary_size=None),
            costs=scheduler.costs,
            vocabulary=engine.model.vocabulary_size,
        )

    def scheduler(self) -> Scheduler:
        """Make the same scheduler on an empty pool."""
        manager = BlockManager(
            self.num_blocks,
            self.block_size,
            host_blocks=self.host_blocks,
            prefix_caching=self.prefix_caching,
            host_caching=self.host_caching,
        )
        return Scheduler(manager, policy=self.policy, costs=self.costs, **msgspec.structs.asdict(self.limits))

    def prompt_of(self, trace: Trace) -> Callable[[int], NDArray[np.int32]]:
        """Return the function from a request to its prompt in the model's vocabulary, which keeps what prompts share."""
        return lambda request: trace.prompt(request) % np.int32(self.vocabulary)


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded run of a trace. Percentiles as in a `SimulationResult`.

    clients     of a closed loop; None: the trace's arrivals
    decisions   an entry for each step, and `seconds`, its duration
    outputs     tokens of each request, by its number
    makespan_s  from the first arrival to the last token
    """

    setup: Setup
    clients: int | None
    decisions: tuple[Decision, ...]
    seconds: tuple[float, ...]
    outputs: tuple[tuple[int, ...], ...]
    rejected: int
    preemptions: Preemptions
    makespan_s: float
    ttft_s: Percentiles
    itl_s: Percentiles
    longest_gap_s: Percentiles
    e2e_s: Percentiles


def record(
    engine: Engine, trace: Trace, *, clients: int | None = None, clock: Callable[[], float] = time.perf_counter
) -> Recording:
    """Run a trace on a new engine, and record it.

    Each request gets as many tokens as the trace has for it, past any end of the model's. `clients`: of a closed loop, as in a `Simulation`; None:
    requests come at the trace's times, by the wall clock. `clock` returns seconds. Raises InvalidConfig for an engine that has had requests, a trace
    whose requests end before their declared maximum, or fewer than one client; and RecordingFailed.
    """
    if engine.scheduler.counts()["submitted"]:
        raise InvalidConfig("the engine has had requests; a recording begins with a new one")
    if clients is not None:
        at_least("clients", clients, 1)
    if (trace.max_tokens > trace.output_tokens).any():
        raise InvalidConfig(
            "the trace has requests that write less than they declare; an engine cannot be told where to stop"
        )
    run = _Run(engine, trace, clients, clock)
    run.to_the_end()
    return run.recording()


class _Run:
    """A recording under way. Its clock is the sum of the steps' seconds, as a simulation's is."""

    def __init__(self, engine: Engine, trace: Trace, clients: int | None, clock: Callable[[], float]) -> None:
        self._engine, self._trace, self._clients, self._clock = engine, trace, clients, clock
        self._setup = Setup.of(engine)
        self._prompt_of = self._setup.prompt_of(trace)
        self._latencies = Latencies(len(trace))
        self._decisions: list[Decision] = []
        self._seconds: list[float] = []
        self._outputs: list[list[int]] = [[] for _ in range(len(trace))]
        self._batches: list[Batch] = []
        self._arrivals = Arrivals(trace, clients)
        self._num_rejected = 0
        self._now_s = 0.0
        # The clock's time at `now_s`.
        self._mark = 0.0

    def to_the_end(self) -> None:
        """Run every step. Raises RecordingFailed."""
        engine, num_idle_calls = self._engine, 0
        before, engine.on_batch = engine.on_batch, self._batches.append
        self._mark = self._clock()
        try:
            while self._arrivals.are_left or engine.has_unfinished:
                if not engine.has_unfinished:
                    self._wait_for(self._arrivals.next_s())
                self._add_arrived()
                num_idle_calls = 0 if self._step() else num_idle_calls + 1
                if num_idle_calls == MOST_IDLE_CALLS and engine.has_unfinished:
                    raise RecordingFailed(
                        f"step {len(self._decisions) + 1}: {engine.scheduler.counts()}, and nothing ran twice."
                    )
        finally:
            engine.on_batch = before

    def _wait_for(self, arrival: float) -> None:
        idle = arrival - self._now_s
        if 0 < idle < np.inf:
            self._mark += idle
            while (left := self._mark - self._clock()) > 0:
                time.sleep(left)
            self._now_s = arrival

    def _add_arrived(self) -> None:
        while (arrival := self._arrivals.next_s()) <= self._now_s:
            number, trace = self._arrivals.take(), self._trace
            self._latencies.arrived(number, arrival)
            try:
                add_request(self._engine, trace, number, self._prompt_of(number).tolist())
            except NeverFits:
                self._num_rejected += 1
                continue
            self._arrivals.is_waited_for()

    def _step(self) -> bool:
        """Run a step of the engine. Return whether a batch ran."""
        failed = self._engine.stats().failed_steps
        self._batches.clear()
        outputs = self._engine.step()
        if self._engine.stats().failed_steps != failed:
            raise RecordingFailed(f"step {len(self._decisions) + 1} of the engine failed")
        if not self._batches:
            return False
        shown = self._clock()
        seconds = shown - self._mark
        self._mark = shown
        self._now_s += seconds
        self._seconds.append(seconds)
        (batch,) = self._batches
        ended = tuple(int(output.id) for output in outputs if output.finish_reason is not None)
        for output in outputs:
            self._outputs[int(output.id)] += output.token_ids
        sampled = np.array([int(id) for id in batch.ids[batch.samples]], np.int64)
        self._latencies.tokens(sampled, self._now_s)
        self._latencies.finished(np.array(ended, np.int64), self._now_s)
        self._arrivals.answered(len(ended), self._now_s)
        step = Step(len(self._decisions) + 1, self._now_s, seconds, batch, ended)
        self._decisions.append(decision_of(step))
        return True

    def recording(self) -> Recording:
        """Return the recording so far."""
        latencies, stats = self._latencies, self._engine.scheduler.stats()
        return Recording(
            setup=self._setup,
            clients=self._clients,
            decisions=tuple(self._decisions),
            seconds=tuple(self._seconds),
            outputs=tuple(map(tuple, self._outputs)),
            rejected=self._num_rejected,
            preemptions=Preemptions(recompute=stats.preemptions_recompute, swap=stats.preemptions_swap),
            makespan_s=latencies.last_token_s,
            **latencies.percentiles(),
        )


def add_request(engine: Engine, trace: Trace, number: int, prompt: list[int]) -> None:
    """Add a request of a trace to an engine, which writes as many tokens as the trace has for it."""
    engine.add_request(
        prompt,
        SamplingParams(max_tokens=int(trace.output_tokens[number]), ignore_eos=True),
        id=str(number),
        priority=int(trace.priority[number]),
        salt=str(trace.tenant[number]) or None,
        tenant=str(trace.tenant[number]) or None,
    )


class RecordedSeconds:
    """A cost model that plays recorded seconds, one step after another, whatever their work.

    Raises InvalidConfig without steps, and in `seconds` after the last one.
    """

    tiling: ClassVar[Tiling | None] = None
    spans: ClassVar[Spans] = ()

    def __init__(self, seconds: Sequence[float], costs: Costs) -> None:
        if not seconds:
            raise InvalidConfig("the recording has no steps")
        self._seconds = seconds
        self._costs = costs
        self._num_played = 0

    def seconds(self, work: StepWork) -> Any:
        """Return the seconds of the next recorded step."""
        if self._num_played == len(self._seconds):
            raise InvalidConfig(f"the recording has {len(self._seconds):,} steps; the simulation wants one more")
        self._num_played += 1
        return self._seconds[self._num_played - 1]

    def costs(self, block_size: int) -> Costs:
        """Return the costs of the recorded scheduler."""
        return self._costs


def replay(recording: Recording, trace: Trace) -> list[Decision]:
    """Simulate with the engine's seconds and tokens. Return the decisions, which should have no `differences` from the recording's.

    Raises InvalidConfig for a recording of another trace, or without steps.
    """
    _check_is_of(recording, trace)
    prompts = trace.prompt_tokens

    def written(batch: Batch) -> NDArray[np.int32]:
        """Return the recorded tokens at these places; beyond the recording, which only happens where the logs differ, 0."""
        requests = [int(id) for id in batch.ids[batch.samples]]
        places = (batch.seq_lens[batch.samples] - prompts[requests]).tolist()
        outputs = [recording.outputs[request] for request in requests]
        return np.array([said[at] if at < len(said) else 0 for said, at in zip(outputs, places)], np.int32)

    simulation = Simulation(
        trace,
        recording.setup.scheduler(),
        RecordedSeconds(recording.seconds, recording.setup.costs),
        clients=recording.clients,
        prompt_of=recording.setup.prompt_of(trace),
        answer=written,
    )
    return [decision_of(step) for step in simulation.steps()]


def predict(recording: Recording, trace: Trace, cost_model: CostModel) -> SimulationResult:
    """Simulate the trace by a cost model, from the run's setup alone. Raises InvalidConfig for a recording of another trace."""
    _check_is_of(recording, trace)
    return Simulation(trace, recording.setup.scheduler(), cost_model, clients=recording.clients).run()


def _check_is_of(recording: Recording, trace: Trace) -> None:
    if len(recording.outputs) != len(trace):
        raise InvalidConfig(f"the recording has {len(recording.outputs):,} requests; the trace has {len(trace):,}")


class Decision(msgspec.Struct, frozen=True):
    """A step of the log.

    step       number, from 1
    end_s      when it ended, in seconds since the first arrival
    skipped    steps with the same rows that ran since the entry before and are not in the log
    requests   ids of its requests, and `tokens`, the computed tokens of each
    admitted   ids of admitted requests, returning ones included
    preempted  (id, "recompute" or "swap")
    ended      ids of the requests that ended with it
    """

    step: int
    end_s: float
    skipped: int
    requests: tuple[str, ...]
    tokens: tuple[int, ...]
    admitted: tuple[str, ...]
    preempted: tuple[tuple[str, str], ...]
    ended: tuple[str, ...]


def decision_of(step: Step) -> Decision:
    """Return the entry of a step."""
    batch = step.batch
    return Decision(
        step=step.number,
        end_s=step.now_s,
        skipped=step.skipped,
        requests=tuple(batch.ids.tolist()),
        tokens=tuple(batch.num_tokens.tolist()),
        admitted=batch.admitted,
        preempted=batch.preempted,
        ended=tuple(map(str, step.ended)),
    )


def differences(first: Sequence[Decision], second: Sequence[Decision], *, most: int = 10) -> list[str]:
    """Compare two logs entry by entry. Return a sentence for each entry that differs, at most `most`; empty if they are identical."""
    found: list[str] = []
    for number, (one, other) in enumerate(zip_longest(first, second), 1):
        if len(found) == most:
            break
        if one is None or other is None:
            found.append(f"step {number}: the logs have {len(first):,} and {len(second):,} entries")
            break
        fields = [name for name in Decision.__struct_fields__ if getattr(one, name) != getattr(other, name)]
        if fields:
            told = "; ".join(f"{name} {getattr(one, name)!r} and {getattr(other, name)!r}" for name in fields)
            found.append(f"step {number}: {told}")
    return found
