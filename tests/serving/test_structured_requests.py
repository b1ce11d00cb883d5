"""Answers that have a form, over HTTP: what cannot be followed is the client's to mend, and nobody waits for another's form."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")

from .http_client import ask, get  # noqa: TID252
from .serving_process import served  # noqa: TID252

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
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


@pytest.fixture
def server(usual_server):
    return usual_server


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 120))


def by_schema(schema):
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize(
    "more", [by_schema(SCHEMA), {"structured_outputs": {"json": SCHEMA}}], ids=["response_format", "structured_outputs"]
)
def test_json_has_no_white_space_that_it_does_not_need(server, path, more):
    heard = run(ask(server.port, path, BODIES[path] | more))
    assert heard.finish_reason == "stop"
    assert heard.text == json.dumps(json.loads(heard.text), separators=(",", ":"))


def test_white_space_is_allowed_to_whom_asks_for_it(server):
    form = {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": False}}
    heard = run(ask(server.port, TEXT, BODIES[TEXT] | form))
    assert heard.status == 200
    assert any(char.isspace() for char in heard.text)


WRONG = {
    "a schema that is itself": {"$ref": "#"},
    "a cycle": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "a reference that leads nowhere": {"$ref": "#/$defs/a"},
    "3,000 optional properties": {
        "type": "object",
        "properties": {f"p{number}": {"type": "integer"} for number in range(3000)},
    },
    "50 times 200 alternatives": {
        "type": "object",
        "properties": {
            f"p{number}": {
                "anyOf": [
                    {"type": "object", "properties": {f"q{other}": {"const": other}}, "required": [f"q{other}"]}
                    for other in range(200)
                ]
            }
            for number in range(50)
        },
    },
    "more text than may be": {"enum": ["x" * 300_000]},
    "objects 500 deep": json.loads('{"a":' * 500 + "1" + "}" * 500),
    "no number": {"type": "integer", "maximum": float("nan")},
}


@pytest.mark.parametrize("what", WRONG)
def test_a_schema_that_cannot_be_followed_is_refused_by_its_field(server, what):
    for path, more, param in (
        (TEXT, by_schema(WRONG[what]), "response_format"),
        (CHAT, {"structured_outputs": {"json": WRONG[what]}}, "structured_outputs"),
    ):
        heard = run(ask(server.port, path, BODIES[path] | more))
        assert (heard.status, heard.error["param"]) == (400, param), heard.body
        assert "<state>" not in heard.error["message"]


def test_a_number_of_a_schema_may_be_longer_than_64_bits(server):
    heard = run(ask(server.port, TEXT, BODIES[TEXT] | by_schema({"type": "boolean", "x-limit": 10**30})))
    assert heard.text in ("true", "false")


# Its first place takes little; a longer answer has more ways to be read than the grammar's row may have.
EXPLODES = "start: s\ns: " + " | ".join(" ".join(["s"] * count) for count in range(2, 30)) + ' | "a" | "b"\n'


@pytest.mark.parametrize("streams", [False, True])
def test_a_grammar_that_takes_too_much_later_on_is_the_clients_to_mend(server, streams):
    body = {"prompt": "a", "max_tokens": 400, "temperature": 0, "stream": streams}
    heard = run(ask(server.port, TEXT, body | {"structured_outputs": {"grammar": EXPLODES}}))
    assert heard.error is not None
    assert heard.error["type"] == "invalid_request_error"
    assert heard.error["param"] == "structured_outputs"
    if not streams:
        assert heard.status == 400


def chain(length, link):
    """A schema whose references lead from one to the next."""
    links = {f"a{number}": link(f"#/$defs/a{number + 1}") for number in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": links | {f"a{length}": {"type": "string"}}}


HEAVY = {
    "references of references": {"json": chain(4000, lambda to: {"$ref": to})},
    "objects of objects": {"json": chain(1000, lambda to: {"type": "object", "properties": {"x": {"$ref": to}}})},
    "alternatives of alternatives": {"json": chain(4000, lambda to: {"anyOf": [{"$ref": to}, {"type": "null"}]})},
    "rules of rules": {
        "grammar": "start: r0\n" + "".join(f'r{i}: r{i + 1} "a"\n' for i in range(8000)) + 'r8000: "b"\n'
    },
    "terminals of terminals": {
        "grammar": "start: R0\n" + "".join(f'R{i}: R{i + 1} "a"\n' for i in range(8000)) + 'R8000: "b"\n'
    },
    "an intersection of thirty expressions": {
        "grammar": "start: A\nA: " + " & ".join(f"/.*x{number}.*/" for number in range(30))
    },
}


@pytest.mark.parametrize("what", HEAVY)
def test_no_form_brings_the_engine_down(server, what):
    children = ["pgrep", "-P", str(server.process.pid)]
    before = subprocess.run(children, capture_output=True, text=True, check=True).stdout
    heard = run(ask(server.port, TEXT, BODIES[TEXT] | {"structured_outputs": HEAVY[what]}))
    assert heard.status in (200, 400), heard.body
    if what == "an intersection of thirty expressions":
        assert "takes more than 4 s of a processor" in heard.error["message"]
        assert heard.error["param"] == "structured_outputs"
    assert run(ask(server.port, TEXT, BODIES[TEXT])).status == 200
    assert subprocess.run(children, capture_output=True, text=True, check=True).stdout == before


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
    (tmp_path / "sitecustomize.py").write_text(SLOW)
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    regex = {"prompt": "a", "max_tokens": 20, "structured_outputs": {"regex": "slow|slowly"}}
    usual = {"prompt": "The with statement", "max_tokens": 40, "temperature": 0, "ignore_eos": True, "stream": True}

    async def go(server):
        slow = asyncio.create_task(ask(server.port, TEXT, regex))
        goes = regex | {"structured_outputs": {"regex": "slower"}}
        named = {"x-request-id": "gone"}
        while not (tmp_path / "begun").exists():
            await asyncio.sleep(0.01)
        leaves = asyncio.create_task(ask(server.port, TEXT, goes, headers=named))
        while (await get(server.port, "/load")).body["server_load"] < 2:
            await asyncio.sleep(0.01)
        leaves.cancel()
        while (await get(server.port, "/load")).body["server_load"] > 1:
            await asyncio.sleep(0.01)
        # Nobody's step waits for the form.
        streams = await asyncio.gather(*(ask(server.port, TEXT, usual) for _ in range(3)))
        assert not slow.done()
        (tmp_path / "go").touch()
        last = await ask(server.port, TEXT, regex | {"structured_outputs": {"regex": "slowest"}})
        return streams, await slow, last, await get(server.port, "/requests/gone")

    with served(log="off", env={"PYTHONPATH": path, "READING": str(tmp_path)}) as server:
        streams, slow, last, gone = run(go(server))
    assert all(each.is_whole and each.usage is None for each in streams)
    assert slow.text in ("slow", "slowly")
    assert last.text == "slowest"
    assert gone.status == 404
