"""Metrics: the names are vLLM's where they say so, counters never fall, parts add up to their wholes, and a record's times are told as they are."""

import json
import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings, strategies as st
from prometheus_client import CollectorRegistry, Histogram as TheirHistogram, generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families

from paged.block_manager import GroupStats, LayerGroup
from paged.scheduler import SchedulerStats
from paged.serving.metrics import GAP, MISSED, Histogram, Metrics
from paged.serving.wire import Figures, Stepped

from .samples import READY, RECORD  # noqa: TID252

VLLMS = json.loads(Path(__file__).with_name("vllm_metrics.json").read_text())["metrics"]

NAME = 'a "quoted"\nname \\ of Ω'
STATES = {"running": 3, "waiting": 2, "paused": 5, "swapped": 7, "loading": 11}
BLOCKS = {"free": 50, "cached": 20, "used": 30, "shared": 4, "reserved": 6, "pinned": 9, "disk": 7}
BLOCKS |= {"host_free": 13, "host_cached": 5, "host_used": 2}
FIGURES = Figures(
    now=1.0, requests=STATES, blocks=BLOCKS,
    totals=msgspec.structs.asdict(SchedulerStats()), failed_steps=0, host_s=0.0, model_s=0.0,
    forecast=[0.1, 0.2, 0.5, 0.9],
)  # fmt: skip
NOTHING = Stepped(**dict.fromkeys(Stepped.__struct_fields__, 0) | {"outputs": [], "completions": [], "begun": []})


def told(now=FIGURES, **totals):
    return msgspec.structs.replace(NOTHING, figures=msgspec.structs.replace(now, totals={**now.totals, **totals}))


def step(tokens):
    return msgspec.structs.replace(NOTHING, tokens=tokens, figures=None)


def series(metrics):
    """By name, and by name{label=value} where a label is the metric's own, the values of all samples."""
    metrics.render()
    found = {}
    for sample in (sample for family in metrics.registry.collect() for sample in family.samples):
        own = {name: value for name, value in sample.labels.items() if name not in ("model_name", "engine")}
        found[sample.name + "".join(f"{{{name}={value}}}" for name, value in own.items())] = sample.value
    return found


def of_label(metrics, name, label):
    found = (re.fullmatch(rf"{name}{{{label}=(.*)}}", key) for key in series(metrics))
    return {each[1]: series(metrics)[each[0]] for each in found if each}


def counters(metrics):
    """Whatever must never fall: counters, and counts and buckets of histograms."""
    endings = ("_total", "_count", "_sum", "_bucket")
    return {name: value for name, value in series(metrics).items() if name.partition("{")[0].endswith(endings)}


def families(metrics):
    """By name, of those that are the server's own: kind, labels, and bounds of buckets."""
    return {family.name: family for family in metrics.registry.collect() if ":" in family.name}


def assert_has(metrics, expected):
    found = series(metrics)
    assert {name: found[name] for name in expected} == expected


@pytest.fixture
def metrics():
    made = Metrics(NAME)
    made.ready(READY)
    return made


def busy(metrics):
    """Let every metric have a series."""
    metrics.stepped(told())
    metrics.stepped(step(5))
    metrics.ended(RECORD)
    metrics.refused(replace(RECORD, status=429, error="overloaded"))
    metrics.watch(open_streams=lambda: 3)
    return metrics


def test_what_bears_vllms_name_is_of_vllms_kind_and_has_its_labels_and_buckets(metrics):
    shared = {name: family for name, family in families(busy(metrics)).items() if name.startswith("vllm:")}
    assert len(shared) == 31
    assert set(shared) <= set(VLLMS)
    histograms = {}
    for name, family in shared.items():
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        if name == "vllm:cache_config_info":
            assert labels <= set(VLLMS[name]["labels"])
        else:
            assert (family.type, labels) == (VLLMS[name]["kind"], set(VLLMS[name]["labels"])), name
        if family.type == "histogram":
            histograms[name] = [float(sample.labels["le"]) for sample in family.samples if "le" in sample.labels]
    assert len(histograms) == 16
    assert histograms == {name: [*VLLMS[name]["buckets"], math.inf] for name in histograms}


