"""A server's metrics for Prometheus: vLLM's names for vLLM's meanings, and our own.

    vllm:time_to_first_token_seconds        name, labels and buckets are vLLM's
    paged:blocks{state="cached"}            ours, which vLLM does not have

Belongs to one event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from paged.serving.histogram import Histogram
from paged.serving.readings import COUNTERS, GAUGES, NO_ENGINE, PREFIX_COUNTERS, Read, Reading, readings_of
from paged.serving.records import Durations, RequestRecord, durations
from paged.serving.wire import Figures, Ready, Stepped

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

CACHE_CONFIG = (
    *("block_size", "cache_dtype", "enable_prefix_caching", "kv_cache_size_tokens"),
    *("num_cpu_blocks", "num_gpu_blocks", "engine"),
)
"""The labels of vLLM's cache_config_info that have a meaning here."""

Observe = Callable[[RequestRecord, Durations], float | None]


def _num_gaps(record: RequestRecord) -> float:
    """Return the mean number of gaps in an answer."""
    return record.output_tokens / record.answers - 1


def _token_time(record: RequestRecord, took: Durations) -> float | None:
    """Return the mean gap; 0 of an answer of one token, as in vLLM."""
    num = _num_gaps(record)
    return None if took.decode is None else took.decode / num if num > 0 else 0.0


def _pause(record: RequestRecord, took: Durations) -> float | None:
    return record.longest_pause_s if took.decode is not None and _num_gaps(record) > 0 else None


def _num_computed(record: RequestRecord, _: Durations) -> int:
    return max(0, record.prompt_tokens - record.cached_tokens)


def _of(name: str) -> Observe:
    return lambda record, _: getattr(record, name)


def _took(name: str) -> Observe:
    return lambda _, took: getattr(took, name)


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

Family = TypeVar("Family", Counter, Gauge)


