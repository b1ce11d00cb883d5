"""The embedding example: it runs without torch, and memory pressure changes no token of it."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from types import ModuleType

import numpy as np
import pytest

RunPython = Callable[..., "CompletedProcess[str]"]


@pytest.fixture(scope="module")
def embed(repository: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("embed_example", repository / "examples" / "embed.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tokens_without_paging(embed: ModuleType, prompt: np.ndarray, count: int) -> list[int]:
    """The stand-in model's continuation of a prompt, straight from its formula: no blocks, no tables, no scheduler."""
    tokens = [int(token) for token in prompt]
    for _ in range(count):
        mixed = [token + position for position, token in enumerate(tokens)]
        tokens.append(sum(place * value for place, value in enumerate(mixed, start=1)) % embed.VOCABULARY)
    return tokens[len(prompt) :]


def test_the_example_runs_where_torch_cannot_be_imported(run_python: RunPython, repository: Path) -> None:
    script = repository / "examples" / "embed.py"
    program = f"import runpy, sys; sys.modules['torch'] = None; runpy.run_path({str(script)!r}, run_name='__main__')"
    result = run_python("-c", program)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("48 requests, ")


def test_under_pressure_each_request_gets_the_tokens_it_gets_alone(embed: ModuleType) -> None:
    outputs, scheduler = embed.serve(embed.conversations(), num_blocks=64, host_blocks=12)
    stats = scheduler.stats()
    assert stats.preemptions_recompute > 0
    assert stats.preemptions_swap > 0
    assert stats.hit_tokens > 0
    for request in embed.conversations():
        alone, _ = embed.serve([request], num_blocks=1_000)
        assert outputs[request.id] == alone[request.id], request.id


def test_the_tokens_are_those_of_the_formula(embed: ModuleType) -> None:
    requests = embed.conversations(6)
    outputs, _ = embed.serve(requests, num_blocks=24, host_blocks=8)
    for request in requests:
        assert outputs[request.id] == tokens_without_paging(embed, request.prompt, request.max_tokens), request.id


def test_nothing_is_left_behind(embed: ModuleType) -> None:
    _, scheduler = embed.serve(embed.conversations(), num_blocks=64, host_blocks=12)
    assert scheduler.manager.device.num_used == 0
    assert scheduler.check() == []


def test_a_wrong_table_gives_another_token(embed: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    # The example must be able to notice: with one kind of move forgotten its outputs differ.
    right, _ = embed.serve(embed.conversations(), num_blocks=64, host_blocks=12)
    monkeypatch.setattr(embed.StandInEngine, "move", lambda engine, moves: None)
    wrong, _ = embed.serve(embed.conversations(), num_blocks=64, host_blocks=12)
    assert wrong != right
