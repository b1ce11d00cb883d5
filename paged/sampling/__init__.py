"""How the next token is chosen: a request's parameters, and one draw for every row of a batch.

Importing this loads no torch: logits bring it along.
"""

from paged.sampling.errors import InvalidSampling
from paged.sampling.params import SamplingParams
from paged.sampling.sampler import BadLogits, NoTokenAllowed, sample, seed_of

__all__ = [
    "BadLogits",
    "InvalidSampling",
    "NoTokenAllowed",
    "SamplingParams",
    "sample",
    "seed_of",
]
