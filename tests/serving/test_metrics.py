"""Metrics: the names are vLLM's where they say so, counters never fall, parts add up to their wholes, and a record's times are told as they are."""

import json
import math
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, strategies as st
from prometheus_client import CollectorRegistry, Histogram as TheirHistogram, generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families

from paged.scheduler import SchedulerStats
from paged.serving.histogram import Histogram
from paged.serving.metrics import GAP, MISSED, Metrics
from paged.serving.records import RequestRecord
from paged.serving.wire import Figures, Ready, Stepped

VLLMS = json.loads(Path(__file__).with_name("vllm_metrics.json").read_text())["metrics"]

READY = Ready(
    block_size=16,
    num_blocks=100,
    host_blocks=20,
    block_bytes=4096,
    max_model_len=1600,
    max_sequences=8,
    max_tokens_per_step=256,
    vocabulary_size=512,
    policy="paged",
    dtype="float32",
    device="cpu",
    backend="native",
    prefix_caching=True,
)
FIGURES = Figures(
    now=1.0,
    running=3,
    waiting=2,
    paused=5,
    swapped=7,
    loading=11,
    free_blocks=50,
    cached_blocks=20,
    used_blocks=30,
    shared_blocks=4,
    reserved_blocks=6,
    host_free=13,
    host_cached=5,
    host_used=2,
    totals=msgspec.structs.asdict(SchedulerStats()),
    steps=0,
    failed_steps=0,
    host_s=0.0,
    model_s=0.0,
    forecast=[0.1, 0.2, 0.5, 0.9],
)
STREAMED = RequestRecord(
    id="a",
    endpoint="/v1/completions",
    arrived=10.0,
    submitted=10.5,
    begun=12.0,
    first=12.25,
    last=14.25,
    ended=15.0,
    status=200,
    finish_reason="length",
    prompt_tokens=100,
    cached_tokens=64,
    output_tokens=5,
    longest_answer=5,
    max_tokens=5,
    preemptions=2,
    longest_pause_s=1.5,
)


def figures(now=FIGURES, **totals):
    return msgspec.structs.replace(now, totals={**now.totals, **totals})


NOTHING = Stepped(**dict.fromkeys(Stepped.__struct_fields__, 0) | {"outputs": [], "completions": [], "begun": []})


def told(now):
    return msgspec.structs.replace(NOTHING, figures=now)


def step(tokens):
    return msgspec.structs.replace(NOTHING, tokens=tokens, figures=None)


def series(metrics):
    """By name, and by name{label=value} where a label is the metric's own, the values of all samples."""
    found = {}
    for family in text_string_to_metric_families(metrics.render()[0].decode()):
        for sample in family.samples:
            own = {name: value for name, value in sample.labels.items() if name not in ("model_name", "engine")}
            found[sample.name + "".join(f"{{{name}={value}}}" for name, value in own.items())] = sample.value
    return found


def counters(metrics):
    """Whatever must never fall: counters, and counts and buckets of histograms."""
    endings = ("_total", "_count", "_sum", "_bucket")
    return {name: value for name, value in series(metrics).items() if name.partition("{")[0].endswith(endings)}


def families(metrics):
    """By name, of those that are the server's own: kind, labels, and bounds of buckets."""
    return {family.name: family for family in metrics.registry.collect() if ":" in family.name}


@pytest.fixture
def metrics():
    made = Metrics("model")
    made.ready(READY)
    return made


def busy(metrics):
    """Let every metric have a series."""
    metrics.stepped(told(FIGURES))
    metrics.stepped(step(5))
    metrics.ended(STREAMED)
    metrics.refused(replace(STREAMED, status=429, error="overloaded"))
    metrics.watch(open_streams=lambda: 3)
    return metrics


