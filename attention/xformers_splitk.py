"""Attention by xformers' split-K operator in Triton, which reads K and V where they lie, through block tables.

Runs on CUDA devices, and for tests on a CPU in Triton's interpreter (TRITON_INTERPRET=1). In a call every row has the
same number of queries, and its last query is at the last position that it reads. So a sequence's tokens are cut into
pieces, from the end. Each piece is a row with a table and a length of its own, and the first piece is padded in front:

    37 tokens, the last 18 of them in this step, as two rows of 16 queries
    reads | 0 ... 36 |    queries | 21 ... 36             |
    reads | 0 ... 20 |    queries | 14 of padding, 19, 20 |

The number of rows and the width of tables are constants in the compiled kernel, so both are rounded up to powers of
two. Padding points to the scratch block, and is not read. Tables leave out blocks before a layer's window: they may be
free.

The operator, its paged masks and its way with grouped heads are xformers' (`xformers.ops.fmha.triton_splitk`, BSD);
splitting the keys is Flash-Decoding (Dao et al., 2023).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged.base.growing import rounded_up
from paged.errors import UnsupportedByBackend

from .backend import LayerOptions, LayerShape
from .kv_dtypes import AUTO
from .kv_pool import LayeredPool
from .layouts.entries import Entries
from .step_tokens import Ints, StepTokens
from .triton_device import check_device

_BLOCK_SIZES = (16, 32, 64)
_HEAD_DIMS = (16, 32, 64, 128, 256, 512)
_DTYPES = (torch.float16, torch.bfloat16)
# xformers 0.0.35 reads memory through Triton's block pointers.
_FIRST_WITHOUT_BLOCK_POINTERS = (3, 9)
# Queries in a row. The operator takes 16 at most; shorter rows are for drafts, a few tokens on a long context.
_ROW_LENGTHS = np.array([1, 2, 4, 8, 16])
_OTHERS = 'the backends "triton", "torch_gather" and "reference" can.'
_SOFT_CAP, _SINKS, _CHUNKS = "a soft cap on scores", "attention sinks", "attention within chunks"


@dataclass(frozen=True, slots=True)
class Rows:
    """n pieces of `length` queries, each a row. `num_rows` are rounded up: the last ones are padding.

    sequences        int64 [n]; the sequence of each piece
    first_positions  int64 [n]; the position of its first token
    num_seen         int64 [n]; tokens of the sequence up to the piece's last one, included
    queries          int64 [num_rows * length]; the token at each place, and token 0 where there is padding
    tokens, places   int64 [tokens of these pieces]; the tokens, and where each is among the queries
    """

    length: int
    num_rows: int
    sequences: Ints
    first_positions: Ints
    num_seen: Ints
    queries: Tensor
    tokens: Tensor
    places: Tensor


@dataclass(slots=True)
class Plan:
    """The rows of one step, by length, and xformers' masks of them, by a layer's window and the way it lies.

    num_columns  of a table: the longest sequence's blocks, rounded up to a power of two
    """

    step: StepTokens
    rows: list[Rows]
    num_columns: int
    masks: dict[Any, list[Any]] = field(default_factory=dict)


class Backend:
    """See the module.

    Raises UnsupportedByBackend without xformers or a Triton that it works with, and for the invariant mode.
    """

    name = "xformers_splitk"
    is_invariant = False
    piece = 1

    def __init__(self, is_invariant: bool) -> None:
        if is_invariant:
            raise _unsupported("an invariant mode: it splits a context by how much else there is", _OTHERS)
        try:
            triton = import_module("triton")
            with _only_errors("xformers"):
                self._fmha = import_module("xformers.ops.fmha")
        except ImportError as error:
            raise _unsupported(f"anything here ({error})", "paged's extra `gpu` brings xformers and Triton") from error
        if tuple(map(int, triton.__version__.split(".")[:2])) >= _FIRST_WITHOUT_BLOCK_POINTERS:
            raise _unsupported(
                f"anything with Triton {triton.__version__}, which has no block pointers",
                f"pip install 'triton<{_dotted(_FIRST_WITHOUT_BLOCK_POINTERS)}'",
            )
        self._mask, self._windowed_mask = _masks(self._fmha)
        self._operators = {size: _operator(self._fmha, size, self._windowed_mask) for size in _BLOCK_SIZES}

    @staticmethod
    def check(shape: LayerShape) -> None:
        """Raise UnsupportedByBackend for a device, dtype, size or feature that it does not take. Needs no xformers."""
        check_device(Backend.name, shape.device, _OTHERS)
        # The operator takes bfloat16 on a GPU alone.
        dtypes = _DTYPES if shape.device.type == "cuda" else _DTYPES[:1]
        limits: tuple[tuple[str, object, tuple[object, ...]], ...] = (
            (f"{shape.dtype} on {shape.device.type}", shape.dtype, dtypes),
            (f"head size {shape.head_dim}", shape.head_dim, _HEAD_DIMS),
            (f"blocks of {shape.block_size} tokens", shape.block_size, _BLOCK_SIZES),
        )
        for what, value, known in limits:
            if value not in known:
                raise _unsupported(what, f"it takes {_listed(known)}; {_OTHERS}")
        has_other_values = shape.value_dim not in (None, shape.head_dim)
        _refuse(
            (shape.has_soft_cap, _SOFT_CAP),
            (shape.has_sinks, _SINKS),
            (shape.has_chunks, _CHUNKS),
            (has_other_values, f"keys of {shape.head_dim} and values of {shape.value_dim} a head"),
            (shape.kv_dtype != AUTO, f"K and V in {shape.kv_dtype}"),
            (not shape.is_even, "pages that are no whole number of a layer's blocks"),
        )

    def prepare(self, step: StepTokens, pool: LayeredPool) -> Plan:
        """Cut the step into rows."""
        counts = np.diff(step.query_start_loc)
        longest = len(_ROW_LENGTHS) - 1
        lengths = _ROW_LENGTHS[np.minimum(np.searchsorted(_ROW_LENGTHS, counts), longest)]
        return Plan(
            step,
            [
                _cut(step, (lengths == length).nonzero()[0], length, pool.device)
                for length in np.unique(lengths).tolist()
            ],
            rounded_up(-(-int(step.seq_lens.max(initial=1)) // step.block_size)),
        )

    def renew(self, plan: Plan, step: StepTokens, pool: LayeredPool) -> None:
        """See RenewsPlans."""
        plan.step = step
        [rows] = plan.rows
        plan.rows = [replace(rows, first_positions=step.positions, num_seen=step.seq_lens)]
        for (window, part, token_steps), [mask] in plan.masks.items():
            lengths, tables = _tables(plan.rows[0], plan, part, pool.scratch_block, window)
            tables *= token_steps.page // step.block_size
            mask.k_seqinfo.seqlen.copy_(torch.from_numpy(lengths))
            mask.block_tables.copy_(torch.from_numpy(tables))

    def attend(self, queries: Tensor, pool: LayeredPool, layer: int, plan: Plan, options: LayerOptions) -> Tensor:
        """See AttentionBackend. Raises UnsupportedByBackend for what `check` refuses, in case it was not called."""
        own = pool.layer(layer)
        _refuse(
            (options.soft_cap is not None, _SOFT_CAP),
            (options.sinks is not None, _SINKS),
            (options.chunk is not None, _CHUNKS),
            (own.keys.part != own.values.part, "K and V of a layer on two pages"),
        )
        if not (isinstance(own.keys, Entries) and isinstance(own.values, Entries)):
            raise _unsupported("quantised K and V", _OTHERS)
        key = (options.window, own.keys.part, own.keys.token_steps)
        if key not in plan.masks:
            plan.masks[key] = [self._mask_of(rows, plan, pool, own.keys, options.window) for rows in plan.rows]
        num_heads, head_dim = queries.shape[1:]
        num_kv_heads = own.keys.heads
        group = num_heads // num_kv_heads
        # [1, slots, num_kv_heads, group, head_dim]; the heads of a group are the same memory.
        # K and V begin at two places of a page, so they may differ in slots; behind the scratch block none is read.
        num_slots = min(len(own.keys.tokens), len(own.values.tokens))
        keys, values = (
            part.tokens[None, :num_slots, :, None].expand(-1, -1, -1, group, -1) for part in (own.keys, own.values)
        )
        out = torch.zeros_like(queries)
        # Triton launches on the current device, even if its arguments are on another.
        with torch.cuda.device(queries.get_device()):
            for rows, mask in zip(plan.rows, plan.masks[key], strict=True):
                result = self._fmha.memory_efficient_attention_forward(
                    queries[rows.queries].view(1, -1, num_kv_heads, group, head_dim),
                    keys,
                    values,
                    attn_bias=mask,
                    scale=options.scale,
                    op=self._operators[pool.block_size],
                )
                out[rows.tokens] = result.reshape(-1, num_heads, head_dim)[rows.places]
        return out

    def _mask_of(self, rows: Rows, plan: Plan, pool: LayeredPool, entries: Entries, window: int | None) -> Any:
        """Make xformers' mask of these rows: lengths, and tables from the window's first block on."""
        lengths, tables = _tables(rows, plan, entries.part, pool.scratch_block, window)
        block_size = plan.step.block_size
        tables *= entries.token_steps.page // block_size
        mask = (self._mask if window is None else self._windowed_mask).from_seqlens(
            [rows.length] * rows.num_rows,
            lengths.tolist(),
            torch.from_numpy(tables).to(pool.device),
            block_size,
            device=pool.device,
        )
        if window is not None:
            mask._window_size = window
        return mask


@contextmanager
def _only_errors(name: str) -> Iterator[None]:
    """Let this logger log errors only: xformers warns that its C++ operators, unused here, do not fit torch."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _cut(step: StepTokens, chosen: Ints, length: int, device: torch.device) -> Rows:
    """Cut the tokens of the chosen sequences into pieces of `length`, each sequence's last piece first."""
    num_pieces = -(-np.diff(step.query_start_loc)[chosen] // length)
    sequences = np.repeat(chosen, num_pieces)
    rank_in_sequence = np.arange(len(sequences)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    num_behind = rank_in_sequence * length
    tokens = (step.query_start_loc[sequences + 1] - num_behind)[:, None] + np.arange(-length, 0)
    is_token = tokens >= step.query_start_loc[sequences][:, None]
    num_seen = step.seq_lens[sequences] - num_behind
    num_rows = rounded_up(len(sequences))
    queries = np.zeros((num_rows, length), np.int64)
    queries[: len(sequences)] = np.where(is_token, tokens, 0)
    return Rows(
        length,
        num_rows,
        sequences,
        num_seen - is_token.sum(1),
        num_seen,
        torch.from_numpy(queries.reshape(-1)).to(device),
        torch.from_numpy(tokens[is_token]).to(device),
        torch.from_numpy(is_token.reshape(-1).nonzero()[0]).to(device),
    )


def _tables(
    rows: Rows, plan: Plan, part: int, scratch_block: int, window: int | None
) -> tuple[Ints, NDArray[np.int32]]:
    """Return how many tokens each row reads, int64 [num_rows], and their blocks, int32 [num_rows, width].

    A row begins with the first block that its first token sees.
    """
    step, width = plan.step, plan.num_columns
    n, size = len(rows.sequences), step.block_size
    first_seen = np.zeros_like(rows.num_seen)
    if window is not None:
        first_seen = np.maximum(rows.first_positions - window + 1, 0)
        # The tokens that a row reads may begin in the middle of a block.
        width = min(width, rounded_up(-(-(window + rows.length - 1) // size) + 1))
    first_columns = first_seen // size
    lengths = np.zeros(rows.num_rows, np.int64)
    lengths[:n] = rows.num_seen - first_columns * size
    num_columns = -(-lengths[:n, None] // size)
    rising = np.arange(width)
    is_read = rising < num_columns
    columns = np.where(is_read, first_columns[:, None] + rising, 0)
    tables = np.full((rows.num_rows, len(rising)), scratch_block, np.int32)
    tables[:n] = np.where(is_read, step.table(part)[rows.sequences[:, None], columns], scratch_block)
    return lengths, tables


def _masks(fmha: Any) -> tuple[Any, Any]:
    """Return the class of paged causal masks, and one of our own with a window, which the kernel can do."""
    biases = fmha.attn_bias
    paged, local = biases.PagedBlockDiagonalPaddedKeysMask, biases.BlockDiagonalCausalLocalAttentionPaddedKeysMask
    return biases.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask, type("PagedWindowedMask", (paged, local), {})


def _operator(fmha: Any, block_size: int, windowed_mask: Any) -> Any:
    """Make the operator for blocks of this size: it reads a block's keys at a time, since more may not be there."""
    base = fmha.triton_splitk.FwOp

    def not_supported_reasons(cls: Any, inputs: Any) -> list[str]:
        # Triton compiles the kernel: xformers' C++ libraries, which need one version of CUDA, are not used.
        reasons: list[str] = base.not_supported_reasons.__func__(cls, inputs)
        return [each for each in reasons if "build with CUDA" not in each]

    return type(
        f"FwOpBlocksOf{block_size}",
        (base,),
        {
            "NAME": f"{base.NAME}_blocks_of_{block_size}",
            "BLOCK_N": block_size,
            "not_supported_reasons": classmethod(not_supported_reasons),
            # "cpu" is Triton's interpreter; `check` refuses other CPUs.
            "SUPPORTED_DEVICES": {"cuda", "cpu"},
            "SUPPORTED_ATTN_BIAS_TYPES": (*base.SUPPORTED_ATTN_BIAS_TYPES, windowed_mask),
        },
    )


def _refuse(*wishes: tuple[bool, str]) -> None:
    """Raise UnsupportedByBackend for the first of these features that is wanted."""
    for is_wanted, what in wishes:
        if is_wanted:
            raise _unsupported(what, _OTHERS)


def _unsupported(what: str, instead: str) -> UnsupportedByBackend:
    return UnsupportedByBackend(Backend.name, what, instead)


def _listed(values: tuple[object, ...]) -> str:
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
