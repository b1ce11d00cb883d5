"""Decodes as CUDA graphs: a forward pass in which each sequence has one token is captured once, and replayed with other numbers.

A GPU computes such a step faster than Python launches its kernels: of 8 billion parameters in bfloat16 several times as fast
(benchmarks/results/gpu.md). A graph holds for so many sequences, and tables so wide, each rounded up to a power of two; places
that are left repeat the last sequence, token for token, so that they write what it writes. All graphs of a pool are captured on one
stream and share memory, those of as many sequences their logits, too. The idea is vLLM's and SGLang's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged.attention import LayeredPool, StepTokens
from paged.attention.backend import RenewsPlans
from paged.base.growing import rising, rounded_up
from paged.errors import PagedWarning

# Behind it a GPU has enough to do, and Python keeps up.
_MOST_SEQUENCES = 512
# A capture begins by waiting for the whole device, which one that is under way in another thread does not survive.
_ONE_AT_A_TIME = Lock()

Forward = Callable[[StepTokens, Tensor, Any], Tensor]
"""(step of n tokens; int64 [3, n]: tokens, positions and slots; the backend's plan of the step) → logits [n, vocabulary]"""


@dataclass(frozen=True, slots=True)
class Captured:
    """A graph, and the tensors that it reads and writes: `inputs`, int64 [3, n], those of `plan`, and `logits`, [n, vocabulary]."""

    replay: Callable[[], None]
    inputs: Tensor
    plan: Any
    logits: Tensor


class CapturedDecodes:
    """The graphs of one model on one pool. Where a pass cannot be captured it warns, once, frees them, and leaves all passes to the caller."""

    def __init__(self, backend: RenewsPlans, pool: LayeredPool) -> None:
        self._backend, self._pool = backend, pool
        # By sequences and columns, both rounded up.
        self.graphs: dict[tuple[int, int], Captured] = {}
        # By sequences, where graphs write.
        self._logits: dict[int, Tensor] = {}
        # Graphs share memory for what they compute in between: one runs at a time. What one frees is another's on the same stream alone.
        self._memory: Any = None
        self._stream: Any = None
        self._has_failed = False

    def logits(self, forward: Forward, step: StepTokens, token_ids: NDArray[np.int32]) -> Tensor | None:
        """float32 [n, vocabulary] after the tokens of a step, int32 [n]; None: it is no decode that can be captured. `forward` is the same each time:
        it is not kept, since it has the runner that has this."""
        n = step.num_sequences
        if self._has_failed or not n == step.num_tokens <= _MOST_SEQUENCES or step.tables is not None:
            return None
        key = rounded_up(n), rounded_up(-(-int(step.seq_lens.max()) // step.block_size))
        step, inputs = _repeated(step, token_ids, key[0])
        captured = self.graphs.get(key)
        if captured is None:
            try:
                with _ONE_AT_A_TIME:
                    captured = self.graphs[key] = self._captured(forward, step, inputs.to(self._pool.device))
            except RuntimeError as error:
                self._has_failed, self._memory = True, None
                self.graphs.clear()
                self._logits.clear()
                said = (str(error).splitlines() or [""])[0]
                warnings.warn(f"decodes run uncaptured, which is slower: {said}", PagedWarning, stacklevel=2)
                return None
        else:
            captured.inputs.copy_(inputs)
            self._backend.renew(captured.plan, step, self._pool)
        captured.replay()
        # The next replay writes there, while these may not have been read.
        return captured.logits[:n].to(torch.float32, copy=True)

    def _captured(self, forward: Forward, step: StepTokens, inputs: Tensor) -> Captured:
        """Run the pass, so that its kernels are compiled and its plan is whole, and capture it."""
        plan = self._backend.prepare(step, self._pool)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._pool.device)
        stream, current = self._stream, torch.cuda.current_stream(self._pool.device)
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                found = forward(step, inputs, plan)
        finally:
            # Of a pass that is interrupted, too: what it writes comes before what is run next.
            current.wait_stream(stream)
        logits = self._logits.setdefault(len(found), found)
        graph = torch.cuda.CUDAGraph()
        # Other threads go on with their own work. A capture that fails leaves its stream as the current one.
        captures = torch.cuda.graph(graph, pool=self._memory, stream=stream, capture_error_mode="thread_local")
        with torch.cuda.stream(current), captures:
            logits.copy_(forward(step, inputs, plan))
        self._memory = graph.pool()
        return Captured(graph.replay, inputs, plan, logits)


def _repeated(step: StepTokens, token_ids: NDArray[np.int32], size: int) -> tuple[StepTokens, Tensor]:
    """So many sequences, the last of them again and again, and their tokens, positions and slots, int64 [3, size]."""
    chosen = np.minimum(np.arange(size), step.num_sequences - 1)
    positions, slots = step.positions[chosen], step.slot_mapping[chosen]
    repeated = replace(
        step,
        positions=positions,
        slot_mapping=slots,
        query_start_loc=rising(size + 1),
        seq_lens=step.seq_lens[chosen],
        block_tables=step.block_tables[chosen],
    )
    return repeated, torch.from_numpy(np.stack([token_ids[chosen].astype(np.int64), positions, slots]))
