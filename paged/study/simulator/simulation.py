"""The loop of a simulation on a virtual clock: arrivals, a step, its tokens."""

from collections.abc import Callable, Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from paged import Batch, Request, Scheduler
from paged.base.fields import converted
from paged.errors import NeverFits, SimulationStuck
from paged.study.hardware import CostModel, StepWork
from paged.study.hardware.step_work import StepTime
from paged.study.limits import NotNegative, at_least
from paged.study.simulator.arrivals import STOP, Answers, Arrivals
from paged.study.simulator.ledger import Ledger
from paged.study.simulator.result import Latencies, SimulationResult
from paged.study.simulator.stretch import skip, steady_batch, steady_steps, steady_work, work_of
from paged.study.traces import Trace

LEAST_AT_ONCE, MOST_AT_ONCE = 32, 512
"""Steps to time at once: few, since most stretches are short and the timing of steps that are not taken is lost; twice as many whenever all were
taken; more gain nothing."""

Answer = Callable[[Batch], NDArray[np.int32]]


class Step(msgspec.Struct, frozen=True):
    """A step of a simulation: its batch, its end in virtual seconds, and the numbers of the requests that ended with it.

    Since the step before, `skipped` steps with the same rows have run, whose time is in `now_s` and `seconds`.
    """

    number: int
    now_s: float
    seconds: float
    batch: Batch
    ended: tuple[int, ...]
    skipped: int = 0


