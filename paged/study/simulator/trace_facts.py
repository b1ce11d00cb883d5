"""The facts of a trace that a reader needs before its figures: number, rate and lengths of requests, and what is left out.

A service that begins empty is full once as many requests end as come, after about the longest residence. A trace has to last several times that
(`Scenario.settles_in_s`) to show its load: then most requests see a full service, and a growing queue has time to grow.
"""

import msgspec
import numpy as np
from numpy.typing import NDArray

from paged.base.budget import short
from paged.study.simulator.result import Percentiles
from paged.study.traces import Trace


class Lengths(msgspec.Struct, frozen=True):
    """Tokens of all requests' prompts, or outputs: their mean, and their 99th percentile (nearest rank)."""

    mean: float
    p99: int

    @classmethod
    def of(cls, tokens: NDArray[np.int64]) -> "Lengths":
        return cls(float(tokens.mean()), int(Percentiles.of(tokens.astype(np.float64)).p99 or 0))


class TraceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A trace as it was simulated.

    requests    that came
    left_out    requests longer than the `context` (None: no limit), which did not come
    clipped     of those that came, cut to fit the context
    span_s      from the first arrival to the last
    per_s       requests ÷ span_s; None if all come at once, or in a closed loop
    drawn_from  requests of the trace itself, if more were drawn because it was too short; None: it was not
    settles_in_s
                seconds until its load has settled (`Scenario.settles_in_s`); 0: it has no rate
    note        the source of an excerpt and its filter; "": not known
    """

    name: str
    requests: int
    left_out: int
    clipped: int
    context: int | None
    span_s: float
    per_s: float | None
    prompts: Lengths
    outputs: Lengths
    note: str
    drawn_from: int | None = None
    settles_in_s: float = 0.0

    @property
    def is_too_short(self) -> bool:
        """Whether it ends before its load has settled, by more than the fifth by which drawn spans differ."""
        return self.span_s < 0.8 * self.settles_in_s

    def pace(self, rate: float) -> str:
        """Return the rate of arrivals in words; `rate` is the factor on the trace's, for a trace without a rate of its own."""
        return f"{rate:g} × the trace's rate" if self.per_s is None else f"{per_second(self.per_s)} requests/s"

    @classmethod
    def of(cls, trace: Trace, *, is_open: bool = True, settles_in_s: float = 0.0) -> "TraceFacts":
        """Return a trace's facts. `is_open`: requests come at the trace's times, and not from a closed loop."""
        span = float(trace.arrival_s[-1])
        fitted = [applied for applied in trace.applied if applied.name == "fitted"]
        longer = (each for each in trace.applied if each.requests_after > each.requests_before)
        drawn_from = [each.requests_before for each in longer if each.name == "resampled"]
        return cls(
            name=trace.name,
            requests=len(trace),
            left_out=trace.num_left_out,
            clipped=sum(applied.counts.get("clipped", 0) for applied in fitted),
            context=int(fitted[-1].arguments["context"]) if fitted else None,
            span_s=span,
            per_s=len(trace) / span if span and is_open else None,
            prompts=Lengths.of(trace.prompt_tokens),
            outputs=Lengths.of(trace.output_tokens),
            note=trace.note,
            settles_in_s=settles_in_s,
            drawn_from=drawn_from[0] if drawn_from else None,
        )


def per_second(rate: float) -> str:
    """Return a rate in three figures, also below 1; a whole number without decimals."""
    shown = short(rate) if rate >= 1 else f"{rate:.3g}"
    whole, _, rest = shown.partition(".")
    return shown if rest.strip("0") else whole
