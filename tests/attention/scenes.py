"""Sequences in plain contiguous memory, and steps that read them through block tables.

Memory of no sequence is NaN: other layers, spare blocks, and the slots of a block beyond its sequence's tokens. Entries
behind a table's end name such blocks, or blocks that do not exist. A backend that reads any of them, even to multiply it by
0, returns NaN. Under the address sanitizer (`make sanitize`) C code that reads one at all ends the process.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from paged.attention import AttentionBackend, EntryPlace, KVPlace, KVPool, LayeredPool, LayerOptions, StepTokens
from paged.attention.kv_dtypes import block_bytes

NUM_LAYERS, LAYER = 3, 1
NUM_SPARE = 3

# The process, which has these functions where it runs under the address sanitizer.
PROCESS = ctypes.CDLL(None)
IS_SANITIZED = hasattr(PROCESS, "__asan_poison_memory_region")


@dataclass(frozen=True)
class History:
    """n tokens: queries [n, num_heads, head_dim], keys and values [n, num_kv_heads, head_dim], in the order of positions."""

    queries: Tensor
    keys: Tensor
    values: Tensor


# Tokens `done` to `stop` - 1 of the sequence are in the step; those before them were computed earlier.
Turn = tuple[History, int, int]


@dataclass(frozen=True)
class Scene:
    """A step, the pool with its sequences' history in it, and the queries, keys and values of its tokens."""

    pool: LayeredPool
    step: StepTokens
    queries: Tensor
    keys: Tensor
    values: Tensor

    def attend(self, backend: AttentionBackend, *options: LayerOptions, places: int | None = None) -> list[Tensor]:
        """What the backend gives for the step's tokens, by one plan, under each of these options; `places` in all."""
        step = self.step if places is None else replace(self.step, num_padded=places - self.step.num_tokens)
        return self._forward(backend, step, 0, options)

    def attend_in_parts(self, backend: AttentionBackend, options: LayerOptions, cuts: list[int], places: int) -> Tensor:
        """The same, the step being cut before these tokens: K and V of a part are written when its turn comes."""
        total = self.step.num_tokens
        edges = [0, *sorted({cut for cut in cuts if 0 < cut < total}), total]
        results = []
        for first, stop in pairwise(edges):
            part = self.step.part(first, stop, places - (stop - first))
            results += self._forward(backend, part, first, (options,))
        return torch.cat(results)

    def _forward(
        self, backend: AttentionBackend, step: StepTokens, first: int, options: tuple[LayerOptions, ...]
    ) -> list[Tensor]:
        own = slice(first, first + step.num_tokens)
        self.pool.write_kv(LAYER, step.slot_tensor(self.pool.device), self.keys[own], self.values[own])
        plan = backend.prepare(step, self.pool)
        padding = self.queries[:1].repeat(step.num_padded, 1, 1)
        queries = torch.cat([self.queries[own], padding])
        results = []
        for each in options:
            with _guarded(self.pool, step, each, backend.name):
                results.append(backend.attend(queries, self.pool, LAYER, plan, each))
        for result in results:
            assert result.shape == (*queries.shape[:2], self.values.shape[2]) and result.dtype == queries.dtype
            assert result.isfinite().all()
        return [result[: step.num_tokens] for result in results]


