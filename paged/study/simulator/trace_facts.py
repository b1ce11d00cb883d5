"""What a reader should know of a trace before its figures: how many requests, how fast, how long, and what is not in it.

A service that begins empty is full once as many requests end as come, after about the longest residence. A trace shows the load that it stands
for if it lasts some times that (`settling_s`): most of its requests see a full service, and a queue that grows has time to.
"""

import math
from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from paged.base.budget import short
from paged.study.hardware import CostModel, StepWork
from paged.study.simulator.result import Percentiles
from paged.study.traces import Trace

_TIMES = 4
"""How many times the residence of a long request a trace has to last."""
_LONG = 0.99
"""The share of requests that are shorter than a long one."""


class Lengths(msgspec.Struct, frozen=True):
    """Tokens of all requests' prompts, or outputs: their mean, and their 99th percentile (nearest rank)."""

    mean: float
    p99: int

    @classmethod
    def of(cls, tokens: NDArray[np.int64]) -> "Lengths":
        return cls(float(tokens.mean()), int(Percentiles.of(tokens.astype(np.float64)).p99 or 0))


class TraceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A trace as it was simulated.

    requests   that came
    left_out   that did not, because they were longer than the context; `context` is what they are held to, None: nothing
    clipped    of those that came, cut to fit the context
    span_s     from the first arrival to the last
    per_s      requests ÷ that; None where all come at once, or a client waits for an answer
    drawn_from requests of the trace itself, where more were drawn from them because they came in too short a time; None: it is as it was
    settles_in_s
               what it would have to last until its load has settled (`settling_s`); 0: it has no rate
    note       what a file is an excerpt of, and by what it was filtered; "" where nothing is known
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
        """Whether it ends before its load has settled; a fifth does not matter, since what is drawn differs a little."""
        return self.span_s < 0.8 * self.settles_in_s

    def pace(self, rate: float) -> str:
        """How fast its requests come, in words; where they have no rate of their own, `rate` times as fast as the trace's."""
        return f"{rate:g} × the trace's rate" if self.per_s is None else f"{per_second(self.per_s)} requests/s"

    @classmethod
    def of(cls, trace: Trace, *, is_open: bool = True, settles_in_s: float = 0.0) -> "TraceFacts":
        """`is_open`: requests come when the trace says, and not when a client of a closed loop sends the next."""
        span = float(trace.arrival_s[-1])
        fitted = [applied for applied in trace.applied if applied.name == "fitted"]
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
            drawn_from=next(
                (
                    each.requests_before
                    for each in trace.applied
                    if each.name == "resampled" and each.requests_after > each.requests_before
                ),
                None,
            ),
        )


def per_second(rate: float) -> str:
    """A rate in three figures, also below 1; of a whole number no more than that."""
    shown = short(rate) if rate >= 1 else f"{rate:.3g}"
    whole, _, rest = shown.partition(".")
    return shown if rest.strip("0") else whole


def settling_s(trace: Trace, cost_model: CostModel, *, rows_at: Callable[[int], int]) -> float:
    """Seconds that a trace has to last, in two figures: four times what a request with the 99th percentile of outputs takes to decode beside
    as many others as there are at once (`rows_at` a length). 0 where all requests come at once: they have no rate."""
    if not trace.arrival_s[-1]:
        return 0.0
    length = max(1, int(trace.prompt_tokens.mean() + trace.output_tokens.mean() / 2))
    rows = rows_at(length)
    decoding = StepWork.of_rows([1] * rows, [length] * rows, sampled_rows=rows, spans=cost_model.spans)
    needed = _TIMES * float(cost_model.seconds(decoding)) * float(np.quantile(trace.output_tokens, _LONG))
    if needed <= 0:
        return 0.0
    digit = 10.0 ** (math.floor(math.log10(needed)) - 1)
    return float(f"{math.ceil(needed / digit) * digit:.6g}")
