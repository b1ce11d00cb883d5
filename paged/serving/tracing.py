"""Spans for OpenTelemetry: one a request, a child of its client's span if that sent a `traceparent`.

    llm_request  |───── begun ───── first_token ─────────────────|      attributes by the names of vLLM and of the GenAI conventions

Another thread sends them, in batches. `span` neither waits nor fails: spans that a slow or absent collector does not
take are lost, and counted. Needs the `otel` extra.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Thread
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from paged.base.extras import import_with_extra
from paged.errors import InvalidConfig
from paged.serving.records import RequestRecord, durations

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

MOST_SPANS = 2048
"""Limit on the spans that wait for the collector; further ones are lost."""


class Traces:
    """The spans of a server. OpenTelemetry's environment variables set sampling and the service's name.

    endpoint  the collector's URL; without a path /v1/traces is added
    exporter  takes the spans instead of the collector, if it is given

    Raises MissingExtra and InvalidConfig.
    """

    def __init__(self, endpoint: str, *, model_name: str = "paged", exporter: SpanExporter | None = None) -> None:
        url = checked_url(endpoint)
        # First, so that the error of a missing part names the extra that brings it.
        for module in ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter"):
            import_with_extra(module, "serving.tracing.Traces")
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._model_name = model_name
        self._sender = Sender(OTLPSpanExporter(url) if exporter is None else exporter)
        # Not the process's global provider, and not shut down at exit, which would wait for the collector.
        self._provider = TracerProvider(resource=_service(), shutdown_on_exit=False)
        sender = cast("SpanExporter", self._sender)
        self._provider.add_span_processor(BatchSpanProcessor(sender, max_queue_size=MOST_SPANS))
        self._tracer = self._provider.get_tracer("paged.serving")
        self._propagator = TraceContextTextMapPropagator()
        self._is_closed = False
        self._num_given = 0
        self._num_refused = 0

    @property
    def lost(self) -> int:
        """Spans that the collector was not given."""
        return self._num_refused + self._sender.num_failed

    def span(self, record: RequestRecord, traceparent: str | None, wall: float) -> None:
        """Make the span of a request that ended at the Unix time `wall`. `traceparent`: the header of that name; None: it had none."""
        from opentelemetry.trace import SpanKind, StatusCode

        if self._is_closed or self._num_given - self._sender.num_taken >= MOST_SPANS:
            self._num_refused += 1
            return
        ended = record.arrived if record.ended is None else record.ended

        def at(moment: float) -> int:
            return round(wall * 1e9) - round((ended - moment) * 1e9)

        span = self._tracer.start_span(
            "llm_request",
            context=self._propagator.extract({} if traceparent is None else {"traceparent": traceparent}),
            kind=SpanKind.SERVER,
            attributes=attributes(record, self._model_name),
            start_time=at(record.arrived),
        )
        if not span.is_recording():
            # The client's trace is not sampled.
            return
        for name, moment in (("begun", record.begun), ("first_token", record.first)):
            if moment is not None:
                span.add_event(name, timestamp=at(moment))
        if record.status >= 500:
            span.set_status(StatusCode.ERROR, record.error)
        self._num_given += 1
        span.end(at(ended))

    def close(self, timeout_s: float = 2.0) -> None:
        """Send the waiting spans for at most `timeout_s`; the others are lost."""
        self._is_closed = True
        # The processor waits half a minute for its thread, which retries.
        ending = Thread(target=self._provider.shutdown, name="paged-traces-end", daemon=True)
        ending.start()
        ending.join(timeout_s)
        self._sender.shutdown()
        ending.join(timeout_s)


class Sender:
    """An exporter that counts spans: num_taken wait no more, num_failed of them were not sent."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._is_shut = False
        self.num_taken = 0
        self.num_failed = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans, and count them."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            if result is not SpanExportResult.SUCCESS:
                self.num_failed += len(spans)
            self.num_taken += len(spans)
        return result

    def shutdown(self) -> None:
        """Send no more, and stop retrying."""
        if not self._is_shut:
            self._is_shut = True
            self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """See SpanExporter."""
        return self._exporter.force_flush(timeout_millis)


def attributes(record: RequestRecord, model_name: str) -> dict[str, Any]:
    """Return the attributes of a request's span."""
    took = durations(record)
    said = {
        # vLLM's names.
        "gen_ai.request.id": record.id,
        "gen_ai.request.n": record.n,
        "gen_ai.request.max_tokens": record.max_tokens or None,
        "gen_ai.response.model": model_name,
        "gen_ai.usage.prompt_tokens": record.prompt_tokens,
        "gen_ai.usage.completion_tokens": record.output_tokens,
        "gen_ai.latency.time_in_queue": took["queue"],
        "gen_ai.latency.time_to_first_token": took["ttft"],
        "gen_ai.latency.e2e": took["e2e"],
        "gen_ai.latency.time_in_model_prefill": took["prefill"],
        "gen_ai.latency.time_in_model_decode": took["decode"],
        "gen_ai.latency.time_in_model_inference": took["inference"],
        # The conventions' names.
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        "gen_ai.response.finish_reasons": (record.finish_reason,) if record.finish_reason else None,
        "http.response.status_code": record.status,
        "url.path": record.endpoint,
        "error.type": (record.error or str(record.status)) if record.status >= 400 else None,
        # Ours.
        "paged.tenant": record.tenant,
        "paged.preemptions": record.preemptions,
        "paged.recomputed_tokens": record.recomputed_tokens,
        "paged.longest_pause": record.longest_pause_s,
    }
    return {name: value for name, value in said.items() if value is not None}


def checked_url(endpoint: str) -> str:
    """Return the URL that spans are sent to. Raises InvalidConfig."""
    try:
        parts = urlsplit(endpoint)
        is_usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable:
        raise InvalidConfig(f'traces_endpoint has to be an http or https URL; got "{endpoint}".')
    return parts._replace(path="/v1/traces").geturl() if parts.path in ("", "/") else endpoint


def _service() -> Resource:
    """Return the service as the environment names it; "paged" if it does not."""
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource

    found = Resource.create()
    if str(found.attributes[SERVICE_NAME]).startswith("unknown_service"):
        found = found.merge(Resource({SERVICE_NAME: "paged"}))
    return found
