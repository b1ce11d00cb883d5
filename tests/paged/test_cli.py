"""The command line from outside: what it prints where, and with which status; and frames of the live view."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace as counted
from importlib import import_module

import numpy as np
import pytest
from msgspec.structs import replace
from rich.console import Console
from typer.main import get_command

from paged import BlockManager, SchedulerStats, __version__
from paged.cli.app import app
from paged.cli.view import PALETTE, Frame, colour_of, render
from paged.serving.block_map import CACHED, FREE, SHARED
from paged.study.bench import decode_step
from paged.study.simulator import run

TINY = ["--limit", "12", "--length-scale", "0.02", "--blocks", "64", "--block-size", "8"]


def test_the_version_is_the_packages_and_shells_can_complete(paged, printed):
    assert paged("--version") == (0, f"paged {__version__}\n", "")
    assert "Usage" in paged()[1] and "--install-completion" in printed("--help")


def commands_of(group, name=""):
    """Each command of the program, and each group of some: (what it is called by, whether it is a group)."""
    yield name, hasattr(group, "commands")
    for word, command in getattr(group, "commands", {}).items():
        yield from commands_of(command, f"{name} {word}".strip())


@pytest.mark.parametrize(("command", "is_group"), [*commands_of(get_command(app))])
def test_every_command_explains_itself_with_an_example_and_no_types(printed, command, is_group):
    out = printed(*command.split(), "--help")
    example = rf"Example[:,] ([^:]*: )?([^|]*\| )?paged {command}\b"
    assert is_group or command == "check replay" or re.search(example, " ".join(out.replace("│", "").split()))
    assert "bool" not in out.lower()


@pytest.mark.parametrize("name", ["WITH_MODEL", "STAND_IN"])
def test_a_scenario_of_the_demo_has_both_kinds_of_preemption_and_a_full_pool(name):
    result = run(getattr(import_module("paged.cli.demo"), name)).result
    assert result.requests == result.finished + result.rejected == 160
    assert result.preemptions.recompute > 0 < result.preemptions.swap
    assert result.peak_block_usage == 1
    assert 0 < result.prefix_hit_rate < 1


@pytest.fixture
def short_demo(monkeypatch):
    """The module of the demo, with fewer requests than people see, half their outputs, and even less memory for them."""
    demo = import_module("paged.cli.demo")
    for name, limit, blocks in (("WITH_MODEL", 16, 24), ("STAND_IN", 20, 228), ("HYBRID", 8, 90), ("ALONE", 8, 4000)):
        scenario = getattr(demo, name)
        load = replace(scenario.load, limit=limit, outputs=1 / 16)
        monkeypatch.setattr(demo, name, replace(scenario, load=load, blocks=blocks))
    return demo


def test_without_torch_a_stand_in_answers_the_demo_and_one_line_says_what_brings_the_model(
    printed, short_demo, monkeypatch
):
    monkeypatch.setattr(short_demo, "has_extra", lambda extra: False)
    out = printed("demo")
    assert out.splitlines()[0] == (
        "What runs a model is not installed, so a stand-in answers; `pip install '.[engine]'` in a checkout of paged brings it."
    )
    assert re.search(r"invariants: 0 violations in \d+ checked steps", out)
    assert "\x1b" not in out
    # A tenth of the requests each.
    assert sum(line.startswith("step ") for line in out.splitlines()) == 10


@pytest.mark.skipif(os.name == "nt", reason="there are no such terminals")
@pytest.mark.parametrize("command", [["chat"], ["bench", "attention"]])
def test_who_waits_at_a_terminal_is_told_before_torch_is_imported(command):
    ours, theirs = os.openpty()
    program = "import sys; sys.modules['torch'] = None; from paged.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", program, *command], stdin=theirs, stderr=theirs)
    lines = os.read(ours, 4096).decode().splitlines()
    os.close(theirs)
    os.close(ours)
    assert done.returncode == 2
    assert re.fullmatch("paged: loading (the model that ships|torch and the backends)", lines[0])
    assert "needs torch, which is not installed" in lines[1]


def test_the_demo_answers_under_pressure_as_without_and_draws_the_pool_and_then_a_table(
    printed, terminal, short_demo, monkeypatch
):
    demo_model = import_module("paged.cli.demo_model")
    screen = terminal(80, modules=("demo", "show"), color_system="truecolor", height=24)

    def marked(*arguments, **options):
        screen.write("<compiled>")
        return runner_for(*arguments, **options)

    def shown_as_json_too(result, more, json):
        show(result, more, json)
        show(result, more, True)

    runner_for, show = demo_model.runner_for, short_demo._show
    monkeypatch.setattr(demo_model, "runner_for", marked)
    monkeypatch.setattr(short_demo, "_show", shown_as_json_too)
    result = json.loads(printed("demo", "--speed", 1000))
    assert (result["requests"], result["finished"], result["rejected"]) == (16, 16, 0)
    assert result["steps"] == result["checked_steps"] > 0
    assert result["preemptions"]["recompute"] > 0 < result["preemptions"]["swap"]
    assert (result["violations"], result["different_outputs"]) == (0, 0)
    assert 0 < result["prefix_hit_rate"] < 1 and result["tokens_per_s"] > 0
    hybrid = result["hybrid"]
    assert hybrid["checked_steps"] > 0 < hybrid["preemptions"]
    assert hybrid["pages_each"] == {"full": 2, "state": 1}
    assert hybrid["hit_tokens"] >= 16 * hybrid["hits"] > 0
    assert (hybrid["finished"], hybrid["violations"], hybrid["different_outputs"]) == (8, 0, 0)
    drawn = screen.getvalue()
    for words in (
        "24 blocks of 8 tokens", "preempted", "16 of 16 requests ended", "prefix hits", "0 violations", "0 of 16",
        "90 pages for layers of 2 kinds", "full, 2 a block", "state, 1 a state", "8 of 8 requests ended",
        "begins at the state kept after", "0 of 8 answers under pressure and alone", "██",
    ):  # fmt: skip
        assert words in drawn
    # What takes long comes first, and says so until nothing more has to be made.
    waits = "reading the model: a few seconds"
    first, second = drawn.split("reading the hybrid", 1)
    assert first.index(waits) < first.rindex("<compiled>") < first.rindex(waits) < first.index("24 blocks of 8 tokens")
    assert second.rindex("<compiled>") < second.index("90 pages for layers of 2 kinds")


def test_seeds_of_a_file_draw_its_requests_anew_so_that_an_interval_is_one(printed, document):
    arguments = ["simulate", "azure", *TINY, "--seeds", 3, "--jobs", 1]
    _, line, _ = printed(*arguments).splitlines()
    assert "±" in line and "± 0.0" not in line
    first, second, third = document(*arguments)
    (alone,) = document("simulate", "azure", *TINY)
    assert first["makespan_s"] == alone["makespan_s"]
    assert len({result["makespan_s"] for result in (first, second, third)}) == 3
    assert first["applied"] == alone["applied"]
    assert second["applied"] == ["resampled(seed=1, block=1): 12 of 12 requests", *alone["applied"]]
    assert second["load"]["note"] == "excerpt: the first 500 of 19,366 requests"


@pytest.mark.parametrize("command", ["simulate", "plan --find rate --ttft 9 --no-explain"])
def test_prompts_over_the_budget_of_a_policy_that_splits_none_are_told(paged, trace_file, command):
    trace, size = trace_file("0,8,3", "1,65,9", "2,64,6"), ("--max-tokens-per-step", 64, "--blocks", 50)
    status, out, err = paged(*command.split(), trace, *size, "--jobs", 1, "--policy", "tgi,paged,static", "--json")
    assert (status, err) == (
        0,
        "paged: tgi splits no prompt, and 1 of 3 prompts are over its token budget of 64: each is computed alone, over several "
        "steps, where the system itself would refuse it\n",
    )
    assert [result["prompts_over_budget"] for result in json.loads(out)] == [1, 0, 0]


def test_the_log_has_a_line_a_step_that_decided_something(document, tmp_path):
    path = tmp_path / "log.jsonl"
    (result,) = document("simulate", "azure", *TINY, "--log", path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) + sum(line["skipped"] for line in lines) == result["steps"]
    for name in ("requests", "admitted", "ended"):
        assert {id for line in lines for id in line[name]} == set(map(str, range(12)))
    assert sum(len(line["ended"]) for line in lines) == 12
    assert [line["end_s"] for line in lines] == sorted(line["end_s"] for line in lines)


def test_violations_found_are_status_1_and_said_on_standard_error(paged, monkeypatch):
    monkeypatch.setattr("paged.scheduler.Scheduler.check", lambda _self: ["block 3 is lost"])
    status, out, err = paged("simulate", "azure", *TINY, "--check", "--json")
    assert status == 1
    assert json.loads(out)[0]["violations"] > 0
    assert "block 3 is lost" in err


def test_the_bench_is_a_list_with_a_cell_for_each_size_and_ends_when_many_decode_for_long(printed, document):
    sizes = ["--rows", "1,4", "--steps", 16, "--holes", 2, "--context", 30]
    cells = document("bench", "scheduler", *sizes)
    assert [(cell["rows"], cell["caching"]) for cell in cells] == [(1, False), (1, True), (4, False), (4, True)]
    assert {(cell["holes"], cell["context"]) for cell in cells} == {(2, 30)}
    for cell in cells:
        assert 0 < cell["us_min"] <= cell["us_per_step"] <= cell["us_max"]
    assert printed("bench", "scheduler", *sizes, "--caching", "on").split()[:2] == ["rows", "caching"]
    # A policy that looks ahead kept some of them back, since more was declared than the pool held: the bench waited for ever.
    assert decode_step(64, caching=True, steps=400).steps == 400


def test_a_pool_that_this_machine_cannot_account_for_is_one_line(refused, monkeypatch):
    def exhausted(*_arguments, **_options):
        raise MemoryError

    monkeypatch.setattr("paged.study.simulator.scenario.BlockManager", exhausted)
    assert "too little memory" in refused("simulate", "azure")


def test_a_reader_that_goes_away_gets_no_complaint():
    command = [sys.executable, "-m", "paged", "simulate", "azure", *TINY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert (process.stderr.read(), process.wait(timeout=600)) == (b"", 1)


@pytest.mark.parametrize("library", ["typer", "rich"])
def test_without_its_extra_the_command_line_is_one_line_that_says_what_brings_it(run_python, library):
    process = run_python("-c", f"import sys; sys.modules['{library}'] = None\nfrom paged.__main__ import main; main()")
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr == (
        f"paged: paged.cli needs {library}, which is not installed; `pip install '.[cli]'` in a checkout of paged brings it.\n"
    )


@pytest.mark.parametrize("width", [24, 40, 80])
def test_no_figure_of_a_table_is_broken_however_narrow_the_terminal_is(printed, terminal, width):
    screen = terminal(width, color_system=None)
    printed("simulate", "azure", *TINY, "--policy", "paged,vllm", "--jobs", 1)
    drawn = screen.getvalue()
    assert max(map(len, drawn.splitlines())) <= width
    # Headers in the table, names in the blocks.
    assert all(re.search(rf"\b{word}\b", drawn) for word in ("tokens/s", "p99 first", "preempted", "finished", "vllm"))
    assert len(re.findall(r"\d s\b|\d ms\b", drawn)) == 4


def frame_of(cells, host_blocks=8):
    fields = {
        "step": 412, "now_s": 37.25, "cells": np.asarray(cells, np.int64), "block_size": 16, "requests": 160,
        "memory": counted(BlockManager(6, 16).stats(), used=4, cached=1, free=1, host_blocks=host_blocks, host_used=2),
        "counts": {"waiting": 21, "running": 9, "paused": 2, "swapped": 3, "finished": 57, "rejected": 0},
        "batch_tokens": 96, "batch_sequences": 9, "token_budget": 256, "totals": SchedulerStats(
            preemptions_recompute=14, preemptions_swap=22, hit_tokens=12_032, prompt_tokens=60_230),
        "events": tuple((float(i), i, f"event {i} {'with many words ' * 12}") for i in range(40)),
    }  # fmt: skip
    return Frame(**fields)


def drawn(frame, width=80, height=24, colour=False):
    console = Console(width=width, height=height, force_terminal=colour, color_system="truecolor" if colour else None)
    with console.capture() as capture:
        console.print(render(frame, "a title", width, height))
    return capture.get().rstrip("\n").split("\n")


def test_every_block_is_drawn_once_with_its_sign_and_neighbouring_requests_have_different_colours():
    assert drawn(frame_of([SHARED, 7, 8, 8, CACHED, FREE]))[2].strip("│ ") == "▓▓██████▒▒·"
    text = "".join(drawn(frame_of([3, 4] + [FREE] * 4), colour=True))
    for request in (3, 4):
        red, green, blue = (int(colour_of(request)[i : i + 2], 16) for i in (1, 3, 5))
        assert f"{red};{green};{blue}m██" in text
    assert len(set(PALETTE)) == len(PALETTE) and colour_of(3) != colour_of(4)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (80, 50), (100, 30), (200, 60), (60, 20)])
@pytest.mark.parametrize("num_blocks", [6, 228, 1000, 50_000])
def test_a_frame_fits_its_terminal(width, height, num_blocks):
    lines = drawn(frame_of(np.arange(num_blocks) % 40), width, height)
    assert len(lines) <= height
    assert max(len(line) for line in lines) <= width


COUNTS = [
    "waiting 21", "running 9", "paused 2", "swapped 3", "57 of 160 requests ended", "14 by recompute", "22 by swap",
    "12,032 of 60,230",
]  # fmt: skip


def test_the_counts_are_on_the_screen_and_the_latest_events_last():
    lines = drawn(frame_of([FREE] * 228), width=100, height=30)
    text = "\n".join(lines)
    assert [figure for figure in COUNTS if figure not in text] == []
    assert "event 39" in lines[-1] and "event 38" in lines[-2]
    # Without a host tier there is no bar of it.
    hosts = [[line.strip("│ ")[:5] for line in drawn(frame_of([FREE] * 6, host_blocks=host))] for host in (8, 0)]
    assert ["host " in each for each in hosts] == [True, False]