class Simulation:
    """A simulation of a trace on its own scheduler. Request i of the trace has the id str(i)."""

    def __init__(
        self,
        trace: Trace,
        scheduler: Scheduler,
        cost_model: CostModel | None = None,
        *,
        check: bool = False,
        clients: int | None = None,
        fast_forward: bool = True,
        price_per_hour: float | None = None,
        runs_ahead: bool = False,
        prompt_of: Callable[[int], NDArray[np.int32]] | None = None,
        answer: Answer | None = None,
        shared: Arrivals | None = None,
        latencies: Latencies | None = None,
        as_asked: Callable[[Request], Request] | None = None,
    ) -> None:
        """Options:

        clients       of a closed loop: each sends the trace's next request when its last one has ended; arrival times are ignored
        fast_forward  take steps without a decision at once, to the same effect
        runs_ahead    the engine decides a step while the one before runs, so a request that comes meanwhile is in the step after it
        prompt_of     returns a request's prompt; None: the trace's
        answer        runs a batch and returns a token for each row that samples; None: the stand-in's
        shared, latencies
                      arrivals and latencies that all replicas share, of which this is one
        as_asked      returns a request as it is added; None: as the trace has it

        Raises InvalidConfig for fewer than one client, or a price that is negative or not finite.
        """
        if clients is not None:
            at_least("clients", clients, 1)
        converted("price_per_hour", price_per_hour, NotNegative | None)
        self.trace = trace
        self.scheduler = scheduler
        self.cost_model: CostModel = StepTime() if cost_model is None else cost_model
        self.check = check
        self.now_s = 0.0
        self.ledger = Ledger(trace, scheduler, price_per_hour, latencies)
        self.latencies, self.timeline = self.ledger.latencies, self.ledger.timeline
        self._prompt_tokens = trace.prompt_tokens
        self._any_ends_early = bool((trace.max_tokens > trace.output_tokens).any())
        self._answers = Answers(trace)
        self._prompt_of = prompt_of or trace.prompt
        self._answer = answer
        self._as_asked = as_asked or (lambda request: request)
        self._runs_ahead = runs_ahead
        # When the latest step began.
        self._began_s = 0.0
        self._may_skip = fast_forward and not check and answer is None
        self._ask_for = LEAST_AT_ONCE
        self.arrivals = shared or Arrivals(trace, clients)
        self.deliver: Callable[[float], None] = self._add_arrived
        """Add the requests that have come until a time; with replicas, each to its replica."""
        self._num_empty = 0
        # Requests of the rows that sampled last, for further steps with the same rows.
        self._ids: NDArray[np.object_] | None = None
        self._numbers: NDArray[np.int64] = np.empty(0, np.int64)

    def steps(self) -> Iterator[Step]:
        """Run to the end, and yield each step. Raises SimulationStuck."""
        while self.arrivals.are_left or self.scheduler.has_unfinished:
            if not self.scheduler.has_unfinished:
                # No request is here: skip to when the next one comes.
                self.now_s = max(self.now_s, self.arrivals.next_s())
            self.deliver(self.seen_s)
            before, skipped = self.ledger.num_skipped, self.skip_ahead()
            if skipped:
                self.deliver(self.seen_s)
            step = self.run_step()
            if step is not None and skipped:
                num_skipped = self.ledger.num_skipped - before
                step = msgspec.structs.replace(step, seconds=step.seconds + skipped, skipped=num_skipped)
            if step is not None:
                yield step

    def run(self) -> SimulationResult:
        """Run to the end. Return the figures. Raises SimulationStuck."""
        for _ in self.steps():
            pass
        return self.result()

    def run_step(self) -> Step | None:
        """Run the next step alone. Return it; None if no request can run. Raises SimulationStuck."""
        batch = self.scheduler.schedule(self.now_s)
        if batch.is_empty:
            self.nothing_ran(batch)
            return None
        work = self.work_of(batch)
        return self.finish(batch, work, float(self.cost_model.seconds(work)))

    def nothing_ran(self, batch: Batch) -> None:
        """End an empty batch. Raises SimulationStuck for the second one in a row."""
        # The first empty batch may fetch outputs of requests that ended without running.
        outputs = self.scheduler.update(batch, np.empty(0, np.int32), now=self.now_s)
        self.arrivals.answered(len(outputs.others), self.now_s)
        self._num_empty += 1
        if self._num_empty == 2 and self.scheduler.has_unfinished:
            waiting = self.scheduler.waiting_ids()
            first = f" {self.scheduler.explain(waiting[0])}" if waiting else ""
            raise SimulationStuck(
                f"step {self.ledger.num_steps}: {self.scheduler.counts()}, and nothing was scheduled twice.{first}"
            )

    @property
    def seen_s(self) -> float:
        """The time until which arrivals are in the next step."""
        return self._began_s if self._runs_ahead and self.scheduler.has_unfinished else self.now_s

    def _add_arrived(self, seen_s: float) -> None:
        while (arrival := self.arrivals.next_s()) <= seen_s:
            self.add(self.arrivals.take(), arrival)

    def add(self, number: int, arrival: float) -> bool:
        """Add a request of the trace. Return whether it can ever run."""
        self.latencies.arrived(number, arrival)
        try:
            self.scheduler.add(self._as_asked(self._request(number)), now=arrival)
        except NeverFits:
            # The scheduler counts it as rejected, and the simulation goes on, as a service would.
            return False
        self.arrivals.is_waited_for()
        return True

    def _request(self, number: int) -> Request:
        trace = self.trace
        output, declared = int(trace.output_tokens[number]), int(trace.max_tokens[number])
        is_stopped = declared > output
        return Request(
            id=str(number),
            prompt=self._prompt_of(number),
            max_tokens=declared if is_stopped else output,
            expected_tokens=output,
            stop_token_ids=(STOP,) if is_stopped else (),
            priority=int(trace.priority[number]),
            salt=str(trace.tenant[number]) or None,
            tenant=str(trace.tenant[number]) or None,
        )

    def skip_ahead(self) -> float:
        """Take the coming steps without a decision at once, up to the next arrival. Return their seconds."""
        scheduler, asked = self.scheduler, self._ask_for
        allowed = steady_steps(scheduler, asked) if self._may_skip else 0
        if allowed < 2:
            return 0.0
        first = steady_batch(scheduler)
        requests = self._numbers_of(first.ids)[: first.num_samples]
        written = first.seq_lens[: first.num_samples] - self._prompt_tokens[requests]
        if self._any_ends_early and len(requests):
            # The step in which a request stops is a decision.
            allowed = min(allowed, int((self.trace.output_tokens[requests] - written).min()) - 1)
            if allowed < 2:
                return 0.0
        work = steady_work(first, allowed, self.cost_model.tiling, self.cost_model.spans)
        seconds = np.broadcast_to(self.cost_model.seconds(work), allowed)
        # Added in the order of the steps: the same clock, to the last bit.
        clock = np.add.accumulate(np.concatenate([[self.now_s], seconds]))
        until_seen = int(np.searchsorted(clock[:-1], self.arrivals.next_s(), "left")) + self._runs_ahead
        count = min(allowed, until_seen)
        if count < 2:
            return 0.0
        self._ask_for = min(MOST_AT_ONCE, 2 * asked) if count == asked else LEAST_AT_ONCE
        seconds, times = seconds[:count], clock[1 : count + 1]
        memory = self.ledger.memory()
        tokens = self._answers.tokens(requests, written[:, None] + np.arange(count))
        drawn = skip(scheduler, tokens, now=float(clock[count - 1]))
        context = float(np.asarray(work.context_tokens)[:count].sum())
        self.ledger.stretch(memory, requests, times, seconds, drawn, rows=len(first.ids), context=context)
        before, self.now_s, self._began_s = self.now_s, float(times[-1]), float(clock[count - 1])
        return self.now_s - before

    def work_of(self, batch: Batch) -> StepWork:
        """Return the work of a batch for the device."""
        return work_of(batch, self.scheduler.manager.block_size, self.cost_model.tiling, self.cost_model.spans)

    def finish(self, batch: Batch, work: StepWork, seconds: float) -> Step:
        """End a batch after so many seconds. Return its step."""
        self._num_empty = 0
        scheduler = self.scheduler
        memory = self.ledger.memory()
        self._check(ends_step=False)
        sampling = batch.ids if batch.samples.all() else batch.ids[batch.samples]
        sampled = self._numbers_of(sampling)
        if self._answer is None:
            self._answers.begin(map(int, batch.admitted))
            lengths = batch.seq_lens if len(sampled) == len(batch.rows) else batch.seq_lens[batch.samples]
            tokens = self._answers.tokens(sampled, lengths - self._prompt_tokens[sampled])
        else:
            tokens = self._answer(batch)
        self._began_s = self.now_s
        self.now_s += seconds
        outputs = scheduler.update(batch, tokens, now=self.now_s)
        self._check(ends_step=True)
        self.ledger.step(memory, sampled, end_s=self.now_s, seconds=seconds, rows=len(batch.rows), work=work)
        ended = [int(id) for id in outputs.ids[outputs.finish > 0]] if outputs.usage else []
        if ended:
            self.latencies.finished(np.array(ended), self.now_s)
            self._answers.forget(ended)
        self.arrivals.answered(len(ended) + len(outputs.others), self.now_s)
        return Step(self.ledger.num_steps, self.now_s, seconds, batch, tuple(ended))

    def _numbers_of(self, ids: NDArray[np.object_]) -> NDArray[np.int64]:
        """Return the request of each id, int64 [n]."""
        if ids is not self._ids:
            self._ids, self._numbers = ids, np.array(ids.tolist(), np.int64) if len(ids) else np.empty(0, np.int64)
        return self._numbers

    def _check(self, *, ends_step: bool) -> None:
        if self.check:
            self.ledger.checked(self.scheduler.check(), ends_step=ends_step)

    def result(self) -> SimulationResult:
        """Return the figures so far."""
        return self.ledger.result(self.arrivals.num_added)