class Followed:
    """A counter that follows a total, and goes on when the total begins at 0 again."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._seen = 0.0

    def follow(self, total: float) -> None:
        """Count the rise of the total above its highest value so far."""
        if total > self._seen:
            self._counter.inc(total - self._seen)
            self._seen = total

    def begin_anew(self) -> None:
        """Note that the total begins at 0 again."""
        self._seen = 0.0


class Metrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        # vLLM calls its first engine "0".
        self._labels = {"model_name": model_name, "engine": "0"}
        self._families: dict[str, Counter | Gauge] = {}
        self._shows_groups = False
        self._make_engines()
        self._make_servers()
        self._make_requests()
        ProcessCollector(registry=self.registry)

    def ready(self, ready: Ready) -> None:
        """Note that an engine process takes requests."""
        self._caches_prefixes = ready.prefix_caching
        if not self._shows_groups and ready.groups:
            # Any later engine has the same model.
            self._shows_groups = True
            gauges, counters = readings_of(ready.groups)
            self._gauges += self._readings(Gauge, gauges)
            self._counters += self._followed(counters)
        # A later engine may have a pool of another size.
        self._cache_config.clear()
        self._cache_config.labels(
            block_size=ready.block_size,
            cache_dtype=ready.cache_dtype,
            enable_prefix_caching=ready.prefix_caching,
            kv_cache_size_tokens=ready.cache_tokens,
            num_cpu_blocks=ready.host_blocks,
            num_gpu_blocks=ready.num_blocks,
            engine=self._labels["engine"],
        ).set(1)

    def restarted(self) -> None:
        """Note that the engine process has died: its requests are gone, and the totals of the next one begin at 0."""
        self._restarts.inc()
        for counter, _ in (*self._counters, *self._prefix_counters):
            counter.begin_anew()
        self._set_gauges(NO_ENGINE)

    def stepped(self, step: Stepped) -> None:
        """Count a step, and show its figures if it has any."""
        if step.tokens:
            self._step_tokens.observe(step.tokens)
        if step.figures is not None:
            self._show(step.figures)

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
        self._open_streams.set_function(open_streams)
        self._log_lines_lost, self._spans_lost = log_lines_lost, spans_lost

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return all metrics and their content type: OpenMetrics if the Accept header names it, else Prometheus' text."""
        self._lines_counted.follow(self._log_lines_lost())
        self._spans_counted.follow(self._spans_lost())
        if "application/openmetrics-text" in accept:
            # The default escaping replaces the colon in samples' names, which is allowed there.
            page = openmetrics.generate_latest(self.registry, escaping=openmetrics.ALLOWUTF8)
            return page, openmetrics.CONTENT_TYPE_LATEST
        return generate_latest(self.registry), CONTENT_TYPE_PLAIN_0_0_4

    def _set_gauges(self, figures: Figures) -> None:
        for gauge, read in self._gauges:
            gauge.set(read(figures))

    def _show(self, figures: Figures) -> None:
        self._set_gauges(figures)
        for counter, read in self._counters:
            counter.follow(read(figures))
        if self._caches_prefixes:
            for counter, read in self._prefix_counters:
                counter.follow(read(figures))

    def _note_client(self, record: RequestRecord) -> None:
        if record.status == 499:
            self._clients_gone.inc()

    def _make_engines(self) -> None:
        """Make the metrics of the engine."""
        self._gauges = self._readings(Gauge, GAUGES)
        self._set_gauges(NO_ENGINE)
        self._counters, self._prefix_counters = self._followed(COUNTERS), self._followed(PREFIX_COUNTERS)
        self._caches_prefixes = False
        self._cache_config = Gauge(
            "vllm:cache_config_info", "The KV cache; always 1.", CACHE_CONFIG, registry=self.registry
        )
        self._restarts = self._series(Counter, "paged:engine_restarts", "Engine processes that died.")
        self._step_tokens = self._histogram("vllm:iteration_tokens_total", "Tokens of a step.", STEP_TOKENS)

    def _make_servers(self) -> None:
        """Make the metrics of the server itself."""
        self._open_streams = self._series(Gauge, "paged:open_streams", "Answers that are being streamed.")
        self._log_lines_lost = int
        self._spans_lost = int
        self._lines_counted = Followed(
            self._series(Counter, "paged:log_lines_lost", "Lines of the log that were not written.")
        )
        self._spans_counted = Followed(
            self._series(Counter, "paged:spans_lost", "Spans that the collector was not given.")
        )
        self._clients_gone = self._series(Counter, "paged:clients_gone", "Requests whose client went first.")
        refused = "Requests that were not taken, by the error's code."
        self._refused = Counter("paged:requests_refused", refused, [*self._labels, "code"], registry=self.registry)
        missed = "Requests whose time was up: to end, or to begin."
        self._missed = {
            reason: self._series(Counter, "paged:deadlines_missed", missed, ("kind", reason)) for reason in MISSED
        }

    def _make_requests(self) -> None:
        """Make the metrics of requests."""
        finished = "Requests that ended, by how."
        self._finished = {
            reason: self._series(Counter, "vllm:request_success", finished, ("finished_reason", reason))
            for reason in FINISHED
        }
        self._of_requests = [(self._histogram(name, said, buckets), read) for name, said, buckets, read in REQUESTS]
        self._gap = self._histogram(
            "vllm:inter_token_latency_seconds", "Between a sequence's tokens of two steps.", GAP
        )

    def _readings(self, kind: type[Family], readings: Iterable[Reading]) -> list[tuple[Family, Read]]:
        """Make the series of each reading; return it and what it reads."""
        return [(self._series(kind, name, said, label), read) for name, said, read, label in readings]

    def _followed(self, readings: Iterable[Reading]) -> list[tuple[Followed, Read]]:
        return [(Followed(counter), read) for counter, read in self._readings(Counter, readings)]

    def _series(
        self, kind: type[Family], name: str, documentation: str, label: tuple[str, str] | None = None
    ) -> Family:
        """Make a series of a metric, and the metric with its first series. `label`: the metric's own, name and value."""
        labels = self._labels if label is None else {**self._labels, label[0]: label[1]}
        family = self._families.get(name)
        if family is None:
            family = self._families[name] = kind(name, documentation, list(labels), registry=self.registry)
        assert isinstance(family, kind), "a name is of one kind"
        return family.labels(**labels)

    def _histogram(self, name: str, documentation: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, documentation, buckets, self._labels, self.registry)
