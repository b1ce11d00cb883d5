"""Attention by Triton kernels of our own, which read K and V where they lie, through block tables (`block_kernel.py`).

Runs on CUDA devices, and for tests on a CPU in Triton's interpreter (TRITON_INTERPRET=1). It takes windows, chunks,
soft caps, sinks, heads of up to 512, blocks of any size, and K and V in 8 and 4 bits. With `is_invariant` all tiles
have one shape; without it a prompt's tokens go in larger ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged.base.growing import rising, rounded_up
from paged.errors import UnsupportedByBackend

from .backend import LayerOptions, LayerShape
from .kv_pool import LayeredPool
from .step_tokens import Ints, StepTokens
from .triton_device import check_device

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MOST_HEAD = 512
_OTHERS = 'the backends "torch_gather" and "reference" can.'
_FEW_ROWS, _MANY_ROWS = 16, 64
"""Rows of a tile for decodes and drafts, and for prompts if tiles may differ."""
_QUERY_BYTES = 32 * 1024
"""Bytes of queries in a tile, at most: so a program fits into the 99 KiB of shared memory of the smaller GPUs."""


@dataclass(slots=True)
class Plan:
    """A step. `pieces`: by query heads that share one of K and V, and by rows of a large tile. `tables`: by page of a
    block, `num_columns` wide, arbitrary behind a sequence's blocks. Both are filled when a layer first needs them."""

    step: StepTokens
    num_columns: int
    pieces: dict[tuple[int, int], list[Any]] = field(default_factory=dict)
    tables: dict[int, Tensor] = field(default_factory=dict)


class Backend:
    """See the module. Raises UnsupportedByBackend without Triton."""

    name = "triton"
    piece = 1

    def __init__(self, is_invariant: bool) -> None:
        self.is_invariant = is_invariant
        try:
            self._kernel = import_module("paged.attention.block_kernel")
        except ImportError as error:
            raise _unsupported(f"anything here ({error})", "paged's extra `gpu` brings Triton") from error

    @staticmethod
    def check(shape: LayerShape) -> None:
        """Raise UnsupportedByBackend for a device, dtype or head size that the kernels do not take. Needs no Triton."""
        check_device(Backend.name, shape.device, _OTHERS)
        # Triton's interpreter computes in numpy, which has no bfloat16.
        dtypes = _DTYPES if shape.device.type == "cuda" else _DTYPES[:2]
        if shape.dtype not in dtypes:
            takes = ", ".join(map(str, dtypes))
            raise _unsupported(f"{shape.dtype} on {shape.device.type}", f"it takes {takes}; {_OTHERS}")
        largest = max(shape.head_dim, shape.value_dim or 0)
        if largest > _MOST_HEAD:
            raise _unsupported(f"heads of {largest}", f"it does heads of up to {_MOST_HEAD}; {_OTHERS}")
        group = shape.num_heads // shape.num_kv_heads
        if rounded_up(group) * rounded_up(largest) * shape.dtype.itemsize > _QUERY_BYTES:
            what = f"{group} query heads of {largest} in {shape.dtype} for one of K and V"
            raise _unsupported(what, f"it has room for {_QUERY_BYTES:,} bytes of them, rounded up; {_OTHERS}")

    def prepare(self, step: StepTokens, pool: LayeredPool) -> Plan:
        """Return an empty plan: its pieces and tables depend on a layer's heads and on where it lies."""
        return Plan(step, rounded_up(-(-int(step.seq_lens.max(initial=1)) // step.block_size)))

    def renew(self, plan: Plan, step: StepTokens, pool: LayeredPool) -> None:
        """See RenewsPlans."""
        plan.step = step
        for [pieces] in plan.pieces.values():
            pieces.pieces[3].copy_(torch.from_numpy(step.positions))
        for part, table in plan.tables.items():
            table.copy_(torch.from_numpy(_table(step, part, plan.num_columns)))

    def attend(self, queries: Tensor, pool: LayeredPool, layer: int, plan: Plan, options: LayerOptions) -> Tensor:
        """See AttentionBackend."""
        own, step = pool.layer(layer), plan.step
        asked = own.keys.transformed(queries).to(queries.dtype)
        asked = asked if asked.stride(2) == 1 else asked.contiguous()
        out = torch.empty(*queries.shape[:2], own.values.size, dtype=queries.dtype, device=queries.device)
        out[step.num_tokens :] = 0
        padded = rounded_up(max(own.keys.size, own.values.size)) * queries.itemsize
        many = max(_FEW_ROWS, min(_MANY_ROWS, _QUERY_BYTES // padded))
        key = queries.shape[1] // own.keys.heads, many
        if key not in plan.pieces:
            plan.pieces[key] = self._cut(step, *key, pool.device)
        for each in (own.keys.part, own.values.part):
            if each not in plan.tables:
                plan.tables[each] = torch.from_numpy(_table(step, each, plan.num_columns)).to(pool.device)
        tables = plan.tables[own.keys.part], plan.tables[own.values.part]
        for pieces in plan.pieces[key]:
            self._kernel.attend(asked, out, own, tables, pieces, plan.num_columns * step.block_size, options)
        return own.values.transformed(out).to(queries.dtype)

    def _cut(self, step: StepTokens, group: int, many: int, device: torch.device) -> list[Any]:
        """Cut sequences into pieces of as many tokens as a tile has room for. Sequences with more than _FEW_ROWS rows
        get large tiles, except in the invariant mode."""
        counts = np.diff(step.query_start_loc)
        is_long = np.full(len(counts), False) if self.is_invariant else counts * group > _FEW_ROWS
        found = []
        for rows, chosen in ((_FEW_ROWS, ~is_long), (many, is_long)):
            if counts[chosen].any():
                rows, length = max(rows, rounded_up(group)), max(1, rows // group)
                pieces = _pieces(step, chosen.nonzero()[0], length)
                found.append(self._kernel.Pieces(torch.from_numpy(pieces).to(device), rows))
        return found


def _pieces(step: StepTokens, chosen: Ints, length: int) -> NDArray[np.int32]:
    """Return the chosen sequences in pieces of up to `length` tokens, as block_kernel.Pieces."""
    num_pieces = -(-np.diff(step.query_start_loc)[chosen] // length)
    sequences = chosen.repeat(num_pieces)
    rank = rising(len(sequences)) - (num_pieces.cumsum() - num_pieces).repeat(num_pieces)
    first = step.query_start_loc[sequences] + rank * length
    num_tokens = np.minimum(step.query_start_loc[sequences + 1] - first, length)
    return np.stack([sequences, first, num_tokens, step.positions[first]]).astype(np.int32)


def _table(step: StepTokens, part: int, num_columns: int) -> NDArray[np.int32]:
    table = np.zeros((step.num_sequences, num_columns), np.int32)
    given = step.table(part)[:, :num_columns]
    table[:, : given.shape[1]] = given
    return table


def _unsupported(what: str, instead: str) -> UnsupportedByBackend:
    return UnsupportedByBackend(Backend.name, what, instead)
