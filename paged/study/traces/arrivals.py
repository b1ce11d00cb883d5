"""When the requests of a made-up service arrive."""

import numpy as np
from numpy.typing import NDArray

from paged.errors import InvalidConfig
from paged.study.traces.limits import between, positive

PROCESSES = {
    "poisson": "independent of each other: gaps are exponential (cv 1)",
    "gamma": "in bursts: gaps are gamma-distributed with the coefficient of variation `cv` (1 is poisson, more is burstier)",
    "deterministic": "one every 1/rate seconds",
    "at-once": "all at 0",
}

CV_LIMITS = (0.01, 100.0)
"""Too even to differ from deterministic, and burstier than a trace of a million requests can show."""


def check_process(process: str, rate: float | None, cv: float | None) -> None:
    """Raises InvalidConfig for an unknown process, and for a rate or a cv that it cannot have, or lacks."""
    if process not in PROCESSES:
        raise InvalidConfig(f'"{process}" is no arrival process; known are {", ".join(PROCESSES)}')
    if rate is not None:
        positive("rate", rate)
        if process == "at-once":
            raise InvalidConfig(f"rate is {rate:g}, but at-once has none: all requests arrive at 0")
    if cv is not None:
        between("cv", cv, *CV_LIMITS)
        if process != "gamma":
            raise InvalidConfig(f"cv is {cv:g}, but {process} has none; gamma has")
    elif process == "gamma":
        raise InvalidConfig("gamma needs cv, the coefficient of variation of the gaps between arrivals")


def arrivals(
    process: str, count: int, rate: float, cv: float | None, random: np.random.Generator
) -> NDArray[np.float64]:
    """Seconds, float64 [count], never falling; the first is 0. `rate` is a second's expected arrivals."""
    if process == "at-once":
        return np.zeros(count)
    num_gaps = count - 1
    if process == "deterministic":
        gaps = np.full(num_gaps, 1 / rate)
    elif process == "gamma" and cv is not None:
        # A gamma distribution of shape k has a coefficient of variation of 1/√k.
        gaps = random.gamma(1 / cv**2, cv**2 / rate, num_gaps)
    else:
        gaps = random.exponential(1 / rate, num_gaps)
    return np.concatenate((np.zeros(1), np.cumsum(gaps)))
