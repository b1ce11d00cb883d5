"""Copies of rows between a GPU's memory and pinned memory of the host, by one kernel that reads and writes both where they lie.

An H200 copies pages of 64 KiB to 2 MiB so at 0.92 to 0.95 of the rate of one large copy; a copy a page comes to 0.14 at 64 KiB
(benchmarks/results/gpu.md). Imported only where there is Triton.
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
    """Rows `sources` of `source`, [rows, words], become rows `destinations` of `target`, both int64 [n]. One of the two lies on a GPU, the other there or
    in pinned memory. The call does not wait for it: it is done when the current stream comes to it, and only behind that the host may read its side.
    The rows' numbers do wait for what the stream has to do before, unless they lie on the GPU."""
    gpu = source if source.is_cuda else target
    num_words = source.shape[1]
    kernel: Any = _copy_rows[len(sources), triton.cdiv(num_words, _WORDS_A_PROGRAM)]
    # Triton launches on the current device, whichever its arguments are on.
    with torch.cuda.device(gpu.get_device()):
        kernel(source, target, sources.to(gpu.device), destinations.to(gpu.device), num_words, size=_WORDS_A_PROGRAM)