def test_what_bears_vllms_name_is_of_vllms_kind_and_has_its_labels(metrics):
    shared = {name: family for name, family in families(busy(metrics)).items() if name.startswith("vllm:")}
    assert len(shared) == 31
    assert set(shared) <= set(VLLMS)
    for name, family in shared.items():
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        if name == "vllm:cache_config_info":
            assert labels <= set(VLLMS[name]["labels"])
        else:
            assert (family.type, labels) == (VLLMS[name]["kind"], set(VLLMS[name]["labels"])), name


def test_histograms_of_vllms_name_have_vllms_buckets(metrics):
    compared = 0
    for name, family in families(metrics).items():
        if name.startswith("vllm:") and family.type == "histogram":
            bounds = [float(sample.labels["le"]) for sample in family.samples if "le" in sample.labels]
            assert bounds == [*VLLMS[name]["buckets"], math.inf], name
            compared += 1
    assert compared == 16


def test_every_series_of_a_metric_that_is_not_counted_yet_is_there_from_the_beginning(metrics):
    before = series(metrics)
    after = series(busy(metrics))
    # What comes with the error that is its label's value.
    assert {name.partition("{")[0] for name in set(after) - set(before)} == {
        "paged:requests_refused_total",
        "paged:requests_refused_created",
    }


TOTALS = sorted(SchedulerStats.__struct_fields__)
rises = st.dictionaries(st.sampled_from(TOTALS), st.integers(0, 100), max_size=4)


@given(st.lists(st.lists(rises, max_size=5), min_size=1, max_size=4))
def test_no_counter_falls_over_restarts_and_each_is_the_sum_of_the_engines_totals(lives):
    metrics = Metrics("model")
    before, whole = counters(metrics), dict.fromkeys(TOTALS, 0)
    for number, life in enumerate(lives):
        if number:
            metrics.restarted()
        metrics.ready(READY)
        totals = dict.fromkeys(TOTALS, 0)
        for rise in life:
            totals = {name: total + rise.get(name, 0) for name, total in totals.items()}
            metrics.stepped(told(figures(**totals)))
            after = counters(metrics)
            assert [name for name, value in before.items() if after[name] < value] == []
            before = after
        whole = {name: whole[name] + total for name, total in totals.items()}
    found = series(metrics)
    assert found["vllm:prompt_tokens_total"] == whole["prompt_tokens"]
    assert found["vllm:generation_tokens_total"] == whole["output_tokens"]
    assert found["paged:recomputed_tokens_total"] == whole["recomputed_tokens"]
    assert found["vllm:num_preemptions_total"] == whole["preemptions_recompute"] + whole["preemptions_swap"]
    assert found["paged:engine_restarts_total"] == len(lives) - 1


def test_a_total_that_falls_and_rises_again_is_counted_once(metrics):
    for total in (10, 4, 10, 12):
        metrics.stepped(told(figures(output_tokens=total)))
    assert series(metrics)["vllm:generation_tokens_total"] == 12


def test_parts_add_up_to_their_wholes(metrics):
    metrics.stepped(
        told(
            figures(
                prompt_tokens=1000,
                hit_tokens=300,
                host_hit_tokens=100,
                preemptions_recompute=3,
                preemptions_swap=4,
                drafted_tokens=50,
                accepted_tokens=30,
            )
        )
    )
    found = series(metrics)

    def parts(name, label, *values):
        return sum(found[f"{name}{{{label}={value}}}"] for value in values)

    assert found["vllm:num_preemptions_total"] == parts("paged:preemptions_total", "kind", "recompute", "swap") == 7
    cached = parts("vllm:prompt_tokens_cached_by_source_total", "source", "device", "host")
    assert found["vllm:prompt_tokens_cached_total"] == cached == 300
    assert found["vllm:prefix_cache_hits_total"] == parts(
        "vllm:prompt_tokens_cached_by_source_total", "source", "device"
    )
    assert found["vllm:prefix_cache_queries_total"] == 1000
    accepted = found["vllm:spec_decode_num_accepted_tokens_total"]
    assert found["vllm:spec_decode_num_draft_tokens_total"] == accepted + found["paged:rejected_drafts_total"] == 50
    waiting = parts("vllm:num_requests_waiting_by_reason", "reason", "capacity", "deferred")
    assert found["vllm:num_requests_waiting"] == waiting == 2 + 5 + 7 + 11
    assert found["vllm:num_requests_running"] == 3
    assert parts("paged:requests", "state", "running", "waiting", "paused", "swapped", "loading") == 28
    assert parts("paged:blocks", "state", "free", "cached", "used") == READY.num_blocks
    assert parts("paged:blocks", "state", "host_free", "host_cached", "host_used") == READY.host_blocks
    assert found["vllm:kv_cache_usage_perc"] == 0.3


