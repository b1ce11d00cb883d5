"""The command line from outside: what it prints where, and with which status."""

import io
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
from rich.console import Console

from paged import POLICIES, __version__
from paged.study.bench import decode_step
from paged.study.traces import excerpt_path

TINY = ["--limit", "12", "--length-scale", "0.02", "--blocks", "64", "--block-size", "8"]


@pytest.fixture
def refused(paged):
    """Run a command line that must be refused, and return its one line."""

    def call(*arguments):
        status, out, err = paged(*arguments)
        assert status == 2
        assert out == ""
        assert err.count("\n") == 1
        assert err.startswith("paged: ")
        return err

    return call


needs_a_model = pytest.mark.skipif(find_spec("torch") is None, reason="needs the extra engine")


def test_the_version_is_the_packages(paged):
    assert paged("--version") == (0, f"paged {__version__}\n", "")


def test_without_a_command_the_help_is_shown(paged):
    status, out, err = paged()
    assert status == 0
    assert "Usage" in out
    assert err == ""


@pytest.mark.parametrize(
    "command",
    [
        ["simulate"],
        ["demo"],
        ["doctor"],
        ["generate"],
        ["chat"],
        ["serve"],
        ["bench", "scheduler"],
        ["capacity"],
        ["policies"],
        ["plan"],
        ["profile"],
        ["top"],
    ],
)
def test_every_command_explains_itself_with_an_example(paged, command):
    status, out, err = paged(*command, "--help")
    assert status == 0
    assert err == ""
    assert "Example" in out
    assert f"paged {' '.join(command)}" in out


@needs_a_model
def test_the_demo_shows_both_kinds_of_preemption_a_full_pool_and_no_violation(paged):
    status, out, err = paged("demo", "--json")
    result = json.loads(out)
    assert (status, err) == (0, "")
    assert result["requests"] == result["finished"] + result["rejected"] > 0
    assert result["steps"] == result["checked_steps"] > 0
    assert result["preemptions"]["recompute"] > 0
    assert result["preemptions"]["swap"] > 0
    assert result["peak_block_usage"] > 0.95
    assert 0 < result["prefix_hit_rate"] < 1
    assert result["violations"] == 0
    assert result["different_outputs"] == 0
    assert result["tokens_per_s"] > 0


@needs_a_model
def test_the_demo_without_a_terminal_is_plain_lines(paged):
    status, out, err = paged("demo")
    assert (status, err) == (0, "")
    assert "\x1b" not in out
    lines = out.splitlines()
    # A tenth of the requests each, under pressure and with ample memory.
    assert sum(line.startswith("step ") for line in lines) == 20
    assert any(line.startswith("invariants: 0 violations") for line in lines)
    assert any(line.startswith("different answers: 0 of 160 ") for line in lines)


def test_without_torch_a_stand_in_answers_the_demo_and_one_line_says_what_brings_the_model(paged, monkeypatch):
    monkeypatch.setattr("paged.cli.demo.has_extra", lambda extra: False)
    status, out, err = paged("demo")
    assert (status, err) == (0, "")
    assert out.splitlines()[0] == (
        "What runs a model is not installed, so a stand-in answers; `pip install '.[engine]'` in a checkout of paged brings it."
    )
    assert "invariants: 0 violations in 989 checked steps" in out
    status, out, err = paged("demo", "--json")
    assert (status, err) == (0, "")
    assert json.loads(out)["steps"] == 989


@pytest.mark.skipif(os.name == "nt", reason="there are no such terminals")
@pytest.mark.parametrize("command", [["generate", "-p", "a"], ["chat"], ["bench", "engine"], ["bench", "attention"]])
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


