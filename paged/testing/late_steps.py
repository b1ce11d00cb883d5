"""The steps of our own `Engine` on a device that lags: a batch runs when it is to be ended.

What an engine may not read then has become another by then. `run_late(engine)` makes an engine step so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from paged.engine.engine import Engine
from paged.engine.executor import Launched, LocalExecutor, Ran
from paged.engine.steps import FailedBatch, OnLogits, Steps
from paged.model.step_input import StepInput
from paged.sampling.rows import Asked
from paged.scheduler import Batch, Outputs
from paged.testing.late_worker import Blocks, LateWorker


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

    fails  where the next batch to run fails: before its copies, behind them, or in its forward pass; the engine's step raises DeviceLost
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
