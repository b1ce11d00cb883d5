"""Triton kernels of attention that read K and V where they lie, through block tables. Importing them needs Triton.

A program computes a tile of rows that read the same head of K and V. A row is one query: one token, one query head. The
program goes through the context in stretches of STRETCH positions, tile by tile, and merges each stretch's result into
what came before. If the stretches are few enough, each has a program of its own, and a second kernel merges them in the
same order. Tiles and stretches begin at multiples of their sizes, and finite numbers that a row does not see change
nothing. So a row's result depends on its own context alone, to the last bit.

Running maximum and sum are FlashAttention's (Dao et al., 2022), parallel stretches Flash-Decoding's (Dao et al., 2023),
and a fixed size of stretches is from "Defeating Nondeterminism in LLM Inference" (Thinking Machines, 2025). Scales of K
multiply scores. V is scaled before its product, because a weight times a scale may be too small for float16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged.base.growing import rounded_up

from .backend import LayerOptions
from .kv_dtypes import CODE_BITS
from .kv_pool import LayerKV
from .layouts.quantised import AnyEntries

STRETCH = 512  # positions; a multiple of those of any tile
LEAST_ROWS = 16  # of a tile in each direction: a product takes no fewer
_MOST_POSITIONS = 64  # of a tile
_TILE_BYTES = 16 * 1024  # of K or V in a tile, at most, unless LEAST_ROWS positions are more
_MOST_PARTIAL_BYTES = 64 * 2**20
"""Bytes of partial results, at most; if stretches would need more, one program goes through all of a row's."""
_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces of sequences: each is a few consecutive tokens, which are computed together.

    pieces  int32 [4, n]; sequence, first token, number of tokens, and position of the first
    rows    rows of a tile: tokens of a piece times heads of a group, rounded up to a power of two
    """

    pieces: Tensor
    rows: int


@triton.jit
def _merged(highest, weight, total, its_highest, its_weight, its_total):  # type: ignore[no-untyped-def]
    """Merge two stretches: the highest score, the sum of weights relative to it, and the weighted sum of values."""
    higher = tl.maximum(highest, its_highest)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    shrink, its_shrink = tl.exp2(highest - base), tl.exp2(its_highest - base)
    # An explicit fma, so that both kernels round alike.
    weight = tl.fma(its_weight, its_shrink, weight * shrink)
    total = tl.fma(its_total, its_shrink[:, None], total * shrink[:, None])
    return higher, weight, total


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    shrunk = tl.exp(-2.0 * tl.abs(x))
    far = tl.where(x < 0, -1.0, 1.0) * (1.0 - shrunk) / (1.0 + shrunk)
    # Near 0 `1.0 - shrunk` loses precision: take a polynomial.
    square = x * x
    return tl.where(square < 0.01, x * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0))), far)


@triton.jit  # type: ignore[untyped-decorator]
def _starts(table, width, sequence, positions, is_read, page_step, token_step, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return at which element the entries of these positions begin."""
    pages = tl.load(table + sequence * width + positions // block, mask=is_read, other=0)
    return pages.to(tl.int64) * page_step + positions % block * token_step


@triton.jit  # type: ignore[untyped-decorator]
def _numbers(memory, starts, head_start, is_read, like, bits: tl.constexpr, size: tl.constexpr, padded: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load one head, [positions, padded], in the dtype `like`: 0 where nothing is read; codes are not scaled."""
    at = tl.arange(0, padded)
    is_inside = is_read[:, None] & (at < size)[None, :]
    if bits == 4:
        both = tl.load(memory + starts[:, None] + (head_start + at // 2)[None, :], mask=is_inside, other=0).to(tl.int32)
        found = tl.where((at % 2 == 0)[None, :], ((both & 15) ^ 8) - 8, both >> 4)
    else:
        found = tl.load(memory + starts[:, None] + (head_start + at)[None, :], mask=is_inside, other=0)
    return found.to(like)


@triton.jit  # type: ignore[untyped-decorator]
def _stretch(  # type: ignore[no-untyped-def]
    q, firsts, lasts, lowest, low, stop, sequence, head,
    keys, key_scales, key_table, key_page, key_scale_page, values, value_scales, value_table, value_page, value_scale_page,
    width, scale, soft_cap,
    kv_heads: tl.constexpr, size: tl.constexpr, value_size: tl.constexpr, padded: tl.constexpr, value_padded: tl.constexpr,
    block: tl.constexpr, bits: tl.constexpr, has_cap: tl.constexpr, tile_rows: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Attend to positions `low` to `stop` - 1, and return what `_merged` takes. Nothing before `lowest` is read."""
    highest = tl.full([tile_rows], float("-inf"), tl.float32)
    weight = tl.zeros([tile_rows], tl.float32)
    total = tl.zeros([tile_rows, value_padded], tl.float32)
    # Bytes of a head's codes, or its numbers.
    of_key: tl.constexpr = (size + 1) // 2 if bits == 4 else size
    of_value: tl.constexpr = (value_size + 1) // 2 if bits == 4 else value_size
    for start in range(low // tile * tile, stop, tile):
        positions = start + tl.arange(0, tile)
        is_read = (positions >= lowest) & (positions < stop)
        starts = _starts(key_table, width, sequence, positions, is_read, key_page, kv_heads * of_key, block)
        k = _numbers(keys, starts, head * of_key, is_read, q.dtype, bits, size, padded)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if bits:
            of_scales = _starts(key_table, width, sequence, positions, is_read, key_scale_page, kv_heads, block)
            scores *= tl.load(key_scales + of_scales + head, mask=is_read, other=0).to(tl.float32)[None, :]
        if has_cap:
            scores = _tanh(scores / soft_cap) * soft_cap
        is_seen = (positions[None, :] >= firsts[:, None]) & (positions[None, :] <= lasts[:, None])
        scores = tl.where(is_seen, scores * _LOG2_E, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(highest - base)
        weight = tl.fma(weight, shrink, tl.sum(weights, 1))
        starts = _starts(value_table, width, sequence, positions, is_read, value_page, kv_heads * of_value, block)
        v = _numbers(values, starts, head * of_value, is_read, q.dtype, bits, value_size, value_padded)
        if bits:
            of_scales = _starts(value_table, width, sequence, positions, is_read, value_scale_page, kv_heads, block)
            its_scales = tl.load(value_scales + of_scales + head, mask=is_read, other=0).to(tl.float32)
            v = (v.to(tl.float32) * its_scales[:, None]).to(q.dtype)
        total = tl.dot(weights.to(q.dtype), v, total * shrink[:, None], input_precision="ieee")
        highest = higher
    return highest, weight, total


@triton.jit  # type: ignore[untyped-decorator]
def _store(  # type: ignore[no-untyped-def]
    out, at, highest, weight, total, is_row, sinks, heads, has_sinks: tl.constexpr, value_size: tl.constexpr, value_padded: tl.constexpr
):  # fmt: skip
    """Divide totals by weights and store the rows' results. A sink adds its weight, and no value."""
    if has_sinks:
        sink = tl.load(sinks + heads, mask=is_row, other=0).to(tl.float32) * _LOG2_E
        highest, weight, total = _merged(highest, weight, total, sink, 1.0, tl.zeros_like(total))
    found = total / tl.where(weight > 0, weight, 1.0)[:, None]
    values = tl.arange(0, value_padded)
    is_inside = is_row[:, None] & (values < value_size)[None, :]
    tl.store(out + at[:, None] * value_size + values[None, :], found.to(out.dtype.element_ty), mask=is_inside)


@triton.jit(do_not_specialize=["num_pieces", "num_stretches", "width"])  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    queries, token_step, head_step, out, highests, weights, totals, sinks, pieces, num_pieces, num_stretches,
    keys, key_scales, key_table, key_page, key_scale_page, values, value_scales, value_table, value_page, value_scale_page,
    width, scale, soft_cap,
    kv_heads: tl.constexpr, group: tl.constexpr, size: tl.constexpr, value_size: tl.constexpr, padded: tl.constexpr, value_padded: tl.constexpr,
    block: tl.constexpr, bits: tl.constexpr, window: tl.constexpr, chunk: tl.constexpr, has_cap: tl.constexpr, has_sinks: tl.constexpr,
    is_split: tl.constexpr, stretch_size: tl.constexpr, tile_rows: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    piece, head = tl.program_id(0), tl.program_id(1)
    sequence, first = tl.load(pieces + piece).to(tl.int64), tl.load(pieces + num_pieces + piece)
    num_tokens, position = tl.load(pieces + 2 * num_pieces + piece), tl.load(pieces + 3 * num_pieces + piece)
    rows = tl.arange(0, tile_rows)
    is_row = rows < num_tokens * group
    heads = head * group + rows % group
    lasts = tl.where(is_row, position + rows // group, -1)
    firsts, lowest = tl.zeros_like(lasts), position * 0
    if window:
        firsts, lowest = tl.maximum(firsts, lasts - window + 1), tl.maximum(lowest, position - window + 1)
    if chunk:
        firsts, lowest = tl.maximum(firsts, lasts // chunk * chunk), tl.maximum(lowest, position // chunk * chunk)
    end = position + num_tokens
    tokens = (first + rows // group).to(tl.int64)
    sizes = tl.arange(0, padded)
    at = tokens[:, None] * token_step + heads[:, None] * head_step + sizes[None, :]
    q = tl.load(queries + at, mask=is_row[:, None] & (sizes < size)[None, :], other=0)
    places = tokens * (kv_heads * group) + heads
    if is_split:
        stretch = tl.program_id(2)
        low, stop = tl.maximum(lowest, stretch * stretch_size), tl.minimum(end, (stretch + 1) * stretch_size)
        if low < stop:
            highest, weight, total = _stretch(
                q, firsts, lasts, lowest, low, stop, sequence, head,
                keys, key_scales, key_table, key_page, key_scale_page, values, value_scales, value_table, value_page, value_scale_page,
                width, scale, soft_cap,
                kv_heads, size, value_size, padded, value_padded, block, bits, has_cap, tile_rows, tile,
            )  # fmt: skip
            its = places * num_stretches + stretch
            tl.store(highests + its, highest, mask=is_row)
            tl.store(weights + its, weight, mask=is_row)
            of_values = tl.arange(0, value_padded)
            tl.store(totals + its[:, None] * value_padded + of_values[None, :], total, mask=is_row[:, None])
    else:
        highest = tl.full([tile_rows], float("-inf"), tl.float32)
        weight = tl.zeros([tile_rows], tl.float32)
        total = tl.zeros([tile_rows, value_padded], tl.float32)
        for start in range(lowest // stretch_size * stretch_size, end, stretch_size):
            low, stop = tl.maximum(lowest, start), tl.minimum(end, start + stretch_size)
            its_highest, its_weight, its_total = _stretch(
                q, firsts, lasts, lowest, low, stop, sequence, head,
                keys, key_scales, key_table, key_page, key_scale_page, values, value_scales, value_table, value_page, value_scale_page,
                width, scale, soft_cap,
                kv_heads, size, value_size, padded, value_padded, block, bits, has_cap, tile_rows, tile,
            )  # fmt: skip
            highest, weight, total = _merged(highest, weight, total, its_highest, its_weight, its_total)
        _store(out, places, highest, weight, total, is_row, sinks, heads, has_sinks, value_size, value_padded)


@triton.jit(do_not_specialize=["num_pieces", "num_stretches"])  # type: ignore[untyped-decorator]
def _merge_stretches(  # type: ignore[no-untyped-def]
    out, highests, weights, totals, sinks, pieces, num_pieces, num_stretches,
    kv_heads: tl.constexpr, group: tl.constexpr, value_size: tl.constexpr, value_padded: tl.constexpr,
    window: tl.constexpr, chunk: tl.constexpr, has_sinks: tl.constexpr, stretch_size: tl.constexpr, tile_rows: tl.constexpr,
):  # fmt: skip
    piece, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(pieces + num_pieces + piece)
    num_tokens, position = tl.load(pieces + 2 * num_pieces + piece), tl.load(pieces + 3 * num_pieces + piece)
    lowest = position * 0
    if window:
        lowest = tl.maximum(lowest, position - window + 1)
    if chunk:
        lowest = tl.maximum(lowest, position // chunk * chunk)
    rows = tl.arange(0, tile_rows)
    is_row = rows < num_tokens * group
    heads = head * group + rows % group
    places = (first + rows // group).to(tl.int64) * (kv_heads * group) + heads
    of_values = tl.arange(0, value_padded)
    highest = tl.full([tile_rows], float("-inf"), tl.float32)
    weight = tl.zeros([tile_rows], tl.float32)
    total = tl.zeros([tile_rows, value_padded], tl.float32)
    for stretch in range(lowest // stretch_size, tl.cdiv(position + num_tokens, stretch_size)):
        its = places * num_stretches + stretch
        its_highest = tl.load(highests + its, mask=is_row, other=float("-inf"))
        its_weight = tl.load(weights + its, mask=is_row, other=0)
        its_total = tl.load(totals + its[:, None] * value_padded + of_values[None, :], mask=is_row[:, None], other=0)
        highest, weight, total = _merged(highest, weight, total, its_highest, its_weight, its_total)
    _store(out, places, highest, weight, total, is_row, sinks, heads, has_sinks, value_size, value_padded)


def attend(
    queries: Tensor,
    out: Tensor,
    own: LayerKV,
    tables: tuple[Tensor, Tensor],
    pieces: Pieces,
    longest: int,
    options: LayerOptions,
) -> None:
    """Compute attention for pieces of `queries` [T, num_heads, size of K] into `out` [T, num_heads, size of V].

    `out` and each head of `queries` are contiguous. `tables`: the block tables of K's page and of V's page, int32
    [sequences, width] each. No context is longer than `longest`.
    """
    num_pieces, num_heads = pieces.pieces.shape[1], queries.shape[1]
    keys, values = own.keys, own.values
    sizes = {"value_size": values.size, "value_padded": _padded(values.size)}
    alike = {
        "kv_heads": keys.heads, "group": num_heads // keys.heads, "window": options.window or 0, "chunk": options.chunk or 0,
        "has_sinks": options.sinks is not None, "stretch_size": STRETCH, "tile_rows": pieces.rows,
    }  # fmt: skip
    num_stretches = -(-longest // STRETCH)
    partial = (len(queries), num_heads, num_stretches)
    is_split = (
        num_stretches > 1
        and 4 * len(queries) * num_heads * num_stretches * sizes["value_padded"] <= _MOST_PARTIAL_BYTES
    )
    highests, weights, totals = out, out, out
    if is_split:
        highests, weights = (torch.empty(partial, dtype=torch.float32, device=out.device) for _ in range(2))
        totals = torch.empty(*partial, sizes["value_padded"], dtype=torch.float32, device=out.device)
    sinks = out if options.sinks is None else options.sinks
    found = out, highests, weights, totals, sinks, pieces.pieces, num_pieces, num_stretches
    a_position = max(_padded(keys.size), sizes["value_padded"]) * queries.itemsize
    # Measured on an H200 (benchmarks/results/gpu.md): a 16-bit decode waits for memory; with 2 warps more programs run.
    is_light = pieces.rows == LEAST_ROWS and a_position <= _TILE_BYTES // _MOST_POSITIONS
    warps, stages = (2, 3) if is_light else (4, 2)
    kernel: Any = _attend[num_pieces, keys.heads, num_stretches if is_split else 1]
    # Triton launches on the current device, even if its arguments are on another.
    with torch.cuda.device(queries.get_device()):
        kernel(
            queries, queries.stride(0), queries.stride(1), *found, *_lies(keys, tables[0]), *_lies(values, tables[1]),
            tables[0].shape[1], options.scale, options.soft_cap or 0.0, **alike, **sizes, size=keys.size, padded=_padded(keys.size),
            block=own.keys.stored[0].blocks.shape[1], bits=CODE_BITS.get(keys.kv_dtype, 0), has_cap=options.soft_cap is not None,
            is_split=is_split, tile=max(LEAST_ROWS, min(_MOST_POSITIONS, _TILE_BYTES // a_position)), num_warps=warps, num_stages=stages,
            enable_fp_fusion=False,
        )  # fmt: skip
        if is_split:
            merge: Any = _merge_stretches[num_pieces, keys.heads]
            merge(*found, **alike, **sizes, enable_fp_fusion=False)


def _lies(entries: AnyEntries, table: Tensor) -> tuple[Tensor, Tensor, Tensor, int, int]:
    """Return numbers or codes, scales, the table, and how many elements apart pages are in the first two."""
    numbers, scales = entries.stored[-1].blocks, entries.stored[0].blocks
    return numbers, scales, table, numbers.stride(0), scales.stride(0)


def _padded(size: int) -> int:
    """Return the size of a head in a tile."""
    return max(LEAST_ROWS, rounded_up(size))
