"""A worker behind a queue, and the steps of our own `Engine` on it: a batch runs when the scheduler has long gone on.

    scheduler   step 4 | step 5 |         update 4 | step 6 |         update 5
    device                        4 runs                      5 runs

A step begins when it runs, so nothing that changes after it is read; arrays that were written while their step waited
are reported. `run_late(engine)` makes an engine step so; a `LateRun` is our scheduler on such a worker, without an
engine.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from paged.engine.engine import Engine
from paged.engine.executor import Launched, LocalExecutor, Ran
from paged.engine.step_inputs import StepInputs
from paged.engine.steps import FailedBatch, OnLogits, Steps
from paged.model.capacity import pool_for
from paged.model.loading import LoadedModel
from paged.model.runner import Runner, runner_for
from paged.model.step_input import StepInput
from paged.model.worker import ReadyStep, Worker
from paged.sampling.rows import Asked
from paged.scheduler import Batch, Outputs, Request
from paged.testing.engine_world import EngineWorld, scheduler_in
from paged.testing.pressure import Answers

Blocks = NDArray[np.int64]


@dataclass
class _Waiting:
    """A step that has not run, the arrays of its batch as they were when it came, and blocks that held nothing then."""

    batch: Batch
    step: StepInput
    arrays: list[tuple[str, NDArray[Any]]]
    free: Blocks
    has_begun: bool = False


class LateWorker(Worker):
    """Steps that wait for their worker. `violations` grows by a sentence for each array that did not stay as it was."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self.violations: list[str] = []
        self._waiting: list[_Waiting] = []
        # Cancelled batches whose copies are still to be made, by a later one.
        self._num_carried = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, batch: Batch, step: StepInput, free: Blocks) -> None:
        """Queue the step of a batch. `free`: device blocks, int64 [k], that held nothing before it was scheduled; they
        are filled with NaN before it runs."""
        # Copies of a cancelled batch still read blocks that are free.
        blocks = free[:0] if self._num_carried else free
        self._waiting.append(_Waiting(batch, step, [(name, array.copy()) for name, array in _arrays(batch)], blocks))
        if self._num_carried and len(batch.moves):
            self._num_carried -= 1

    def begin(self, step: StepInput) -> None:
        """As Worker, of the oldest step, once."""
        oldest = self._waiting[0]
        if not oldest.has_begun:
            oldest.has_begun = True
            self.runner.pool.poison(torch.from_numpy(oldest.free))
            super().begin(step)

    def ready(self, step: StepInput) -> ReadyStep:
        """As Worker, of the oldest step, which waits no more."""
        oldest = self._waiting.pop(0)
        for (name, before), (_, now) in zip(oldest.arrays, _arrays(oldest.batch), strict=True):
            if not np.array_equal(before, now):
                self.violations.append(f"batch {oldest.batch.number}: {name} was written while the batch waited.")
        return super().ready(step)

    def take(self) -> ReadyStep:
        """The oldest step, begun, for its forward pass."""
        self.begin_oldest()
        return self.ready(self._waiting[0].step)

    def begin_oldest(self) -> None:
        """Make the copies of the oldest step, if they are not made."""
        self.begin(self._waiting[0].step)

    def spoil(self) -> None:
        """The oldest step fails in its forward pass: it has written anything, and has to be dropped."""
        step = self.take()
        self.logits(step._replace(token_ids=(step.token_ids + 1) % self.runner.model.vocabulary_size))

    def drop(self, batch: Batch, inputs: StepInputs | None = None) -> bool:
        """Cancel the latest batch, also in `inputs`, which made its step. Return whether its copies are made."""
        if not self._waiting or self._waiting[-1].batch is not batch:
            return True
        last = self._waiting.pop()
        if not last.has_begun and inputs is not None:
            inputs.take_back(last.step)
        self._num_carried += not last.has_begun and len(batch.moves) > 0
        return last.has_begun


def _arrays(batch: Batch) -> Iterator[tuple[str, NDArray[Any]]]:
    """Every array that a batch owns, by name: all but the view of the scheduler's tables."""
    fields = [(batch, name) for name in batch.__struct_fields__ if name != "block_tables"]
    moves = [(batch.moves, name) for name in ("device_to_host", "host_to_device", "device_to_device")]
    for holder, name in fields + moves:
        if isinstance(value := getattr(holder, name), np.ndarray):
            yield name, value


class DeviceLost(Exception):
    """The stand-in device failed, as it was asked to."""


