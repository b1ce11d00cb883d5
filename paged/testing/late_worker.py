"""A worker behind a queue: steps wait there, and run in order, when the scheduler has long gone on.

    scheduler   step 4 | step 5 |         update 4 | step 6 |         update 5
    device                        4 runs                      5 runs

A step begins when it runs, so nothing that changes after it is read; arrays that were written while their step waited are reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paged.engine.step_inputs import StepInputs
from paged.model.runner import Runner
from paged.model.step_input import StepInput
from paged.model.worker import ReadyStep, Worker
from paged.scheduler import Batch

Blocks = NDArray[np.int64]
NO_BLOCKS: Blocks = np.empty(0, np.int64)


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
        """Queue the step of a batch. `free`: device blocks, int64 [k], without content or holder before it was scheduled; they are filled with
        NaN before it runs."""
        # Copies of a cancelled batch still read blocks that are free.
        blocks = NO_BLOCKS if self._num_carried else free
        self._waiting.append(_Waiting(batch, step, [(name, array.copy()) for name, array in _arrays(batch)], blocks))
        if self._num_carried and len(batch.moves):
            self._num_carried -= 1

    def begin(self, step: StepInput) -> None:
        """As Worker, of the oldest step, if that is not done."""
        oldest = self._waiting[0]
        if not oldest.has_begun:
            oldest.has_begun = True
            self.runner.pool.poison(torch.from_numpy(oldest.free))
            super().begin(step)

    def ready(self, step: StepInput) -> ReadyStep:
        """As Worker, of the oldest step, which waits no more."""
        self._see_unchanged(self._waiting.pop(0))
        return super().ready(step)

    def take(self) -> ReadyStep:
        """The oldest step, begun, for its forward pass."""
        step = self._waiting[0].step
        self.begin(step)
        return self.ready(step)

    def begin_oldest(self) -> None:
        """Make the copies of the oldest step, if they are not made."""
        self.begin(self._waiting[0].step)

    def spoil(self) -> None:
        """The oldest step fails in its forward pass: what it has written is not what it should be. It has to be dropped."""
        step = self.take()
        self.logits(step._replace(token_ids=(step.token_ids + 1) % self.runner.model.vocabulary_size))

    def drop(self, batch: Batch, inputs: StepInputs | None = None) -> bool:
        """The batch, the latest one, is cancelled, which `inputs`, what made its step, hears of; whether its copies are made."""
        if not self._waiting or self._waiting[-1].batch is not batch:
            return True
        last = self._waiting.pop()
        if not last.has_begun and inputs is not None:
            inputs.take_back(last.step)
        self._num_carried += not last.has_begun and len(batch.moves) > 0
        return last.has_begun

    def _see_unchanged(self, waiting: _Waiting) -> None:
        for (name, before), (_, now) in zip(waiting.arrays, _arrays(waiting.batch), strict=True):
            if not np.array_equal(before, now):
                self.violations.append(f"batch {waiting.batch.number}: {name} was written while the batch waited.")


def _arrays(batch: Batch) -> Iterator[tuple[str, NDArray[Any]]]:
    """Every array that a batch owns, by name: all but the view of the scheduler's tables."""
    for holder in (batch, batch.moves):
        for name in (
            ("device_to_host", "host_to_device", "device_to_device") if holder is not batch else batch.__struct_fields__
        ):
            value = getattr(holder, name)
            if isinstance(value, np.ndarray) and name != "block_tables":
                yield name, value