def test_every_series_of_a_metric_that_is_not_counted_yet_is_there_from_the_beginning(metrics):
    before = series(metrics)
    new = {name.partition("{")[0] for name in set(series(busy(metrics))) - set(before)}
    # What comes with the error that is its label's value.
    assert new == {"paged:requests_refused_total", "paged:requests_refused_created"}


TOTALS = sorted(SchedulerStats.__struct_fields__)
rises = st.dictionaries(st.sampled_from(TOTALS), st.integers(0, 100), max_size=4)


@settings(max_examples=20)
@given(st.lists(st.lists(rises, max_size=3), min_size=1, max_size=3))
def test_no_counter_falls_over_restarts_and_each_is_the_sum_of_the_engines_totals(lives):
    metrics = Metrics("model")
    before, whole = counters(metrics), Counter(dict.fromkeys(TOTALS, 0))
    for number, life in enumerate(lives):
        if number:
            metrics.restarted()
        metrics.ready(READY)
        totals = Counter()
        for rise in life:
            totals.update(rise)
            metrics.stepped(told(**totals))
            after = counters(metrics)
            assert [name for name, value in before.items() if after[name] < value] == []
            before = after
        whole.update(totals)
    expected = {
        "vllm:prompt_tokens_total": whole["prompt_tokens"],
        "vllm:generation_tokens_total": whole["output_tokens"],
        "paged:recomputed_tokens_total": whole["recomputed_tokens"],
        "vllm:num_preemptions_total": whole["preemptions_recompute"] + whole["preemptions_swap"],
        "paged:engine_restarts_total": len(lives) - 1,
    }
    assert_has(metrics, expected)


def test_a_total_that_falls_and_rises_again_is_counted_once(metrics):
    for total in (10, 4, 10, 12):
        metrics.stepped(told(output_tokens=total))
    assert_has(metrics, {"vllm:generation_tokens_total": 12})


def test_parts_add_up_to_their_wholes(metrics):
    now = msgspec.structs.replace(FIGURES, disk_hit_tokens=40, sessions=8)
    totals = {"prompt_tokens": 1000, "hit_tokens": 300, "host_hit_tokens": 100, "drafted_tokens": 50}
    metrics.stepped(told(now, **totals, accepted_tokens=30, preemptions_recompute=3, preemptions_swap=4))
    wholes = {
        "vllm:num_preemptions_total": 7, "vllm:prompt_tokens_cached_total": 340, "vllm:prefix_cache_hits_total": 200,
        "vllm:prefix_cache_queries_total": 1000, "vllm:spec_decode_num_draft_tokens_total": 50,
        "vllm:spec_decode_num_accepted_tokens_total": 30, "paged:rejected_drafts_total": 20,
        "vllm:num_requests_running": 3, "vllm:num_requests_waiting": 2 + 5 + 7 + 11, "vllm:kv_cache_usage_perc": 0.3,
        "paged:sessions": 8,
    }  # fmt: skip
    assert_has(metrics, wholes)
    assert of_label(metrics, "paged:preemptions_total", "kind") == {"recompute": 3, "swap": 4}
    cached = of_label(metrics, "vllm:prompt_tokens_cached_by_source_total", "source")
    assert cached == {"device": 200, "host": 100, "disk": 40}
    waiting = of_label(metrics, "vllm:num_requests_waiting_by_reason", "reason")
    assert waiting["capacity"] + waiting["deferred"] == 25
    assert of_label(metrics, "paged:requests", "state") == STATES
    assert of_label(metrics, "paged:blocks", "state") == BLOCKS


WINDOW = LayerGroup("window", 1024, pages=2)
GROUPS = [LayerGroup("full"), WINDOW, LayerGroup("state"), LayerGroup("state", pages=3)]


