"""A worker behind a queue, and the steps of our own `Engine` on it: a batch runs when the scheduler has long gone on.

    scheduler   step 4 | step 5 |         update 4 | step 6 |         update 5
    device                        4 runs                      5 runs

A step begins when it runs, so nothing that changes after it is read; arrays that were written while their step waited
are reported. `run_late(engine)` makes an engine step so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from paged.engine.engine import Engine
from paged.engine.executor import Launched, LocalExecutor, Ran
from paged.engine.step_inputs import StepInputs
from paged.engine.steps import FailedBatch, OnLogits, Steps
from paged.model.runner import Runner
from paged.model.step_input import StepInput
from paged.model.worker import ReadyStep, Worker
from paged.sampling.rows import Asked
from paged.scheduler import Batch, Outputs

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
