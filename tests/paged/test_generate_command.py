"""`paged generate`: where prompts come from, and how answers look."""

import io
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from paged.cli.app import run
from paged.model.checkpoint import checkpoint_path

PROMPT = "The with statement is used to"


def test_an_answer_that_memory_ends_early_is_said_in_a_line(paged):
    status, out, error = paged("generate", "--prompt", "a", "--blocks", 1, "--max-tokens", 100)
    assert (status, out[:1]) == (0, "a")
    assert error == "paged: 1 of 1 answer ended before --max-tokens 100: the model's context, or memory, was full\n"
    assert paged("generate", "--prompt", "a", "--max-tokens", 4)[2] == ""


def test_json_tells_ids_text_reasons_times_and_pages_by_layer_group(document):
    found = document("generate", "-p", PROMPT, "-p", "Return", "--max-tokens", 8)
    first, second = found["completions"]
    assert [first["prompt"], second["prompt"]] == [PROMPT, "Return"]
    (answer,) = first["outputs"]
    assert answer["finish_reason"] in ("length", "stop")
    assert len(answer["token_ids"]) == first["usage"]["output_tokens"] <= 8
    assert found["tokens_per_s"] > 0 < first["timings"]["ttft_s"]
    assert (found["batch_invariant"], found["groups"]) == (True, [])
    fast = document("generate", "-p", PROMPT, "--max-tokens", 2, "--fast", "--model", "hybrid")
    assert fast["batch_invariant"] is False
    full, state = fast["groups"]
    assert (full["group"]["kind"], state["group"]["kind"]) == ("full", "state")
    assert (state["used"], state["passed"], state["lost_tokens"]) == (0, 0, 0)


def test_the_next_call_finds_on_the_disk_what_this_one_computed(document, tmp_path):
    asked = ("generate", "-p", PROMPT * 8, "--max-tokens", 4, "--disk-cache", tmp_path, "--disk-cache-gb", 0.5)
    first, again = (document(*asked)["completions"][0] for _ in range(2))
    assert first["outputs"] == again["outputs"]
    assert (first["usage"]["hit_tokens"], again["usage"]["hit_tokens"] > 16) == (0, True)


def test_prompts_come_from_a_file_a_line_each(printed, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_bytes("Return a list\r\n\nÄ with\u2028\f☃\n".encode())
    out = printed("generate", "--file", file, "--max-tokens", 3)
    assert "[1] Return a list of" in out and "[2] Ä with\u2028\f☃" in out and "[3]" not in out


def test_a_prompt_that_is_refused_is_not_written(refused, tmp_path):
    for file in checkpoint_path().glob("[cgm]*"):
        shutil.copy(file, tmp_path)
    err = refused("generate", "--prompt", PROMPT, "--model", tmp_path)
    assert "no tokenizer there, so prompts have to be token ids" in err


def test_every_wish_has_an_option(document, tmp_path):
    grammar = tmp_path / "grammar.lark"
    grammar.write_text('start: "yes" | "no"', encoding="utf-8")
    wishes = "--echo --prompt-logprobs 1 --logit-bias 300=-100 --stop-token-id 5 --stop ☃ --include-stop"
    form = f"--grammar {grammar} --allowed-token-id 0 --allowed-token-id 78 --allowed-token-id 79"
    first, second = (
        document("generate", "-p", PROMPT, "--max-tokens", 6, *options.split())["completions"][0]
        for options in (wishes, form)
    )
    assert first["outputs"][0]["text"].startswith(PROMPT) and len(first["prompt_logprobs"]) > 4
    assert second["outputs"][0]["text"] in ("no", "")


@pytest.fixture
def broken_weights(tmp_path):
    """The model that ships with one number of its weights not a number, and a template for chats."""
    folder = tmp_path / "broken"
    shutil.copytree(checkpoint_path(), folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer["chat_template"] = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return folder


NAN = "BadLogits: row 0: a logit is NaN; a token is chosen from finite logits, at least one of them, and -inf."


def test_answers_that_failed_are_status_1_and_one_line_that_says_how_many_and_why(paged, broken_weights):
    asked = ("generate", "--model", broken_weights, "--prompt", PROMPT)
    assert paged(*asked) == (1, f"{PROMPT}\n", f"paged: 1 of 1 request failed; request-0 with {NAN}\n")
    status, out, err = paged(*asked, "--prompt", "Return", "--json")
    assert [each["outputs"][0]["finish_reason"] for each in json.loads(out)["completions"]] == ["error", "error"]
    assert (status, err) == (1, f"paged: 2 of 2 requests failed; request-0 with {NAN}\n")


def test_a_chat_without_an_answer_ends_with_status_1_and_says_why(paged, broken_weights, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("What is a list?\nAnd a set?\n"))
    assert paged("chat", "--model", broken_weights) == (1, "\n", f"paged: no answer: {NAN}\n")


def test_a_chat_that_becomes_too_long_ends_and_says_so(paged, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("What is a list?\n" + "a list " * 1000))
    status, out, err = paged("chat", "--max-tokens", 4)
    assert (status, out.count("tokens said]")) == (1, 1)
    assert err.startswith("paged: the conversation has become too long, begin another one: request")


def test_a_chat_in_another_encoding_is_refused_in_a_line(paged, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"na\xefve\n"), encoding="utf-8"))
    assert paged("chat") == (2, "", "paged: standard input: byte 0xef is not UTF-8.\n")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_who_chats_at_a_terminal_is_told_what_answers_and_how_to_leave(monkeypatch):
    screen = Terminal()
    for name, stream in (("stdin", Terminal()), ("stdout", screen), ("stderr", screen)):
        monkeypatch.setattr(sys, name, stream)
    assert run(["chat"]) == 0
    monkeypatch.undo()
    assert screen.getvalue().splitlines() == [
        "paged: loading the model that ships",
        "paged: the model that ships continues text from Python's documentation; it does not converse",
        "paged: an empty line or Ctrl-D ends the conversation",
        "> ",
    ]


def virtual_memory():
    """The most that this process ever had, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmPeak:"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux says what a process has")
@pytest.mark.parametrize(("option", "count"), [("--blocks", 99_999_999), ("--host-blocks", 2_000_000_000)])
def test_more_blocks_than_memory_holds_are_one_line_that_says_how_many_would_fit(printed, refused, option, count):
    printed("generate", "--prompt", PROMPT, "--max-tokens", 1)
    before = virtual_memory()
    err = refused("generate", "--prompt", PROMPT, option, count)
    name = {"--blocks": "num_blocks", "--host-blocks": "host_blocks"}[option]
    # 32 KiB each, and far more than a machine has.
    assert re.fullmatch(
        rf"paged: {name} {count:,} take {count / 2**15:,.1f} GiB; [\d,.]+ GiB are free on cpu, which hold [\d,]+\.\n",
        err,
    )
    # The weights are loaded again; not even the books of so many blocks are made.
    assert virtual_memory() - before < 200 * 2**10


def test_where_attention_cannot_be_compiled_a_line_says_so_once(paged, nothing_built, monkeypatch):
    monkeypatch.setenv("CC", "/nonexistent")
    status, out, err = paged("generate", "--prompt", PROMPT, "--prompt", "Return", "--max-tokens", "4", "--json")
    assert (status, json.loads(out)["backend"]) == (0, "torch_gather")
    assert err == (
        'paged: attention runs in torch, which is slower, because "native" cannot be compiled: '
        "CC names '/nonexistent', and there is no such compiler.\n"
    )
