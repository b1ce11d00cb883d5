"""The steps of our own `Engine` on a device that lags: a batch runs when it is to be ended.

What an engine may not read then has become another by then. `run_late(engine)` makes an engine step so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from paged.base.uninterrupted import Uninterrupted
from paged.engine.engine import Engine
from paged.engine.steps import FailedBatch, OnLogits, PutOut, Steps
from paged.sampling.rows import Asked
from paged.scheduler import Batch, Outputs
from paged.testing.late_worker import NO_BLOCKS, Blocks, LateWorker


class DeviceLost(Exception):
    """The stand-in device failed, as it was told to."""


class LateSteps(Steps):
    """Batches of one engine, each of which runs when its tokens are asked for.

    fails  where the next batch to run fails: before its copies, behind them, or in its forward pass; the engine's step raises DeviceLost
    """

    def __init__(self, engine: Engine) -> None:
        self.late = LateWorker(engine.runner)
        super().__init__(engine.scheduler, self.late, engine._sampling, engine._clock)
        self.fails: Literal["before", "behind", "within"] | None = None
        # How each row is sampled, when a batch was put out: rows get others' values while it waits.
        self._asked: list[tuple[PutOut, Asked, OnLogits | None]] = []
        self._free: Blocks = NO_BLOCKS

    @property
    def num_launched(self) -> int:
        """Batches that are out."""
        return len(self._outstanding)

    def launch(self, note_admitted: Callable[[Batch], None], on_logits: OnLogits | None) -> FailedBatch | None:
        """Only queue the batch."""
        self._free = (self._scheduler.manager.device.states == 0).nonzero()[0]
        put = self._put_out(self._clock(), note_admitted)
        if put is not None:
            self._asked.append((put, self._sampling.of(put.batch.rows), on_logits))
        return None

    def finish(self, deliver: Callable[[Outputs], None]) -> Batch | None:
        """Run the oldest batch, and end it."""
        if self._asked:
            self._fail_if_asked()
            self.late.take()
            failed = self._run(*self._asked.pop(0))
            if failed is not None:
                raise failed.error
        return super().finish(deliver)

    def take_back(self) -> None:
        """Cancel every batch that is out, the latest first."""
        with Uninterrupted():
            for waiting in (self._launched, self._asked):
                waiting.clear()
            while self._outstanding:
                batch = self._outstanding.pop()
                self._scheduler.cancel(batch, moved=self.late.drop(batch, self._inputs))

    def _fail_if_asked(self) -> None:
        fails, self.fails = self.fails, None
        if fails is not None:
            if fails == "behind":
                self.late.begin_oldest()
            if fails == "within":
                self.late.spoil()
            raise DeviceLost(fails)

    def _begin(self, put: PutOut) -> None:
        self.late.put(put.batch, put.step, self._free)


def run_late(engine: Engine) -> LateSteps:
    """Let an engine that has not begun step on a device that lags; returns its steps."""
    steps = engine._steps = LateSteps(engine)
    return steps
