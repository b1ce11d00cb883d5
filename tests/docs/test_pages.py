"""Pages: links lead somewhere, their Python runs, and options, names, limits and tables are those of the code."""

import re
import shlex
import time
from contextlib import closing
from pathlib import Path

import pytest

from paged import BlockManager, EngineConfig
from paged.cli.app import run
from paged.engine.config import fields_of
from paged.engine.disk_tier import PATIENCE_S, PIECE_BYTES
from paged.engine.routing import RoutingRules
from paged.serving.kv_events import KvEventPublisher
from paged.serving.kv_wire import BlockStored
from paged.serving.settings import KvEventsConfig, Settings
from paged.storage.disk_store import _BATCH_BYTES, QUEUE_BYTES
from paged.study.simulator import ROUTERS, SimulationResult
from paged.study.traces import PRESETS, PROCESSES, open_trace, read_trace
from paged.study.traces.opening import KEYS

REPOSITORY = Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
PAGES += sorted(page.relative_to(REPOSITORY).as_posix() for page in (REPOSITORY / "docs").rglob("*.md"))
# Of vLLM's own command, whose results are read.
OF_VLLM = {"--save-result", "--save-detailed"}


def anchors_of(page):
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^a-z0-9_ -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_every_link_of_a_page_leads_somewhere(page):
    page = REPOSITORY / page
    for path, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text(encoding="utf-8")):
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors_of(target), f"{path}#{anchor}"


@pytest.mark.parametrize("page", ["routing", "sessions", "tiers", "decoding", "configuration"])
def test_the_program_of_a_page_runs_and_prints_what_the_page_says(page, ran, text_of, fences):
    out, text = ran(page), text_of(f"docs/{page}.md")
    assert page != "sessions" or out == "".join(fences(text, "text"))
    assert page != "configuration" or (out and out.strip() in text)


