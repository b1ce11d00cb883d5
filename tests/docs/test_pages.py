"""Pages of a few figures: their Python runs, their options exist, and the names and limits on them are those of the code."""

import re

import pytest

from paged.engine.disk_tier import PATIENCE_S, PIECE_BYTES
from paged.engine.routing import RoutingRules
from paged.storage.disk_store import _BATCH_BYTES, QUEUE_BYTES
from paged.study.simulator import ROUTERS

# Of vLLM's own command, whose results are read.
OF_VLLM = {"--save-result", "--save-detailed"}


@pytest.mark.parametrize("page", ["routing", "sessions", "tiers", "decoding"])
def test_the_program_of_a_page_runs_and_prints_what_the_page_says(page, text_of, fences, capsys):
    text = text_of(f"docs/{page}.md")
    (program,) = fences(text, "python")
    exec(compile(program, f"{page}.md", "exec"), {"__name__": page})
    assert capsys.readouterr().out == "".join(fences(text, "text")) or page != "sessions"


def test_the_program_that_splits_a_model_prints_an_answer(text_of, fences, capsys):
    (program,) = (each for each in fences(text_of("docs/scaling.md"), "python") if "tensor_parallel_size" in each)
    # Two ranks answer as one does in tests/model/parallel.
    exec(compile(program.replace("size=2", "size=1"), "scaling.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out == " is used to wrap the execu\n"


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