@needs_a_model
def test_the_demo_in_a_terminal_draws_the_pool_and_then_a_table(paged, monkeypatch):
    from paged.cli import demo_model

    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, color_system="truecolor", width=80, height=24)
    for module in ("paged.cli.demo", "paged.cli.show"):
        monkeypatch.setattr(f"{module}.console", lambda: terminal)

    def marked(*arguments, **options):
        screen.write("<compiled>")
        return runner_for(*arguments, **options)

    runner_for = demo_model.runner_for
    monkeypatch.setattr(demo_model, "runner_for", marked)
    status, out, err = paged("demo", "--speed", 1000)
    assert (status, out, err) == (0, "", "")
    drawn = screen.getvalue()
    for words in ("96 blocks of 8 tokens", "preempted", "160 of 160 requests ended", "prefix hits", "0 violations"):
        assert words in drawn
    assert "██" in drawn
    # What takes long comes first, and says so until nothing more has to be made.
    waits = "reading the model: a few seconds"
    assert drawn.index(waits) < drawn.rindex("<compiled>") < drawn.rindex(waits) < drawn.index("96 blocks of 8 tokens")


def test_a_simulation_into_a_pipe_is_one_figure_a_line(paged):
    status, out, err = paged("simulate", "mooncake", *TINY)
    assert (status, err) == (0, "")
    assert "\x1b" not in out
    assert "requests: 12: " in out
    assert all(": " in line for line in out.splitlines())


def test_a_simulations_json_is_a_list_of_one(paged):
    status, out, err = paged("simulate", excerpt_path("azure"), *TINY, "--check", "--json")
    (result,) = json.loads(out)
    assert (status, err) == (0, "")
    assert result["requests"] == 12
    assert result["num_blocks"] == 64
    assert set(result["ttft_s"]) == {"p50", "p90", "p99", "max"}
    assert result["violations"] == 0


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_can_be_simulated(paged, policy):
    status, out, _ = paged("simulate", "azure", *TINY, "--policy", policy, "--json")
    assert status == 0
    assert json.loads(out)[0]["policy"] == policy


def test_several_policies_and_rates_are_a_table_and_a_list(paged):
    sweep = ["simulate", "azure", *TINY, "--policy", "paged,vllm", "--rate-scale", "1,4", "--jobs", 2]
    status, out, err = paged(*sweep)
    assert (status, err) == (0, "")
    head, *lines, trace = out.splitlines()
    assert head.split()[:2] == ["policy", "rate"]
    # Rates differ, so that of the trace is not said.
    assert trace.startswith("azure_conversation.csv: 12 requests, prompts ")
    assert [line.split()[:2] for line in lines] == [
        ["paged", "1.27"],
        ["paged", "5.09"],
        ["vllm", "1.27"],
        ["vllm", "5.09"],
    ]
    results = json.loads(paged(*sweep, "--json")[1])
    assert [(result["policy"], result["rate_scale"]) for result in results] == [
        ("paged", 1), ("paged", 4), ("vllm", 1), ("vllm", 4),
    ]  # fmt: skip
    assert results[1]["makespan_s"] < results[0]["makespan_s"]
    for result in results:
        assert result["finished"] + result["rejected"] == result["requests"] == 12


def test_a_trace_that_is_made_faster_lasts_until_its_load_has_settled(paged):
    tiny = ["simulate", "azure", *TINY, "--jobs", 1, "--json"]
    (plain,) = json.loads(paged(*tiny)[1])
    assert plain["load"]["drawn_from"] is None
    (fast,) = json.loads(paged(*tiny, "--rate-scale", 1000)[1])
    assert fast["load"]["drawn_from"] == plain["requests"]
    assert fast["load"]["per_s"] == pytest.approx(1000 * plain["load"]["per_s"], rel=0.1)
    assert fast["load"]["span_s"] > 0.8 * fast["load"]["settles_in_s"]
    (short,) = json.loads(paged(*tiny, "--rate-scale", 1000, "--least-span", 0)[1])
    assert short["requests"] == plain["requests"]
    assert "has settled after about" in short["notes"][0]


def test_seeds_give_a_mean_and_an_interval(paged):
    trace = "synthetic:poisson,rate=8,requests=30,lengths=alpaca"
    options = ["--blocks", 64, "--max-tokens-per-step", 64, "--jobs", 1]
    out = paged("simulate", trace, *options, "--policy", "paged,vllm", "--seeds", 3)[1]
    _, *lines, _, note = out.splitlines()
    assert len(lines) == 2
    assert note.startswith("Note: the trace lasts ")
    assert all("±" in line for line in lines)
    results = json.loads(paged("simulate", trace, *options, "--seeds", 3, "--json")[1])
    assert [result["seed"] for result in results] == [0, 1, 2]
    assert len({result["makespan_s"] for result in results}) == 3


