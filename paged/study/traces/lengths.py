"""The lengths of prompts and outputs of a generated service."""

import math
import sys
from statistics import NormalDist
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from paged.base.fields import converted
from paged.errors import InvalidConfig
from paged.study.limits import MAX_TOKENS, at_least, between, positive

MAX_SIGMA = 10.0
"""At this spread, one of two lengths is more than 10,000 times the other half of the time."""


class LogNormal(msgspec.Struct, frozen=True):
    """Lengths whose logarithms are normal with mean `mu` and standard deviation `sigma`; the median is exp(mu) tokens."""

    mu: float
    sigma: float

    @classmethod
    def of_mean(cls, mean: float, *, sigma: float) -> "LogNormal":
        """Return the distribution with this mean in tokens: mean = exp(mu + sigma² / 2). Raises InvalidConfig."""
        return cls(math.log(positive("mean", mean)) - between("sigma", sigma, 0, MAX_SIGMA) ** 2 / 2, sigma)

    @classmethod
    def of_quantile(cls, mean: float, *, share: float, tokens: float) -> "LogNormal":
        """Return the distribution with this mean of which a `share` of all lengths are under `tokens`.

        ln tokens = mu + z · sigma and ln mean = mu + sigma² / 2 have two solutions or none; the smaller spread is taken. Raises InvalidConfig if
        there is none.
        """
        positive("mean", mean)
        positive("tokens", tokens)
        converted("share", share, Annotated[float, Meta(gt=0, lt=1)])
        z = NormalDist().inv_cdf(share)
        ratio = math.log(tokens) - math.log(mean)
        under_root = z * z - 2 * ratio
        roots = [z - math.sqrt(under_root), z + math.sqrt(under_root)] if under_root >= 0 else []
        sigmas = [root for root in roots if root >= 0]
        if not sigmas:
            problem = (
                f"no log-normal distribution has a mean of {mean:g} and {share:.0%} of its values under {tokens:g}"
            )
            raise InvalidConfig(f"{problem}; at most {mean * math.exp(max(z, 0) ** 2 / 2):g} are possible")
        return cls.of_mean(mean, sigma=min(sigmas))

    @property
    def mean(self) -> float:
        """The mean in tokens."""
        return math.exp(self.mu + self.sigma**2 / 2)

    def check(self, what: str) -> None:
        """Raise InvalidConfig unless it is a distribution of lengths that a request can have."""
        between(f"mu of {what}", self.mu, -sys.float_info.max, sys.float_info.max)
        between(f"sigma of {what}", self.sigma, 0, MAX_SIGMA)
        exponent = self.mu + self.sigma**2 / 2
        if exponent > math.log(MAX_TOKENS):
            raise InvalidConfig(f"{what} have a mean of e^{exponent:g} tokens; at most {MAX_TOKENS:,} are possible")

    def draw(self, count: int, random: np.random.Generator) -> NDArray[np.int64]:
        """Draw lengths in whole tokens, from 1 to MAX_TOKENS; int64 [count]."""
        lengths = np.rint(random.lognormal(self.mu, self.sigma, count))
        return np.clip(lengths, 1, MAX_TOKENS).astype(np.int64)


class Fixed(msgspec.Struct, frozen=True):
    """Lengths of the same number of tokens."""

    tokens: int

    def check(self, what: str) -> None:
        """Raise InvalidConfig unless a request can have so many tokens."""
        at_least(what, self.tokens, 1, MAX_TOKENS)

    def draw(self, count: int, random: np.random.Generator) -> NDArray[np.int64]:
        """Return the number, int64 [count]; draws nothing."""
        return np.full(count, self.tokens, np.int64)


class LengthPreset(msgspec.Struct, frozen=True):
    """Named lengths; `source` says what is published and what we assume."""

    prompt: LogNormal
    output: LogNormal
    source: str


_AZURE_SPREAD = "sigmas are those of the logarithms of the Azure conversation hour's lengths, an assumption"

PRESETS = {
    "sharegpt": LengthPreset(
        LogNormal.of_mean(161.31, sigma=0.99),
        LogNormal.of_mean(337.99, sigma=0.86),
        f"means: Kwon et al., SOSP '23, figure 11 (ShareGPT); {_AZURE_SPREAD}",
    ),
    "alpaca": LengthPreset(
        LogNormal.of_mean(19.31, sigma=0.99),
        LogNormal.of_mean(58.45, sigma=0.86),
        f"means: Kwon et al., SOSP '23, figure 11 (Alpaca); {_AZURE_SPREAD}",
    ),
    "reasoning": LengthPreset(
        LogNormal.of_mean(200.0, sigma=0.99),
        LogNormal.of_mean(5000.0, sigma=0.86),
        "nothing published: short questions and answers that think for some thousand tokens, an assumption; the same sigmas",
    ),
}
