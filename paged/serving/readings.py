"""The metrics made from the engine's figures: tables of gauges and counters.

A new metric of the engine is a line here, and one in docs/metrics.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import NamedTuple

from msgspec.structs import asdict

from paged.block_manager import LayerGroup
from paged.scheduler import SchedulerStats
from paged.serving.wire import Figures

Read = Callable[[Figures], float]

STATES = ("running", "waiting", "paused", "swapped", "loading")
BLOCKS = (
    *("free", "cached", "used", "shared", "reserved", "pinned", "disk"),
    *("host_free", "host_cached", "host_used"),
)
NO_ENGINE = Figures(
    now=0.0,
    requests=dict.fromkeys(STATES, 0),
    blocks=dict.fromkeys(BLOCKS, 0),
    totals=asdict(SchedulerStats()),
    failed_steps=0,
    host_s=0.0,
    model_s=0.0,
    forecast=[],
)
"""The figures while there is no engine process."""


class Reading(NamedTuple):
    """A series: its metric's name and documentation, its number, and the name and value of its metric's own label, if it has one."""

    name: str
    documentation: str
    read: Read
    label: tuple[str, ...] = ()


def _in(name: str, state: str) -> Read:
    return lambda figures: getattr(figures, name)[state]


def _away(figures: Figures) -> int:
    """Return the requests that wait for room: those that have not begun, and preempted ones."""
    return sum(figures.requests[state] for state in ("waiting", "paused", "swapped"))


def _device_hits(figures: Figures) -> int:
    return figures.totals["hit_tokens"] - figures.totals["host_hit_tokens"]


def _hits(figures: Figures) -> int:
    return figures.totals["hit_tokens"] + figures.disk_hit_tokens


def _usage(figures: Figures) -> float:
    used = figures.blocks["used"]
    return used / max(1, figures.blocks["free"] + figures.blocks["cached"] + used)


def _forecast(figures: Figures) -> float:
    """Return the forecast of the place behind all waiting requests, or of the forecast's last place."""
    if not figures.forecast:
        return math.nan
    return figures.forecast[min(figures.requests["waiting"], len(figures.forecast) - 1)]


_BY_REASON = "Requests that wait: for capacity, or deferred until their blocks are back from the host."
_BLOCKS = "Device blocks are free, cached or used, and of used ones some are shared; reserved ones are kept by count, pinned ones by hints. Host blocks: host_*. disk: of this model on the disk."
_BY_SOURCE = "Prompt tokens found in the prefix cache, by where their blocks were."
_PREEMPTIONS = "Preemptions, by what became of the request's blocks."
_SWAPPED = "Blocks copied to the host (out), and back (in)."

GAUGES = (
    Reading("vllm:num_requests_running", "Requests in the batch.", _in("requests", "running")),
    Reading(
        "vllm:num_requests_waiting",
        "Requests that wait, preempted ones included.",
        lambda figures: _away(figures) + figures.requests["loading"],
    ),
    Reading("vllm:num_requests_waiting_by_reason", _BY_REASON, _away, ("reason", "capacity")),
    Reading("vllm:num_requests_waiting_by_reason", _BY_REASON, _in("requests", "loading"), ("reason", "deferred")),
    Reading("vllm:kv_cache_usage_perc", "Used device blocks over all of them: 1 is full.", _usage),
    *(Reading("paged:requests", "Requests by state.", _in("requests", state), ("state", state)) for state in STATES),
    *(Reading("paged:blocks", _BLOCKS, _in("blocks", state), ("state", state)) for state in BLOCKS),
    Reading("paged:sessions", "Sessions that are known.", attrgetter("sessions")),
    Reading("paged:forecast_seconds", "In how many seconds a request that came now would begin.", _forecast),
)
"""Figures of now."""

PREFIX_COUNTERS = (
    Reading("vllm:prefix_cache_queries", "Prompt tokens that were looked up.", _in("totals", "prompt_tokens")),
    Reading("vllm:prefix_cache_hits", "Of them, found in blocks of the device.", _device_hits),
)
"""Totals since the engine process began, which stay 0 without prefix caching."""