def test_seeds_of_a_file_draw_its_requests_anew_so_that_an_interval_is_one(paged):
    arguments = ["simulate", "azure", *TINY, "--seeds", 3, "--jobs", 1]
    _, line, _ = paged(*arguments)[1].splitlines()
    assert "± 0.0" not in line
    assert "±" in line
    first, second, third = json.loads(paged(*arguments, "--json")[1])
    alone = json.loads(paged("simulate", "azure", *TINY, "--json")[1])[0]
    assert first["makespan_s"] == alone["makespan_s"]
    assert len({result["makespan_s"] for result in (first, second, third)}) == 3
    assert first["applied"] == alone["applied"]
    assert second["applied"] == ["resampled(seed=1, block=1): 12 of 12 requests", *alone["applied"]]
    assert second["load"]["note"] == "excerpt: the first 500 of 19,366 requests"


def test_a_trace_says_its_rate_its_lengths_and_by_what_it_was_filtered(paged, tmp_path):
    line = paged("simulate", "mooncake")[1].splitlines()[0]
    assert line == (
        "trace: mooncake_conversation.jsonl: 300 requests over 333 s, 0.901 requests/s, prompts 1,746 tokens on average (p99 3,980), "
        "outputs 323 tokens on average (p99 864); excerpt: 300 of 12,031 requests, the first with prompts of up to 4,096 tokens, "
        "as a third of all have"
    )
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n0,8,3\n1,4,9\n2,6,6\n")
    assert paged("simulate", path)[1].splitlines()[0] == (
        "trace: trace.csv: 3 requests over 2 s, 1.50 requests/s, prompts 6 tokens on average (p99 8), outputs 6 tokens on average (p99 9)"
    )


