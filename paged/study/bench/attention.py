"""Attention alone: every backend over the same blocks, as an engine's steps would read them.

    decode    | one token of every sequence
    prefill   | the last `prompt` tokens of each of 4 sequences
    mixed     | one token of every sequence but the last, and the last `prompt` tokens of that one, in one call

A pool has enough layers to exceed a processor's cache, and its blocks lie in random order. What a backend prepares once
for all layers of a step is not timed.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from paged.attention import AttentionBackend, KVPool, LayerOptions, LayerShape, StepTokens, get_backend
from paged.attention.kv_dtypes import AUTO, head_bytes
from paged.errors import InvalidConfig, UnsupportedByBackend
from paged.model.free_memory import check_fits
from paged.study.bench.workloads import Measured
from paged.study.hardware import StepWork
from paged.study.limits import at_least

# K and V of a pool's layers together: more than a processor's cache holds. Steps so small that they would need more layers stay in the cache.
_BYTES, _MOST_LAYERS = 256 * 2**20, 256
_PREFILLS = 4
# The backends of a CPU but the reference, which reads slot by slot and takes too long to run by default.
_HERE = ("native", "torch_gather")
_CPU = torch.device("cpu")


class HeadShape(msgspec.Struct, frozen=True):
    """Query heads, heads of K and V, and the size of a head. Raises InvalidConfig if query heads cannot share heads of K and V evenly."""

    heads: int
    kv_heads: int
    head_size: int

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise InvalidConfig(f"{self.heads} query heads cannot share {self.kv_heads} heads of K and V evenly")

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads}/{self.head_size}"


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """The work of a step: `sequences` with `context` tokens each, of which the last `prompt` are new in a prefill. Raises InvalidConfig for a prompt
    longer than its context."""

    dtype: str
    kv_dtype: str = AUTO
    sequences: int = 64
    context: int = 512
    prompt: int = 256

    def __post_init__(self) -> None:
        if self.prompt > self.context:
            raise InvalidConfig(
                f"prompt is {self.prompt:,}; of a context of {self.context:,} tokens at most all can be new"
            )


class AttentionTimes(msgspec.Struct, frozen=True, kw_only=True):
    """One backend on one shape and block size. Milliseconds of the wall clock of one layer.

    decode_bytes_per_s   bytes of K and V that are attended to, over the median
    share_of_copy        the same as a share of `copy_bytes_per_s`, the rate of a copy on this machine, reads and writes counted
    prefill_flops_per_s  4 × heads × head size × positions that the new tokens attend to, over the median
    """

    backend: str
    is_invariant: bool
    shape: HeadShape
    block_size: int
    load: Load
    threads: int
    decode_ms: Measured
    decode_bytes_per_s: float
    share_of_copy: float
    prefill_ms: Measured
    prefill_flops_per_s: float
    mixed_ms: Measured
    copy_bytes_per_s: float


def chosen_backends(
    names: Sequence[str] | None,
    shape: HeadShape,
    block_size: int,
    dtype: torch.dtype,
    *,
    kv_dtype: str = AUTO,
    invariant: bool,
) -> list[AttentionBackend]:
    """Return the backends of these names; None: all that support such layers on a CPU, but the reference.

    Raises UnknownBackend, and UnsupportedByBackend for a named backend that does not support them.
    """
    layers = LayerShape(shape.heads, shape.kv_heads, shape.head_size, block_size, dtype, _CPU, kv_dtype=kv_dtype)
    chosen = []
    for name in dict.fromkeys(names or _HERE):
        try:
            backend = get_backend(name, invariant=invariant)
            backend.check(layers)
        except UnsupportedByBackend:
            if names:
                raise
        else:
            chosen.append(backend)
    return chosen


class AttentionBench:
    """Backends on one shape and block size, over one pool, timed in turn in each round. `steps` are a decode, a prefill and both mixed.

    Raises InvalidConfig for a pool that does not fit in memory.
    """

    def __init__(
        self, backends: Sequence[AttentionBackend], shape: HeadShape, block_size: int, load: Load, dtype: torch.dtype
    ) -> None:
        self._shape, self._block_size, self._load = shape, block_size, load
        of_head = head_bytes(load.kv_dtype, shape.head_size, dtype.itemsize)
        self._layer_bytes = 2 * load.sequences * load.context * shape.kv_heads * of_head
        self.pool, tables = _pool(shape, block_size, load, dtype, min(-(-_BYTES // self._layer_bytes), _MOST_LAYERS))
        ones = np.ones(load.sequences, np.int64)
        few = min(_PREFILLS, load.sequences)
        prefill = StepWork.of_rows([load.prompt] * few, [load.context] * few, sampled_rows=0)
        self._prefill_flops = 4 * shape.heads * shape.head_size * float(prefill.attended_pairs)
        self.steps = {
            "decode": _step(ones, tables, load.context, block_size),
            "prefill": _step(ones[:few] * load.prompt, tables[:few], load.context, block_size),
            "mixed": _step(np.append(ones[1:], load.prompt), tables, load.context, block_size),
        }
        drawn = torch.Generator().manual_seed(1)
        self._queries = {
            name: torch.randn(step.num_tokens, shape.heads, shape.head_size, generator=drawn).to(dtype)
            for name, step in self.steps.items()
        }
        self._ways = [
            (backend, {name: backend.prepare(step, self.pool) for name, step in self.steps.items()})
            for backend in backends
        ]
        self._ms: list[dict[str, list[float]]] = [{name: [] for name in self.steps} for _ in backends]
        self._num_rounds = 0

    def round(self, *, is_counted: bool = True) -> None:
        """Time each backend once."""
        for (backend, plans), times in zip(self._ways, self._ms, strict=True):
            # A decode reads every layer of the pool; the other steps read another layer than the round before.
            every = range(self.pool.num_layers)
            for name, plan in plans.items():
                layers = every if name == "decode" else [self._num_rounds % len(every)]
                seconds = self._timed(backend, plan, name, layers)
                if is_counted:
                    times[name].append(seconds / len(layers) * 1e3)
        self._num_rounds += 1

    @torch.inference_mode()
    def _timed(self, backend: AttentionBackend, plan: object, name: str, layers: Sequence[int]) -> float:
        options, queries = LayerOptions(self._shape.head_size**-0.5), self._queries[name]
        began = time.perf_counter()
        for layer in layers:
            backend.attend(queries, self.pool, layer, plan, options)
        return time.perf_counter() - began

    def times(self, copy_bytes_per_s: float) -> list[AttentionTimes]:
        """Return the times of all rounds so far, in the order of the backends."""
        found = []
        for (backend, _), times in zip(self._ways, self._ms):
            ms = {f"{name}_ms": Measured.of(each) for name, each in times.items()}
            rate = self._layer_bytes / ms["decode_ms"].median * 1e3
            its = AttentionTimes(
                backend=backend.name,
                is_invariant=backend.is_invariant,
                shape=self._shape,
                block_size=self._block_size,
                load=self._load,
                threads=torch.get_num_threads(),
                decode_bytes_per_s=rate,
                share_of_copy=rate / copy_bytes_per_s,
                prefill_flops_per_s=self._prefill_flops / ms["prefill_ms"].median * 1e3,
                copy_bytes_per_s=copy_bytes_per_s,
                **ms,
            )
            found.append(its)
        return found


def attention_times(
    backends: Sequence[AttentionBackend],
    shape: HeadShape,
    block_size: int,
    load: Load,
    dtype: torch.dtype,
    *,
    copy_bytes_per_s: float,
    rounds: int = 7,
    after_round: Callable[[], object] = lambda: None,
) -> list[AttentionTimes]:
    """Time the backends in `rounds` rounds after a warm-up. Raises InvalidConfig below one round."""
    at_least("rounds", rounds, 1)
    bench = AttentionBench(backends, shape, block_size, load, dtype)
    # The first round pays for what is made once.
    bench.round(is_counted=False)
    for _ in range(rounds):
        bench.round()
        after_round()
    return bench.times(copy_bytes_per_s)


def _pool(
    shape: HeadShape, block_size: int, load: Load, dtype: torch.dtype, num_layers: int
) -> tuple[KVPool, NDArray[np.int32]]:
    """Return a pool of so many layers with random values, and block tables into it, int32 [sequences, columns], in random order."""
    columns = -(-load.context // block_size)
    num_blocks = load.sequences * columns
    sizes: dict[str, Any] = {
        "num_layers": num_layers,
        "block_size": block_size,
        "num_kv_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "kv_dtype": load.kv_dtype,
    }
    check_fits(num_blocks, 0, KVPool.bytes_per_block(**sizes, dtype=dtype), _CPU)
    pool = KVPool(num_blocks=num_blocks, **sizes, dtype=dtype)
    drawn = torch.Generator().manual_seed(0)
    slots = torch.arange(num_blocks * block_size)
    numbers = torch.empty(2, len(slots), shape.kv_heads, shape.head_size, dtype=dtype).normal_(generator=drawn)
    for layer in range(num_layers):
        pool.write_kv(layer, slots, *numbers)
    tables = np.random.default_rng(0).permutation(num_blocks).astype(np.int32).reshape(load.sequences, columns)
    return pool, tables


def _step(num_new: NDArray[np.int64], tables: NDArray[np.int32], context: int, block_size: int) -> StepTokens:
    """Return the step that computes the last `num_new` [sequences] of `context` tokens of each sequence."""
    starts = np.append(0, num_new.cumsum())
    owners = np.arange(len(num_new)).repeat(num_new)
    positions = np.arange(starts[-1]) - starts[owners] + (context - num_new)[owners]
    blocks = tables[owners, positions // block_size].astype(np.int64)
    return StepTokens(
        positions=positions,
        slot_mapping=blocks * block_size + positions % block_size,
        query_start_loc=starts,
        seq_lens=np.full(len(num_new), context),
        block_tables=tables,
        block_size=block_size,
    )
