"""Outcomes as rows, and Chrome traces. That a file which is written is none that is read is in refused_commands.txt."""

import csv
import json
import os
from itertools import pairwise

import msgspec
import pytest

from paged import __version__
from paged.errors import UnwritablePath
from paged.study.report import TraceEvents, flat, writable, write_csv, write_trace_events
from paged.study.simulator import Device, Load, Scenario, SimulationResult, StepTime, outcome_of, run

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
    missing = [
        field
        for field in SimulationResult.__struct_fields__
        if not any(name.startswith(field.removesuffix("_s")) for name in row)
    ]
    assert missing == []


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
