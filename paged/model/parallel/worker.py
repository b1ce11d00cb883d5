"""A worker on rank 0 of a split model: what it runs, all ranks run at the same time.

A message and the work that it asks for are inside one guard. An interrupt between the two would leave the other ranks one step ahead.
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
    """As a Worker; `begin`, `logits` and `read` raise RanksFailed as soon as a rank has failed. The steps of one thread."""

    def __init__(self, runner: Runner, ranks: Ranks) -> None:
        super().__init__(runner)
        self.ranks = ranks

    def begin(self, step: StepInput) -> None:
        """As Worker's, on each rank: copies are each rank's own."""
        with self.ranks.guarded():
            self.ranks.send(Begun(step.encoded()))
            super().begin(step)

    def logits(self, step: ReadyStep, lengths: NDArray[np.int64] | None = None) -> Tensor:
        """As Worker's."""
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
        """As Worker's."""
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
        """Its tokens are all known here, drafts included; the others guess none, and keep none."""
        kept = None if lengths is None else np.ascontiguousarray(lengths, np.int64).tobytes()
        tokens = np.ascontiguousarray(step.token_ids, np.int32).tobytes()
        self.ranks.send(Run(step.input.number, tokens, sent(others), sent(stateful), kept))
