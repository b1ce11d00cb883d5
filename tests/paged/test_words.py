"""What commands and errors say, as somebody reads it who has never seen our words."""

import pytest

from paged import SamplingParams
from paged.cli.app import run
from paged.engine.door import checked_text, checked_tokens
from paged.errors import InvalidRequest, InvalidSampling

LOAD = ["azure", "--limit", "20", "--blocks", "500"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--blocks", "0"], '--blocks takes a whole number of at least 1, or several with commas between; got "0"'),
        (["--blocks", "9,x"], '--blocks takes a whole number of at least 1 between commas; got "x"'),
        (["--rate-scale", "fast"], '--rate-scale takes a number, or several with commas between; got "fast"'),
        (
            ["--max-tokens-per-step", "knees"],
            '--max-tokens-per-step takes a whole number of at least 1, auto, knee or own, or several with commas between; got "knees"',
        ),
    ],
)
def test_a_value_that_is_none_is_told_with_what_would_be_one(options, said, capsys):
    assert run(["simulate", "azure", *options]) == 2
    assert capsys.readouterr().err == f"paged: {said}\n"


def test_where_nothing_meets_the_program_is_named_once(capsys):
    assert run(["plan", *LOAD, "--find", "rate", "--ttft", "0.0001"]) == 1
    errors = capsys.readouterr().err
    assert errors.startswith("paged: with policy paged no rate meets") and "paged: paged:" not in errors


@pytest.mark.parametrize(
    "command",
    [[], ["simulate"], ["plan"], ["generate"], ["demo"], ["bench"], ["bench", "scheduler"], ["check", "replay"]],
)
def test_no_flag_has_a_type(command, capsys):
    assert run([*command, "--help"]) == 0
    assert "bool" not in capsys.readouterr().out.lower()


def test_shells_can_complete(capsys):
    assert run(["--help"]) == 0
    assert "--install-completion" in capsys.readouterr().out


def test_seeds_that_change_nothing_have_no_interval(capsys):
    fixed = "synthetic:deterministic,rate=1,requests=5,prompt=50,output=5"
    assert run(["simulate", fixed, "--blocks", "500", "--seeds", "2", "--jobs", "1"]) == 0
    assert "±" not in capsys.readouterr().out
    varied = [
        "simulate",
        "synthetic:poisson,rate=2,requests=20,lengths=sharegpt",
        "--blocks",
        "2000",
        "--seeds",
        "2",
        "--jobs",
        "1",
    ]
    assert run(varied) == 0
    assert "±" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([{"role": "user", "content": "hi"}], "apply_chat_template"),
        ({"role": "user"}, "apply_chat_template"),
        (b"abc", "has to be text"),
        ({1, 2}, "has to be text"),
        ([1.5], r"integers; got 1\.5"),
        ([1, True], "integers; got True"),
        ([1, None], "integers; got None"),
        (["a"], "integers; got 'a'"),
    ],
)
def test_what_is_no_prompt_is_shown(prompt, said):
    with pytest.raises(InvalidRequest, match=said):
        checked_tokens(prompt)


def test_half_a_surrogate_pair_is_no_text():
    assert checked_text("µ😀") == "µ😀"
    with pytest.raises(InvalidRequest, match=r"character 1 of the prompt is '\\ud800'"):
        checked_text("a\ud800")


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"max_tokens": "5"},
        {"temperature": 1.0, "top_k": 0},
        {"seed": -1},
        {"stop_token_ids": 5},
        {"top_p": 0.5},
    ],
)
def test_sampling_parameters_are_checked_when_they_are_made(wrong):
    with pytest.raises(InvalidSampling, match=list(wrong)[-1]):
        SamplingParams(**wrong)
