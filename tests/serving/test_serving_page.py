"""The page about serving: its commands and programs run against a server, and its tables say what the code says."""

import asyncio
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from contextlib import redirect_stdout
from pathlib import Path

import msgspec
import pytest

from paged.engine.vllm_flags import FLAGS
from paged.serving.app import build_app
from paged.serving.bodies import ChatRequest, CompletionRequest
from paged.serving.front import Front
from paged.serving.settings import Settings

from .http_client import asked, key  # noqa: TID252

PAGE = "docs/serving.md"
KEY = "right"
ON_THE_PAGE = "http://127.0.0.1:8000"
# Executables of benchmarks, which have environments of their own.
OTHERS = {"vllm": "PAGED_VLLM_BENCH", "guidellm": "PAGED_GUIDELLM"}


@pytest.fixture
def server(tenants_server):
    return tenants_server


@pytest.fixture(scope="module")
def lines(page, fences):
    """The command lines of the page, each in one line."""
    return [line for fence in fences(page, "sh") for line in fence.replace("\\\n", " ").splitlines()]


def of(program, lines):
    """Those that begin with a program, but for variables."""
    return [line for line in lines if re.match(rf"(\w+=\S+ )*{program} ", line)]


def ran(command, server, **more):
    """What a command of the page says on standard output; it has to succeed."""
    shell = ["/bin/sh", "-c", command.replace(ON_THE_PAGE, server.url)]
    environment = {**os.environ, "PAGED_API_KEY": KEY, **more}
    done = subprocess.run(shell, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_line_of_a_shell_is_one_that_is_looked_at(lines):
    known = [line for program in ("paged serve", "curl", *OTHERS) for line in of(program, lines)]
    rest = [line for line in lines if line not in known]
    assert [line.split("=")[0] for line in rest if line != "paged serve"] == ["export PAGED_API_KEY", "TOKENIZER"]


def test_the_servers_of_the_page_can_be_begun(lines, settings_of, monkeypatch, repository):
    monkeypatch.chdir(repository)
    begun = [settings_of(*shlex.split(line, comments=True)[2:]) for line in of("paged serve", lines)]
    assert len(begun) >= 4
    assert begun[-1].tls_client_ca == "clients.pem"


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
def test_what_curl_asks_is_answered(lines, server):
    turn = {"prompt": "The with statement " * 12, "max_tokens": 1, "session_id": "agent 7"}
    assert asked(server, turn, headers=key(KEY)).status == 200
    heard = [ran(f"{line} -sS --fail", server) for line in of("curl", lines)]
    models, completion, chat, stream, hint, sessions, end = heard
    assert msgspec.json.decode(models)["data"][0]["id"] == "paged"
    assert msgspec.json.decode(completion)["usage"]["completion_tokens"] == 16
    assert msgspec.json.decode(chat)["choices"][0]["message"]["role"] == "assistant"
    assert stream.startswith("data: {") and stream.endswith("data: [DONE]\n\n")
    assert msgspec.json.decode(hint)["status"] == msgspec.json.decode(end)["status"] == "accepted"
    assert [each["id"] for each in msgspec.json.decode(sessions)["sessions"]] == ["agent 7"]


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_a_program_of_the_page_runs_with_openais_own_client(page, fences, server, monkeypatch, place):
    pytest.importorskip("openai")
    monkeypatch.setenv("PAGED_API_KEY", KEY)
    programs = fences(page, "python")
    assert len(programs) == 4
    said = io.StringIO()
    with redirect_stdout(said):
        exec(compile(programs[place].replace(ON_THE_PAGE, server.url), "serving.md", "exec"), {})
    assert bool(said.getvalue().strip()) == (place != 2)


@pytest.mark.parametrize("program", OTHERS)
def test_a_benchmark_of_others_runs_as_it_is(lines, server, program, tmp_path):
    executable = os.environ.get(OTHERS[program])
    if executable is None:
        pytest.skip(f"{OTHERS[program]} names no {program}")
    (line,) = of(program, lines)
    folder = Path(sys.modules["paged"].__file__).parent / "model" / "checkpoint"
    command = f"cd {tmp_path} && {line}".replace(f"{program} ", f"{executable} ", 1)
    said = ran(command, server, TOKENIZER=str(folder))
    if program == "vllm":
        assert re.search(r"Successful requests: +20\b", said), said
        assert re.search(r"Failed requests: +0\b", said), said
    else:
        document = msgspec.json.decode((tmp_path / "benchmarks.json").read_bytes())
        totals = document["benchmarks"][0]["metrics"]["request_totals"]
        assert (totals["successful"], totals["errored"], totals["incomplete"]) == (20, 0, 0)


def test_the_tenants_of_the_page_are_settings(page, fences):
    (text,) = fences(page, "toml")
    settings = msgspec.convert(tomllib.loads(text), Settings)
    assert settings.tenants[0].name == "product"


def cells(page, section):
    """The rows of a section's tables, as cells without their heads."""
    text = page.split(f"\n## {section}\n")[1].split("\n## ")[0]
    lines = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in lines if not set(row[0]) <= set("|-: ")]


def test_each_field_that_is_taken_and_changes_nothing_or_is_refused_is_on_the_page(page):
    (harmless,) = (row[0] for row in cells(page, "What each address takes") if "they change no answer" in row[-1])
    refused = page.split("* **Fields:**")[1].split("* **Addresses:**")[0]
    for kind in (CompletionRequest, ChatRequest):
        fields = {name for name, field in kind.model_fields.items() if field.description == "Changes no answer."}
        assert fields == set(re.findall(r"`(\w+)`", harmless)) - {"description"}
        assert set(kind.unsupported) <= set(re.findall(r"`(\w+)`", refused))


def test_each_flag_of_vllm_is_on_the_page_with_what_becomes_of_it(page):
    told = {}
    for names, *rest in cells(page, "vLLM's flags"):
        for name in re.findall(r"`(-[^`]+)`", names):
            told.setdefault(name, []).append(rest)
    for name, flag in FLAGS.items():
        (row,) = told[name]
        why = flag.why.removesuffix(".")
        values = re.findall(r"`([^`]+)`", row[0]) if len(row) == 2 else []
        assert row[-1] == why, name
        assert tuple(values) == (flag.values or ()), name
        assert (len(row) == 2) == bool(flag.granted or flag.values), name


def test_each_address_of_the_interface_is_on_the_page(page):
    async def paths():
        front = Front(Settings(log="off"))
        try:
            found = build_app(front)
            while not hasattr(found, "routes"):
                found = getattr(found, "_app", None) or found.app
            return {route.path for route in found.routes}
        finally:
            await front.close()

    told = {path for row in cells(page, "What each address takes") for path in re.findall(r"(/[a-z0-9/._]*)", row[0])}
    # What takes a name is told by its beginning, or by each name that there is.
    known = {path.split("{")[0].rstrip("/") for path in asyncio.run(paths())}
    known -= {"/dashboard/feed"}
    assert known == {"/debug" if path.startswith("/debug/") else path.rstrip("/") for path in told}
