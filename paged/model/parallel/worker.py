"""The worker on rank 0 of a split model: all ranks run its steps at the same time.

A message and rank 0's part of the same work are inside one guard: an interrupt between the two would leave the other ranks one step ahead.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paged.model.parallel.messages import Begun, Run, sent
from paged.model.parallel.ranks import Ranks
from paged.model.runner import Read, Runner
from paged.model.step_input import StepInput
from paged.model.worker import ReadyStep, Worker


class TensorParallelWorker(Worker):
    """A Worker whose `begin`, `logits` and `read` raise RanksFailed once a rank has failed. For one thread."""

    def __init__(self, runner: Runner, ranks: Ranks) -> None:
        super().__init__(runner)
        self.ranks = ranks

    def begin(self, step: StepInput) -> None:
        """Begin the step on each rank, as Worker does. Each rank makes the copies in its own pool."""
        with self.ranks.guarded():
            self.ranks.send(Begun(step.encoded()))
            super().begin(step)

    def logits(self, step: ReadyStep, lengths: NDArray[np.int64] | None = None) -> Tensor:
        """Run the step on each rank, as `Worker.logits` does."""
        with self.ranks.guarded():
            self._send(step, None, None, lengths)
            return super().logits(step, lengths)

    def read(
        self,
        step: ReadyStep,
        others: NDArray[np.bool_],
        stateful: NDArray[np.bool_],
        lengths: NDArray[np.int64] | None = None,
    ) -> Read:
        """Run the step on each rank, as `Worker.read` does."""
        with self.ranks.guarded():
            self._send(step, others, stateful, lengths)
            return super().read(step, others, stateful, lengths)

    def _send(
        self,
        step: ReadyStep,
        others: NDArray[np.bool_] | None,
        stateful: NDArray[np.bool_] | None,
        lengths: NDArray[np.int64] | None,
    ) -> None:
        """Send a step with all its tokens, drafts included: other ranks neither draft nor keep tokens."""
        tokens = np.ascontiguousarray(step.token_ids, np.int32).tobytes()
        self.ranks.send(Run(step.input.number, tokens, sent(others), sent(stateful), sent(lengths)))
