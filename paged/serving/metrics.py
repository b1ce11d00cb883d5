"""A server's metrics for Prometheus: vLLM's names for vLLM's meanings, and our own.

    vllm:time_to_first_token_seconds        name, labels and buckets are vLLM's
    paged:blocks{state="cached"}            ours, which vLLM does not have

A new metric of the engine is a line in GAUGES or COUNTERS, and one in docs/metrics.md. Belongs to one event loop.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from operator import attrgetter
from time import time
from typing import NamedTuple

from msgspec.structs import asdict
from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from paged.block_manager import LayerGroup
from paged.scheduler import SchedulerStats
from paged.serving.records import RequestRecord, durations
from paged.serving.wire import Figures, Ready, Stepped

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


# vLLM's buckets, so that one dashboard shows both; only vLLM ends those of tokens at the model's length.
LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
GAP = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
ANSWERS = (1, 2, 5, 10, 20)
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
TOKENS = (*(mantissa * 10**power for power in range(6) for mantissa in (1, 2, 5)), 10**6)

FINISHED = ("stop", "length", "abort", "error")
"""vLLM's finish reasons. Of ours, those in MISSED count as "abort", any other as "error"."""
MISSED = ("deadline", "queue_timeout")
"""Finish reasons of requests whose time was up."""

CACHE_CONFIG = {
    "block_size": "block_size",
    "cache_dtype": "cache_dtype",
    "enable_prefix_caching": "prefix_caching",
    "kv_cache_size_tokens": "cache_tokens",
    "num_cpu_blocks": "host_blocks",
    "num_gpu_blocks": "num_blocks",
}
"""The labels of vLLM's cache_config_info that have a meaning here, and what of Ready they are; `engine` is one, too."""

Durations = dict[str, float | None]
Observe = Callable[[RequestRecord, Durations], float | None]


def _num_gaps(record: RequestRecord) -> float:
    """Return the mean number of gaps in an answer."""
    return record.output_tokens / record.answers - 1


def _token_time(record: RequestRecord, took: Durations) -> float | None:
    """Return the mean gap; 0 of an answer of one token, as in vLLM."""
    num = _num_gaps(record)
    return None if took["decode"] is None else took["decode"] / num if num > 0 else 0.0


def _pause(record: RequestRecord, took: Durations) -> float | None:
    return record.longest_pause_s if took["decode"] is not None and _num_gaps(record) > 0 else None


def _num_computed(record: RequestRecord, _: Durations) -> int:
    return max(0, record.prompt_tokens - record.cached_tokens)


def _of(name: str) -> Observe:
    return lambda record, _: getattr(record, name)


def _took(name: str) -> Observe:
    return lambda _, took: took[name]


REQUESTS: tuple[tuple[str, str, Sequence[float], Observe], ...] = (
    ("vllm:request_prompt_tokens", "Prompt tokens of a request.", TOKENS, _of("prompt_tokens")),
    ("vllm:request_prefill_kv_computed_tokens", "Of them, not found in the prefix cache.", TOKENS, _num_computed),
    ("vllm:request_generation_tokens", "Output tokens of a request.", TOKENS, _of("output_tokens")),
    ("vllm:request_max_num_generation_tokens", "Tokens of a request's longest answer.", TOKENS, _of("longest_answer")),
    (
        "vllm:request_params_max_tokens",
        "Output tokens that it asked for.",
        TOKENS,
        lambda record, _: record.max_tokens or None,
    ),
    ("vllm:request_params_n", "Answers that a request asked for.", ANSWERS, _of("n")),
    ("vllm:request_num_preemptions", "Preemptions of a request.", PREEMPTIONS, _of("preemptions")),
    ("vllm:time_to_first_token_seconds", "From a request's coming to its first token.", FIRST_TOKEN, _took("ttft")),
    ("vllm:request_time_per_output_token_seconds", "Mean of a request's gaps.", GAP, _token_time),
    ("paged:request_pause_seconds", "Longest gap of a request.", GAP, _pause),
    ("vllm:e2e_request_latency_seconds", "From a request's coming to its end.", LATENCY, _took("e2e")),
    ("vllm:request_queue_time_seconds", "From being given to the engine to its beginning.", LATENCY, _took("queue")),
    ("vllm:request_prefill_time_seconds", "From its beginning to its first token.", LATENCY, _took("prefill")),
    ("vllm:request_decode_time_seconds", "From its first token to its last.", LATENCY, _took("decode")),
    ("vllm:request_inference_time_seconds", "From its beginning to its last token.", LATENCY, _took("inference")),
)
"""Histograms of requests that ended: name, documentation, buckets, and the value of a record; None: it is not observed."""