def test_the_program_that_splits_a_model_prints_an_answer(text_of, fences, capsys):
    (program,) = (each for each in fences(text_of("docs/scaling.md"), "python") if "tensor_parallel_size" in each)
    # Two ranks answer as one does in tests/model/parallel.
    exec(compile(program.replace("size=2", "size=1"), "scaling.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out == " is used to wrap the execu\n"


def test_the_programs_and_the_command_of_the_tutorial_print_what_it_shows(text_of, capsys):
    page, names = text_of("docs/tutorial.md"), {}
    steps = re.findall(r"^```(python|sh)\n(.*?)^```\n\n```text\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    assert len(steps) == page.count("```python") + 1 == 6
    for language, program, shown in steps:
        if language == "python":
            exec(compile(program, "tutorial.md", "exec"), names)
            assert capsys.readouterr().out == shown
        else:
            assert run(shlex.split(program.removeprefix("paged "))) == 0
            assert set(shown.splitlines()) <= set(capsys.readouterr().out.splitlines())


@pytest.mark.parametrize(
    ("page", "commands"),
    [("routing", ["simulate"]), ("sessions", ["sessions"]), ("simulator", ["simulate", "plan", "validate"])],
)
def test_every_option_of_a_page_is_one_of_its_commands(page, commands, text_of, options_of):
    options = set(re.findall(r"--[a-z][a-z-]+", text_of(f"docs/{page}.md"))) - OF_VLLM
    assert len(options) > 4
    assert options <= set().union(*map(options_of, commands))


def test_every_router_and_the_rules_that_bound_a_choice_are_on_their_page(text_of):
    page, rules = text_of("docs/routing.md"), ("bound_s", "bound_times", "spared", "crowded", "lately_s")
    assert [name for name in (*ROUTERS, *rules) if f"`{name}`" not in page] == []
    assert set(rules) <= set(RoutingRules.__struct_fields__)


def test_the_tables_on_sessions_are_those_of_the_results(text_of):
    rows = [line for line in text_of("benchmarks/results/session_study.md").splitlines() if line.startswith("| ")]
    assert len(rows) > 4
    assert [row for row in rows if row not in text_of("docs/sessions.md")] == []


def test_the_sizes_on_tiers_are_those_of_the_code(text_of):
    page = text_of("docs/tiers.md")
    for num_bytes, words in (
        (QUEUE_BYTES, "at most {} MiB"),
        (_BATCH_BYTES, "{} MiB a process at most"),
        (PIECE_BYTES, "{} MiB at a time"),
    ):
        assert words.format(num_bytes // 2**20) in page
    assert PATIENCE_S == 10 and "after ten seconds" in page


def test_every_setting_is_in_one_row_and_each_of_an_engine_says_when_to_change_it(text_of):
    page = text_of("docs/configuration.md")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    by_name = [(row[0].split("`")[1], row) for row in rows if not row[0].startswith("`paged ")]
    settings = fields_of(EngineConfig)
    assert sorted(name for name, _ in by_name) == sorted({**settings, **fields_of(Settings)}.keys() - {"tenants"})
    assert all(len(row) == 6 and row[5].endswith(".") for name, row in by_name if name in settings)


def test_the_python_of_the_page_on_traces_runs(ran, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = ran("traces").splitlines()
    assert said[0] == "half(half=2): 250 of 500 requests"
    assert said[1].startswith("fitted(context=4096, how=clip): 250 of 250 requests, ")
    assert said[-1].startswith("2000 ")


def test_the_files_of_the_page_on_traces_can_be_read(text_of, fences, tmp_path):
    as_csv, as_json = (text for text in fences(text_of("docs/traces.md"), "") if "arrival_s" in text)
    path = tmp_path / "trace"
    path.write_text(as_csv)
    assert read_trace(path).prompt_tokens.tolist() == [812, 655, 90]
    path.write_text(as_json)
    trace = read_trace(path)
    first, second = trace.prompt(0), trace.prompt(1)
    assert (second[:812] == first).all()
    assert (second[812:932] == trace.output(0)).all()
    assert len(second) == 812 + 120 + 44


def test_the_descriptions_of_traces_can_be_opened_and_every_key_process_and_preset_is_named(text_of):
    page = text_of("docs/traces.md")
    specs = re.findall(r"^synthetic:.*$", page, flags=re.MULTILINE)
    assert [len(open_trace(spec)) for spec in specs] == [1000] * 3
    synthetic = page.partition("## Synthetic traces")[2]
    keys = [key for key in KEYS if not key.startswith("output_")]
    assert [name for name in (*keys, *PROCESSES, *PRESETS) if f"`{name}`" not in synthetic] == []


def test_the_reader_of_the_page_on_kv_events_knows_what_is_cached(ran):
    names, any_port = {}, "tcp://127.0.0.1:*"
    ran("kv_events", names)
    manager = BlockManager(8, 4)
    with closing(KvEventPublisher(manager, KvEventsConfig(endpoint=any_port, replay_endpoint=any_port))) as publisher:
        row = manager.add(range(10))
        manager.allocate([row], [10])
        manager.confirm()
        publisher.publish(time.time())
        assert names["cached_tokens"](publisher.endpoint, publisher.replay_endpoint, range(20)) == 8
    manager.free([row])


def test_the_page_on_kv_events_names_every_key_and_every_field_and_the_defaults(text_of):
    page, default = text_of("docs/kv_events.md"), KvEventsConfig()
    assert [key for key in KvEventsConfig.__struct_fields__ if f"| `{key}` |" not in page] == []
    assert [field for field in BlockStored.__struct_fields__ if f'"{field}": ' not in page] == []
    for key in ("buffer_steps", "hwm", "max_queue_size"):
        assert f"| `{key}` | {getattr(default, key):,} |" in page
    assert f"| `endpoint` | `{default.endpoint}` |" in page


def test_the_python_of_the_page_on_the_simulator_runs(text_of, fences, capsys):
    for program in fences(text_of("docs/simulator.md"), "python"):
        exec(compile(program, "simulator.md", "exec"), {})
    *compared, planned = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in compared] == ["paged", "vllm"]
    answer, missed, *_, rate = planned.split()
    assert float(answer) == float(rate) < float(missed) <= float(answer) * 1.1


def test_the_figures_of_the_page_on_the_simulator_are_those_of_a_result(text_of):
    table = text_of("docs/simulator.md").partition("## What the figures mean")[2].partition("## What comes out")[0]
    cells = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    names = [name.partition(".")[0] for cell in cells for name in re.findall(r"`([a-z_.0-9]+)`", cell)]
    assert len(names) > 12
    assert set(names) <= set(SimulationResult.__struct_fields__)


@pytest.mark.slow
def test_the_plans_of_the_page_on_the_simulator_are_what_the_commands_print(text_of, fences, capsys):
    """The same question twice: without a budget, and with one that binds."""
    (shown,) = (block for block in fences(text_of("docs/simulator.md"), "") if block.startswith("$ paged plan "))
    commands = [part.splitlines() for part in shown.split("$ paged ")[1:]]
    replicas = []
    for command, *lines in commands:
        assert run([*command.split(), "--jobs", "1"]) == 0
        printed = capsys.readouterr().out.splitlines()
        assert [line for line in lines if line not in printed] == []
        assert len(lines) >= 3
        replicas.append(int(re.search(r": ([\d,]+) replicas?; missed", lines[0])[1]))
    unnamed, binding = replicas
    assert unnamed < binding
    assert f"What binds: token budget; with 512 tokens a step instead of 2,048: {unnamed} replicas." in shown
