"""Requests for an engine, as traces: three made-up ones by name, and any trace by its own name; and a figure that was measured several times.

offline        64 requests, log-normal lengths, about 160 tokens in (8 to 512) and 96 out (8 to 256)
shared_prefix  64 requests of 4 families; 512 tokens that a family shares, 32 of each request's own, 64 out
single         one request, 128 tokens in and 128 out
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import msgspec
import numpy as np

from paged.errors import InvalidConfig
from paged.study.limits import positive
from paged.study.traces import LogNormal, Trace, open_trace
from paged.study.traces.content import UNSHARED

_REQUESTS, _FAMILIES = 64, 4
_SHARED, _OWN, _SHARED_OUTPUT = 512, 32, 64
_SINGLE = 128
# Distributions of lengths, and the bounds that draws are clipped to.
_OFFLINE_INPUT = (LogNormal.of_mean(160, sigma=0.8), 8, 512)
_OFFLINE_OUTPUT = (LogNormal.of_mean(96, sigma=0.8), 8, 256)


def workload(name: str, *, limit: int | None = None, scale: float = 1.0, context: int | None = None) -> Trace:
    """Return the first `limit` requests of that name, or of a trace: lengths divided by `scale`, then clipped to `context` tokens in all.

    Raises InvalidConfig for a name that is neither and for a scale that is none, and what `open_trace` raises for a trace.
    """
    positive("scale", scale)
    trace = WORKLOADS[name]() if name in WORKLOADS else _opened(name, limit)
    if limit is not None:
        trace = trace if limit >= len(trace) else trace.head(limit)
    if scale != 1.0:
        trace = trace.scaled(prompts=1 / scale, outputs=1 / scale)
    if context is not None and (trace.prompt_tokens + trace.output_tokens).max() > context:
        trace = trace.fitted(context, how="clip")
    return trace


def offline() -> Trace:
    """See the module."""
    random = np.random.default_rng(0)
    prompts, outputs = (
        np.clip(lengths.draw(_REQUESTS, random), least, most)
        for lengths, least, most in (_OFFLINE_INPUT, _OFFLINE_OUTPUT)
    )
    return Trace.from_lengths(np.zeros(_REQUESTS), prompts, outputs, name="offline")


def shared_prefix() -> Trace:
    """See the module. The families take turns."""
    everybody = np.arange(_REQUESTS)
    alone = Trace.from_lengths(
        np.zeros(_REQUESTS), np.full(_REQUESTS, _OWN), np.full(_REQUESTS, _SHARED_OUTPUT), name="shared_prefix"
    )
    return replace(
        alone,
        segment_starts=np.arange(0, 2 * _REQUESTS + 1, 2),
        segment_ids=np.stack([everybody % _FAMILIES, np.full(_REQUESTS, UNSHARED)], 1).ravel(),
        segment_lengths=np.tile([_SHARED, _OWN], _REQUESTS),
    )


def single() -> Trace:
    """See the module."""
    return Trace.from_lengths([0.0], [_SINGLE], [_SINGLE], name="single")


WORKLOADS = {"offline": offline, "shared_prefix": shared_prefix, "single": single}
"""By name, what makes the requests."""


def _opened(name: str, limit: int | None) -> Trace:
    try:
        return open_trace(name, limit=limit)
    except FileNotFoundError as problem:
        raise InvalidConfig(
            f'"{name}" is none of {", ".join(WORKLOADS)}, and no trace: {problem.strerror or problem}'
        ) from None


class Measured(msgspec.Struct, frozen=True):
    """The median, the least and the most, in the unit that the field's name says."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Measured":
        """Of at least one value."""
        return cls(float(median(values)), float(min(values)), float(max(values)))

    def __format__(self, form: str) -> str:
        """Return the median, followed by the least and the most where they differ as printed."""
        middle, least, most = (format(value, form) for value in (self.median, self.least, self.most))
        return middle if least == most else f"{middle} ({least} to {most})"
