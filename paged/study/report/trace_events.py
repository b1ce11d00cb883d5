"""A simulation as a Chrome trace, the JSON that Perfetto and chrome://tracing open."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from paged.base.whole_file import whole_file
from paged.study.report.over_time import parts_of
from paged.study.simulator import Outcome, Step

Event = dict[str, Any]

_STEPS, _REQUESTS = 1, 2
"""Processes of the trace: the device's steps with its counters, and the requests."""


class TraceEvents:
    """The steps of a simulation, which a trace needs beside its outcome: call `see` with each step, in order."""

    def __init__(self) -> None:
        self._slices: list[Event] = []
        self._ended: list[tuple[int, float]] = []
        self._num_steps = self._end = 0

    def see(self, step: Step) -> None:
        """Note the latest step, without its batch's arrays."""
        batch, num_steps, self._num_steps = step.batch, step.number - self._num_steps, step.number
        start, self._end = max(self._end, _us(step.now_s - step.seconds)), _us(step.now_s)
        common: Event = {"pid": _STEPS, "tid": 1, "ts": start}
        args = {"last": step.number, "rows": len(batch.rows), "tokens": batch.num_scheduled_tokens}
        self._slices.append(
            common
            | {
                "ph": "X",
                "name": "step" if num_steps == 1 else f"{num_steps} steps",
                "cat": "step",
                "dur": self._end - start,
                "args": args | {"admitted": len(batch.admitted)},
            }
        )
        mark = common | {"ph": "i", "s": "t", "cat": "preemption"}
        self._slices += [mark | {"name": f"preempted: {how}", "args": {"request": id}} for id, how in batch.preempted]
        self._ended.extend((request, step.now_s) for request in step.ended)

    def events(self, outcome: Outcome) -> list[Event]:
        """Return all events in order of time, names of processes first. Times are whole µs of virtual time."""
        result = outcome.result
        name = f"{result.policy} on {result.trace}"
        named: list[Event] = [
            {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "ts": 0, "args": {"name": text}}
            for pid, text in ((_STEPS, f"steps: {name}"), (_REQUESTS, "requests"))
        ]
        events = [*self._slices, *_counters(outcome), *self._lifetimes(outcome)]
        # A stable sort keeps the order of events at one moment, so a wait ends before what follows it begins.
        return named + sorted(events, key=lambda event: event["ts"])

    def _lifetimes(self, outcome: Outcome) -> Iterator[Event]:
        for request, end_s in self._ended:
            arrival_s = end_s - float(outcome.e2e_s[request])
            first_s = arrival_s + float(outcome.ttft_s[request])
            if not np.isfinite(first_s):
                continue
            spans = (
                (f"request {request}", arrival_s, end_s),
                ("to first token", arrival_s, first_s),
                ("writing", first_s, end_s),
            )
            common = {"cat": "request", "id": str(request), "pid": _REQUESTS, "tid": 1}
            outer, wait, write = ((common | {"name": name}, _us(since), _us(until)) for name, since, until in spans)
            for (event, since, until), phases in ((outer, "b"), (wait, "be"), (write, "be"), (outer, "e")):
                yield from (event | {"ph": phase, "ts": since if phase == "b" else until} for phase in phases)


def write_trace_events(path: str | Path, events: TraceEvents, outcome: Outcome) -> None:
    """Write a Chrome trace of a simulation that has run, whose steps `events` has seen: about 500 bytes a step. Raises UnwritablePath."""
    document = {
        "displayTimeUnit": "ms",
        "otherData": {"times": "virtual", "applied": list(outcome.applied)},
        "traceEvents": events.events(outcome),
    }
    with whole_file(path) as file:
        file.write(msgspec.json.encode(document).decode())


def _counters(outcome: Outcome) -> Iterator[Event]:
    """Yield memory in KV slots and requests by state, averages or ends of an entry, at the entry's end."""
    result, columns = outcome.result, outcome.timeline
    slots = result.num_blocks * result.block_size
    memory = parts_of(slots, *(columns[name] for name in ("held", "filled", "promised", "cached")))
    requests = {"running": columns["rows"], "waiting": columns["waiting"], "away": columns["away"]}
    for name, figures in (("KV slots", memory), ("requests", requests)):
        for end_s, *values in zip(columns["end_s"].tolist(), *(column.tolist() for column in figures.values())):
            args = dict(zip(figures, values))
            yield {"ph": "C", "name": name, "pid": _STEPS, "tid": 0, "ts": _us(end_s), "args": args}


def _us(seconds: float) -> int:
    # Whole numbers, so that no slice overlaps the next by a rounding error: a viewer would draw it under that.
    return round(seconds * 1e6)
