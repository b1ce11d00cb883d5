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
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged.attention import LayeredPool, StepTokens
from paged.attention.backend import RenewsPlans
from paged.attention.step_tokens import Ints
from paged.base.growing import rising, rounded_up
from paged.errors import PagedWarning

# Behind it a GPU has enough to do, and Python keeps up.
_MOST_TOKENS = 512
# A capture begins by waiting for the whole device, which one that is under way in another thread does not survive.
_ONE_AT_A_TIME = Lock()


class Pass(NamedTuple):
    """n tokens, each the last of its sequence, and what each group of layers that attend sees of them."""

    step: StepTokens
    groups: dict[int, StepTokens]


Forward = Callable[[Pass, Tensor, dict[int, Any]], Tensor]
"""(a pass; int64 [2 + k, n]: tokens, positions, pages that states are read from and written to, and slots by group and page of a block; plans by group)
→ logits [n, vocabulary]"""


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

    def __init__(self, backend: RenewsPlans | None, pool: LayeredPool, groups: Iterable[int], tile: int | None) -> None:
        """Without a backend no layer attends."""
        self._backend: Any = backend
        self._pool, self._groups, self._tile = pool, sorted(groups), tile
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
        # A state is that behind all tokens of its sequence.
        may_cut = self._tile is not None and step.states is None
        if self._has_failed or n > _MOST_TOKENS or not (may_cut or n == step.num_sequences):
            return None
        size = self._tile or rounded_up(n)
        chosen = np.minimum(np.arange(size), n - 1)
        its = _as_sequences(step, self._groups, chosen)
        pages = [each.T for each in its.step.states or ()]
        slots = [each.slot_mapping.reshape(size, -1).T for each in its.groups.values()]
        inputs = torch.from_numpy(np.concatenate([token_ids[None, chosen], its.step.positions[None], *pages, *slots]))
        if bool((inputs[2:] < 0).any()):
            # Some place writes nothing, or has no state yet.
            return None
        key = size, rounded_up(-(-int(step.positions.max() + 1) // step.block_size))
        captured = self.graphs.get(key)
        if captured is None:
            with _ONE_AT_A_TIME:
                found = self._first(key, forward, its, inputs.to(self._pool.device))
            return found[:n].to(torch.float32, copy=True)
        captured.inputs.copy_(inputs)
        for group, seen in its.groups.items():
            self._backend.renew(captured.plans[group], seen, self._pool)
        captured.replay()
        # The next replay writes there, while these may not have been read.
        return captured.logits[:n].to(torch.float32, copy=True)

    def _first(self, key: tuple[int, int], forward: Forward, its: Pass, inputs: Tensor) -> Tensor:
        """Run the pass, so that its kernels are compiled and its plans are whole; then capture it, which runs nothing. Returns the logits of the run: a
        second one would begin with states that the first one left."""
        plans = {group: self._backend.prepare(seen, self._pool) for group, seen in its.groups.items()}
        found = self._run(forward, its, inputs, plans)
        logits = self._logits.setdefault(len(found), found)
        try:
            replay = self._capture(lambda: logits.copy_(forward(its, inputs, plans)))
        except RuntimeError as error:
            self._has_failed, self._memory = True, None
            self.graphs.clear()
            self._logits.clear()
            said = (str(error).splitlines() or [""])[0]
            warnings.warn(f"passes run uncaptured, which is slower: {said}", PagedWarning, stacklevel=3)
        else:
            self.graphs[key] = Captured(replay, inputs, plans, logits)
        return found

    def _run(self, forward: Forward, its: Pass, inputs: Tensor, plans: dict[int, Any]) -> Tensor:
        """The logits of the pass, on the stream on which it will be captured."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._pool.device)
        stream, current = self._stream, torch.cuda.current_stream(self._pool.device)
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                return forward(its, inputs, plans)
        finally:
            # Of a pass that is interrupted, too: what it writes comes before what is run next.
            current.wait_stream(stream)

    def _capture(self, work: Callable[[], object]) -> Callable[[], None]:
        """What replays the kernels that this launches."""
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._pool.device)
        # Other threads go on with their own work. A capture that fails leaves its stream as the current one.
        captures = torch.cuda.graph(graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local")
        with torch.cuda.stream(current), captures:
            work()
        self._memory = graph.pool()
        return graph.replay


def _as_sequences(step: StepTokens, groups: Iterable[int], chosen: Ints) -> Pass:
    """The chosen tokens of a step, each the last of a sequence."""
    owners = np.arange(step.num_sequences).repeat(np.diff(step.query_start_loc))[chosen]
    its = replace(
        step,
        positions=step.positions[chosen],
        slot_mapping=step.slot_mapping[chosen],
        query_start_loc=rising(len(chosen) + 1),
        seq_lens=step.positions[chosen] + 1,
        block_tables=step.block_tables[owners],
        num_padded=0,
        tables=step.tables and tuple(each if each is None else each[owners] for each in step.tables),
        written_from=None if step.written_from is None else step.written_from[:, owners],
        states=step.states and (step.states[0][owners], step.states[1][owners]),
    )
    return Pass(its, {group: its.of_group(group) for group in groups})
