"""The examples without a model run, are short, and show what they are there to show; the embedding gives the right tokens."""

import re
import runpy

import numpy as np
import pytest


@pytest.mark.parametrize(
    ("name", "says"),
    [("one_step_ahead", "tokens as alone; 2 preemptions, 5 tokens void"), ("drafts", "drafts were right")],
)
def test_an_engine_of_ones_own_says_what_it_should_and_needs_nothing_but_numpy(name, says, said, repository):
    assert says in "\n".join(said(name))
    needs_numpy_alone((repository / "examples" / f"{name}.py").read_text())


def needs_numpy_alone(source):
    imported = set(re.findall(r"^(?:import|from) (\S+)", source, re.M))
    assert imported <= {"numpy", "numpy.typing", "paged", "collections.abc"}


def test_three_kinds_of_layers_in_sixty_lines_are_preempted_and_begin_where_a_state_was_kept(said, repository):
    tokens, begun = said("hybrid")
    assert "156 tokens in 36 pages, each as without memory" in tokens
    assert int(re.findall(r"(\d+) preemptions", tokens)[0]) > 0
    places = [(int(at), int(length)) for at, length in re.findall(r"at (\d+) of (\d+)", begun)]
    # A second turn is the first one, whose last token is not computed yet, and three tokens more.
    assert any(at == length - 4 and at % 4 for at, length in places)
    source = (repository / "examples" / "hybrid.py").read_text()
    needs_numpy_alone(source)
    assert len([line for line in source.splitlines() if line.strip()]) <= 60


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("pages[state.read]", "pages[state.write]"),
        ("enumerate(zip(full.tables, window.tables", "enumerate(zip(full.tables, full.tables"),
        ("window.tables[rows, columns, 0]", "window.tables[rows, columns, 0] - 1"),
        ('LayerGroup("window", reach=REACH)', 'LayerGroup("window", reach=1)'),
    ],
)
def test_layers_that_read_or_keep_something_else_say_another_token(right, wrong, repository, tmp_path):
    source = (repository / "examples" / "hybrid.py").read_text()
    assert source.count(right) == 1
    (tmp_path / "hybrid.py").write_text(source.replace(right, wrong))
    with pytest.raises(AssertionError, match=r"talk \d"):
        runpy.run_path(str(tmp_path / "hybrid.py"), run_name="__main__")


def test_a_streaming_server_outlives_its_clients_in_ninety_lines(said, repository):
    out = "\n".join(said("async_server"))
    assert "48 clients, 3 hung up" in out
    assert "no answer differs" in out
    assert " 0 preemptions" not in out
    source = (repository / "examples" / "async_server.py").read_text()
    assert len([line for line in source.splitlines() if line.strip()]) <= 90


def test_less_memory_costs_each_policy_throughput(said):
    _, *lines = map(str.split, said("memory_pressure"))
    throughput = {(policy, int(blocks)): float(number) for policy, blocks, number, *_ in lines}
    for policy in ("paged", "vllm", "tgi", "orca-max"):
        assert throughput[policy, 250] < throughput[policy, 2000]
    assert throughput["orca-max", 500] < throughput["tgi", 500] < throughput["paged", 500]


def test_a_policy_of_ones_own_swaps_where_it_says_so(said):
    mine, paged, vllm = map(str.split, said("own_policy"))
    assert ([line[0] for line in (mine, paged, vllm)], mine[3]) == (["mine", "paged", "vllm"], "0")
    assert int(mine[5]) > 0
    assert int(vllm[3]) > 0


def test_batching_in_flight_is_faster_than_static(said):
    static, orca, paged = (float(line.split()[1]) for line in said("static_or_in_flight"))
    assert static < orca < paged


@pytest.fixture(scope="module")
def embed(example):
    return example("embed")


@pytest.fixture(scope="module")
def served(embed):
    """(tokens by request, scheduler) of the example's conversations in memory that is short."""
    return embed.serve(embed.conversations(), num_blocks=64, host_blocks=12)


def test_the_embedding_runs_where_torch_cannot_be_imported(run_python, repository):
    script = repository / "examples" / "embed.py"
    program = f"import runpy, sys; sys.modules['torch'] = None; runpy.run_path({str(script)!r}, run_name='__main__')"
    result = run_python("-c", program)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("48 requests, ")


def test_under_pressure_each_request_gets_the_tokens_of_the_formula_and_nothing_is_left_behind(embed, served):
    outputs, scheduler = served
    stats = scheduler.stats()
    assert min(stats.preemptions_recompute, stats.preemptions_swap, stats.hit_tokens) > 0
    assert (scheduler.manager.device.num_used, scheduler.check()) == (0, [])
    for request in embed.conversations():
        # Straight from the stand-in model's formula: no blocks, no tables, no scheduler.
        tokens = np.array(request.prompt, np.int64)
        while len(tokens) < len(request.prompt) + request.max_tokens:
            places = np.arange(len(tokens))
            tokens = np.append(tokens, (tokens + places) @ (places + 1) % embed.VOCABULARY)
        assert outputs[request.id] == tokens[len(request.prompt) :].tolist(), request.id


def test_with_one_kind_of_move_forgotten_the_tokens_differ(embed, served, monkeypatch):
    monkeypatch.setattr(embed.StandInEngine, "move", lambda engine, moves: None)
    wrong, _ = embed.serve(embed.conversations(), num_blocks=64, host_blocks=12)
    assert wrong != served[0]
