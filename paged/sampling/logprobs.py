"""Log-probabilities (natural), from a model's unchanged logits; their bits do not depend on the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paged.sampling.weights import column, likeliest, total_weights, unit_bits

if TYPE_CHECKING:
    from torch import Tensor


class Logprobs(NamedTuple):
    """Log-probabilities of n tokens, float64 [n]; their ranks, int64 [n], 1 for the likeliest; and ids and log-probabilities of the k likeliest tokens at
    each place, the likeliest first, int64 and float64 [n, k]."""

    chosen: NDArray[np.float64]
    ranks: NDArray[np.int64]
    top_ids: NDArray[np.int64]
    top: NDArray[np.float64]


def logprobs(logits: Tensor, tokens: NDArray[np.int32], num_top: int) -> Logprobs:
    """Return log-probabilities of `tokens`, int [n], and of the `num_top` likeliest, by logits [n, vocabulary]. Equal ones rank by id, the lower first."""
    import torch

    logits = logits.detach().contiguous()
    vocabulary_size = logits.shape[1]
    highest = logits.amax(-1, keepdim=True)
    one = torch.ones_like(highest, dtype=torch.float64)
    # As in a draw, a weight below half a unit counts as 0.
    log_total = (total_weights(logits, highest, one).double() * 2.0 ** -unit_bits(vocabulary_size)).log()
    ids = column(logits, tokens.astype(np.int64))
    chosen = logits.gather(-1, ids)
    before = (logits == chosen) & (torch.arange(vocabulary_size, device=logits.device) < ids)
    ranks = 1 + (logits > chosen).sum(-1) + before.sum(-1)
    top, top_ids = likeliest(logits, min(num_top, vocabulary_size)) if num_top else (chosen[:, :0], ids[:, :0])

    def of(values: Tensor) -> NDArray[np.float64]:
        found: NDArray[np.float64] = (values.double() - highest.double() - log_total).cpu().numpy()
        return found

    return Logprobs(of(chosen)[:, 0], ranks.cpu().numpy(), top_ids.cpu().numpy(), of(top))
