"""Natural logarithms of probabilities, from a model's own logits, the same to the last bit in whatever batch they come."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paged.sampling.weights import column, likeliest, total_weights, unit_bits

if TYPE_CHECKING:
    from torch import Tensor


class Logprobs(NamedTuple):
    """Of n tokens: chosen float64 [n]; ranks int64 [n], 1 is the likeliest; and the k likeliest ones instead, likeliest first: top_ids
    int64 [n, k], top float64 [n, k]."""

    chosen: NDArray[np.float64]
    ranks: NDArray[np.int64]
    top_ids: NDArray[np.int64]
    top: NDArray[np.float64]


def logprobs(logits: Tensor, tokens: NDArray[np.int32], num_top: int) -> Logprobs:
    """Of `tokens`, int [n], and of the `num_top` likeliest, by logits [n, vocabulary]. Equals rank by their ids, the lower first."""
    import torch

    logits = logits.detach().contiguous()
    vocabulary_size = logits.shape[1]
    highest = logits.amax(-1, keepdim=True)
    one = torch.ones_like(highest, dtype=torch.float64)
    # A weight below half a unit counts as nothing, here as in a draw.
    log_total = (total_weights(logits, highest, one).double() * 2.0 ** -unit_bits(vocabulary_size)).log()
    ids = column(logits, tokens.astype(np.int64))
    said = logits.gather(-1, ids)
    before = (logits == said) & (torch.arange(vocabulary_size, device=logits.device) < ids)
    ranks = 1 + (logits > said).sum(-1) + before.sum(-1)
    top, top_ids = likeliest(logits, min(num_top, vocabulary_size)) if num_top else (said[:, :0], ids[:, :0])

    def of(values: Tensor) -> NDArray[np.float64]:
        found: NDArray[np.float64] = (values.double() - highest.double() - log_total).cpu().numpy()
        return found

    return Logprobs(of(said)[:, 0], ranks.cpu().numpy(), top_ids.cpu().numpy(), of(top))