def test_a_rate_is_so_many_requests_a_second_of_what_is_simulated(paged):
    slow, fast = json.loads(
        paged("simulate", "azure", *TINY, "--rate", "2,8", "--length-scale", 0.5, "--jobs", 1, "--json")[1]
    )
    assert [slow["load"]["per_s"], fast["load"]["per_s"]] == pytest.approx([2, 8])
    assert fast["rate_scale"] == pytest.approx(4 * slow["rate_scale"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["azure", "--rate", 2, "--rate-scale", 2], "--rate 2 and --rate-scale 2 both say how fast"),
        (["azure", "--rate", 2, "--clients", 3], "each of 3 clients waits for its answer"),
        (["synthetic:at-once,requests=5", "--rate", 2], "all arrive at once"),
        (["azure", "--rate", 0], "--rate is 0"),
        (["azure", "--rate", "inf"], "--rate is inf"),
        (["azure", "--rate", "fast"], '--rate takes a number, or several with commas between; got "fast"'),
    ],
    ids=str,
)
def test_what_is_no_rate_is_refused(paged, arguments, words):
    status, out, err = paged("simulate", *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert words in err


def test_the_context_is_the_models_and_what_is_longer_is_counted(paged, tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n0,8,3\n1,4090,9\n2,4090,6\n")
    device = ["--model", "llama-2-7b", "--device", "a100-80g"]
    out = paged("simulate", path, *device)[1]
    assert "requests: 3: 2 finished, 1 rejected" in out
    assert "; 1 left out, longer than the context of 4,096 tokens" in out
    (result,) = json.loads(paged("simulate", path, *device, "--json")[1])
    assert (result["load"]["left_out"], result["load"]["context"], result["load"]["requests"]) == (1, 4096, 2)
    (clipped,) = json.loads(paged("simulate", path, *device, "--over-long", "clip", "--json")[1])
    assert (clipped["load"]["left_out"], clipped["load"]["clipped"], clipped["finished"]) == (0, 1, 3)
    (named,) = json.loads(paged("simulate", path, *device, "--context", 5000, "--json")[1])
    assert (named["load"]["left_out"], named["finished"]) == (0, 3)


def test_prompts_over_the_budget_of_a_policy_that_splits_none_are_told(paged, tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n0,8,3\n1,65,9\n2,64,6\n")
    arguments = ["simulate", path, "--max-tokens-per-step", 64, "--blocks", 50, "--jobs", 1]
    _, _, err = paged(*arguments, "--policy", "tgi,paged")
    assert err == (
        "paged: tgi splits no prompt, and 1 of 3 prompts are over its token budget of 64: each is computed alone, over several "
        "steps, where the system itself would refuse it\n"
    )
    _, out, _ = paged(*arguments, "--policy", "tgi,paged,static", "--json")
    assert [result["prompts_over_budget"] for result in json.loads(out)] == [1, 0, 0]


def test_a_budget_that_nobody_named_suits_model_and_device_and_is_said_to_be_chosen(paged):
    arguments = ["simulate", "azure", "--limit", 5, "--model", "llama-3-8b", "--device", "a100-80g"]
    assert ", token budget 512, chosen\n" in paged(*arguments)[1]
    assert ", token budget 512\n" in paged(*arguments, "--max-tokens-per-step", 512)[1]
    results = json.loads(paged(*arguments, "--policy", "paged,vllm,tgi,static", "--jobs", 1, "--json")[1])
    assert [result["max_tokens_per_step"] for result in results] == [512, 512, 4096, None]
    assert {result["token_budget"] for result in results} == {"auto"}
    assert json.loads(paged("simulate", "azure", "--limit", 5, "--json")[1])[0]["max_tokens_per_step"] == 2048


def test_a_model_on_a_device_decides_blocks_budget_and_times(paged):
    options = [
        "--model",
        "llama-2-13b",
        "--device",
        "a100-40g",
        "--max-tokens-per-step",
        "knee",
        "--limit",
        5,
        "--json",
    ]
    (result,) = json.loads(paged("simulate", "azure", *options)[1])
    assert 500 < result["num_blocks"] < 1200
    assert 128 < result["max_tokens_per_step"] < 256
    assert 0.02 < result["itl_s"]["p50"] < 0.05


def test_the_log_has_a_line_a_step_that_decided_something(paged, tmp_path):
    path = tmp_path / "log.jsonl"
    status, out, _ = paged("simulate", "azure", *TINY, "--log", path, "--json")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    (result,) = json.loads(out)
    assert status == 0
    assert len(lines) + sum(line["skipped"] for line in lines) == result["steps"]
    assert sorted(int(id) for line in lines for id in line["ended"]) == list(range(12))
    assert [line["end_s"] for line in lines] == sorted(line["end_s"] for line in lines)


def test_scales_change_what_arrives(paged):
    def of(*options):
        return json.loads(paged("simulate", "azure", "--limit", 30, "--json", *options)[1])[0]

    plain, short = of(), of("--prompt-scale", 0.5, "--output-scale", 0.25)
    assert short["prompt_tokens"] == pytest.approx(plain["prompt_tokens"] / 2, rel=0.01)
    assert short["output_tokens"] == pytest.approx(plain["output_tokens"] / 4, rel=0.05)
    assert of("--rate-scale", 100, "--least-span", 0)["makespan_s"] < plain["makespan_s"]


def test_violations_found_are_status_1_and_said_on_standard_error(paged, monkeypatch):
    monkeypatch.setattr("paged.scheduler.Scheduler.check", lambda _self: ["block 3 is lost"])
    status, out, err = paged("simulate", "azure", *TINY, "--check", "--json")
    assert status == 1
    assert json.loads(out)[0]["violations"] > 0
    assert "block 3 is lost" in err


def test_policies_are_listed_with_what_they_do(paged):
    assert {policy["name"] for policy in json.loads(paged("policies", "--json")[1])} == set(POLICIES)
    out = paged("policies")[1]
    for policy in POLICIES.values():
        assert policy.summary in out


def test_the_bench_is_a_list_with_a_cell_for_each_size(paged):
    status, out, err = paged("bench", "scheduler", "--rows", "1,4", "--steps", "16", "--json")
    cells = json.loads(out)
    assert (status, err) == (0, "")
    assert [(cell["rows"], cell["caching"]) for cell in cells] == [(1, False), (1, True), (4, False), (4, True)]
    for cell in cells:
        assert 0 < cell["us_min"] <= cell["us_per_step"] <= cell["us_max"]


def test_the_bench_ends_when_many_sequences_are_to_decode_for_long():
    """A policy that looks ahead kept some of them back, since more was declared than the pool held: the bench waited for ever."""
    assert decode_step(64, caching=True, steps=400).steps == 400


def test_the_bench_takes_holes_and_longer_contexts(paged):
    options = ["--rows", "3", "--holes", "2", "--context", "300", "--caching", "on", "--steps", "16"]
    (cell,) = json.loads(paged("bench", "scheduler", *options, "--json")[1])
    assert (cell["holes"], cell["context"], cell["caching"]) == (2, 300, True)
    table = paged("bench", "scheduler", *options)[1].splitlines()
    assert table[0].split()[:2] == ["rows", "caching"]
    assert len(table) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["simulate"], "TRACE"),
        (["simulate", "nope.csv"], "nope.csv: no such file"),
        (["simulate", "."], "directory"),
        (["simulate", "azure", "--blocks", "0"], "--blocks"),
        (["simulate", "azure", "--blocks", "many"], "--blocks"),
        (["simulate", "azure", "--block-size", "-1"], "--block-size"),
        (["simulate", "azure", "--host-blocks", "-1"], "--host-blocks"),
        (["simulate", "azure", "--max-tokens-per-step", "0"], "--max-tokens-per-step"),
        (["simulate", "azure", "--max-sequences", "0"], "--max-sequences"),
        (["simulate", "azure", "--limit", "0"], "--limit"),
        (["simulate", "azure", "--rate-scale", "0"], "rate"),
        (["simulate", "azure", "--length-scale", "nan"], "prompts"),
        (["simulate", "azure", "--output-scale", "-2"], "outputs"),
        (["simulate", "azure", "--weights-ms", "-1"], "weights_ms"),
        (["simulate", "azure", "--token-us", "inf"], "token_us"),
        (["simulate", "azure", "--policy", "magic"], 'unknown policy "magic"; known are ' + ", ".join(POLICIES)),
        (["simulate", "azure", "--colour"], "--colour"),
        (["simulate", "azure", "--policy", "paged,vlm"], 'Did you mean "vllm"?'),
        (["simulate", "azure", "--rate-scale", "1,fast"], 'a number between commas; got "fast"'),
        (["simulate", "azure", "--blocks", "9,0"], 'at least 1 between commas; got "0"'),
        (["simulate", "azure", "--max-tokens-per-step", "knee"], "needs a model and a device"),
        (["simulate", "azure", "--model", "llama-2-13b"], "a model runs on a device"),
        (["simulate", "azure", "--model", "lama-2-13b", "--device", "h100"], "llama-2-13b"),
        (["simulate", "azure", "--model", "llama-2-70b", "--device", "a100-40g"], "weights"),
        (["simulate", "azure", "--clients", "0"], "--clients"),
        (["simulate", "azure", "--seeds", "0"], "--seeds"),
        (["simulate", "azure", "--context", "1"], "--context"),
        (["simulate", "azure", "--declared", "100"], "need a context"),
        (["simulate", "azure", "--price-per-hour", "-1"], "price_per_hour"),
        (["simulate", "azure", "--log", "/nowhere/at/all"], "/nowhere/at/all"),
        (["simulate", "azure", "--policy", "paged,vllm", "--log", "x"], "--log follows one simulation"),
        (["simulate", "synthetic:poison,rate=1"], "poisson"),
        (["simulate", "azure", "--dtype", "fp8"], "--dtype goes with --model and --device"),
        (["simulate", "azure", "--tensor-parallel", "2"], "--tensor-parallel goes with --model and --device"),
        (["simulate", "azure", "--memory-share", "0.5"], "--memory-share goes with --model and --device"),
        (["simulate", "azure", "--published"], "--published goes with --model and --device"),
        (
            ["simulate", "azure", "--model", "llama-3-8b", "--device", "h100", "--weights-ms", "5"],
            "--weights-ms is for steps without a model; --model times them here",
        ),
        (["profile", "--out", "x.json", "--on", "h100"], "--on h100 goes with --import"),
        (["profile", "--out", "x.json", "--source", "me"], "--source me goes with --import"),
        (["profile", "--out", "x.json", "--import", "nope", "--on", "h100"], "nope: no such folder"),
        (["profile", "--out", ""], "Invalid value for '--out': it is empty; a path is needed"),
        (["generate", "--prompt", "a", "--model="], "model has to be a checkpoint folder"),
        (["simulate", "azure", "--csv", ""], "Invalid value for '--csv': it is empty; a path is needed"),
        (["bench", "scheduler", "--rows", "4,x"], '"4,x"'),
        (["bench", "scheduler", "--rows", "0"], "at least 1 row"),
        (["bench", "scheduler", "--caching", "maybe"], "on, off or both"),
        (["demo", "--speed", "0"], "--speed"),
        (["dance"], "dance"),
        (["bench", "dance"], "dance"),
    ],
    ids=" ".join,
)
def test_wrong_input_is_one_line_on_standard_error_and_status_2(refused, arguments, words):
    assert words in refused(*arguments)


