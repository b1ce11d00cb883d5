"""Fields of a request: each is heeded, or refused by its name, and those that change no answer are taken."""

import json

import pytest

from paged.serving.bodies import ChatRequest, CompletionRequest

from ..shown import assert_shown, shown_in  # noqa: TID252
from .http_client import CHAT, TEXT, asked  # noqa: TID252

QUESTION = {"role": "user", "content": "a"}
BODIES = {
    TEXT: {"prompt": "The with statement", "max_tokens": 1, "temperature": 0},
    CHAT: {"messages": [QUESTION], "max_tokens": 1, "temperature": 0},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
}


def told(server, path, more):
    return asked(server, BODIES[path] | more, path)


@pytest.mark.parametrize(("wanted", "shown"), shown_in("serving/refused_fields.txt", "POST"))
def test_a_field_that_is_not_heeded_is_refused_by_its_name_with_why(usual_server, wanted, shown):
    path, _, more = wanted.partition(" ")
    heard = told(usual_server, path, json.loads(more))
    assert set(heard.error) == {"message", "type", "param", "code"}
    assert_shown(f"{heard.status} {heard.error['code']} at {heard.error['param']}: {heard.error['message']}\n", shown)


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_fields_that_are_not_supported_and_ask_for_nothing_are_taken(usual_server, path):
    kind = CompletionRequest if path == TEXT else ChatRequest
    for place in range(3):
        nothing = {name: ((None, *neutral) * 3)[place] for name, (_, neutral) in kind.unsupported.items()}
        heard = told(usual_server, path, nothing)
        assert heard.status == 200, heard.body
    # What OpenAI's client sends of an earlier answer.
    nothing = dict.fromkeys(("refusal", "audio", "function_call", "tool_calls")) | {"annotations": []}
    said = {"messages": [QUESTION, {"role": "assistant", "content": "b"} | nothing, QUESTION]}
    assert told(usual_server, CHAT, said).status == 200


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_fields_that_change_no_answer_are_taken_and_change_none(usual_server, path):
    harmless = dict.fromkeys(("user", "safety_identifier", "prompt_cache_key"), "a") | {"metadata": {"a": "b"}}
    harmless |= {"store": True, "service_tier": "auto", "prompt_cache_retention": "24h"}
    heard = told(usual_server, path, harmless)
    assert heard.status == 200, heard.body
    assert heard.text == told(usual_server, path, {}).text
    fields = (CompletionRequest if path == TEXT else ChatRequest).model_fields
    assert {name for name in fields if fields[name].description == "Changes no answer."} == set(harmless)


@pytest.mark.parametrize(
    ("path", "raw", "param"),
    [
        (TEXT, rb'{"prompt": "a", "structured_outputs": {"json": {"properties": {"\uD800": {}}}}}', "structured_outputs"),
        (TEXT, b'{"prompt": "a", "user": "\xed\xa0\x80"}', "user"),
        (CHAT, rb'["\ud800"]', None),
    ],
)  # fmt: skip
def test_half_of_a_surrogate_pair_is_refused_however_it_is_written(usual_server, path, raw, param):
    heard = asked(usual_server, raw, path)
    assert (heard.status, heard.error["param"]) == (400, param)
    assert "half of a surrogate pair" in heard.error["message"]


@pytest.mark.parametrize("prompt", ["\U0001f600", "\\ud800", "\\\U0001f600\\udc00"])
def test_whole_pairs_and_backslashes_before_what_looks_like_half_of_one_are_text(usual_server, prompt):
    heard = told(usual_server, "/tokenize", {"prompt": prompt})
    assert heard.status == 200, heard.body
