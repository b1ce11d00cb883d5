"""Answers that have to have a form: whatever is drawn, drafted or computed again, they have it."""

import json
import re
import sys

import llguidance
import pytest

from paged import LLM, Engine, SamplingParams, StructuredOutputsParams
from paged.errors import InvalidSampling, MissingExtra
from paged.sampling import form_probe, grammars

from ..driving import driven  # noqa: TID252

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["with", "def"]},
        "line": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["name", "line", "tags"], "additionalProperties": False,
}  # fmt: skip
FORMS = {
    "json": {"json": SCHEMA, "disable_any_whitespace": True},
    "json text": {"json": json.dumps(SCHEMA), "disable_any_whitespace": True},
    "regex": {"regex": r"[a-c]{3}-\d{2}"},
    "choice": {"choice": ("yes", 'a "quoted" one', "with statement\n")},
    "grammar": {"grammar": 'start: "a" "b"+ "c" | "(" start ")"'},
}
WISHES = [{}, {"temperature": 1.5, "seed": 4, "n": 2}, {"temperature": 1.0, "seed": 1, "repetition_penalty": 1.2}]


def has_form(name, text):
    if name.startswith("json"):
        found = json.loads(text)
        return (
            set(found) == set(SCHEMA["required"])
            and found["name"] in ("with", "def")
            and 0 <= found["line"] <= 99
            and len(found["tags"]) <= 2
            and all(len(tag) <= 3 for tag in found["tags"])
        )
    if name == "choice":
        return text in FORMS["choice"]["choice"]
    if name == "grammar":
        return re.fullmatch(r"\(*ab+c\)*", text) is not None and text.count("(") == text.count(")")
    return re.fullmatch(FORMS["regex"]["regex"], text) is not None


def answers(model, **options):
    llm = LLM(model, block_size=4, **options)
    violations = []
    llm.engine.on_batch = lambda batch: violations.extend(llm.engine.check())
    asked = [
        SamplingParams(structured_outputs=StructuredOutputsParams(**form), max_tokens=32, **wish)
        for form in FORMS.values()
        for wish in WISHES
    ]
    # One in five says what he likes.
    asked += [SamplingParams(max_tokens=20)] * 3
    found = llm.generate(["The with statement is"] * len(asked), asked)
    assert not llm.engine._sampling.adjustments._grammars and llm.engine.manager.device.num_used == 0 == len(violations)
    return [[(each.text, each.finish_reason) for each in answer.outputs] for answer in found], llm.engine


@pytest.fixture(scope="module")
def ample(model):
    return answers(model, num_blocks=800)[0]


def test_every_answer_that_ends_has_its_form(ample):
    names = [name for name in FORMS for _ in WISHES]
    ended = [
        (name, text) for name, texts in zip(names, ample, strict=False) for text, reason in texts if reason == "stop"
    ]
    assert all(has_form(name, text) for name, text in ended), ended
    assert {name for name, _ in ended} == set(FORMS) and len(ended) >= 18


@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 20, "policy": "vllm", "host_blocks": 40},
        {"num_blocks": 20, "policy": "vllm", "max_tokens_per_step": 7, "steps_ahead": 1},
        {"num_blocks": 20, "speculate": "lookahead"}, {"num_blocks": 20, "speculate": "draft"},
    ],
    ids=str,
)  # fmt: skip
def test_it_is_the_same_answer_whatever_memory_and_drafts_there_are(model, ample, options):
    found, engine = answers(model, **options)
    assert found == ample
    assert engine.scheduler.stats().preemptions > 0 or "policy" not in options
    assert engine.stats().accepted_tokens > 0 or "speculate" not in options


def test_what_is_allowed_is_what_could_be_drawn_before(model):
    """Log-probabilities are the model's own, and the likeliest of what the form allows is taken."""
    form = StructuredOutputsParams(choice=("yes", "no"))
    (answer,) = LLM(model).generate("def", SamplingParams(structured_outputs=form, max_tokens=3, logprobs=1024))
    first = answer.outputs[0].logprobs[0]
    starts = [id for id in first if first[id].decoded_token in ("y", "ye", "yes", "n", "no")]
    assert answer.token_ids[0] == max(starts, key=lambda id: first[id].logprob)


def test_a_form_is_read_once_for_all_who_ask_for_it(model):
    engine = Engine(model)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json=SCHEMA), n=3, temperature=1.0)
    for _ in range(4):
        engine.add_request("def", params)
    assert len(engine._grammars._known) == 1
    for number in range(80):
        engine.add_request("def", SamplingParams(structured_outputs=StructuredOutputsParams(choice=(str(number),))))
    assert len(engine._grammars._known) == 64


@pytest.mark.parametrize("options", [{}, {"speculate": "draft"}], ids=str)
def test_a_grammar_that_explodes_ends_its_request_and_no_other(model, monkeypatch, options):
    monkeypatch.setattr(form_probe, "LIMITS", llguidance.LLParserLimits(max_items_in_row=12))
    form = StructuredOutputsParams(grammar='start: s\ns: s s | s s s | "a" | ""')
    engine = Engine(model, **options)
    wishes = (SamplingParams(max_tokens=8), SamplingParams(structured_outputs=form, max_tokens=40))
    good, bad = (engine.live_request(engine.add_request("def", wish)) for wish in wishes)
    driven(engine)
    assert (good.completion().finish_reason, bad.completion().finish_reason) == ("length", "error")
    reason = "GrammarFailed: the grammar cannot be followed: Parser Error: Current row has 15 items; max is 12"
    assert bad.completion().error.startswith(reason) and "<state>" not in bad.completion().error


def test_a_schema_without_rules_is_named_when_it_takes_too_long_to_read(monkeypatch):
    monkeypatch.setattr(grammars, "_PROBE_S", 0.0)
    with pytest.raises(InvalidSampling, match="^structured_outputs: json cannot be followed: it takes more than"):
        grammars.probe(StructuredOutputsParams(json={}))


def test_the_extra_is_named_where_it_is_not_installed(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    monkeypatch.delitem(sys.modules, "paged.sampling.grammars", raising=False)
    engine = Engine(model)
    with pytest.raises(MissingExtra, match=r"StructuredOutputsParams needs llguidance, .*pip install '\.\[grammar\]'"):
        engine.add_request("def", SamplingParams(structured_outputs=StructuredOutputsParams(regex="a")))
    assert not engine.has_unfinished