def test_layer_groups_are_series_of_their_own_and_states_are_one(metrics):
    assert not any("group" in name for name in series(metrics))
    ready = msgspec.structs.replace(READY, groups=GROUPS)
    metrics.ready(ready)
    assert of_label(metrics, "paged:group_used_pages", "group") == {"full": 0, "window_1024": 0, "state": 0}
    stats = tuple(GroupStats(group, 10 + i, 20 + i, 30 + i, 40 + i) for i, group in enumerate(GROUPS))
    now = msgspec.structs.replace(FIGURES, groups=stats)
    metrics.stepped(told(now))
    assert of_label(metrics, "paged:group_used_pages", "group") == {"full": 10, "window_1024": 11, "state": 25}
    assert of_label(metrics, "paged:group_cached_pages", "group") == {"full": 20, "window_1024": 21, "state": 45}
    assert of_label(metrics, "paged:group_passed_pages_total", "group")["window_1024"] == 31
    assert of_label(metrics, "paged:group_lost_tokens_total", "group") == {"full": 40, "window_1024": 41, "state": 85}
    metrics.restarted()
    metrics.ready(ready)
    assert of_label(metrics, "paged:group_used_pages", "group")["full"] == 0
    metrics.stepped(told(now))
    assert of_label(metrics, "paged:group_lost_tokens_total", "group") == {"full": 80, "window_1024": 82, "state": 170}


@pytest.mark.parametrize(
    ("waiting", "forecast", "seconds"),
    [(0, [0.1, 0.2], 0.1), (1, [0.1, 0.2], 0.2), (5, [0.1, 0.2], 0.2), (0, [], math.nan)],
)
def test_the_forecast_is_of_the_place_behind_all_that_wait_and_without_an_engine_there_is_none(
    metrics, waiting, forecast, seconds
):
    metrics.stepped(told(msgspec.structs.replace(FIGURES, requests=STATES | {"waiting": waiting}, forecast=forecast)))
    assert series(metrics)["paged:forecast_seconds"] == pytest.approx(seconds, nan_ok=True)
    metrics.restarted()
    assert_has(metrics, {"vllm:num_requests_running": 0, "paged:blocks{state=used}": 0})
    assert math.isnan(series(metrics)["paged:forecast_seconds"])


def test_the_cache_is_described_once_as_the_latest_engine_has_it_and_where_there_is_none_nothing_is_looked_up(metrics):
    metrics.ready(msgspec.structs.replace(READY, num_blocks=90, cache_tokens=1431, prefix_caching=False))
    metrics.stepped(told(prompt_tokens=1000))
    assert_has(metrics, {"vllm:prompt_tokens_total": 1000, "vllm:prefix_cache_queries_total": 0})
    (sample,) = families(metrics)["vllm:cache_config_info"].samples
    assert sample.value == 1
    assert sample.labels == {
        "block_size": "16", "cache_dtype": "float32", "enable_prefix_caching": "False", "kv_cache_size_tokens": "1431",
        "num_cpu_blocks": "20", "num_gpu_blocks": "90", "engine": "0",
    }  # fmt: skip


def test_a_request_that_ended_is_observed_once_by_its_own_times_and_sizes(metrics):
    # A time per token is from the first to the last, of answers with sixteen each.
    observed = json.loads(Path(__file__).with_name("metrics_of_a_record.json").read_text())
    metrics.ended(RECORD)
    assert_has(metrics, {f"{name}_count": 1 for name in observed})
    assert_has(metrics, {f"{name}_sum": value for name, value in observed.items()})


def test_what_did_not_happen_is_not_observed(metrics):
    waited = replace(
        RECORD, begun=None, first=None, last=None, output_tokens=0, max_tokens=0, finish_reason="queue_timeout"
    )
    metrics.ended(waited)
    observed = {name for name, value in series(metrics).items() if name.endswith("_seconds_count") and value}
    assert observed == {"vllm:e2e_request_latency_seconds_count"}
    assert_has(metrics, {"vllm:request_params_max_tokens_count": 0})


def test_a_single_token_has_no_pause_and_a_mean_of_zero_and_no_time_is_negative(metrics):
    metrics.ended(replace(RECORD, last=RECORD.first, output_tokens=1, n=1, answers=1))
    mean = "vllm:request_time_per_output_token_seconds_bucket{le=0.01}"
    assert_has(metrics, {"paged:request_pause_seconds_count": 0, mean: 1})
    # Moments out of order.
    metrics.ended(replace(RECORD, begun=99.0, first=98.9, last=98.8, ended=98.0, cached_tokens=200))
    assert min(counters(metrics).values()) == 0


