"""The seconds of each part of a request, under their names in metrics, log and traces.

arrived      submitted        begun             first               last     ended
   |             |── queue ─────|──── prefill ────|───── decode ──────|        |
   |────────── waited ──────────|──────────── inference ──────────────|        |
   |──────────────────── ttft ────────────────────|                            |
   |─────────────────────────────────── e2e ───────────────────────────────────|
"""

from __future__ import annotations

from typing import NamedTuple

from paged.serving.records import RequestRecord


class Durations(NamedTuple):
    """Seconds, at least 0; None where the request did not get there."""

    waited: float | None
    queue: float | None
    prefill: float | None
    decode: float | None
    inference: float | None
    ttft: float | None
    e2e: float | None


def durations(record: RequestRecord) -> Durations:
    """All of them, by the monotonic clock alone."""
    return Durations(
        waited=_between(record.arrived, record.begun),
        queue=_between(record.submitted, record.begun),
        prefill=_between(record.begun, record.first),
        decode=_between(record.first, record.last),
        inference=_between(record.begun, record.last),
        ttft=_between(record.arrived, record.first),
        e2e=_between(record.arrived, record.ended),
    )


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else max(0.0, end - start)
