"""`paged plan` from outside: the probes and the answer, JSON, and what nothing meets."""

import csv
import html
import io
import json
import re

import pytest
from rich.console import Console
from rich.progress import Progress, TextColumn

TRACE = "synthetic:poisson,rate=20,requests=40,prompt=40,output_mean=12,output_sigma=0.6"
SLOW = ["--weights-ms", 20, "--context-us", 1, "--token-us", 200]
SMALL = ["--block-size", 4, "--max-tokens-per-step", 64, "--max-sequences", 16, *SLOW]
POOL = [*SMALL, "--blocks", 60, "--jobs", 1]


def test_a_rate_is_a_table_of_probes_and_a_sentence(printed):
    out = printed("plan", TRACE, *POOL, "--find", "rate", "--ttft", 0.2)
    head, *lines = out.splitlines()
    assert head.split()[:2] == ["rate", "requests/s"]
    probes = [line for line in lines if line[:8].strip()[:1].isdigit()]
    rates = [float(line.split()[0]) for line in probes]
    assert rates == sorted(rates)
    outcomes = ["met" if " met " in line else "missed" for line in probes]
    assert outcomes == sorted(outcomes)
    answer, missed = rates[outcomes.count("met") - 1], rates[outcomes.count("met")]
    sentence = next(line for line in lines if line.startswith("Highest rate"))
    assert f"with p99 first within 200 ms: {answer:g} (" in sentence
    assert f"missed at {missed:g} (" in sentence
    assert "p99 first over 200 ms" in out
    assert any(line.startswith("Median time to first token by quarter of the trace: ") for line in lines)


def test_several_policies_or_budgets_are_a_line_each(printed):
    find = ["--find", "rate", "--ttft", 0.2, "--tolerance", 0.2, "--seeds", 2]
    head, *lines, trace = printed("plan", TRACE, *POOL, "--policy", "paged,vllm", *find).splitlines()
    assert (head.split()[:3], head.split()[-1]) == (["policy", "rate", "requests/s"], "binds")
    assert trace.startswith("synthetic:poisson")
    assert [line.split()[0] for line in lines] == ["paged", "vllm"]
    head, *lines, _ = printed("plan", TRACE, *POOL, "--max-tokens-per-step", "32,128", *find).splitlines()
    assert head.split()[:2] == ["policy", "budget"]
    assert [line.split()[1] for line in lines] == ["32", "128"]


def test_the_json_has_the_answer_and_what_the_answer_simulated_again_says(document):
    find = ["--find", "memory", "--ttft", 0.5, "--gap", 0.5]
    (plan,) = document("plan", TRACE, *POOL, "--rate-scale", 0.6, *find)
    assert (plan["find"], plan["policy"], plan["requests"], plan["left_out"]) == ("memory", "paged", 40, 0)
    assert plan["targets"] == {"ttft_s": 0.5, "gap_s": 0.5, "itl_s": None}
    assert plan["requests_per_s"] is None
    assert plan["best"] == plan["answer"] == plan["missed"] + 1
    blocks = f"{plan['missed']},{plan['answer']}"
    less, enough = document("simulate", TRACE, *SMALL, "--rate-scale", 0.6, "--blocks", blocks)
    assert enough["ttft_s"]["p99"] <= 0.5
    assert enough["longest_gap_s"]["p99"] <= 0.5
    assert less["ttft_s"]["p99"] > 0.5 or less["longest_gap_s"]["p99"] > 0.5
    (probe,) = (probe for probe in plan["probes"] if probe["value"] == plan["answer"])
    assert probe["met"] is True
    assert probe["p99"]["ttft_s"] == enough["ttft_s"]["p99"]


def test_devices_are_replicas_of_as_many_as_a_model_is_split_over(printed):
    device = ["--model", "llama-2-70b", "--device", "h100", "--tensor-parallel", 4, "--context", 4096, "--limit", 40]
    search = ["--find", "devices", "--ttft", 0.5, "--jobs", 1, "--rate-scale", 20]
    out = printed("plan", "azure", *device, *search)
    sentence = next(line for line in out.splitlines() if line.startswith("Fewest replicas"))
    assert re.search(r": \d+ replicas of 4 devices; missed at", sentence)
    assert "The device has room for " in out
    assert "longer than the context of 4,096 tokens" in out


