"""The HTML report: complete, self-contained, with plots of what outcomes say. Outcomes as rows, and Chrome traces."""

import csv
import json
import os
import re
import sys
from html.parser import HTMLParser
from itertools import pairwise

import msgspec
import numpy as np
import pytest

from paged import __version__
from paged.errors import InvalidConfig, MissingExtra, UnwritablePath
from paged.study.hardware.kernels import kernels_named
from paged.study.report import (
    TraceEvents,
    flat,
    writable,
    write_csv,
    write_html,
    write_plan_html,
    write_sessions_html,
    write_trace_events,
    write_validation_html,
)
from paged.study.report.comparisons import preemptions, under_load  # noqa: F401
from paged.study.report.facts import facts, sentence
from paged.study.report.naming import named
from paged.study.report.over_time import edges_of, memory_parts, points, roofline  # noqa: F401
from paged.study.report.table import lines
from paged.study.simulator import Device, Load, Scenario, SimulationResult, StepTime, grouped, outcome_of, run

from .files_of_others import assert_by_hand, by_hand_in  # noqa: TID252


def scenario_of(policy="vllm", rate=20.0, seed=0, **more):
    load = Load(trace="azure", limit=30, prompts=1 / 16, outputs=1 / 4, rate=rate, seed=seed)
    return Scenario(load=load, policy=policy, blocks=48, block_size=8, max_tokens_per_step=64, **more)


@pytest.fixture(scope="module")
def outcomes():
    on_device = Device(model="llama-2-13b", device="a100-40g")
    return [
        run(scenario_of(policy, rate, device=on_device, price_per_hour=2.0))
        for rate in (10.0, 20.0)
        for policy in ("vllm", "paged", "static")
    ]


class Page(HTMLParser):
    """Elements that are not closed, what is loaded from elsewhere, scripts by id, text outside scripts."""

    def __init__(self, text):
        super().__init__()
        self.open, self.loaded, self.scripts, self.text, self.tags = [], [], [], "", []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "link", "line"):
            self.open.append(tag)
        self.loaded += [value for name, value in attributes if name in ("src", "href", "srcset", "action", "data")]
        if tag == "script":
            self.scripts.append([dict(attributes), ""])

    def handle_startendtag(self, tag, attributes):
        self.loaded += [value for name, value in attributes if name in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1][1] += data
        elif self.open and self.open[-1] != "style":
            self.text += data