def test_without_a_prefix_cache_nothing_is_looked_up():
    metrics = Metrics("model")
    metrics.ready(msgspec.structs.replace(READY, prefix_caching=False))
    metrics.stepped(told(figures(prompt_tokens=1000)))
    found = series(metrics)
    assert (found["vllm:prompt_tokens_total"], found["vllm:prefix_cache_queries_total"]) == (1000, 0)


@pytest.mark.parametrize(
    ("waiting", "forecast", "seconds"),
    [(0, [0.1, 0.2], 0.1), (1, [0.1, 0.2], 0.2), (5, [0.1, 0.2], 0.2), (0, [], math.nan)],
)
def test_the_forecast_is_of_the_place_behind_all_that_wait(metrics, waiting, forecast, seconds):
    metrics.stepped(told(msgspec.structs.replace(FIGURES, waiting=waiting, forecast=forecast)))
    assert series(metrics)["paged:forecast_seconds"] == pytest.approx(seconds, nan_ok=True)


def test_while_there_is_no_engine_nothing_runs_waits_or_is_forecast(metrics):
    metrics.stepped(told(FIGURES))
    metrics.restarted()
    found = series(metrics)
    assert (found["vllm:num_requests_running"], found["paged:blocks{state=used}"]) == (0, 0)
    assert math.isnan(found["paged:forecast_seconds"])


def test_the_cache_is_described_once_as_the_latest_engine_has_it(metrics):
    metrics.ready(msgspec.structs.replace(READY, num_blocks=90))
    (sample,) = families(metrics)["vllm:cache_config_info"].samples
    assert sample.value == 1
    assert sample.labels == {
        "block_size": "16",
        "cache_dtype": "float32",
        "enable_prefix_caching": "True",
        "kv_cache_size_tokens": "1440",
        "num_cpu_blocks": "20",
        "num_gpu_blocks": "90",
        "engine": "0",
    }


def test_a_step_is_observed_by_its_tokens_and_what_is_told_outside_steps_is_none(metrics):
    for tokens in (5, 0, 300):
        metrics.stepped(step(tokens))
    found = series(metrics)
    assert (found["vllm:iteration_tokens_total_count"], found["vllm:iteration_tokens_total_sum"]) == (2, 305)
    assert found["vllm:iteration_tokens_total_bucket{le=8.0}"] == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vllm:time_to_first_token_seconds", 2.25),
        ("vllm:e2e_request_latency_seconds", 5.0),
        ("vllm:request_queue_time_seconds", 1.5),
        ("vllm:request_prefill_time_seconds", 0.25),
        ("vllm:request_decode_time_seconds", 2.0),
        ("vllm:request_inference_time_seconds", 2.25),
        ("vllm:request_time_per_output_token_seconds", 0.5),
        ("paged:request_pause_seconds", 1.5),
        ("vllm:request_prompt_tokens", 100),
        ("vllm:request_prefill_kv_computed_tokens", 36),
        ("vllm:request_generation_tokens", 5),
        ("vllm:request_max_num_generation_tokens", 5),
        ("vllm:request_params_max_tokens", 5),
        ("vllm:request_params_n", 1),
        ("vllm:request_num_preemptions", 2),
    ],
)
def test_a_request_that_ended_is_observed_once_by_its_own_times_and_sizes(metrics, name, value):
    metrics.ended(STREAMED)
    found = series(metrics)
    assert (found[f"{name}_count"], found[f"{name}_sum"]) == (1, value)