class Metrics(Collector):
    """The metrics of one server, in a registry of their own. What is made from the engine's figures is made when they are read."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        # vLLM calls its first engine "0".
        self._labels = {"model_name": model_name, "engine": "0"}
        self._made_at = time()
        self._figures = NO_ENGINE
        self._gauges, self._counters = list(GAUGES), [*COUNTERS, *PREFIX_COUNTERS]
        self._shows_groups = self._caches_prefixes = False
        # By counter: what engines that have died counted, and the highest total since.
        self._before: dict[Reading, float] = {}
        self._highest: dict[Reading, float] = {}
        self.watch(open_streams=int)
        self.registry.register(self)
        self._cache_config = Gauge(
            "vllm:cache_config_info", "The KV cache; always 1.", [*CACHE_CONFIG, "engine"], registry=self.registry
        )
        self._restarts = self._counter("paged:engine_restarts", "Engine processes that died.")
        self._step_tokens = self._histogram("vllm:iteration_tokens_total", "Tokens of a step.", STEP_TOKENS)
        self._clients_gone = self._counter("paged:clients_gone", "Requests whose client went first.")
        refused = "Requests that were not taken, by the error's code."
        self._refused = Counter("paged:requests_refused", refused, [*self._labels, "code"], registry=self.registry)
        missed = "Requests whose time was up: to end, or to begin."
        self._missed = self._by_value("paged:deadlines_missed", missed, "kind", MISSED)
        finished = "Requests that ended, by how."
        self._finished = self._by_value("vllm:request_success", finished, "finished_reason", FINISHED)
        self._of_requests = [(self._histogram(name, said, buckets), read) for name, said, buckets, read in REQUESTS]
        gaps = "Between a sequence's tokens of two steps."
        self._gap = self._histogram("vllm:inter_token_latency_seconds", gaps, GAP)
        ProcessCollector(registry=self.registry)

    def ready(self, ready: Ready) -> None:
        """Note that an engine process takes requests."""
        self._caches_prefixes = ready.prefix_caching
        if not self._shows_groups and ready.groups:
            # Any later engine has the same model.
            self._shows_groups = True
            gauges, counters = readings_of(ready.groups)
            self._gauges += gauges
            self._counters += counters
        # A later engine may have a pool of another size.
        self._cache_config.clear()
        described = {label: getattr(ready, name) for label, name in CACHE_CONFIG.items()}
        self._cache_config.labels(**described, engine=self._labels["engine"]).set(1)

    def restarted(self) -> None:
        """Note that the engine process has died: its requests are gone, and the totals of the next one begin at 0."""
        self._restarts.inc()
        self._before = {reading: self._total(reading) for reading in self._counters}
        for reading in self._counters:
            self._highest.pop(reading, None)
        self._figures = NO_ENGINE

    def stepped(self, step: Stepped) -> None:
        """Count a step, and show its figures if it has any."""
        if step.tokens:
            self._step_tokens.observe(step.tokens)
        if step.figures is not None:
            self._figures = step.figures

    def token_gap(self, seconds: float) -> None:
        """Count the seconds between the tokens that two steps gave a sequence. As in vLLM this is one gap, however many tokens they are."""
        self._gap.observe(seconds)

    def ended(self, record: RequestRecord) -> None:
        """Count a request that was taken and has ended, in any way."""
        reason = record.finish_reason
        if reason in MISSED:
            self._missed[reason].inc()
            reason = "abort"
        self._finished[reason if reason in FINISHED else "error"].inc()
        self._note_client(record)
        took = durations(record)
        for histogram, read in self._of_requests:
            value = read(record, took)
            if value is not None:
                histogram.observe(value)

    def refused(self, record: RequestRecord) -> None:
        """Count a refused request."""
        self._refused.labels(**self._labels, code=record.error or str(record.status)).inc()
        self._note_client(record)

    def watch(
        self,
        *,
        open_streams: Callable[[], int],
        log_lines_lost: Callable[[], int] = int,
        spans_lost: Callable[[], int] = int,
    ) -> None:
        """Set what is called whenever the metrics are read: the number of answers being streamed, and totals of what log and traces lost."""
        self._streams = Reading("paged:open_streams", "Answers that are being streamed.", lambda _: open_streams())
        lines, spans = "Lines of the log that were not written.", "Spans that the collector was not given."
        self._lost = (
            Reading("paged:log_lines_lost", lines, lambda _: log_lines_lost()),
            Reading("paged:spans_lost", spans, lambda _: spans_lost()),
        )

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return all metrics and their content type: OpenMetrics if the Accept header names it, else Prometheus' text."""
        if "application/openmetrics-text" in accept:
            # The default escaping replaces the colon in samples' names, which is allowed there.
            page = openmetrics.generate_latest(self.registry, escaping=openmetrics.ALLOWUTF8)
            return page, openmetrics.CONTENT_TYPE_LATEST
        return generate_latest(self.registry), CONTENT_TYPE_PLAIN_0_0_4

    def collect(self) -> Iterable[Metric]:
        """Return the series that are made now; see prometheus_client."""
        gauges: dict[str, GaugeMetricFamily] = {}
        counters: dict[str, CounterMetricFamily] = {}
        values = [*self._labels.values()]
        for name, said, read, label in (*self._gauges, self._streams):
            gauge = gauges.setdefault(name, GaugeMetricFamily(name, said, labels=[*self._labels, *label[:1]]))
            gauge.add_metric([*values, *label[1:]], read(self._figures))
        for reading in (*self._counters, *self._lost):
            name, said, _, label = reading
            counter = counters.setdefault(name, CounterMetricFamily(name, said, labels=[*self._labels, *label[:1]]))
            counter.add_metric([*values, *label[1:]], self._total(reading), created=self._made_at)
        return [*gauges.values(), *counters.values()]

    def _total(self, reading: Reading) -> float:
        """Return what a counter counts: it never falls, and goes on when an engine's totals begin at 0 again."""
        if self._caches_prefixes or reading not in PREFIX_COUNTERS:
            self._highest[reading] = max(self._highest.get(reading, 0.0), reading.read(self._figures))
        return self._before.get(reading, 0.0) + self._highest.get(reading, 0.0)

    def _note_client(self, record: RequestRecord) -> None:
        if record.status == 499:
            self._clients_gone.inc()

    def _counter(self, name: str, documentation: str) -> Counter:
        return Counter(name, documentation, [*self._labels], registry=self.registry).labels(**self._labels)

    def _by_value(self, name: str, documentation: str, label: str, values: Iterable[str]) -> dict[str, Counter]:
        """Make a counter for each value of its own label."""
        family = Counter(name, documentation, [*self._labels, label], registry=self.registry)
        return {value: family.labels(**self._labels, **{label: value}) for value in values}

    def _histogram(self, name: str, documentation: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, documentation, buckets, self._labels, self.registry)


class Histogram(Collector):
    """One series. `buckets` are rising upper bounds, each inclusive; a bucket without a bound follows them."""

    def __init__(
        self,
        name: str,
        documentation: str,
        buckets: Sequence[float],
        labels: Mapping[str, str],
        registry: CollectorRegistry,
    ) -> None:
        assert list(buckets) == sorted(buckets), "bounds rise"
        self._name, self._documentation, self._labels = name, documentation, labels
        self._bounds = [float(bound) for bound in buckets]
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """Return the series as it is now; see prometheus_client."""
        family = HistogramMetricFamily(self._name, self._documentation, labels=list(self._labels))
        bounds = [floatToGoString(bound) for bound in (*self._bounds, math.inf)]
        cumulative = [float(count) for count in accumulate(self._counts)]
        family.add_metric(list(self._labels.values()), list(zip(bounds, cumulative)), self._sum)
        return [family]