@pytest.fixture(scope="module")
def page(outcomes, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_html(path, outcomes)
    return Page(path.read_text(encoding="utf-8"))


def test_the_page_is_closed_html_that_loads_nothing_and_forbids_to(page):
    assert (page.open, page.loaded) == ([], ["data:,"])
    styles = [tag for tag, _ in page.tags if tag == "style"]
    assert styles == ["style"]
    rule = next(a["content"] for tag, a in page.tags if tag == "meta" and "default-src" in a.get("content", ""))
    assert rule.startswith("default-src 'none';")
    assert "http" not in rule
    ours = page.scripts[-1][1]
    assert not re.search(r"https?:|fetch\(|XMLHttpRequest|import\(", ours)
    assert "showSendToCloud: false" in ours


def test_the_page_says_what_was_simulated_and_shows_every_figure_of_every_outcome(page, outcomes):
    shown = [
        text
        for group in grouped(named(outcomes), lambda one: one.setting).values()
        for _, heading_lines in lines(group)
        for line in heading_lines
        for text, _ in line.cells(group)
    ]
    shown += [f"{outcome.result.throughput:,.1f}" for outcome in outcomes]
    shown += [f"{outcome.result.wasted_tokens:,}" for outcome in outcomes]
    shown += ["azure_conversation.csv", "llama-2-13b", "a100-40g", "48 blocks of 8 tokens", "at most 64 tokens"]
    assert [text for text in (*shown, "virtual seconds", *outcomes[0].applied) if text not in page.text] == []
    assert min(page.text.count(policy) for policy in ("vllm", "paged", "static")) >= 2
    assert outcomes[0].applied


PLOTS = {"load", "occupancy", "queues", "preemptions", "distributions", "roofline", "cost"}


def test_the_plots_are_json_with_a_plot_for_each_outcome_of_a_setting_and_a_sentence_and_ours_on_top(page):
    figures = json.loads(next(text for attributes, text in page.scripts if attributes.get("id") == "figures"))
    assert [setting["labels"] for setting in figures] == [["vllm", "paged", "static"]] * 2
    for setting in figures:
        assert (len(setting["memory"]), set(setting["plots"])) == (3, PLOTS)
        for name in PLOTS - {"preemptions", "cost"}:
            policies = [trace["meta"]["policy"] for trace in setting["plots"][name]["data"] if "meta" in trace]
            assert set(policies[policies.index("paged") :]) == {"paged"}
        assert None not in setting["plots"].values()
    labels = [attributes["aria-label"] for _, attributes in page.tags if attributes.get("role") == "img"]
    assert len(labels) == 8
    assert all(re.search(r": [A-Z][^.]+\.", label) for label in labels)


def test_names_that_are_no_html_are_shown_as_they_are_and_a_report_of_nothing_is_refused(outcomes, tmp_path):
    name, path = "</script><b>&mine", tmp_path / "odd.html"
    with pytest.raises(InvalidConfig, match="at least one outcome"):
        write_html(path, [])
    write_html(path, [with_result(outcomes[0], policy=name)])
    page = Page(path.read_text(encoding="utf-8"))
    assert page.open == []
    assert "b" not in [tag for tag, _ in page.tags]
    assert name in page.text


def test_a_run_in_which_every_request_was_rejected_is_reported(tmp_path):
    on_device = Device(model="llama-2-13b", device="a100-40g")
    outcome = run(Scenario(load=Load(trace="azure", limit=3), policy="vllm", blocks=1, device=on_device))
    assert (outcome.result.rejected, outcome.result.steps) == (3, 0)
    write_html(tmp_path / "none.html", [outcome])
    assert Page((tmp_path / "none.html").read_text(encoding="utf-8")).open == []
    assert under_load(named([outcome])) is None
    assert "Latency" not in dict(lines(named([outcome])))


@pytest.mark.parametrize(
    "write", [write_html, write_plan_html, write_sessions_html, write_validation_html], ids=lambda write: write.__name__
)
def test_without_plotly_one_sentence_says_what_installs_it(write, monkeypatch):
    for name in ("plotly", "plotly.offline"):
        monkeypatch.setitem(sys.modules, name, None)
    expected = f"paged.study.report.{write.__name__} needs plotly, which is not installed; `pip install '.[study]'` in a checkout of paged brings it."
    with pytest.raises(MissingExtra) as error:
        write("never.html", [])
    assert str(error.value) == expected


def test_a_report_says_what_its_steps_were_timed_by_also_where_a_file_of_kernels_was_named(tmp_path):
    path = tmp_path / "kernels.json"
    kernels_named("h100").save(path)
    device = Device(model="llama-2-13b", device="h100", profile=str(path))
    outcome = run(scenario_of(device=device))
    assert "steps are timed by measured kernels of h100" in dict(facts([outcome]))["Model and device"]
    assert "comes from kernels or layers that were timed" in sentence([outcome])
    assert "nothing here was timed" in sentence([run(scenario_of())])


def test_parts_of_memory_add_up_to_the_pool_and_keep_the_mean_of_filled_slots(outcomes):
    for outcome in outcomes:
        columns = outcome.timeline
        edges = edges_of(columns["end_s"], columns["seconds"], 50)
        parts = memory_parts(outcome, edges)
        assert np.allclose(sum(parts.values()), 48 * 8)
        assert all((values > -1e-6).all() for values in parts.values())
        total = (columns["filled"] * columns["seconds"]).sum()
        assert np.isclose((parts["tokens"] * np.diff(edges)).sum(), total)
        assert np.isclose(total / outcome.result.busy_s / (48 * 8), outcome.result.memory.of_pool)


def with_result(outcome, **changes):
    return msgspec.structs.replace(outcome, result=msgspec.structs.replace(outcome.result, **changes))


def settings_of(outcomes):
    return list(grouped(named(outcomes), lambda one: one.setting).values())


@pytest.mark.parametrize(("call", "by_hand"), by_hand_in("reports.txt"))
def test_what_a_report_shows_is_what_it_is_by_hand(outcomes, call, by_hand):
    assert_by_hand(call, by_hand, globals() | {"outcomes": outcomes})


def test_latency_under_load_is_a_line_a_policy_whose_seeds_are_averaged():
    runs = [run(scenario_of(rate=rate, seed=seed)) for rate in (20.0, 10.0) for seed in (1, 2)]
    runs[0] = with_result(runs[0], throughput=runs[1].result.throughput + 10)
    ttft, gap = under_load(named(runs))["data"]
    assert (ttft["text"], ttft["mode"]) == (["15.1 requests/s", "30.1 requests/s"], "lines+markers")
    assert ttft["x"][1] == pytest.approx(runs[1].result.throughput + 5)
    assert ttft["error_x"]["array"][1] == pytest.approx(5)
    assert gap["yaxis"] == "y2"


def test_no_step_lies_above_the_roof_that_its_time_comes_from(outcomes):
    roof = outcomes[0].scenario.device.roofline()
    for outcome in outcomes:
        intensity, reached = points(outcome, roof)
        assert len(intensity) > 10
        compute = roof.device.peak("bf16") * roof.compute_efficiency
        memory = roof.device.bandwidth * roof.memory_efficiency
        assert (reached <= 1.000001 * np.minimum(compute, memory * intensity)).all()


def test_the_setting_with_the_fullest_memory_is_shown_first(page, outcomes):
    settings = grouped(named(outcomes), lambda one: one.setting)
    fullest = max(settings, key=lambda name: sum(one.outcome.result.memory.of_pool for one in settings[name]))
    tables = [attributes for tag, attributes in page.tags if tag == "table"]
    assert ["hidden" not in attributes for attributes in tables] == [name == fullest for name in settings]
    options = [attributes for tag, attributes in page.tags if tag == "option"]
    assert ["selected" in attributes for attributes in options] == [name == fullest for name in settings]


SECOND_A_STEP = Device(formula=StepTime(weights_ms=1000, context_us=0, token_us=0, swap_us=0))


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens,prefix_id,prefix_tokens\n0,5,3,,\n0.5,6,2,,\n100,999,2,,\n")
    return Scenario(load=Load(trace=str(path)), device=SECOND_A_STEP, policy="vllm", blocks=8, block_size=4)


def test_a_row_tells_what_was_simulated_and_every_figure_of_the_result(tiny):
    row = flat(run(tiny))
    assert (row["trace"], row["policy"], row["num_blocks"]) == ("tiny.csv", "vllm", 8)
    assert (row["finished"], row["rejected"], row["output_tokens"]) == (2, 1, 5)
    assert (row["ttft_p50_s"], row["ttft_max_s"], row["preemptions_recompute"]) == (1.0, 1.5, 0)
    assert (row["throughput_tokens_per_s"], row["paged_version"]) == (5 / row["makespan_s"], __version__)
    assert all(value is None or isinstance(value, str | int | float) for value in row.values())
    shares = {"memory_of_held", "memory_while_waiting_of_pool", "prefix_hit_rate", "waste"}
    assert {f"{name}_share" for name in shares} <= set(row)
    for field in SimulationResult.__struct_fields__:
        assert any(name.startswith(field.removesuffix("_s")) for name in row), field


def test_csv_read_back_is_the_rows_as_text(tiny, tmp_path):
    outcomes = [run(tiny), run(msgspec.structs.replace(tiny, policy="paged", price_per_hour=3.6))]
    write_csv(tmp_path / "out.csv", outcomes)
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows == [
        {name: "" if value is None else str(value) for name, value in flat(outcome).items()} for outcome in outcomes
    ]
    assert ([row["policy"] for row in rows], rows[0]["cost_per_million_tokens"]) == (["vllm", "paged"], "")
    assert float(rows[1]["cost_per_million_tokens"]) == outcomes[1].result.cost_per_million_tokens


def test_a_path_that_can_be_written_is_given_back_and_nothing_is_left_there_or_what_was(tmp_path):
    assert (writable(tmp_path / "new.html"), list(tmp_path.iterdir())) == (tmp_path / "new.html", [])
    (tmp_path / "old.html").write_text("old")
    writable(str(tmp_path / "old.html"))
    assert (tmp_path / "old.html").read_text() == "old"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_path_that_may_not_be_written_is_refused(tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(UnwritablePath, match="permission denied"):
        writable(tmp_path / "closed" / "a.html")


@pytest.fixture
def traced(tiny, tmp_path):
    """The document of a traced simulation, its outcome, and the seconds of all its steps."""
    simulation, events, seconds = tiny.simulation(), TraceEvents(), 0.0
    for step in simulation.steps():
        events.see(step)
        seconds += step.seconds
    outcome = outcome_of(tiny, simulation)
    write_trace_events(tmp_path / "trace.json", events, outcome)
    return json.loads((tmp_path / "trace.json").read_text()), outcome, seconds


def test_a_chrome_trace_has_the_keys_that_each_kind_of_event_needs_in_the_order_of_time(traced):
    document, outcome, _ = traced
    events = document["traceEvents"]
    needed = {"X": {"dur"}, "C": {"args"}, "b": {"id", "cat"}, "e": {"id", "cat"}, "M": {"args"}, "i": {"s"}}
    for event in events:
        assert {"ph", "name", "pid", "tid", "ts"} | needed[event["ph"]] <= set(event)
    times = [event["ts"] for event in events]
    assert (times, times[0]) == (sorted(times), 0)
    slots = outcome.result.num_blocks * outcome.result.block_size
    counters = [e["args"] for e in events if e["ph"] == "C" and e["name"] == "KV slots"]
    assert counters and {sum(values.values()) for values in counters} == {slots}
    assert min(min(values.values()) for values in counters) >= 0


def test_steps_of_a_chrome_trace_take_the_virtual_microseconds_of_the_simulation(traced):
    document, outcome, seconds = traced
    slices = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert sum(event["dur"] for event in slices) == seconds * 1e6 == outcome.result.busy_s * 1e6
    assert slices[-1]["args"]["last"] == outcome.result.steps
    assert all(after["ts"] >= before["ts"] + before["dur"] for before, after in pairwise(slices))


def test_requests_of_a_chrome_trace_begin_when_they_arrive_and_every_beginning_has_its_end(traced):
    document, _, _ = traced
    spans = [event for event in document["traceEvents"] if event["ph"] in "be"]
    assert [(e["name"], e["ph"], e["ts"]) for e in spans if e["id"] == "1"] == [
        ("request 1", "b", 0.5e6), ("to first token", "b", 0.5e6), ("to first token", "e", 2e6), ("writing", "b", 2e6),
        ("writing", "e", 3e6), ("request 1", "e", 3e6),
    ]  # fmt: skip
    assert {e["id"] for e in spans} == {"0", "1"}


def test_a_preemption_is_in_the_chrome_trace_with_its_request_and_kind(tmp_path):
    load = Load(trace="azure", limit=40, prompts=1 / 16, outputs=1 / 4, rate=20.0)
    scenario = Scenario(load=load, policy="vllm", blocks=48, block_size=8, max_tokens_per_step=64)
    simulation, events = scenario.simulation(), TraceEvents()
    for step in simulation.steps():
        events.see(step)
    outcome = outcome_of(scenario, simulation)
    counts = outcome.result.preemptions
    marks = [event for event in events.events(outcome) if event["ph"] == "i"]
    assert counts.recompute > 0
    assert len(marks) == counts.recompute + counts.swap
    assert {mark["name"] for mark in marks} == {"preempted: recompute"}
    slices = [event for event in events.events(outcome) if event["ph"] == "X"]
    assert all(after["ts"] >= before["ts"] + before["dur"] for before, after in pairwise(slices))
    assert sum(event["args"]["rows"] > 0 for event in slices) == len(slices) < outcome.result.steps
