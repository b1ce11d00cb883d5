"""Answers that have a form, over HTTP: what cannot be followed is the client's to mend, and nobody waits for another's form."""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection

import pytest

pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")

from .http_client import CHAT, LONG, TEXT, asked, figure, got, num_open  # noqa: TID252
from .serving_process import END_S, imported_first, started  # noqa: TID252

BODIES = {
    TEXT: {"prompt": "The with statement", "max_tokens": 60, "temperature": 0},
    CHAT: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 60, "temperature": 0},
}
SCHEMA = {
    "type": "object",
    "properties": {"line": {"type": "integer", "maximum": 99, "minimum": 0}, "ok": {"type": "boolean"}},
    "required": ["line", "ok"],
    "additionalProperties": False,
}


def by_schema(schema):
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize(
    "more", [by_schema(SCHEMA), {"structured_outputs": {"json": SCHEMA}}], ids=["response_format", "structured_outputs"]
)
def test_json_has_no_white_space_that_it_does_not_need_but_where_that_is_asked_for(usual_server, path, more):
    heard = asked(usual_server, BODIES[path] | more, path)
    assert heard.finish_reason == "stop"
    assert heard.text == json.dumps(json.loads(heard.text), separators=(",", ":"))
    form = {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": False}}
    assert any(char.isspace() for char in asked(usual_server, BODIES[path] | form, path).text)


def alternatives(number):
    names = [f"q{other}" for other in range(number)]
    return [{"type": "object", "properties": {name: {"const": name}}, "required": [name]} for name in names]


def properties(number, schema):
    return {"type": "object", "properties": {f"p{each}": schema for each in range(number)}}


WRONG = {
    "a schema that is itself": {"$ref": "#"},
    "a cycle": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "a reference that leads nowhere": {"$ref": "#/$defs/a"},
    "3,000 optional properties": properties(3000, {"type": "integer"}),
    "50 times 200 alternatives": properties(50, {"anyOf": alternatives(200)}),
    "more text than may be": {"enum": ["x" * 300_000]},
    "objects 500 deep": json.loads('{"a":' * 500 + "1" + "}" * 500),
    "no number": {"type": "integer", "maximum": float("nan")},
}


@pytest.mark.parametrize("what", WRONG)
def test_a_schema_that_cannot_be_followed_is_refused_by_its_field(usual_server, what):
    for path, more, param in (
        (TEXT, by_schema(WRONG[what]), "response_format"),
        (CHAT, {"structured_outputs": {"json": WRONG[what]}}, "structured_outputs"),
    ):
        heard = asked(usual_server, BODIES[path] | more, path)
        assert (heard.status, heard.error["param"]) == (400, param), heard.body
        assert "<state>" not in heard.error["message"]


def test_a_number_of_a_schema_may_be_longer_than_64_bits(usual_server):
    heard = asked(usual_server, BODIES[TEXT] | by_schema({"type": "boolean", "x-limit": 10**30}), TEXT)
    assert heard.text in ("true", "false")


# Its first place takes little; a longer answer has more ways to be read than the grammar's row may have.
EXPLODES = "start: s\ns: " + " | ".join(" ".join(["s"] * count) for count in range(2, 30)) + ' | "a" | "b"\n'


@pytest.mark.parametrize("streams", [False, True])
def test_a_grammar_that_takes_too_much_later_on_is_the_clients_to_mend(usual_server, streams):
    body = {"prompt": "a", "max_tokens": 400, "temperature": 0, "stream": streams}
    heard = asked(usual_server, body | {"structured_outputs": {"grammar": EXPLODES}}, TEXT)
    assert (heard.error["type"], heard.error["param"]) == ("invalid_request_error", "structured_outputs")
    assert streams or heard.status == 400


def chain(length, link):
    links = {f"a{number}": link(f"#/$defs/a{number + 1}") for number in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": links | {f"a{length}": {"type": "string"}}}


def rules(name):
    """A grammar whose rules (r) or terminals (R) lead from one to the next, 8,000 times."""
    links = "".join(f'{name}{number}: {name}{number + 1} "a"\n' for number in range(8000))
    return f'start: {name}0\n{links}{name}8000: "b"\n'


HEAVY = {
    "references of references": {"json": chain(4000, lambda to: {"$ref": to})},
    "objects of objects": {"json": chain(1000, lambda to: {"type": "object", "properties": {"x": {"$ref": to}}})},
    "alternatives of alternatives": {"json": chain(4000, lambda to: {"anyOf": [{"$ref": to}, {"type": "null"}]})},
    "rules of rules": {"grammar": rules("r")},
    "terminals of terminals": {"grammar": rules("R")},
    "an intersection of thirty expressions": {
        "grammar": "start: A\nA: " + " & ".join(f"/.*x{number}.*/" for number in range(30))
    },
}


@pytest.mark.parametrize("what", HEAVY)
def test_no_form_brings_the_engine_down(usual_server, what):
    before = usual_server.engine
    heard = asked(usual_server, BODIES[TEXT] | {"structured_outputs": HEAVY[what]})
    assert heard.status in (200, 400), heard.body
    if what == "an intersection of thirty expressions":
        assert "takes more than 4 s of a processor" in heard.error["message"]
        assert heard.error["param"] == "structured_outputs"
    assert (asked(usual_server, BODIES[TEXT]).status, usual_server.engine) == (200, before)


SLOW = """
import os, pathlib, time
import llguidance

real, folder = llguidance.LLMatcher, pathlib.Path(os.environ["READING"])


class Slow:
    def __call__(self, tokenizer, text, **options):
        while "slow" in text and not (folder / "go").exists():
            (folder / "begun").touch()
            time.sleep(0.01)
        return real(tokenizer, text, **options)

    def __getattr__(self, name):
        return getattr(real, name)


llguidance.LLMatcher = Slow()
"""


def test_others_are_answered_while_a_form_is_read_and_who_goes_meanwhile_is_not_begun(tmp_path):
    def form_of(regex):
        return {"prompt": "a", "max_tokens": 20, "structured_outputs": {"regex": regex}}

    env = imported_first(tmp_path, SLOW) | {"READING": str(tmp_path)}
    # A full disk under the log holds up none of them.
    with (
        ThreadPoolExecutor(4) as threads,
        open("/dev/full", "w") as full,
        started(env=env, stderr=full) as server,
        closing(HTTPConnection("127.0.0.1", server.port)) as leaves,
    ):
        slow = threads.submit(asked, server, form_of("slow|slowly"))
        server.wait_until((tmp_path / "begun").exists)
        headers = {"content-type": "application/json", "x-request-id": "gone"}
        leaves.request("POST", TEXT, json.dumps(form_of("slower")), headers)
        server.wait_until(lambda: num_open(server) == 2)
        leaves.close()
        server.wait_until(lambda: num_open(server) == 1)
        # Nobody's step waits for the form.
        streams = list(threads.map(lambda _: asked(server, LONG | {"max_tokens": 40}), range(3)))
        assert all(each.is_whole and each.usage is None for each in streams) and not slow.done()
        (tmp_path / "go").touch()
        assert asked(server, form_of("slowest")).text == "slowest"
        assert slow.result().text in ("slow", "slowly")
        assert got(server, "/requests/gone").status == 404
        assert figure(got(server, "/metrics").body, "paged:log_lines_lost_total") >= 1
        server.process.terminate()
        assert server.process.wait(END_S) == 0