def test_the_longest_of_several_answers_counts_and_a_limit_that_was_not_set_is_none(metrics):
    metrics.ended(replace(STREAMED, n=2, answers=2, output_tokens=8, max_tokens=0))
    found = series(metrics)
    assert found["vllm:request_max_num_generation_tokens_sum"] == 5
    assert found["vllm:request_params_max_tokens_count"] == 0
    # Two seconds from the first to the last token, of answers with four each.
    assert found["vllm:request_time_per_output_token_seconds_sum"] == 2 / 3


def test_a_request_that_never_began_has_an_end_and_no_other_time(metrics):
    waited = replace(STREAMED, begun=None, first=None, last=None, output_tokens=0, finish_reason="queue_timeout")
    metrics.ended(waited)
    observed = {name for name, value in series(metrics).items() if name.endswith("_seconds_count") and value}
    assert observed == {"vllm:e2e_request_latency_seconds_count"}


def test_a_single_token_has_no_pause_and_as_with_vllm_a_mean_of_zero(metrics):
    metrics.ended(replace(STREAMED, last=STREAMED.first, output_tokens=1))
    found = series(metrics)
    assert found["paged:request_pause_seconds_count"] == 0
    assert found["vllm:request_time_per_output_token_seconds_bucket{le=0.01}"] == 1


def test_no_time_is_negative_where_a_record_has_its_moments_out_of_order(metrics):
    metrics.ended(replace(STREAMED, begun=11.0, first=10.9, last=10.8, ended=9.0, cached_tokens=200))
    assert min(counters(metrics).values()) == 0


@pytest.mark.parametrize("reason", ["stop", "length", "abort", "error"])
def test_a_request_counts_as_ended_as_it_did(metrics, reason):
    metrics.ended(replace(STREAMED, finish_reason=reason))
    assert finished(metrics) == {reason: 1}


def finished(metrics):
    found = series(metrics)
    counted = {reason: found[f"vllm:request_success_total{{finished_reason={reason}}}"] for reason in FINISHED}
    return {reason: count for reason, count in counted.items() if count}


FINISHED = ("stop", "length", "abort", "error")


@pytest.mark.parametrize("kind", MISSED)
def test_a_request_whose_time_was_up_is_aborted_by_vllms_words_and_counted_by_ours(metrics, kind):
    metrics.ended(replace(STREAMED, finish_reason=kind))
    found = series(metrics)
    assert finished(metrics) == {"abort": 1}
    assert {each: found[f"paged:deadlines_missed_total{{kind={each}}}"] for each in MISSED} == {
        each: float(each == kind) for each in MISSED
    }


def test_a_word_that_vllm_does_not_have_is_an_error(metrics):
    metrics.ended(replace(STREAMED, finish_reason="rejected"))
    assert finished(metrics) == {"error": 1}


def test_refusals_are_counted_by_code_or_by_status_where_there_is_none(metrics):
    for status, code in ((429, "overloaded"), (429, "overloaded"), (400, None)):
        metrics.refused(replace(STREAMED, status=status, error=code))
    found = series(metrics)
    assert found["paged:requests_refused_total{code=overloaded}"] == 2
    assert found["paged:requests_refused_total{code=400}"] == 1
    assert finished(metrics) == {}


def test_clients_that_went_first_are_counted(metrics):
    metrics.ended(replace(STREAMED, status=499, finish_reason="abort"))
    metrics.refused(replace(STREAMED, status=499))
    assert series(metrics)["paged:clients_gone_total"] == 2


