"""A server's metrics for Prometheus: vLLM's names for vLLM's meanings, and our own.

    vllm:time_to_first_token_seconds        name, labels and buckets are vLLM's
    paged:blocks{state="cached"}            ours, which vLLM does not have

Belongs to one event loop.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from time import time

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from paged.serving.readings import COUNTERS, GAUGES, NO_ENGINE, PREFIX_COUNTERS, Reading, readings_of
from paged.serving.records import RequestRecord, durations
from paged.serving.wire import Ready, Stepped

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