def test_what_nothing_meets_is_status_1_with_the_best_and_by_how_much_it_misses(paged, trace_file):
    options = [*POOL, "--find", "devices", "--ttft", 0.001]
    status, out, err = paged("plan", "synthetic:poisson,rate=9,requests=8,prompt=40,output=9", *options)
    assert (status, out.splitlines()[0].split()[0], err.count("\n")) == (1, "replicas", 1)
    assert err.startswith("paged: with policy paged no number of replicas meets p99 first within 1 ms; nearest of ")
    assert "is 8 replicas, p99 first 20 ms, 19 ms over 1 ms" in err
    status, out, err = paged("plan", TRACE, *POOL, "--policy", "vllm,paged", "--find", "rate", "--itl", 0.001, "--json")
    assert (status, [plan["answer"] for plan in json.loads(out)], err.count("\n")) == (1, [None, None], 2)
    # A request that never fits is said with what would do.
    path = trace_file("0,8,3", "1,999,9", "2,8,3")
    find = [*POOL, "--find", "rate", "--ttft", 10]
    status, _, err = paged("plan", path, *find)
    assert [status, *(words in err for words in ("1 request rejected", "60 blocks", "--context"))] == [
        1,
        True,
        True,
        True,
    ]
    assert paged("plan", path, *find, "--context", 200)[0] == 0


def test_what_binds_is_a_sentence_and_in_the_json(printed, document):
    rows = [*POOL, "--max-sequences", 2, "--find", "rate", "--ttft", 0.5]
    out = printed("plan", TRACE, *rows)
    (line,) = (line for line in out.splitlines() if line.startswith("What binds: "))
    assert line.startswith("What binds: rows; with 4 sequences instead of 2: ")
    assert "Not varied: arithmetic (time is by a formula); bandwidth" in out
    (plan,) = document("plan", TRACE, *rows)
    binds = plan["binding"]["binds"]
    assert (binds["knob"], binds["was"], binds["becomes"]) == ("rows", 2, 4)
    assert f"{binds['answer']:g} (" in line
    assert binds["answer"] == pytest.approx(binds["gain"] * plan["answer"])
    assert plan["binding"]["tried_at"] == pytest.approx(1.1 * plan["answer"], rel=1e-5)
    assert "What binds" not in printed("plan", TRACE, *rows, "--no-explain")
    assert document("plan", TRACE, *rows, "--no-explain")[0]["binding"] is None


def test_a_budget_that_was_chosen_is_said_with_why(printed, document):
    small = [*SLOW, "--blocks", 400, "--max-sequences", 16, "--jobs", 1, "--no-explain", "--gap", 0.1]
    find = ("plan", TRACE, *small, "--find", "rate", "--ttft", 0.3)
    (line,) = (line for line in printed(*find).splitlines() if line.startswith("Token budget: "))
    assert re.match(r"Token budget: [\d,]+, chosen from 128 to 8,192: a full step takes about ", line)
    assert ", where 100 ms between two tokens are promised" in line
    assert line.endswith("; no other gives a better answer.")
    (plan,) = document(*find)
    assert line.startswith(f"Token budget: {plan['max_tokens_per_step']:,}, chosen")
    assert plan["weighed"]["limit_s"] == 0.1
    assert "Token budget" not in printed(*find, "--max-tokens-per-step", 512)
    # The least there is meets this gap, so no other budget is held against the answer.
    least = printed("plan", TRACE, *small, "--find", "devices")
    assert "\nToken budget: 256, chosen: a full step takes about 51 ms, where " in least


def test_the_search_begins_at_a_rate_in_requests_a_second(document):
    find = ["plan", TRACE, *POOL, "--find", "devices", "--ttft", 0.3, "--no-explain"]
    (plan,) = document(*find, "--rate", 40)
    assert plan["load"]["per_s"] == pytest.approx(40)
    assert document(*find, "--rate-scale", plan["rate_scale"])[0]["answer"] == plan["answer"]


def test_a_trace_that_is_too_short_at_its_rate_is_drawn_longer_and_the_answer_says_so(printed, document):
    find = ["plan", TRACE, *POOL, "--find", "devices", "--ttft", 0.3, "--no-explain", "--rate", 200]
    (plan,) = document(*find)
    load = plan["load"]
    assert load["drawn_from"] == 40
    assert load["per_s"] == pytest.approx(200, rel=0.01)
    assert load["span_s"] > 0.8 * load["settles_in_s"] > 5 * 40 / 200
    assert not any("settled" in note for note in plan["notes"])
    assert "; drawn from its 40 requests, which end before this load has settled" in printed(*find)
    (short,) = document(*find, "--least-span", 0)
    assert short["load"]["drawn_from"] is None
    assert short["load"]["span_s"] < 0.3
    assert short["answer"] < plan["answer"]
    assert "the trace lasts 0." in short["notes"][0]
    out = " ".join(printed(*find, "--least-span", 0).split())
    assert f"--least-span {short['load']['settles_in_s']:g} draws the trace longer from itself" in out


