"""Passes as CUDA graphs: a forward pass of so many tokens, of which each is the last of its sequence, is captured once, and replayed with other numbers.

A GPU computes such a pass faster than Python launches its kernels: of 8 billion parameters in bfloat16 several times as fast
(benchmarks/results/gpu.md). Captured are decodes; and tiles of the batch-invariant mode, in which a token of a prompt is a sequence of its own, that ends
with it. A graph holds for so many tokens, and tables so wide, each rounded up to a power of two; places that are left repeat the last token, so that
they write what it writes. All graphs of a pool are captured on one stream and share memory, those of as many tokens their logits, too. The
idea is vLLM's and SGLang's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
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
_MOST_TOKENS = 512
# A capture begins by waiting for the whole device, which one that is under way in another thread does not survive.
_ONE_AT_A_TIME = Lock()

Steps = dict[int, StepTokens]
"""A pass as each group of layers sees it, and so its plans."""
Forward = Callable[[Steps, Tensor, dict[int, Any]], Tensor]
"""(a pass of n tokens; int64 [2 + k, n]: tokens, positions, and slots by group and page of a block; plans) → logits [n, vocabulary]"""


@dataclass(frozen=True, slots=True)
class Captured:
    """A graph, and the tensors that it reads and writes: `inputs`, as of Forward, those of `plans`, and `logits`, [n, vocabulary]."""

    replay: Callable[[], None]
    inputs: Tensor
    plans: dict[int, Any]
    logits: Tensor


class CapturedPasses:
    """The graphs of one model on one pool, whose layers are in these groups; with `tile` of tiles of so many places, else of decodes. Where a pass cannot be
    captured it warns, once, frees them, and leaves all passes to the caller."""

    def __init__(self, backend: RenewsPlans, pool: LayeredPool, groups: Iterable[int], tile: int | None) -> None:
        self._backend, self._pool, self._groups, self._tile = backend, pool, sorted(groups), tile
        # By tokens and columns, both rounded up.
        self.graphs: dict[tuple[int, int], Captured] = {}
        # By tokens, where graphs write.
        self._logits: dict[int, Tensor] = {}
        # Graphs share memory for what they compute in between: one runs at a time. What one frees is another's on the same stream alone.
        self._memory: Any = None
        self._stream: Any = None
        self._has_failed = False

    def logits(self, forward: Forward, step: StepTokens, token_ids: NDArray[np.int32]) -> Tensor | None:
        """float32 [n, vocabulary] after the tokens of a step, int32 [n]; None: it is none that can be captured. `forward` is the same each time:
        it is not kept, since it has the runner that has this."""
        n = step.num_tokens
        if self._has_failed or n > _MOST_TOKENS or (self._tile is None and n != step.num_sequences):
            return None
        size = self._tile or rounded_up(n)
        steps = _as_sequences(step, self._groups, size)
        slots = [its.slot_mapping.reshape(size, -1).T for its in steps.values()]
        chosen = np.minimum(np.arange(size), n - 1)
        inputs = torch.from_numpy(np.concatenate([token_ids[None, chosen], step.positions[None, chosen], *slots]))
        if bool((inputs[2:] < 0).any()):
            # Some place writes nothing.
            return None
        key = size, rounded_up(-(-int(step.positions.max() + 1) // step.block_size))
        captured = self.graphs.get(key)
        if captured is None:
            try:
                with _ONE_AT_A_TIME:
                    captured = self.graphs[key] = self._captured(forward, steps, inputs.to(self._pool.device))
            except RuntimeError as error:
                self._has_failed, self._memory = True, None
                self.graphs.clear()
                self._logits.clear()
                said = (str(error).splitlines() or [""])[0]
                warnings.warn(f"decodes run uncaptured, which is slower: {said}", PagedWarning, stacklevel=2)
                return None
        else:
            captured.inputs.copy_(inputs)
            for group, its in steps.items():
                self._backend.renew(captured.plans[group], its, self._pool)
        captured.replay()
        # The next replay writes there, while these may not have been read.
        return captured.logits[:n].to(torch.float32, copy=True)

    def _captured(self, forward: Forward, steps: Steps, inputs: Tensor) -> Captured:
        """Run the pass, so that its kernels are compiled and its plans are whole, and capture it."""
        plans = {group: self._backend.prepare(its, self._pool) for group, its in steps.items()}
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._pool.device)
        stream, current = self._stream, torch.cuda.current_stream(self._pool.device)
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                found = forward(steps, inputs, plans)
        finally:
            # Of a pass that is interrupted, too: what it writes comes before what is run next.
            current.wait_stream(stream)
        logits = self._logits.setdefault(len(found), found)
        graph = torch.cuda.CUDAGraph()
        # Other threads go on with their own work. A capture that fails leaves its stream as the current one.
        captures = torch.cuda.graph(graph, pool=self._memory, stream=stream, capture_error_mode="thread_local")
        with torch.cuda.stream(current), captures:
            logits.copy_(forward(steps, inputs, plans))
        self._memory = graph.pool()
        return Captured(graph.replay, inputs, plans, logits)


def _as_sequences(step: StepTokens, groups: Iterable[int], size: int) -> Steps:
    """So many sequences, each up to a token of the step, the last of them again and again."""
    chosen = np.minimum(np.arange(size), step.num_tokens - 1)
    owners = np.arange(step.num_sequences).repeat(np.diff(step.query_start_loc))[chosen]
    repeated = replace(
        step,
        positions=step.positions[chosen],
        slot_mapping=step.slot_mapping[chosen],
        query_start_loc=rising(size + 1),
        seq_lens=step.positions[chosen] + 1,
        block_tables=step.block_tables[owners],
        num_padded=0,
        tables=step.tables and tuple(each if each is None else each[owners] for each in step.tables),
        written_from=None if step.written_from is None else step.written_from[:, owners],
    )
    return {group: repeated.of_group(group) for group in groups}
