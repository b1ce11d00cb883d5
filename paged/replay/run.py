"""The loop of a replay: arrivals in, a step, its tokens out, on a virtual clock.

Knows the trace, the public calls of a scheduler and the formula for a step's time. Does not know how the scheduler decides, nor who
watches: a caller goes through the steps one by one, or asks for the result.
"""

import time
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from paged import Batch, NeverFits, PagedError, Request, Scheduler
from paged.replay.latencies import Latencies
from paged.replay.result import Preemptions, ReplayResult
from paged.replay.stand_in import stand_in_tokens
from paged.replay.step_time import StepTime
from paged.traces import Trace

MAX_MESSAGES = 10


class ReplayStuck(PagedError, RuntimeError):
    """The scheduler has unfinished requests, none of them in flight, and twice scheduled nothing. A bug, never a slow trace."""


class Step(msgspec.Struct, frozen=True):
    """One step of a replay: what ran, until when (virtual seconds), and which requests ended with it (their numbers)."""

    number: int
    now_s: float
    seconds: float
    batch: Batch
    ended: tuple[int, ...]


class Replay:
    """A trace on its way through a scheduler that nobody else uses. Request i of the trace has the id str(i)."""

    def __init__(
        self,
        trace: Trace,
        scheduler: Scheduler,
        step_time: StepTime | None = None,
        *,
        check: bool = False,
        prompt_of: Callable[[int], NDArray[np.int32]] | None = None,
        answer: Callable[[Batch], NDArray[np.int32]] | None = None,
    ) -> None:
        """`prompt_of` gives a request's prompt, by default the trace's; `answer` runs a batch and gives a token for each row that
        samples, by default the stand-in's."""
        self.trace = trace
        self.scheduler = scheduler
        self._prompt_of = prompt_of or trace.prompt
        self._answer = answer or _stand_in
        self.step_time = step_time or StepTime()
        self.step_time.check()
        self.check = check
        self.num_steps = 0
        self.now_s = 0.0
        self._latencies = Latencies(trace.arrival_s)
        self._num_added = 0
        self._busy_s = 0.0
        self._usage_s = 0.0
        self._peak_usage = 0.0
        self._output_tokens = 0
        self._host_s = 0.0
        self._started = time.perf_counter()
        self._checked_steps = 0
        self._violations = 0
        self._messages: list[str] = []

    def steps(self) -> Iterator[Step]:
        """Run to the end, yielding after each step. Raises ReplayStuck rather than spin."""
        num_empty = 0
        while self._num_added < len(self.trace) or self.scheduler.has_unfinished:
            if not self.scheduler.has_unfinished:
                # Nobody is here: skip to when somebody comes.
                self.now_s = max(self.now_s, float(self.trace.arrival_s[self._num_added]))
            self._add_arrived()
            batch = self._timed_schedule()
            if not batch.is_empty:
                num_empty = 0
                yield self._finish_step(batch)
                continue
            # Outputs of requests that ended without running are still to be fetched; a second time, nothing will come.
            self.scheduler.update(batch, np.empty(0, np.int32), now=self.now_s)
            num_empty += 1
            if num_empty == 2 and self.scheduler.has_unfinished:
                raise ReplayStuck(self._why_stuck())

    def _add_arrived(self) -> None:
        while self._num_added < len(self.trace) and self.trace.arrival_s[self._num_added] <= self.now_s:
            number = self._num_added
            self._num_added += 1
            request = Request(
                id=str(number), prompt=self._prompt_of(number), max_tokens=int(self.trace.output_tokens[number])
            )
            try:
                self.scheduler.add(request, now=float(self.trace.arrival_s[number]))
            except NeverFits:
                # The scheduler counts it as rejected; a replay goes on without it, as a service would.
                continue

    def _timed_schedule(self) -> Batch:
        started = time.perf_counter()
        batch = self.scheduler.schedule(self.now_s)
        self._host_s += time.perf_counter() - started
        return batch

    def _finish_step(self, batch: Batch) -> Step:
        manager = self.scheduler.manager
        computed = batch.num_scheduled_tokens
        moved = (len(batch.moves.device_to_host) + len(batch.moves.host_to_device)) * manager.block_size
        seconds = self.step_time.seconds(computed, int(batch.context_lens.sum()), moved)
        self._note_usage(manager.usage, seconds)
        self._violations_now()
        sampled = _numbers(batch)
        tokens = self._answer(batch)
        self.now_s += seconds
        self.num_steps += 1
        started = time.perf_counter()
        outputs = self.scheduler.update(batch, tokens, now=self.now_s)
        self._host_s += time.perf_counter() - started
        self._violations_now()
        self._checked_steps += self.check
        self._latencies.tokens(sampled, self.now_s)
        self._output_tokens += len(sampled)
        ended = np.array([int(id) for id in outputs.ids[outputs.finish > 0]], np.int64)
        self._latencies.finished(ended, self.now_s)
        return Step(self.num_steps, self.now_s, seconds, batch, tuple(ended.tolist()))

    def _note_usage(self, usage: float, seconds: float) -> None:
        self._peak_usage = max(self._peak_usage, usage)
        self._usage_s += usage * seconds
        self._busy_s += seconds

    def _violations_now(self) -> None:
        if self.check:
            found = self.scheduler.check()
            self._violations += len(found)
            self._messages.extend(
                f"step {self.num_steps}: {message}" for message in found[: MAX_MESSAGES - len(self._messages)]
            )

    def _why_stuck(self) -> str:
        waiting = self.scheduler.waiting_ids()
        first = f" {self.scheduler.explain(waiting[0])}" if waiting else ""
        return f"step {self.num_steps}: {self.scheduler.counts()}, and nothing was scheduled twice.{first}"

    def result(self) -> ReplayResult:
        """The figures so far; after the last step, those of the whole replay."""
        scheduler, manager = self.scheduler, self.scheduler.manager
        stats, counts = scheduler.stats(), scheduler.counts()
        makespan = self._latencies.last_token_s
        return ReplayResult(
            trace=self.trace.name,
            policy=scheduler.policy.name,
            num_blocks=manager.num_blocks,
            block_size=manager.block_size,
            host_blocks=manager.num_host_blocks,
            max_tokens_per_step=scheduler.limits.max_tokens_per_step,
            max_sequences=scheduler.limits.max_sequences,
            prefix_caching=manager.prefix_caching,
            requests=self._num_added,
            finished=counts["finished"],
            rejected=counts["rejected"],
            steps=self.num_steps,
            makespan_s=makespan,
            busy_s=self._busy_s,
            prompt_tokens=stats.prompt_tokens,
            output_tokens=self._output_tokens,
            output_tokens_per_s=self._output_tokens / makespan if makespan else 0.0,
            requests_per_s=counts["finished"] / makespan if makespan else 0.0,
            ttft_s=self._latencies.ttft(),
            itl_s=self._latencies.itl(),
            longest_gap_s=self._latencies.longest_gap(),
            e2e_s=self._latencies.e2e(),
            preemptions=Preemptions(recompute=stats.preemptions_recompute, swap=stats.preemptions_swap),
            max_preemptions=stats.max_preemptions,
            peak_block_usage=self._peak_usage,
            mean_block_usage=self._usage_s / self._busy_s if self._busy_s else 0.0,
            hit_tokens=stats.hit_tokens,
            prefix_hit_rate=stats.hit_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0,
            computed_tokens=stats.computed_tokens,
            wasted_tokens=stats.recomputed_tokens,
            swapped_out_blocks=stats.swapped_out_blocks,
            swapped_in_blocks=stats.swapped_in_blocks,
            checked_steps=self._checked_steps,
            violations=self._violations,
            violation_messages=tuple(self._messages),
            wall_s=time.perf_counter() - self._started,
            us_per_step=self._host_s / self.num_steps * 1e6 if self.num_steps else 0.0,
        )


def _numbers(batch: Batch) -> NDArray[np.int64]:
    """The request of each row that samples, int64 [k]."""
    ids = batch.ids[batch.samples]
    return np.fromiter((int(id) for id in ids), np.int64, len(ids))


def _stand_in(batch: Batch) -> NDArray[np.int32]:
    return stand_in_tokens(_numbers(batch), batch.context_lens[batch.samples])


def replay(
    trace: Trace, scheduler: Scheduler, step_time: StepTime | None = None, *, check: bool = False
) -> ReplayResult:
    """Replay a whole trace. `check` recomputes every invariant twice a step: slow, and worth it.

    Raises ReplayStuck, InvalidConfig for a step time without time, and InvalidRequest where the trace asks for what the scheduler refuses.
    """
    run = Replay(trace, scheduler, step_time, check=check)
    for _ in run.steps():
        pass
    return run.result()
