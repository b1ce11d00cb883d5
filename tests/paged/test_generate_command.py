"""`paged generate`: where prompts come from, how answers look, and what wrong input gets."""

import json
import shutil

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from paged.checkpoint import checkpoint_path

PROMPT = "The with statement is used to"


def test_a_prompt_goes_on_and_the_same_call_gives_the_same_text(paged):
    status, out, err = paged("generate", "--prompt", PROMPT, "--max-tokens", 40)
    assert (status, err) == (0, "")
    assert out.startswith(PROMPT)
    assert len(out) > len(PROMPT) + 20
    assert paged("generate", "--prompt", PROMPT, "--max-tokens", 40) == (status, out, err)


def test_json_tells_ids_text_reasons_and_times(paged):
    status, out, err = paged("generate", "-p", PROMPT, "-p", "Return", "--max-tokens", 8, "--json")
    document = json.loads(out)
    assert (status, err) == (0, "")
    first, second = document["completions"]
    assert [first["prompt"], second["prompt"]] == [PROMPT, "Return"]
    (answer,) = first["outputs"]
    assert answer["finish_reason"] in ("length", "stop")
    assert len(answer["token_ids"]) == first["usage"]["output_tokens"] <= 8
    assert first["timings"]["ttft_s"] > 0
    assert document["batch_invariant"] is True
    assert document["tokens_per_s"] > 0


def test_prompts_come_from_a_file_a_line_each(paged, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("Return a list\n\nÄ with ☃\n", encoding="utf-8")
    status, out, err = paged("generate", "--file", file, "--max-tokens", 3)
    assert (status, err) == (0, "")
    assert "[1] Return a list" in out
    assert "[2] Ä with ☃" in out


def test_a_seed_gives_the_same_draws_and_fast_mode_runs(paged):
    options = ("--temperature", 0.9, "--top-p", 0.9, "--top-k", 50, "--seed", 3, "--max-tokens", 12)
    first = paged("generate", "--prompt", PROMPT, *options)
    assert first == paged("generate", "--prompt", PROMPT, *options)
    assert paged("generate", "--prompt", PROMPT, "--max-tokens", 5, "--fast")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--prompt", "a", "--contrastive", "--beam-width", "3"],
            "--beam-width and --contrastive are two searches; name one",
        ),
        (["--prompt", "a", "--logit-bias", "3"], "--logit-bias has to be ID=NUMBER; got '3'"),
        (["--prompt", "a", "--logit-bias", "3=1000"], "logit_bias has to be from -100 to 100; got 1000.0"),
        (
            ["--prompt", "a", "--allowed-token-id", "9999"],
            "allowed_token_ids have to be token ids from 0 to 1,023; got 9999",
        ),
        (["--prompt", "a", "--beam-width", "3", "--early-stopping", "soon"], "early_stopping has to be True, False or"),
        (["--prompt", "a", "--beam-width", "3", "--echo"], "echo True does not go with beam_width"),
        (["--prompt", "a", "--json-object", "--regex", "a"], "got regex and json_object"),
        (["--prompt", "a", "--contrastive", "--top-k", "1"], "top_k has to be an integer from 2"),
        (["--prompt", "a", "--contrastive", "--seed", "1"], "seed 1 goes with a temperature above 0"),
        (["--prompt", "a", "--contrastive", "--temperature", "1"], "temperature 1.0 does not go with contrastive"),
        (
            ["--prompt", "a", "--beam-width", "4", "--beam-groups", "3", "--diversity-penalty", "1"],
            "num_beam_groups has to be",
        ),
        (["--prompt", "a", "--json-schema", "no-such-file"], "no-such-file: No such file"),
        (["--prompt", "a", "--regex", "a", "--choice", "b"], "got regex and choice"),
        (["--prompt", "a", "--regex", "a(b"], "regex cannot be followed"),
        (["--prompt", "a", "--regex", "a", "--ignore-eos"], "structured_outputs does not go with ignore_eos"),
        (["--prompt", "a", "--speculate", "luck"], "speculate has to be one of 'lookup', 'lookahead', 'draft'"),
        (["--prompt", "a", "--draft-model", "x"], 'a draft_model goes with speculate="draft"'),
        (["--prompt", "a", "--speculate", "draft", "--draft-model", "x"], "x: no such folder"),
        (["--prompt", ""], "a prompt is empty"),
        (["--prompt", "a", "--temperature", "-1"], "temperature has to be"),
        (["--prompt", "a", "--temperature", "nan"], "temperature has to be"),
        (["--prompt", "a", "--top-p", "0.5"], "temperature 0 is greedy"),
        (["--prompt", "a", "--temperature", "1", "--top-p", "0"], "top_p has to be"),
        (["--prompt", "a", "--max-tokens", "0"], "max_tokens has to be"),
        (["--prompt", "a", "--model", "nowhere"], "nowhere: no such folder"),
        (["--prompt", "a", "--backend", "flash"], "known ones are reference, native, torch_gather, xformers_splitk"),
        (["--prompt", "a", "--dtype", "int8"], "known ones are auto, float32, bfloat16, float16"),
        (["--prompt", "a", "--policy", "best"], "paged"),
        (["--file", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_wrong_input_is_one_line_and_status_2(paged, arguments, words):
    status, out, err = paged("generate", *arguments)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert words in err


def test_a_file_that_is_not_utf8_is_named_with_its_line(paged, tmp_path):
    file = tmp_path / "latin1.txt"
    file.write_bytes(b"fine\nna\xefve\n")
    status, out, err = paged("generate", "--file", file)
    assert (status, out) == (2, "")
    assert f"{file}, line 2: byte 0xef is not UTF-8" in err


def test_a_prompt_that_is_refused_is_not_written(paged, tmp_path):
    for file in checkpoint_path().glob("[cgm]*"):
        shutil.copy(file, tmp_path)
    status, out, err = paged("generate", "--prompt", PROMPT, "--model", tmp_path)
    assert (status, out) == (2, "")
    assert "no tokenizer there, so prompts have to be token ids" in err


def test_every_wish_has_an_option(paged, tmp_path):
    """Whatever SamplingParams take, but for code."""
    grammar = tmp_path / "grammar.lark"
    grammar.write_text('start: "yes" | "no"', encoding="utf-8")
    (first, second) = (
        json.loads(paged("generate", "-p", PROMPT, "--json", "--max-tokens", 6, *options)[1])["completions"][0]
        for options in (
            ("--echo", "--prompt-logprobs", 1, "--logit-bias", "300=-100", "--stop-token-id", 5, "--include-stop"),
            ("--grammar", grammar, "--allowed-token-id", 0, "--allowed-token-id", 78, "--allowed-token-id", 79),
        )
    )
    assert first["outputs"][0]["text"].startswith(PROMPT) and len(first["prompt_logprobs"]) > 4
    assert second["outputs"][0]["text"] in ("no", "")
