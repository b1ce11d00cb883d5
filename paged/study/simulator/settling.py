"""How long a trace has to last until it shows the load that it stands for.

A service that begins empty is full once as many requests end as come, after about the longest residence. What is asked of a trace is some
times that, so that most of its requests see a full service, and a queue that grows has time to.
"""

import math
from collections.abc import Callable

import numpy as np

from paged.study.hardware import CostModel, StepWork
from paged.study.traces import Trace

_TIMES = 4
"""How many times the residence of a long request a trace has to last."""
_LONG = 0.99
"""The share of requests that are shorter than a long one."""


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
