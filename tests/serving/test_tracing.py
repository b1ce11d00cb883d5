"""Spans: what they say, whose children they are, and that a collector which is slow or away costs spans and nothing else."""

import http.server
import json
import logging
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import NonRecordingSpan, SpanKind, StatusCode, use_span

from paged.errors import InvalidConfig
from paged.serving.tracing import MOST_SPANS, Traces, checked_url

from .samples import RECORD  # noqa: TID252

WALL = 1_700_000_002.25
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def spans(record=RECORD, traceparent=None):
    exporter = InMemorySpanExporter()
    traces = Traces("http://collector", model_name="model", exporter=exporter)
    traces.span(record, traceparent, WALL)
    traces.close(timeout_s=600)
    assert traces.lost == 0
    return exporter.get_finished_spans()


def test_a_request_is_a_span_that_names_what_vllm_and_the_conventions_do_and_has_its_moments():
    (span,) = spans()
    assert (span.name, span.kind, span.status.status_code) == ("llm_request", SpanKind.SERVER, StatusCode.UNSET)
    kept = json.loads(Path(__file__).with_name("span_attributes.json").read_text())
    assert json.loads(json.dumps(dict(span.attributes))) == kept
    # A time of day in seconds is a float: exact to a quarter of a microsecond.
    assert span.end_time == pytest.approx(1_700_000_002_250_000_000, abs=250)
    assert span.end_time - span.start_time == 2_250_000_000
    assert [(event.name, event.timestamp - span.start_time) for event in span.events] == [
        ("begun", 250_000_000),
        ("first_token", 500_000_000),
    ]


@pytest.mark.parametrize(
    "header", [PARENT, None, "", "banana", PARENT[:-5], "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "\xff" * 99]
)
def test_a_span_is_the_child_of_the_one_that_its_client_names_or_of_none_though_another_is_current(header):
    (current,) = spans()
    with use_span(NonRecordingSpan(current.context)):
        (span,) = spans(traceparent=header)
    if header == PARENT:
        assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (PARENT[3:35], PARENT[36:52])
    else:
        assert span.parent is None


def test_of_a_trace_that_its_client_does_not_sample_there_is_no_span_and_none_is_waited_for():
    exporter = InMemorySpanExporter()
    traces = Traces("http://collector", exporter=exporter)
    for _ in range(MOST_SPANS + 1):
        traces.span(RECORD, PARENT[:-2] + "00", WALL)
    traces.span(RECORD, PARENT, WALL)
    traces.close(timeout_s=600)
    assert (len(exporter.get_finished_spans()), traces.lost) == (1, 0)


@pytest.mark.parametrize(
    ("status", "error", "code"), [(429, "overloaded", StatusCode.UNSET), (500, "engine_died", StatusCode.ERROR)]
)
def test_a_request_that_did_not_begin_says_why_and_only_a_fault_of_the_server_is_the_spans(status, error, code):
    refused = replace(RECORD, begun=None, first=None, last=None, status=status, error=error, finish_reason="")
    (span,) = spans(refused)
    assert (span.events, span.status.status_code) == ((), code)
    assert span.status.description == (error if code == StatusCode.ERROR else None)
    assert span.attributes["error.type"] == error
    assert not {"gen_ai.latency.time_to_first_token", "gen_ai.response.finish_reasons"} & set(span.attributes)


def test_the_service_is_named_by_the_environment_where_that_does(monkeypatch):
    assert spans()[0].resource.attributes["service.name"] == "paged"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat")
    assert spans()[0].resource.attributes["service.name"] == "chat"


class Stuck(SpanExporter):
    """A collector that answers when it is let to."""

    def __init__(self):
        self.may_answer = threading.Event()
        self.num_given = 0

    def export(self, spans):
        self.may_answer.wait()
        self.num_given += len(spans)
        return SpanExportResult.SUCCESS


def test_beside_a_collector_that_does_not_answer_spans_are_lost_and_nobody_waits(caplog):
    collector = Stuck()
    traces = Traces("http://collector", exporter=collector)
    for _ in range(MOST_SPANS + 100):
        traces.span(RECORD, None, WALL)
    assert traces.lost == 100
    collector.may_answer.set()
    traces.close(timeout_s=600)
    assert (collector.num_given, traces.lost) == (MOST_SPANS, 100)
    # A warning would be written by whoever serves the request.
    assert caplog.records == []


def test_closing_does_not_wait_for_a_collector_that_does_not_answer_and_what_comes_then_is_lost():
    collector = Stuck()
    traces = Traces("http://collector", exporter=collector)
    traces.span(RECORD, None, WALL)
    traces.close(timeout_s=0.01)
    traces.span(RECORD, None, WALL)
    assert traces.lost == 1
    collector.may_answer.set()


def test_what_a_collector_that_is_away_was_to_get_is_lost_and_counted(caplog):
    caplog.set_level(logging.CRITICAL)
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        port = server.server_port
    traces = Traces(f"http://127.0.0.1:{port}")
    for _ in range(3):
        traces.span(RECORD, None, WALL)
    # Between two tries it waits a second and more; ending cuts that short.
    traces.close(timeout_s=0.2)
    assert traces.lost == 3


def test_a_collector_gets_the_spans_over_http():
    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            kept.append((self.path, ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    kept = []
    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as server:
        server.timeout = 600
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        traces = Traces(f"http://127.0.0.1:{server.server_port}")
        traces.span(RECORD, PARENT, WALL)
        traces.close(timeout_s=600)
        thread.join()
    ((path, message),) = kept
    (span,) = message.resource_spans[0].scope_spans[0].spans
    assert (path, span.name, span.parent_span_id.hex()) == ("/v1/traces", "llm_request", PARENT[36:52])
    assert traces.lost == 0


def test_an_endpoint_without_a_path_gets_the_usual_one_and_one_that_is_no_url_is_refused():
    assert checked_url("http://collector:4318") == "http://collector:4318/v1/traces"
    assert checked_url("https://collector/") == "https://collector/v1/traces"
    for whole in ("http://collector:4318/v1/traces", "http://collector/of/ours?key=1"):
        assert checked_url(whole) == whole
    for none in ("", "collector:4317", "grpc://collector:4317", "http://", "http://[::1", "http://a:99999"):
        with pytest.raises(InvalidConfig, match="traces_endpoint has to be an http or https URL"):
            Traces(none)


@pytest.mark.parametrize("missing", ["opentelemetry.sdk", "opentelemetry.exporter"])
def test_without_the_extra_it_is_said_what_brings_it(run_without, missing):
    result = run_without([missing], "from paged.serving.tracing import Traces; Traces('http://collector')")
    said = "paged.serving.tracing.Traces needs opentelemetry, which is not installed; `pip install '.[otel]'` in a checkout of paged brings it."
    assert result.stderr.splitlines()[-1] == f"paged.errors.MissingExtra: {said}"