def test_rates_that_are_tried_have_traces_that_settle(document):
    find = ["plan", TRACE, "--limit", 10, *POOL, "--find", "rate", "--ttft", 0.2, "--no-explain"]
    (plan,), (short,) = document(*find), document(*find, "--least-span", 0)
    assert plan["answer"] < short["answer"]
    assert plan["load"]["drawn_from"] == 10


def test_a_price_gives_the_cost_of_the_answer(printed, document):
    find = ["plan", TRACE, *POOL, "--ttft", 0.3, "--price-per-hour", 3, "--no-explain"]
    by_devices = [*find, "--find", "devices", "--rate", 40]
    (devices,), (rate,) = document(*by_devices), document(*find, "--find", "rate")
    assert devices["answer"] > 1
    assert (devices["cost_per_hour"], rate["cost_per_hour"]) == (3 * devices["answer"], 3)
    for plan, per_s in ((devices, 40), (rate, rate["requests_per_s"])):
        tokens_an_hour = 3600 * per_s * plan["load"]["outputs"]["mean"]
        assert plan["cost_per_million_tokens"] == pytest.approx(plan["cost_per_hour"] / tokens_an_hour * 1e6)
    assert f"Cost: {3 * devices['answer']:.2f} an hour, " in printed(*by_devices)


def test_prompts_over_the_budget_of_a_policy_that_splits_none_are_said(paged, trace_file):
    path = trace_file("0,8,3", "1,65,9", "2,64,6")
    find = [*POOL, "--policy", "tgi", "--find", "rate", "--ttft", 1, "--no-explain"]
    status, out, err = paged("plan", path, *find, "--json")
    assert (status, json.loads(out)[0]["prompts_over_budget"]) == (0, 1)
    assert err.startswith("paged: tgi splits no prompt, and 1 of 3 prompts are over its token budget of 64")


def test_a_plan_is_written_as_a_page_and_as_a_table(printed, document, tmp_path):
    pytest.importorskip("plotly")
    page, table = tmp_path / "plan.html", tmp_path / "plan.csv"
    targets = ["--find", "rate", "--ttft", 0.5, "--gap", 0.5]
    out = printed("plan", TRACE, *POOL, *targets, "--html", page, "--csv", table)
    text = page.read_text(encoding="utf-8")
    for line in out.splitlines():
        if line.startswith(("Highest rate", "What binds", "No change", "Median")):
            assert html.escape(line) in text
    assert "default-src 'none'" in text
    rows = list(csv.DictReader(table.read_text().splitlines()))
    (plan,) = document("plan", TRACE, *POOL, *targets)
    assert [float(row["value"]) for row in rows] == [probe["value"] for probe in plan["probes"]]
    assert [row["met"] for row in rows] == [str(probe["met"]) for probe in plan["probes"]]
    assert [float(row["value"]) for row in rows if row["is_answer"] == "True"] == [plan["answer"]]
    figures = json.loads(re.search(r'id="figures">(.*?)</script>', text, flags=re.DOTALL)[1])
    (drawn,) = figures
    met, missed, target = drawn["data"][:3]
    whole = [probe for probe in plan["probes"] if probe["p99"] is not None]
    assert met["x"] == [probe["value"] for probe in whole if probe["met"]]
    assert met["y"] == [probe["p99"]["ttft_s"] for probe in whole if probe["met"]]
    assert missed["x"] == [probe["value"] for probe in whole if not probe["met"]]
    assert target["y"] == [0.5, 0.5]


def test_who_waits_at_a_terminal_sees_which_value_is_being_tried(printed, monkeypatch):
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=200)
    column = TextColumn("{task.description}")

    class Eager(Progress):
        """Draws at each update, so that what is seen does not depend on the machine's load."""

        def update(self, *arguments, **changes):
            super().update(*arguments, **changes)
            self.refresh()

    monkeypatch.setattr("paged.cli.plan.progress_bar", lambda *_: Eager(column, console=terminal, auto_refresh=False))
    printed("plan", TRACE, *POOL, "--find", "rate", "--ttft", 0.2)
    assert "paged: trying 1" in screen.getvalue()
    assert "paged: trying 0.5, 1 misses" in screen.getvalue()