class LateExecutor(LocalExecutor):
    """Steps that run when they are read, on memory that was poisoned. `fail` is called before each."""

    def __init__(self, late: LateWorker, clock: Callable[[], float], fail: Callable[[], None]) -> None:
        super().__init__(late, clock)
        self._late, self._fail = late, fail
        self._next: tuple[Batch, Blocks] | None = None
        self._batches: dict[int, Batch] = {}

    def expect(self, batch: Batch, free: Blocks) -> None:
        """The next step is that of this batch; `free` as of `LateWorker.put`."""
        self._next = batch, free

    def launch(self, step: StepInput, asked: Asked, *, samples: bool) -> Launched:
        """As Executor."""
        assert self._next is not None, "its batch was expected"
        batch, free = self._next
        self._batches[step.number] = batch
        self._late.put(batch, step, free)
        return super().launch(step, asked, samples=samples)

    def result(self, launched: Launched) -> Ran:
        """As Executor."""
        if launched.ran is None:
            self._fail()
        return super().result(launched)

    def drop(self, launched: Launched) -> bool:
        """As Executor; copies may have been made of a step that was not run."""
        super().drop(launched)
        return self._late.drop(self._batches[launched.step.number])


class LateSteps(Steps):
    """Batches of one engine, each of which runs when its tokens are asked for.

    fails  where the next batch to run fails: before its copies, behind them, or within its forward pass. The engine's
           step raises DeviceLost then
    """

    def __init__(self, engine: Engine) -> None:
        self.late = LateWorker(engine.runner)
        self.fails: Literal["before", "behind", "within"] | None = None
        self._late_executor = LateExecutor(self.late, engine._clock, self._fail_if_asked)
        super().__init__(engine.scheduler, self._late_executor, engine._sampling, engine._clock)

    def launch(self, note_admitted: Callable[[Batch], None], on_logits: OnLogits | None) -> bool:
        """Queue the batch."""
        free = (self._scheduler.manager.device.states == 0).nonzero()[0]

        def expect(batch: Batch) -> None:
            self._late_executor.expect(batch, free)
            note_admitted(batch)

        return super().launch(expect, on_logits)

    def settle(self) -> FailedBatch | None:
        """Nothing waits: logits are seen when a batch is ended, too."""
        return None

    def finish(self, deliver: Callable[[Outputs], None]) -> Batch | None:
        """Run the oldest batch, and end it. Raises what a batch had to be cancelled for."""
        found = super().finish(deliver)
        if isinstance(found, FailedBatch):
            raise found.error
        return found

    def _fail_if_asked(self) -> None:
        fails, self.fails = self.fails, None
        if fails is not None:
            if fails == "behind":
                self.late.begin_oldest()
            if fails == "within":
                self.late.spoil()
            raise DeviceLost(fails)


def run_late(engine: Engine) -> LateSteps:
    """Let an engine that has not begun step on a device that lags; returns its steps."""
    steps = engine._steps = LateSteps(engine)
    return steps


MOST_DRAFTS = 4


