"""Several traces at once: the way to a higher rate that keeps the bursts of each."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged.errors import InvalidConfig
from paged.study.limits import MAX_SHARED_IDS, at_least, generators
from paged.study.traces.content import UNSHARED, picked, starts_of
from paged.study.traces.trace import BY_REQUEST, Applied, Trace


def superposed(traces: Sequence[Trace], *, seed: int | None = None) -> Trace:
    """The requests of all traces as one, by arrival. Name, `seed` of the tokens and what was applied before are the first one's.

    Contents stay shared within a trace and are never shared across traces. With a `seed` every trace but the first is turned by a random
    time, what goes over its end coming in at its beginning, so that `superposed([trace] * 3, seed=1)` is three times the rate and not
    three times each request at one moment; a conversation that goes over the end is then cut in two, the later part first. Raises
    InvalidConfig for no traces, and for more shared contents than there are ids.
    """
    at_least("the number of traces to superpose", len(traces), 1)
    arrivals = [trace.arrival_s for trace in traces]
    if seed is not None:
        offsets = generators(seed, 1)[0].random(len(traces))
        turned = zip(traces[1:], offsets[1:].tolist(), strict=True)
        arrivals = [arrivals[0], *(_turned(trace.arrival_s, offset) for trace, offset in turned)]
    arrival_s = np.concatenate(arrivals)
    order = np.argsort(arrival_s, kind="stable")
    starts, segments = picked(starts_of(np.concatenate([np.diff(trace.segment_starts) for trace in traces])), order)
    segment_ids, output_ids = _ids_apart(traces)
    arguments: dict[str, float | int | str] = {"traces": len(traces)}
    if seed is not None:
        arguments["seed"] = seed
    by_request: dict[str, Any] = {
        name: np.concatenate([getattr(trace, name) for trace in traces]) for name in BY_REQUEST
    }
    by_request["output_ids"] = output_ids
    return replace(
        traces[0],
        arrival_s=arrival_s[order],
        segment_starts=starts,
        segment_ids=segment_ids[segments],
        segment_lengths=np.concatenate([trace.segment_lengths for trace in traces])[segments],
        applied=(*traces[0].applied, Applied("superposed", arguments, len(traces[0]), len(order))),
        **{name: column[order] for name, column in by_request.items()},
    )


def _turned(arrival_s: NDArray[np.float64], offset: float) -> NDArray[np.float64]:
    """Arrivals turned by a share of the trace's span, which ends one mean gap after the last of them."""
    span = float(arrival_s[-1]) * len(arrival_s) / max(len(arrival_s) - 1, 1)
    later = arrival_s + offset * span
    return np.where(later >= span, later - span, later)


def _ids_apart(traces: Sequence[Trace]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Segment and output ids of all traces, in a row, each trace's own ids after those of the one before."""
    segment_ids, output_ids = [], []
    num_ids = 0
    for trace in traces:
        ids = np.concatenate((trace.segment_ids, trace.output_ids))
        known, places = np.unique(ids, return_inverse=True)
        # −1 comes first where it is there, and stays what it is.
        num_unshared = int(known[0] == UNSHARED)
        new = np.where(ids == UNSHARED, UNSHARED, places - num_unshared + num_ids)
        num_ids += len(known) - num_unshared
        segment_ids.append(new[: len(trace.segment_ids)])
        output_ids.append(new[len(trace.segment_ids) :])
    if num_ids > MAX_SHARED_IDS:
        raise InvalidConfig(
            f"the traces have {num_ids:,} shared contents together; at most {MAX_SHARED_IDS:,} have ids"
        )
    return np.concatenate(segment_ids), np.concatenate(output_ids)