def test_what_is_watched_is_asked_when_the_metrics_are_read_and_losses_survive_a_restart(metrics):
    now = {"streams": 3, "lines": 2, "spans": 1}
    metrics.watch(
        open_streams=lambda: now["streams"], log_lines_lost=lambda: now["lines"], spans_lost=lambda: now["spans"]
    )
    assert series(metrics)["paged:open_streams"] == 3
    metrics.restarted()
    now.update(streams=0, lines=5)
    found = series(metrics)
    assert found["paged:open_streams"] == 0
    assert (found["paged:log_lines_lost_total"], found["paged:spans_lost_total"]) == (5, 1)


gaps = st.tuples(st.floats(0, 100) | st.sampled_from(GAP), st.integers(0, 5))


@given(st.lists(gaps, max_size=20))
def test_a_histogram_is_prometheus_own_given_each_value_as_often(values):
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    labels = {"model_name": 'a "b"\n'}
    mine = Histogram("gap", "Gaps.", GAP, labels, ours)
    other = TheirHistogram("gap", "Gaps.", list(labels), buckets=GAP, registry=theirs).labels(**labels)
    for value, count in values:
        mine.observe(value, count)
        for _ in range(count):
            other.observe(value)
    (found,), (wanted,) = ours.collect(), theirs.collect()
    assert (found.name, found.type, found.documentation) == (wanted.name, wanted.type, wanted.documentation)
    samples = [(sample.name, sample.labels, pytest.approx(sample.value)) for sample in wanted.samples]
    assert [(sample.name, sample.labels, sample.value) for sample in found.samples] == [
        sample for sample in samples if not sample[0].endswith("_created")
    ]
    assert generate_latest(ours)


def test_gaps_of_a_step_are_observed_at_once_for_all_its_sequences(metrics):
    metrics.token_gap(0.02, 64)
    metrics.token_gap(0.3)
    found = series(metrics)
    assert found["vllm:inter_token_latency_seconds_count"] == 65
    assert found["vllm:inter_token_latency_seconds_sum"] == pytest.approx(64 * 0.02 + 0.3)
    assert found["vllm:inter_token_latency_seconds_bucket{le=0.025}"] == 64


def test_prometheus_gets_the_form_that_it_asks_for(metrics):
    asked = (
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=0.0.4;q=0.4,*/*;q=0.1"
    )
    page, kind = busy(metrics).render(asked)
    assert kind == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert page.endswith(b"# EOF\n")
    opened = {family.name for family in open_metrics(page.decode())}
    for accept in ("", "*/*", "text/plain; version=banana", "\xff,;;q"):
        plain, kind = metrics.render(accept)
        assert kind == "text/plain; version=0.0.4; charset=utf-8"
    plain_names = {family.name for family in text_string_to_metric_families(plain.decode())}
    assert {name for name in opened if ":" in name} == {
        name for name in plain_names if ":" in name and not name.endswith("_created")
    }


def test_a_models_name_may_hold_anything():
    metrics = Metrics('a "quoted"\nname \\ of Ω')
    (sample, *_) = families(metrics)["vllm:num_requests_running"].samples
    assert sample.labels == {"model_name": 'a "quoted"\nname \\ of Ω', "engine": "0"}
    for family in open_metrics(metrics.render("application/openmetrics-text")[0].decode()):
        assert {sample.labels.get("model_name", sample.labels.get("engine")) for sample in family.samples} <= {
            None,
            'a "quoted"\nname \\ of Ω',
        }


def test_two_servers_in_a_process_share_nothing(metrics):
    other = Metrics("model")
    metrics.ended(STREAMED)
    assert series(other)["vllm:e2e_request_latency_seconds_count"] == 0


def test_a_registry_that_is_given_is_the_one_that_is_filled():
    registry = CollectorRegistry()
    assert Metrics("model", registry).registry is registry
    assert "vllm:num_requests_running" in {family.name for family in registry.collect()}