COUNTERS = (
    Reading("vllm:prompt_tokens", "Prompt tokens of requests that began.", _in("totals", "prompt_tokens")),
    Reading("vllm:prompt_tokens_cached", "Of them, found in the prefix cache.", _hits),
    Reading("vllm:prompt_tokens_cached_by_source", _BY_SOURCE, _device_hits, ("source", "device")),
    Reading("vllm:prompt_tokens_cached_by_source", _BY_SOURCE, _in("totals", "host_hit_tokens"), ("source", "host")),
    Reading("vllm:prompt_tokens_cached_by_source", _BY_SOURCE, attrgetter("disk_hit_tokens"), ("source", "disk")),
    Reading("vllm:generation_tokens", "Output tokens.", _in("totals", "output_tokens")),
    Reading(
        "vllm:num_preemptions",
        "Preemptions of all kinds.",
        lambda figures: figures.totals["preemptions_recompute"] + figures.totals["preemptions_swap"],
    ),
    Reading("vllm:spec_decode_num_draft_tokens", "Draft tokens.", _in("totals", "drafted_tokens")),
    Reading("vllm:spec_decode_num_accepted_tokens", "Draft tokens that were right.", _in("totals", "accepted_tokens")),
    *(
        Reading("paged:preemptions", _PREEMPTIONS, _in("totals", f"preemptions_{kind}"), ("kind", kind))
        for kind in ("recompute", "swap")
    ),
    *(
        Reading("paged:swapped_blocks", _SWAPPED, _in("totals", f"swapped_{way}_blocks"), ("way", way))
        for way in ("out", "in")
    ),
    Reading("paged:computed_tokens", "Tokens computed.", _in("totals", "computed_tokens")),
    Reading(
        "paged:recomputed_tokens",
        "Of computed tokens, wasted: computed before and lost to a preemption.",
        _in("totals", "recomputed_tokens"),
    ),
    Reading(
        "paged:rejected_drafts",
        "Draft tokens that were wrong.",
        lambda figures: figures.totals["drafted_tokens"] - figures.totals["accepted_tokens"],
    ),
    Reading("paged:failed_steps", "Steps that were cancelled.", attrgetter("failed_steps")),
    Reading("paged:step_host_seconds", "Seconds in scheduling, sampling and text.", attrgetter("host_s")),
    Reading("paged:step_model_seconds", "Seconds in copies of blocks and forward passes.", attrgetter("model_s")),
)
"""Totals since the engine process began."""

_GROUP_GAUGES = (
    ("paged:group_used_pages", "Pages that requests hold, by layer group.", "used"),
    ("paged:group_cached_pages", "Pages with content that no row holds, by layer group.", "cached"),
    ("paged:group_wasted_pages", "Of the pages that requests hold, those lost to rounding.", "wasted"),
)
_GROUP_COUNTERS = (
    ("paged:group_passed_pages", "Pages that a window or chunk gave back in front.", "passed"),
    ("paged:group_lost_tokens", "Prompt tokens cached in full layers, behind hits that a group ended.", "lost_tokens"),
)


def readings_of(groups: Iterable[LayerGroup]) -> tuple[list[Reading], list[Reading]]:
    """Return gauges and counters of a model's layer groups; groups of one kind and reach are one series."""
    labels = dict.fromkeys(map(_label, groups))
    gauges, counters = (
        [Reading(name, said, _of_group(each, field), ("group", each)) for name, said, field in kind for each in labels]
        for kind in (_GROUP_GAUGES, _GROUP_COUNTERS)
    )
    return gauges, counters


def _label(group: LayerGroup) -> str:
    return f"{group.kind}_{group.reach}" if group.reach else group.kind


def _of_group(label: str, field: str) -> Read:
    return lambda figures: sum(getattr(each, field) for each in figures.groups if _label(each.group) == label)