def test_a_damaged_trace_is_told_by_file_line_and_column(refused, tmp_path):
    path = tmp_path / "bad.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,many,1\n")
    assert (
        refused("simulate", path)
        == f'paged: {path}, line 2, column ContextTokens: "many" is not a whole number of tokens\n'
    )


def test_a_pool_that_this_machine_cannot_account_for_is_one_line(refused, monkeypatch):
    def exhausted(*_arguments, **_options):
        raise MemoryError

    monkeypatch.setattr("paged.study.simulator.scenario.BlockManager", exhausted)
    assert "too little memory" in refused("simulate", "azure")


def test_a_reader_that_goes_away_gets_no_complaint():
    command = [sys.executable, "-m", "paged", "simulate", "azure", *TINY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=600) == 1


def test_the_script_and_the_module_are_the_same_command():
    command = [sys.executable, "-m", "paged", "simulate", "nope.csv"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert process.returncode == 2
    assert process.stdout == ""
    assert process.stderr.startswith("paged: nope.csv: no such file")


@pytest.mark.parametrize("library", ["typer", "rich"])
def test_without_its_extra_the_command_line_is_one_line_that_says_what_brings_it(run_python, library):
    process = run_python("-c", f"import sys; sys.modules['{library}'] = None\nfrom paged.__main__ import main; main()")
    assert process.returncode == 2
    assert process.stdout == ""
    assert process.stderr == (
        f"paged: paged.cli needs {library}, which is not installed; `pip install '.[cli]'` in a checkout of paged brings it.\n"
    )


@pytest.mark.parametrize("width", [24, 40, 80])
def test_no_figure_of_a_table_is_broken_however_narrow_the_terminal_is(paged, monkeypatch, width):
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, color_system=None, width=width)
    monkeypatch.setattr("paged.cli.show.console", lambda: terminal)
    status, _, err = paged("simulate", "azure", *TINY, "--policy", "paged,vllm", "--jobs", 1)
    assert (status, err) == (0, "")
    drawn = screen.getvalue()
    assert max(map(len, drawn.splitlines())) <= width
    # Headers in the table, names in the blocks.
    assert all(re.search(rf"\b{word}\b", drawn) for word in ("tokens/s", "p99 first", "preempted", "finished", "vllm"))
    assert len(re.findall(r"\d s\b|\d ms\b", drawn)) == 4


def test_a_rate_is_shown_as_it_was_asked_for(paged):
    status, out, err = paged("simulate", "azure", *TINY, "--rate", "20,40", "--jobs", 1)
    assert (status, err) == (0, "")
    assert [line[:22].split() for line in out.splitlines()[1:3]] == [
        ["paged", "20", "requests/s"],
        ["paged", "40", "requests/s"],
    ]
    status, out, err = paged(
        "plan", "azure", *TINY, "--rate", "20,40", "--find", "memory", "--ttft", 30, "--no-explain"
    )
    assert (status, err) == (0, "")
    assert [" ".join(line.split()[1:3]) for line in out.splitlines()[1:3]] == ["20 requests/s", "40 requests/s"]