@pytest.mark.parametrize("reason", ["stop", "length", "abort", "error", "rejected", *MISSED])
def test_a_request_counts_as_ended_by_vllms_words_and_one_whose_time_was_up_by_ours_too(metrics, reason):
    metrics.ended(replace(RECORD, finish_reason=reason))
    # vLLM has no word for a rejection.
    finished = "error" if reason == "rejected" else "abort" if reason in MISSED else reason
    counted = of_label(metrics, "vllm:request_success_total", "finished_reason")
    assert counted == {each: float(each == finished) for each in ("stop", "length", "abort", "error")}
    counted = of_label(metrics, "paged:deadlines_missed_total", "kind")
    assert counted == {each: float(each == reason) for each in MISSED}


def test_refusals_are_counted_by_code_or_by_status_and_clients_that_went_first_by_themselves(metrics):
    for status, code in ((429, "overloaded"), (429, "overloaded"), (400, None), (499, "client_gone")):
        metrics.refused(replace(RECORD, status=status, error=code))
    counted = of_label(metrics, "paged:requests_refused_total", "code")
    assert counted == {"overloaded": 2, "400": 1, "client_gone": 1}
    assert set(of_label(metrics, "vllm:request_success_total", "finished_reason").values()) == {0}
    metrics.ended(replace(RECORD, status=499, finish_reason="abort"))
    assert_has(metrics, {"paged:clients_gone_total": 2})


def test_what_is_watched_is_asked_when_the_metrics_are_read_and_losses_survive_a_restart(metrics):
    now = {"streams": 3, "lines": 2, "spans": 1}
    metrics.watch(
        open_streams=lambda: now["streams"], log_lines_lost=lambda: now["lines"], spans_lost=lambda: now["spans"]
    )
    assert_has(metrics, {"paged:open_streams": 3})
    metrics.restarted()
    now.update(streams=0, lines=5)
    assert_has(metrics, {"paged:open_streams": 0, "paged:log_lines_lost_total": 5, "paged:spans_lost_total": 1})


@given(st.lists(st.floats(0, 100) | st.sampled_from(GAP), max_size=20))
def test_a_histogram_is_prometheus_own(values):
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    labels = {"model_name": 'a "b"\n'}
    mine = Histogram("gap", "Gaps.", GAP, labels, ours)
    other = TheirHistogram("gap", "Gaps.", list(labels), buckets=GAP, registry=theirs).labels(**labels)
    for value in values:
        mine.observe(value)
        other.observe(value)
    (found,), (wanted,) = ours.collect(), theirs.collect()
    assert (found.name, found.type, found.documentation) == (wanted.name, wanted.type, wanted.documentation)
    samples = [(sample.name, sample.labels, pytest.approx(sample.value)) for sample in wanted.samples]
    assert [(sample.name, sample.labels, sample.value) for sample in found.samples] == [
        sample for sample in samples if not sample[0].endswith("_created")
    ]
    assert generate_latest(ours)


def test_steps_are_observed_by_their_tokens_and_gaps_by_their_seconds(metrics):
    for tokens in (5, 0, 300):
        metrics.stepped(step(tokens))
    for seconds in (0.02, 0.02, 0.3):
        metrics.token_gap(seconds)
    # What is told outside steps has no tokens.
    steps, gaps = "vllm:iteration_tokens_total", "vllm:inter_token_latency_seconds"
    assert_has(metrics, {f"{steps}_count": 2, f"{steps}_sum": 305, f"{steps}_bucket{{le=8.0}}": 1})
    assert_has(metrics, {f"{gaps}_count": 3, f"{gaps}_bucket{{le=0.025}}": 2})
    assert series(metrics)[f"{gaps}_sum"] == pytest.approx(0.34)


def test_prometheus_gets_the_form_that_it_asks_for_whatever_the_models_name_is(metrics):
    asked = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=0.0.4;q=0.4"
    page, kind = busy(metrics).render(asked)
    assert kind == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert page.endswith(b"# EOF\n")
    read = list(open_metrics(page.decode()))
    opened = {family.name for family in read}
    labels = [sample.labels for family in read for sample in family.samples]
    assert {each["model_name"] for each in labels if "model_name" in each} == {NAME}
    for accept in ("", "*/*", "text/plain; version=banana", "\xff,;;q"):
        plain, kind = metrics.render(accept)
        assert kind == "text/plain; version=0.0.4; charset=utf-8"
    names = {family.name for family in text_string_to_metric_families(plain.decode())}
    ours = {name for name in names if ":" in name and not name.endswith("_created")}
    assert ours == {name for name in opened if ":" in name}
