"""Fields of a request: each is heeded, or refused by its name, and those that change no answer are taken."""

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from paged.serving.bodies import ChatRequest, CompletionRequest

from .http_client import CHAT, TEXT, asked  # noqa: TID252

BODIES = {
    TEXT: {"prompt": "The with statement", "max_tokens": 1, "temperature": 0},
    CHAT: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "temperature": 0},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
}


def told(server, path, more):
    return asked(server, BODIES[path] | more, path)


def message(**more):
    return {"messages": [{"role": "user", "content": "a", **more}]}


TOOLS = [{"type": "function", "function": {"name": "f"}}]
PADDED = {"stream": True, "stream_options": {"include_obfuscation": True}}
OF_TWO_TYPES = {"type": "json_object", "json_schema": {"schema": {}}}


@pytest.mark.parametrize(
    ("path", "more", "param", "says"),
    [
        # Fields that there are not, with the nearest that there is.
        (TEXT, {"max_tokns": 5}, "max_tokns", "there is no such field. Did you mean max_tokens?"),
        (CHAT, {"temprature": 5}, "temprature", "Did you mean temperature?"),
        (TEXT, {"zzz": 5}, "zzz", "there is no such field."),
        (TEXT, {"z z\ud800": 5}, "z z?", "half of a surrogate pair"),
        (TEXT, {"stream_options": {"include_usge": 1}}, "stream_options.include_usge", "Did you mean include_usage?"),
        (TEXT, {"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp", "Did you mean regex?"),
        (CHAT, {"response_format": {"type": "text", "tpe": 1}}, "response_format.tpe", "Did you mean type?"),
        (CHAT, message(contnt="a"), "messages.0.contnt", "Did you mean content?"),
        (CHAT, message(content=[{"type": "text", "txt": "a"}]), "messages.0.content.0.txt", "Did you mean text?"),
        ("/tokenize", {"promt": "a"}, "promt", "Did you mean prompt?"),
        ("/detokenize", {"token": [1]}, "token", "Did you mean tokens?"),
        # What would change an answer, and is not supported.
        (TEXT, {"suffix": "end"}, "suffix", "not supported: a prompt is continued at its end"),
        (TEXT, {"use_beam_search": True}, "use_beam_search", "no search over HTTP"),
        (TEXT, {"prompt_logprobs": 1}, "prompt_logprobs", "echo with logprobs"),
        (TEXT, {"guided_json": {}}, "guided_json", "structured_outputs"),
        (CHAT, {"functions": [{"name": "f"}]}, "functions", "tools describes"),
        (CHAT, {"tool_choice": "required"}, "tool_choice", "calls of tools are not parsed"),
        (CHAT, {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "none or auto"),
        (CHAT, {"audio": {"voice": "a"}}, "audio", "prompts and answers are text"),
        (CHAT, {"modalities": ["text", "audio"]}, "modalities", "prompts and answers are text"),
        (CHAT, {"web_search_options": {}}, "web_search_options", "nothing is searched"),
        (CHAT, {"prediction": {"type": "content"}}, "prediction", "--speculate"),
        (CHAT, {"reasoning_effort": "high"}, "reasoning_effort", "reasoning"),
        (CHAT, {"parallel_tool_calls": False}, "parallel_tool_calls", "tools"),
        (CHAT, {"continue_final_message": True}, "continue_final_message", "chat template"),
        (CHAT, message(content=[{"type": "image_url", "image_url": {}}]), "messages.0.content.0.type", "text"),
        (CHAT, message(refusal="no"), "messages.0.refusal", "content"),
        (TEXT, PADDED, "stream_options.include_obfuscation", "not padded"),
        # What would be taken, and not heeded.
        (TEXT, {"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        (CHAT, {"max_completion_tokens": 3}, "max_tokens", "differ"),
        (CHAT, {"response_format": OF_TWO_TYPES}, "response_format.type", "type json_schema"),
        (CHAT, {"tools": TOOLS}, "tools", "no chat template"),
        (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs", "no chat template"),
        (CHAT, message(name="A"), "messages", "name: the model that ships has no chat template"),
        ("/tokenize", {"tools": TOOLS}, "tools", "goes with messages"),
    ],
)
def test_a_field_that_is_not_heeded_is_refused_by_its_name_with_why(usual_server, path, more, param, says):
    heard = told(usual_server, path, more)
    assert (heard.status, heard.error["param"]) == (400, param)
    assert says in heard.error["message"]
    assert (heard.error["code"] == "unknown_field") == ("there is no such field" in heard.error["message"])


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_fields_that_are_not_supported_and_ask_for_nothing_are_taken(usual_server, path):
    kind = CompletionRequest if path == TEXT else ChatRequest
    for place in range(3):
        nothing = {name: ((None, *neutral) * 3)[place] for name, (_, neutral) in kind.unsupported.items()}
        heard = told(usual_server, path, nothing)
        assert heard.status == 200, heard.body
    # What OpenAI's client sends of an earlier answer.
    nothing = dict.fromkeys(("refusal", "audio", "function_call", "tool_calls")) | {"annotations": []}
    said = {
        "messages": [*message()["messages"], {"role": "assistant", "content": "b"} | nothing, *message()["messages"]]
    }
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
        (TEXT, rb'{"prompt": "a", "model": "\ud800"}', "model"),
        (TEXT, rb'{"prompt": "a", "logit_bias": {"\ud800": 1}}', "logit_bias"),
        (TEXT, rb'{"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": {"\udc00": 1}}}}', "response_format"),
        (TEXT, rb'{"prompt": "a", "structured_outputs": {"json": {"properties": {"\uD800": {}}}}}', "structured_outputs"),
        (TEXT, rb'{"prompt": "a", "structured_outputs": {"json": "{\"\ud800\": 1}"}}', "structured_outputs"),
        (TEXT, b'{"prompt": "a", "user": "\xed\xa0\x80"}', "user"),
        (TEXT, rb'{"prompt": "a", "\udfff": 1}', "?"),
        (CHAT, rb'{"messages": [{"role": "user", "content": "a", "name": "\ude00\ud83d"}]}', "messages"),
        (CHAT, rb'["\ud800"]', None),
        ("/tokenize", rb'{"prompt": "a", "model": "\ud800"}', "model"),
    ],
)  # fmt: skip
def test_half_of_a_surrogate_pair_anywhere_is_refused_by_its_field(usual_server, path, raw, param):
    heard = asked(usual_server, raw, path)
    assert (heard.status, heard.error["param"]) == (400, param)
    assert "half of a surrogate pair" in heard.error["message"]


@pytest.mark.parametrize("prompt", ["\U0001f600", "\\ud800", "\\\U0001f600\\udc00"])
def test_whole_pairs_and_backslashes_before_what_looks_like_half_of_one_are_text(usual_server, prompt):
    heard = told(usual_server, "/tokenize", {"prompt": prompt})
    assert heard.status == 200, heard.body