@contextmanager
def _guarded(pool: LayeredPool, step: StepTokens, options: LayerOptions, name: str) -> Iterator[None]:
    """Under the sanitizer, the native backend may read inside only what a token of the step sees."""
    if not IS_SANITIZED or name != "native":
        yield
        return
    _mark("poison", pool.pages.on_device)
    firsts = options.first_seen(step.seq_lens - np.diff(step.query_start_loc))
    own = pool.layer(LAYER)
    for entries in (own.keys, own.values):
        for i in range(step.num_sequences):
            for slot in step.slots_of(i, int(step.seq_lens[i]), entries.part)[firsts[i] :]:
                for each in entries.stored:
                    _mark("unpoison", each.blocks[slot // step.block_size, slot % step.block_size])
    try:
        yield
    finally:
        _mark("unpoison", pool.pages.on_device)


def _mark(how: str, memory: Tensor) -> None:
    size = ctypes.c_size_t(memory.numel() * memory.itemsize)
    getattr(PROCESS, f"__asan_{how}_memory_region")(ctypes.c_void_p(memory.data_ptr()), size)


def draw_turn(
    done: int,
    count: int,
    *,
    seed: int,
    num_kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 8,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Turn:
    """A sequence from a seed, of which `done` tokens were computed earlier and `count` come; the same seed gives the same one."""
    source, stop = torch.Generator().manual_seed(seed), done + count
    queries, keys, values = (
        torch.randn(stop, heads, size, generator=source, dtype=torch.float64).to(dtype)
        for heads, size in (
            (num_kv_heads * group, head_dim),
            (num_kv_heads, head_dim),
            (num_kv_heads, value_dim or head_dim),
        )
    )
    return History(queries, keys, values), done, stop


def lay_out(
    turns: list[Turn],
    *,
    block_size: int,
    seed: int = 0,
    options: Sequence[LayerOptions] = (),
    parts: int | None = None,
    is_even: bool = False,
    kv_dtype: str = "auto",
) -> Scene:
    """Put turns, in their order, into a pool with blocks in an order drawn from a seed.

    With `options`, what no token of the step can see by any of them is gone from the pool, and from the tables. With `parts` a block has so many
    pages, and K and V of a layer lie on two of them; or on one, pages being whole blocks of K, if `is_even`. `kv_dtype`: as of a KVPool.
    """
    random = np.random.default_rng(seed)
    counts = np.array([stop - done for _, done, stop in turns])
    seq_lens = np.array([stop for _, _, stop in turns])
    num_columns = -(-seq_lens // block_size)
    k = parts or 1
    num_owned = int(num_columns.sum()) * k
    blocks = random.permutation(num_owned + NUM_SPARE)
    stale = [*blocks[num_owned:], 2**31 - 1]
    tables = random.choice(stale, (len(turns), int(num_columns.max()) + 2, k)).astype(np.int32)
    for table, owned in zip(tables, np.split(blocks[:num_owned], np.cumsum(num_columns)[:-1] * k), strict=True):
        table[: len(owned) // k] = owned.reshape(-1, k)

    pool = _pool(turns[0][0], parts, is_even, kv_dtype, num_blocks=len(blocks), block_size=block_size)
    pool.poison(torch.arange(pool.num_blocks))
    positions, slot_mapping = [], []
    for i, (sequence, done, stop) in enumerate(turns):
        at = np.arange(stop)
        first = min((int(each.first_seen(np.array([done]))[0]) for each in options), default=0)
        slots = tables[i].astype(np.int64)[at // block_size] * block_size + (at % block_size)[:, None]
        kept = slice(first, done)
        pool.write_kv(LAYER, torch.from_numpy(slots[kept]), sequence.keys[kept], sequence.values[kept])
        slot_mapping.append(slots[done:])
        positions.append(at[done:])
        tables[i, : first // block_size] = -1
    starts = np.concatenate([[0], np.cumsum(counts)])
    step = StepTokens(np.concatenate(positions), np.concatenate(slot_mapping), starts, seq_lens, tables, block_size)
    if parts is None:
        step = replace(step, slot_mapping=step.slot_mapping[:, 0], block_tables=tables[:, :, 0])
    queries, keys, values = (
        torch.cat([getattr(sequence, name)[done:stop] for sequence, done, stop in turns])
        for name in ("queries", "keys", "values")
    )
    return Scene(pool, step, queries, keys, values)


def _pool(
    sequence: History, parts: int | None, is_even: bool, kv_dtype: str, *, num_blocks: int, block_size: int
) -> LayeredPool:
    """A pool of blocks of all layers; or of blocks of so many pages, K of a layer on one and V on the next, and as much room beside them as one
    number takes."""
    (_, heads, key_size), dtype = sequence.keys.shape, sequence.keys.dtype
    value_size = sequence.values.shape[2]
    sizes = {"num_blocks": num_blocks, "block_size": block_size, "dtype": dtype}
    if parts is None:
        shape = {"num_kv_heads": heads, "head_dim": key_size, "value_dim": value_size, "kv_dtype": kv_dtype}
        return KVPool(num_layers=NUM_LAYERS, **shape, **sizes)
    ends = [0 if is_even else dtype.itemsize] * parts
    layers = {}
    for layer in range(NUM_LAYERS):
        places = []
        for part, size in ((layer % parts, key_size), ((layer + (not is_even)) % parts, value_size)):
            places.append(EntryPlace(part, ends[part], heads, size, kv_dtype))
            ends[part] += block_bytes(kv_dtype, block_size, heads, size, dtype.itemsize)
        layers[layer] = KVPlace(0, *places)
    return LayeredPool(layers, page_bytes=max(ends), **sizes)
