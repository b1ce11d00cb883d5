"""Forward passes as CUDA graphs, captured once and replayed with other numbers; each token of such a pass is the last of its sequence.

A GPU computes a small pass faster than Python launches its kernels; with 8 billion parameters in bfloat16, several times as fast
(benchmarks/results/gpu.md). Captured are decodes, and tiles of the batch-invariant mode, where each token of a prompt counts as a sequence that ends
with it. A graph is for one number of tokens and one width of tables, each rounded up to a power of two. Places that are left over repeat the
last token, and so write what it writes. All graphs of a pool are captured on one stream and share memory; those of as many tokens share their
logits, too. The idea is vLLM's and SGLang's.
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

# With more tokens the GPU takes longer than Python's launches.
_MOST_TOKENS = 512
# A capture begins by waiting for the whole device, which breaks a capture under way in another thread.
_ONE_AT_A_TIME = Lock()


class Pass(NamedTuple):
    """n tokens, each the last of its sequence, as the step and as each group of attention layers sees them."""

    step: StepTokens
    groups: dict[int, StepTokens]


Forward = Callable[[Pass, Tensor, dict[int, Any]], Tensor]
"""(pass; inputs, int64 [2 + k, n]: tokens, positions, pages that states are read from and written to, slots by group and page of a block; plans by
group) → logits [n, vocabulary]"""


@dataclass(frozen=True, slots=True)
class Captured:
    """A graph, and the tensors that it reads and writes: `inputs` as in Forward, those in `plans`, and `logits`, [n, vocabulary]."""

    replay: Callable[[], None]
    inputs: Tensor
    plans: dict[int, Any]
    logits: Tensor


class CapturedPasses:
    """The graphs of one model on one pool whose attention layers are in `groups`: of tiles of `tile` places, or, without it, of decodes.

    If a capture fails it warns, once, frees all graphs, and leaves all passes to the caller.
    """

    def __init__(self, backend: RenewsPlans | None, pool: LayeredPool, groups: Iterable[int], tile: int | None) -> None:
        """Make it without graphs. `backend` None: no layer attends."""
        self._backend: Any = backend
        self._pool, self._groups, self._tile = pool, sorted(groups), tile
        # By tokens and columns, both rounded up.
        self.graphs: dict[tuple[int, int], Captured] = {}
        # By number of tokens, the logits that graphs write.
        self._logits: dict[int, Tensor] = {}
        # Graphs share memory for intermediate results, so one runs at a time. Memory that one frees is safe for another on the same stream alone.
        self._memory: Any = None
        self._stream: Any = None
        self._has_failed = False

    def logits(self, forward: Forward, step: StepTokens, token_ids: NDArray[np.int32]) -> Tensor | None:
        """Run a step. Return logits after its tokens, float32 [n, vocabulary]; None: it cannot be captured, and has not run. `forward` is the same at
        each call; it is no field, since it refers to the runner that owns this object."""
        n = step.num_tokens
        # A state holds all tokens of its sequence, so tokens of one row cannot be sequences of their own.
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
            # A token has no slot, or no state yet.
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
        # A copy: the next replay may write there before the caller has read them.
        return captured.logits[:n].to(torch.float32, copy=True)

    def _first(self, key: tuple[int, int], forward: Forward, its: Pass, inputs: Tensor) -> Tensor:
        """Run the pass, so that its kernels are compiled and its plans are whole; then capture it, which runs nothing. Return the logits of the run,
        since a second run would begin with the states that the first one left."""
        plans = {group: self._backend.prepare(seen, self._pool) for group, seen in its.groups.items()}
        found = self._run(forward, its, inputs, plans)
        logits = self._logits.setdefault(len(found), found)
        try:
            replay = self._capture(lambda: logits.copy_(forward(its, inputs, plans)))
        except RuntimeError as error:
            self._has_failed, self._memory = True, None
            self.graphs.clear()
            self._logits.clear()
            cause = (str(error).splitlines() or [""])[0]
            warnings.warn(f"passes run uncaptured, which is slower: {cause}", PagedWarning, stacklevel=3)
        else:
            self.graphs[key] = Captured(replay, inputs, plans, logits)
        return found

    def _run(self, forward: Forward, its: Pass, inputs: Tensor, plans: dict[int, Any]) -> Tensor:
        """Run the pass on the stream on which it will be captured. Return its logits."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._pool.device)
        stream, current = self._stream, torch.cuda.current_stream(self._pool.device)
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                return forward(its, inputs, plans)
        finally:
            # Also if the pass is interrupted: its writes come before the next pass.
            current.wait_stream(stream)

    def _capture(self, work: Callable[[], object]) -> Callable[[], None]:
        """Capture the kernels that `work` launches. Return what replays them."""
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._pool.device)
        # "thread_local": other threads may use the device meanwhile. A capture that fails leaves its stream as the current one.
        captures = torch.cuda.graph(graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local")
        with torch.cuda.stream(current), captures:
            work()
        self._memory = graph.pool()
        return graph.replay


def _as_sequences(step: StepTokens, groups: Iterable[int], chosen: Ints) -> Pass:
    """Return the chosen tokens of a step, each as the last of a sequence."""
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
