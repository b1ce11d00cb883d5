"""How likely a chi-square is, for tests of what is drawn."""

import math

# A right sampler's counts have a chi-square of k - 1 degrees of freedom, for k tokens that can come up. By chance one run
# in a million exceeds the value whose upper tail is this; the seeds here are fixed, so that a test that passes once always
# does. Every wrong law below is beyond it by far.
LEAST_P = 1e-6


def upper_tail(chi_square: float, freedom: int) -> float:
    """Probability that a chi-square of so many degrees of freedom is at least that large.

    Q(1) = erfc(√(x/2)), Q(2) = exp(-x/2) and Q(n + 2) = Q(n) + (x/2)^(n/2) · exp(-x/2) / Γ(n/2 + 1).
    """
    half = chi_square / 2
    tail, start = (math.erfc(math.sqrt(half)), 1) if freedom % 2 else (math.exp(-half), 2)
    for n in range(start, freedom, 2):
        tail += math.exp(n / 2 * math.log(half) - half - math.lgamma(n / 2 + 1))
    return tail