class LateRun:
    """One run, greedy, with up to `depth` batches out: with drafts, aborts and failed steps, of which the caller's chance
    decides. `events` counts what happened."""

    def __init__(
        self, model: LoadedModel, world: EngineWorld, guesses: Answers, chance: random.Random, depth: int
    ) -> None:
        """`guesses`: what drafts are made of; `chance` makes some of them wrong."""
        longest = model.max_length if world.max_model_len is None else world.max_model_len
        self.scheduler = scheduler_in(world, max_model_len=longest, vocabulary=model.vocabulary_size)
        pool = pool_for(
            model, num_blocks=world.num_blocks, block_size=world.block_size, num_host_blocks=world.host_blocks
        )
        self.late = LateWorker(runner_for(model, pool, backend=world.backend, batch_invariant=True))
        self._inputs = StepInputs(world.block_size)
        self.answers = Answers()
        self.events: Counter[str] = Counter()
        self._guesses = guesses
        self._chance = chance
        self._depth = depth
        self._vocabulary = model.vocabulary_size
        self._requests: dict[str, Request] = {}
        self._out: list[Batch] = []

    def run(self, requests: Sequence[Request]) -> Answers:
        """Serve all to their ends, or as far as 10,000 calls lead."""
        chance, arriving = self._chance, list(requests)
        for _ in range(10_000):
            if not (arriving or self._out or self.scheduler.has_unfinished):
                break
            if arriving and chance.random() < 0.4:
                self._add(arriving.pop(0))
            if chance.random() < 0.01:
                self._abort()
            if self._out and chance.random() < 0.04:
                self._cancel(chance.randint(1, len(self._out)))
            if self._out and (len(self._out) == self._depth or chance.random() < 0.3):
                self._end_oldest()
            else:
                self._schedule()
        stats = self.scheduler.stats()
        self.events["recomputed"] += stats.preemptions_recompute
        self.events["swapped"] += stats.preemptions_swap
        self.events["hit"] += stats.hit_tokens
        self.events["void"] += stats.voided_tokens
        self.answers.violations += self.late.violations + self.scheduler.check()
        num_used = self.scheduler.manager.device.num_used
        if num_used and not self.scheduler.has_unfinished:
            self.answers.violations.append(f"{num_used} blocks are held when all have ended.")
        return self.answers

    def _add(self, request: Request) -> None:
        self._requests[request.id] = request
        for sequence in range(request.num_sequences):
            self.answers.expect((request.id, sequence))
        self.scheduler.add(request)

    def _schedule(self) -> None:
        free = (self.scheduler.manager.device.states == 0).nonzero()[0]
        batch = self.scheduler.schedule(drafts=self._drafts())
        if batch.is_empty:
            return
        self.events["unknown"] += int((batch.source_batches >= 0).sum())
        self.events["preempted in flight"] += any(
            id in out.ids.tolist() for id, _ in batch.preempted for out in self._out
        )
        self._out.append(batch)
        self.late.put(batch, self._inputs.of(batch, self._out[0].number), free)

    def _end_oldest(self) -> None:
        """Run the oldest batch and hand its tokens back: of drafts those that are the model's own words, or fewer."""
        batch = self._out.pop(0)
        self.events["late"] += len(self._out) > 0
        step = self.late.take()
        logits = self.late.logits(step)
        words = logits.nan_to_num(nan=torch.inf).argmax(-1).tolist()
        tokens: list[int] = []
        counts, first = np.zeros(len(batch.rows), np.int64), np.zeros(len(batch.rows), np.int32)
        at = 0
        for place in batch.samples.nonzero()[0].tolist():
            num_drafts, last = int(batch.num_drafts[place]), int(batch.query_start_loc[place + 1])
            drafts = batch.token_ids[last - num_drafts : last].tolist()
            num_right = 0
            while num_right < num_drafts and drafts[num_right] == words[at + num_right]:
                num_right += 1
            if num_right and self._chance.random() < 0.2:
                # An engine may accept fewer than were right.
                num_right = self._chance.randrange(num_right)
            self.events["drafts accepted"] += num_right
            self.events["drafts rejected"] += num_drafts - num_right
            counts[place], first[place] = num_right + 1, words[at]
            tokens += words[at : at + num_right + 1]
            who = batch.ids[place], int(batch.sequences[place])
            first_place = int(batch.seq_lens[place]) - num_drafts - len(self._requests[who[0]].prompt)
            for behind, row in enumerate(logits[at : at + num_right + 1]):
                self.answers.see(who, first_place + behind, row)
            at += num_drafts + 1
        self.late.keep(step.input, first)
        for output in self.scheduler.update(batch, tokens, counts):
            self.answers.take(output)

    def _cancel(self, count: int) -> None:
        """The latest batches fail; the oldest of them may have made its copies, or stop within its forward pass."""
        if count == len(self._out):
            how = self._chance.choice(["before", "behind", "within"])
            if how == "behind":
                self.late.begin_oldest()
            if how == "within":
                self.late.spoil()
            self.events[f"cancelled {how}"] += 1
        for _ in range(count):
            batch = self._out.pop()
            self.events["cancelled with copies"] += len(batch.moves) > 0
            self.scheduler.cancel(batch, moved=self.late.drop(batch, self._inputs))
            self.events["cancelled"] += 1

    def _abort(self) -> None:
        live = [id for id in self._requests if (id, 0) not in self.answers.reasons]
        if not live:
            return
        id = self._chance.choice(live)
        in_flight = any(id in batch.ids.tolist() for batch in self._out)
        output = self.scheduler.abort(id)
        if output is not None:
            self.answers.take(output)
            self.events["aborted"] += 1
            self.events["aborted in flight"] += in_flight

    def _drafts(self) -> dict[str, list[int]]:
        """Guesses, mostly right ones, of what follows the tokens that are known or being sampled."""
        guessed = {}
        for id in self._requests:
            if (id, 0) in self.answers.reasons or self.scheduler.status(id) != "running" or self._chance.random() < 0.3:
                continue
            awaited = sum(id in batch.ids[batch.samples].tolist() for batch in self._out)
            known = len(self.answers.tokens[id, 0]) + awaited
            guess = self._guesses.tokens[id, 0][known:][: self._chance.randint(0, MOST_DRAFTS)]
            if guess and self._chance.random() < 0.4:
                wrong = self._chance.randrange(len(guess))
                guess[wrong] = (guess[wrong] + 1) % self._vocabulary
            guessed[id] = guess
        return guessed
