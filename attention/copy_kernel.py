"""Copies of rows between a GPU's memory and pinned host memory, by one kernel that reads and writes both directly.

On an H200 it copies pages of 64 KiB to 2 MiB at 0.92 to 0.95 of the rate of one large copy; a copy a page reaches 0.14
at 64 KiB (benchmarks/results/gpu.md). Imported only where there is Triton.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_WORDS_A_PROGRAM = 4096


@triton.jit  # type: ignore[untyped-decorator]
def _copy_rows(source, target, sources, destinations, num_words, size: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    its = tl.load(sources + row) * num_words
    theirs = tl.load(destinations + row) * num_words
    words = tl.program_id(1) * size + tl.arange(0, size)
    is_inside = words < num_words
    tl.store(target + theirs + words, tl.load(source + its + words, mask=is_inside), mask=is_inside)


def copy_rows(source: Tensor, target: Tensor, sources: Tensor, destinations: Tensor) -> None:
    """Copy rows `sources` of `source` to rows `destinations` of `target`: [rows, words] each, row numbers int64 [n].
    One of the two lies on a GPU, the other there or in pinned host memory. The call only puts the copy on the current
    stream; the host may read its side once the stream is done. Row numbers that are on the host wait for the stream's
    earlier work."""
    gpu = source if source.is_cuda else target
    num_words = source.shape[1]
    kernel: Any = _copy_rows[len(sources), triton.cdiv(num_words, _WORDS_A_PROGRAM)]
    # Triton launches on the current device, even if its arguments are on another.
    with torch.cuda.device(gpu.get_device()):
        kernel(source, target, sources.to(gpu.device), destinations.to(gpu.device), num_words, size=_WORDS_A_PROGRAM)
