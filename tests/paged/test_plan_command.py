"""`paged plan` from outside: the probes and the answer, JSON, and what nothing meets."""

import csv
import html
import io
import json
import re

import pytest
from rich.console import Console
from rich.progress import Progress, TextColumn

TRACE = "synthetic:poisson,rate=20,requests=20,prompt=40,output_mean=12,output_sigma=0.6"
SLOW = ["--weights-ms", 20, "--context-us", 1, "--token-us", 200]
SMALL = ["--block-size", 4, "--max-tokens-per-step", 64, "--max-sequences", 16, *SLOW]
POOL = [*SMALL, "--blocks", 60, "--jobs", 1]
ROUGHLY = ["--tolerance", 0.2]


def test_the_json_has_the_answer_and_what_the_answer_simulated_again_says(document):
    find = ["--find", "memory", "--ttft", 0.5, "--gap", 0.5]
    (plan,) = document("plan", TRACE, *POOL, "--rate-scale", 0.6, *find)
    assert (plan["find"], plan["policy"], plan["left_out"]) == ("memory", "paged", 0)
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


def test_what_nothing_meets_is_status_1_with_the_best_and_by_how_much_it_misses(paged, trace_file):
    options = [*POOL, "--find", "devices", "--ttft", 0.001]
    status, out, err = paged("plan", "synthetic:poisson,rate=9,requests=8,prompt=40,output=9", *options)
    assert (status, out.splitlines()[0].split()[0], err.count("\n")) == (1, "replicas", 1)
    assert err.startswith("paged: with policy paged no number of replicas meets p99 first within 1 ms; nearest of ")
    assert "is 8 replicas, p99 first 20 ms, 19 ms over 1 ms" in err
    status, out, err = paged(
        "plan", TRACE, *POOL, "--policy", "vllm,paged", "--find", "rate", "--itl", 0.001, "--no-explain", "--json"
    )
    assert (status, [plan["answer"] for plan in json.loads(out)], err.count("\n")) == (1, [None, None], 2)
    # A request that never fits is said with what would do.
    path = trace_file("0,8,3", "1,999,9", "2,8,3")
    find = [*POOL, "--find", "rate", "--ttft", 10]
    status, _, err = paged("plan", path, *find, "--no-explain")
    assert status == 1 and re.search("1 request rejected.*60 blocks.*--context", err)
    assert paged("plan", path, *find, "--no-explain", "--context", 200)[0] == 0


def test_what_binds_is_in_the_json_unless_nobody_asks(document):
    rows = ["plan", TRACE, *POOL, "--max-sequences", 2, "--find", "rate", "--ttft", 0.5, *ROUGHLY]
    (plan,) = document(*rows)
    binds = plan["binding"]["binds"]
    assert (binds["knob"], binds["was"], binds["becomes"]) == ("rows", 2, 4)
    assert binds["answer"] == pytest.approx(binds["gain"] * plan["answer"])
    assert plan["binding"]["tried_at"] == pytest.approx(1.1 * plan["answer"], rel=1e-5)
    assert document(*rows, "--no-explain")[0]["binding"] is None


def test_a_plan_is_written_as_a_page_and_as_a_table(printed, document, tmp_path):
    page, table = tmp_path / "plan.html", tmp_path / "plan.csv"
    targets = ["--find", "rate", "--ttft", 0.5, "--gap", 0.5, "--tolerance", 0.5]
    out = printed("plan", TRACE, *POOL, *targets, "--html", page, "--csv", table)
    text = page.read_text(encoding="utf-8")
    for line in out.splitlines():
        if line.startswith(("Highest rate", "What binds", "No change", "Median")):
            assert html.escape(line) in text
    assert "default-src 'none'" in text
    rows = list(csv.DictReader(table.read_text().splitlines()))
    (plan,) = document("plan", TRACE, *POOL, *targets, "--no-explain")
    assert [float(row["value"]) for row in rows] == [probe["value"] for probe in plan["probes"]]
    assert [row["met"] for row in rows] == [str(probe["met"]) for probe in plan["probes"]]
    assert [float(row["value"]) for row in rows if row["is_answer"] == "True"] == [plan["answer"]]
    figures = json.loads(re.search(r'id="figures">(.*?)</script>', text, flags=re.DOTALL)[1])
    met, missed, target = figures[0]["data"][:3]
    whole = [probe for probe in plan["probes"] if probe["p99"] is not None]
    assert met["x"] == [probe["value"] for probe in whole if probe["met"]]
    assert met["y"] == [probe["p99"]["ttft_s"] for probe in whole if probe["met"]]
    assert (missed["x"], target["y"]) == ([probe["value"] for probe in whole if not probe["met"]], [0.5, 0.5])


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
    printed("plan", TRACE, *POOL, "--find", "rate", "--ttft", 0.1, *ROUGHLY, "--no-explain")
    assert "paged: trying 1" in screen.getvalue()
    assert "paged: trying 0.5, 1 misses" in screen.getvalue()
