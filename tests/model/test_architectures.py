"""The table of architectures: two of its rows as `make architectures` tries them, and what its tool finds if something is wrong."""

import re
import sys
from importlib import import_module

import numpy as np
import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from typer.testing import CliRunner

from paged.attention import LayerOptions
from paged.model import hook, load_check

# Full, window and full in turn, states. Windows alone, caps, sinks and learned positions: test_groups.py; latents and others: test_families.py; all
# of them: `make architectures`.
SOME = ["qwen3 windows", "lfm2"]


@pytest.fixture(scope="module")
def one(repository):
    """conformance/one_architecture.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(repository)
        yield import_module("conformance.one_architecture")


@pytest.fixture(scope="module")
def tool(one):
    return import_module("conformance.architectures")


@pytest.mark.parametrize("name", SOME)
def test_a_family_answers_as_generate_does_and_with_too_little_memory_bit_by_bit(one, name):
    verdict = one.verdict_of(one.families()[name])
    assert (verdict.outcome, verdict.why) == ("equal", "")
    assert verdict.preempted == len(one.LENGTHS)
    # States are no content on the host.
    assert set(verdict.left_out) == set()


def test_what_cannot_be_paged_is_refused_with_the_reason_alone(one):
    verdict = one.verdict_of(one.families()["cpmant"])
    assert verdict.outcome == "refused"
    assert verdict.why.startswith(
        "layers 0, 1 neither attend through transformers' interface nor use its cache; each has"
    )


def test_every_decoder_that_transformers_has_is_a_row_or_left_out_with_a_reason(one):
    rows = {family.model_type for family in one.families().values()}
    left_out = {name for names in one.left_out().values() for name in names}
    assert rows | left_out == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert not rows & left_out


def test_a_window_that_is_ignored_is_found(one, monkeypatch):
    monkeypatch.setattr(load_check, "check_answers", lambda *given: None)
    monkeypatch.setattr(one, "_rounds", lambda *given: [])
    monkeypatch.setattr(hook, "LayerOptions", lambda scale, window, *others: LayerOptions(scale, None, *others))
    verdict = one.verdict_of(one.families()["gpt_oss"])
    assert verdict.outcome == "wrong"
    assert re.match(r"alone, request \d+: tokens", verdict.why)


@pytest.mark.parametrize(
    ("off", "said"), [(1e-6, []), (0.5, ["logits are off by 5.0e-01 of the largest; 1e-03 is allowed."])]
)
def test_on_a_gpu_logits_may_round_and_may_not_be_others(one, off, said):
    ours, theirs = one.Answers(), one.Answers()
    for answers, value in ((ours, 1 - off), (theirs, 1)):
        answers.tokens, answers.reasons, answers.logits = (
            {("a", 0): [5]},
            {("a", 0): "length"},
            {("a", 0): [np.array([value, 0.1])]},
        )
    found = one._beyond_rounding(ours, theirs, one.BOUND)
    assert found == (pytest.approx(off), said)
    ours.tokens["a", 0] = [6]
    assert one._beyond_rounding(ours, theirs, one.BOUND) == (0, ["request a: tokens [6] instead of [5]."])


def test_what_transformers_cannot_run_is_no_fault_of_ours(one):
    verdict = one.verdict_of(one.Family("llama", {"hidden_act": "none of these"}, False))
    assert verdict.outcome == "no model"
    assert "none of these" in verdict.why


def test_a_process_that_dies_is_wrong(tool, monkeypatch, tmp_path):
    dies = tmp_path / "python"
    dies.write_text("#!/bin/sh\necho Traceback >&2; echo KeyError >&2; exit 1\n")
    dies.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(dies))
    verdict = tool.tried("llama")
    assert (verdict.outcome, verdict.why) == ("wrong", "its process ended with status 1: KeyError")


def test_the_table_is_written_and_one_that_is_wrong_ends_the_tool_with_1(tool, one, tmp_path, monkeypatch):
    found = {"llama": one.Verdict(name="llama", preempted=4, layers={"full_attention": 4})}
    monkeypatch.setattr(tool, "tried", found.get)
    called = [tool.app, ["--only", "llama", "--out", str(tmp_path / "table")]]
    assert CliRunner().invoke(*called).exit_code == 0
    assert "| llama | equal | 4 full | 0e+00 | 4 of 4 |  |" in (tmp_path / "table.md").read_text().splitlines()
    found["llama"] = one.Verdict(name="llama", outcome="wrong", why="tokens differ")
    ended = CliRunner().invoke(*called)
    assert ended.exit_code == 1
    assert "0 accepted and equal to `generate`, 1 accepted and wrong" in ended.output
    # A model type names all of its rows.
    assert list(tool.chosen(["gpt_bigcode"])) == ["gpt_bigcode multi-head", "gpt_bigcode multi-query"]
    ended = CliRunner().invoke(tool.app, ["--only", "gpt_huge"])
    assert (ended.exit_code, 'no row "gpt_huge"' in ended.output) == (2, True)
