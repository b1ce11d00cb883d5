"""Logits as weights: integers, whose sum does not depend on the order of additions.

A sum of floats does, and a device's order depends on the shape of the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

# Logits that become weights at a time: at up to 16 bytes each, they stay in a cache.
_CELLS_AT_ONCE = 1 << 18
# Logits of a group, of which only the largest is considered first.
_GROUP = 64


def rows_at_once(vocabulary_size: int) -> int:
    """Return the number of rows whose logits stay in a cache."""
    return max(1, _CELLS_AT_ONCE // vocabulary_size)


def rows_of(logits: Tensor, rows: NDArray[np.int64]) -> Tensor:
    """Return some rows of logits; all of them without a copy."""
    return logits if len(rows) == len(logits) else logits[column(logits, rows)[:, 0]]


def column(logits: Tensor, values: NDArray[Any]) -> Tensor:
    """Return one number for each row as a column, [n, 1], on the logits' device."""
    # Imported here, since parameters are read without torch.
    import torch

    return torch.from_numpy(values).to(logits.device)[:, None]


def likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest logits, the largest first, and their ids, both [n, count]. Of equal ones the lower id is first.

    If more logits equal the last one, the device chooses which of them are in.
    """
    if count == logits.shape[1]:
        ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
        return ordered, ids
    ids = _candidates(logits, count).sort(-1).values
    ordered, places = logits.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return ordered, ids.gather(-1, places)


def _candidates(logits: Tensor, count: int) -> Tensor:
    """Return the ids of the `count` largest logits, [n, count], in any order."""
    import torch

    num_rows, size = logits.shape
    num_groups = size // _GROUP
    if num_groups < 4 * count:
        return logits.topk(count, sorted=False).indices
    # The `count` largest logits lie in the `count` groups with the largest maxima: one pass over all, then a search in few.
    grouped = num_groups * _GROUP
    largest = logits[:, :grouped].view(num_rows, _GROUP, num_groups).amax(1).topk(count, sorted=False).indices
    members = torch.arange(_GROUP, device=logits.device)[:, None] * num_groups
    rest = torch.arange(grouped, size, device=logits.device).expand(num_rows, -1)
    ids = torch.cat([(largest[:, None, :] + members).view(num_rows, -1), rest], -1)
    return ids.gather(-1, logits.gather(-1, ids).topk(count, sorted=False).indices)


def unit_bits(vocabulary_size: int) -> int:
    """Return the exponent of the likeliest token's weight, a power of two; the sum of all weights has at most 62 bits."""
    return 62 - vocabulary_size.bit_length()


def weights(logits: Tensor, top: Tensor, temperature: Tensor, vocabulary_size: int = 0) -> Tensor:
    """Return weights, int64 of the shape of `logits`, in a unit in which `top` has a power of two, and the sum of a row at most 62 bits."""
    bits = unit_bits(vocabulary_size or logits.shape[1])
    exponents = (logits.double() - top.double()).div_(temperature)
    return exponents.exp_().mul_(2.0**bits).round_().long()


def total_weights(logits: Tensor, top: Tensor, temperature: Tensor) -> Tensor:
    """Return the sum of each row's weights, [n, 1]."""
    import torch

    size = rows_at_once(logits.shape[1])
    parts = zip(logits.split(size), top.split(size), temperature.split(size), strict=True)
    return torch.cat([weights(*part).sum(-1, keepdim=True) for part in parts])


def numbers(column: Tensor) -> NDArray[np.int64]:
    """Return the numbers of a column, [n, 1], as int64 [n]."""
    found: NDArray[np.int64] = column[:, 0].long().cpu().numpy()
    return found
