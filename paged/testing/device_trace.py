"""A trace of what an engine does to a device: launches, waits and reads.

    a wait a step      launch 1 · wait 1 · read 1 · launch 2 · wait 2 · read 2 · launch 3 · wait 3 · read 3
    one step ahead     launch 1 · launch 2 · read 1 · launch 3 · read 2 · wait 3 · read 3

The device takes as long for a step as the engine from one launch to the next: a step has run when one behind it is
launched, and a read before that waits. After a wait with nothing launched behind it the device stands still.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paged.engine.engine import Engine
from paged.engine.executor import Launched, LocalExecutor, Ran
from paged.engine.steps import Steps
from paged.model.step_input import StepInput
from paged.sampling.rows import Asked


class TracedExecutor:
    """An Executor before another one, for steps that do not fail. Each launch, wait and read adds a line to `trace`."""

    def __init__(self, device: LocalExecutor) -> None:
        self.trace: list[str] = []
        self._device = device
        self._waiting: list[Launched] = []

    def launch(self, step: StepInput, asked: Asked, *, samples: bool) -> Launched:
        """As Executor."""
        for launched in self._waiting:
            self._device.result(launched)
        self.trace.append(f"launch {step.number}")
        self._waiting = [self._device.launch(step, asked, samples=samples)]
        return self._waiting[0]

    def result(self, launched: Launched) -> Ran:
        """As Executor."""
        number = launched.step.number
        if launched.ran is None:
            self.trace.append(f"wait {number}")
        self.trace.append(f"read {number}")
        return self._device.result(launched)

    def keep(self, launched: Launched, tokens: NDArray[np.int32]) -> None:
        """As Executor."""
        self._device.keep(launched, tokens)

    def drop(self, launched: Launched) -> bool:
        """As Executor."""
        self._waiting = []
        return self._device.drop(launched)

    def close(self) -> None:
        """As Executor."""


def traced(engine: Engine) -> list[str]:
    """The trace of an engine that has not begun; it grows with the engine's steps."""
    executor = TracedExecutor(LocalExecutor(engine.worker, engine._clock))
    engine._steps = Steps(engine.scheduler, executor, engine._sampling, engine._clock)
    return executor.trace
