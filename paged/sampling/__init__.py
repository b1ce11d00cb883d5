"""Sampling of the next token: a request's parameters, and one draw for every row of a batch.

Importing this does not load torch.
"""

from paged.sampling.params import SamplingParams
from paged.sampling.sampler import sample, seed_of

__all__ = [
    "SamplingParams",
    "sample",
    "seed_of",
]
