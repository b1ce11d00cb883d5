"""`paged serve` from outside: its options and vLLM's, what it refuses, what it says, and how a signal ends it."""

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from paged.cli import app
from paged.engine.config import EngineConfig, fields_of
from paged.engine.vllm_flags import FLAGS
from paged.serving import server as serving
from paged.serving.settings import SERVED, KvEventsConfig, Settings, Tenant

from ..shown import shown_in  # noqa: TID252
from .http_client import LONG, asked, got, num_open, streaming  # noqa: TID252
from .serving_process import END_S, READY, started  # noqa: TID252

SERVE = [sys.executable, "-m", "paged", "serve"]


@pytest.fixture
def refused(monkeypatch, capsys):
    """The one line with which a server with these arguments is refused, before anything is loaded."""

    def call(*arguments):
        monkeypatch.setattr(serving, "serve", lambda *_, **__: pytest.fail("it was begun"))
        assert app.run(["serve", *map(str, arguments)]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert err.startswith("paged: ")
        return err

    return call


@pytest.mark.parametrize(("vllm", "ours"), shown_in("serving/same_flags.txt", "$"))
def test_a_flag_of_vllm_is_ours_where_it_means_the_same(settings_of, vllm, ours):
    assert settings_of("a/folder", *vllm.split()) == settings_of("a/folder", *ours.split())


def test_no_flag_that_is_granted_is_an_option_of_ours(settings_of):
    """It would be dropped."""
    spelled = [each for kind in (EngineConfig, Settings) for its in fields_of(kind).values() for each in its.options]
    ours = {name for each in spelled for name in each.split("/")}
    assert "--fast" in ours and not ours & {name for name, flag in FLAGS.items() if flag.granted or flag.values}
    assert settings_of("--enforce-eager").engine.model.enforce_eager


def test_options_change_what_they_name_and_nothing_else(settings_of):
    assert settings_of() == Settings()
    found = settings_of(
        *("a/folder", "--port", 0, "--max-model-len", "16K", "--api-key", "one", "--api-key", "two", "--fast"),
        *("--served-model-name", "a", "--served-model-name", "b", "--kv-events-config", '{"publisher": "zmq"}'),
    )
    engine = SERVED.but(model="a/folder", max_model_len=16384, batch_invariant=False)
    named = {"api_keys": ("one", "two"), "served_model_names": ("a", "b")}
    assert found == Settings(engine=engine, port=0, kv_events=KvEventsConfig(publisher="zmq"), **named)


def test_keys_come_from_the_environment_too_and_an_empty_one_does_not_open_the_server(
    settings_of, refused, monkeypatch
):
    monkeypatch.setenv("PAGED_API_KEY", "one two")
    monkeypatch.setenv("VLLM_API_KEY", "three")
    assert settings_of().api_keys == ("one", "two")
    monkeypatch.setenv("PAGED_API_KEY", "")
    assert "PAGED_API_KEY is empty, so that every client would have access" in refused()


def test_options_win_over_the_file_and_the_file_over_what_is_usual(settings_of, tmp_path):
    path = tmp_path / "serve.toml"
    path.write_text(
        "port = 9000\nmax_waiting = 7\n[engine]\nblock_size = 32\nseed = 3\n"
        '[[tenants]]\nname = "research"\nkeys = ["r"]\nweight = 2\n'
    )
    found = settings_of("--config", path, "--port", 9001, "--seed", 0, "--no-prefix-caching")
    assert (found.port, found.max_waiting, found.max_n) == (9001, 7, Settings().max_n)
    assert found.engine == SERVED.but(block_size=32, seed=0, prefix_caching=False)
    assert found.tenants == (Tenant(name="research", keys=("r",), weight=2.0),)


@pytest.mark.parametrize("name", sorted(FLAGS))
def test_each_flag_of_vllm_is_granted_or_refused_with_the_reason(settings_of, refused, name):
    flag = FLAGS[name]
    if flag.values is None:
        assert (settings_of(name) is not None) if flag.granted else (flag.why in refused(name))
    else:
        assert flag.why in refused(name, "neither")
        for value in flag.values:
            assert settings_of(name, value) == Settings()


def test_what_serves_nothing_needs_no_library_of_the_server(run_without):
    libraries = ["fastapi", "uvicorn", "uvloop", "httptools", "zmq", "starlette", "prometheus_client"]
    libraries += ["torch", "transformers"]
    commands = [["policies"], ["serve", "--help"], ["top", "--help"]]
    ran = run_without(libraries, f"from paged.cli.app import run; sys.exit(any([run(each) for each in {commands}]))")
    assert (ran.returncode, ran.stderr) == (0, "")


# Each command in a fork of its own, since what it imported may be half there; each has to end with status 2. What all take is imported first.
FORKS = """
import os, sys, warnings
import paged.cli.serve, paged.engine.results, pydantic, uvicorn
from paged.base.extras import leave_torch_out
from paged.cli.app import run
# A process that ends closes its sockets.
warnings.simplefilter("ignore", ResourceWarning)

def fork(command, **gone):
    if not os.fork():
        sys.modules.update(gone)
        os._exit(run(["serve", *command.split()]))
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 2, command

for library in {libraries}:
    fork("", **{{library: None}})
import paged.serving.server
leave_torch_out()
for command in {commands}:
    fork("--port 0 " + command)
"""
CANNOT_BEGIN = {
    "--port {port}": r"cannot listen on 127.0.0.1:{port}: Address already in use\. Name another port; 0 is any free one\.",
    "--host 192.0.2.1": r"cannot listen on 192.0.2.1:0: Cannot assign requested address\. Name another --host; .*",
    "{folder}/none": r"{folder}/none: no such folder\..*",
    "--max-model-len 1025": r"max_model_len 1025 is beyond the model's 1024 tokens\.",
}


def test_a_server_that_cannot_begin_says_why_in_a_line_and_without_a_library_what_brings_it(run_without, tmp_path):
    libraries = ["fastapi", "httptools", "zmq"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        names = {"folder": tmp_path, "port": taken.getsockname()[1]}
        commands = [each.format(**names) for each in CANNOT_BEGIN]
        ran = run_without([], FORKS.format(libraries=libraries, commands=commands))
    assert (ran.returncode, ran.stdout) == (0, ""), ran.stderr
    said = "paged: paged.serve needs {}, which is not installed; `pip install '.[serve]'` in a checkout of paged brings it."
    lines = iter(ran.stderr.splitlines())
    assert [next(lines) for _ in libraries] == list(map(said.format, libraries))
    for says in CANNOT_BEGIN.values():
        loading, error = json.loads(next(lines)), json.loads(next(lines))
        assert loading["message"].startswith("loading ")
        assert error["level"] == "error"
        assert re.fullmatch(says.format(**names), error["message"])
    assert not list(lines)


def test_a_signal_lets_running_and_waiting_requests_end_and_takes_no_more():
    # SIGHUP does what SIGTERM does, unless it was ignored where these tests were begun.
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    with ThreadPoolExecutor(10) as threads, started("--log", "off") as server:
        bodies = [LONG | {"prompt": f"{number}", "max_tokens": 250} for number in range(10)]
        tasks = [threads.submit(asked, server, body) for body in bodies]
        server.wait_until(lambda: num_open(server) == 10)
        server.process.send_signal(signal.SIGTERM if is_ignored else signal.SIGHUP)
        server.wait_until(lambda: got(server, "/ready").status == 503)
        late = asked(server)
        assert (late.status, late.error["code"], got(server, "/health").status) == (503, "shutdown", 200)
        heard = [task.result() for task in tasks]
        assert all(each.is_whole and each.finish_reason == "length" for each in heard)
        assert (server.process.wait(END_S), server.said) == (0, "paged: loading the model that ships\n")


def test_a_signal_while_it_loads_ends_it():
    with subprocess.Popen(
        [*SERVE, "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert json.loads(process.stderr.readline())["message"] == "loading the model that ships"
        process.terminate()
        assert process.communicate(timeout=END_S) == ("", "")
    assert process.returncode in (0, 128 + signal.SIGTERM)


def test_in_a_terminal_a_block_says_what_there_is_and_an_interrupt_ends_it_with_a_word_to_requests_that_were_not_in_time():
    # Where these tests were begun with interrupts ignored, as by nohup, the server has them ignored, too.
    is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    number, status = (signal.SIGTERM, 0) if is_ignored else (signal.SIGINT, 130)
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [*SERVE, "--port", "0", "--blocks", "600", "--shutdown-timeout", "0"],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    ) as process:
        os.close(theirs)
        drawn = ""
        while "/dashboard" not in drawn:
            drawn += os.read(ours, 4096).decode()
        with streaming(int(READY.search(drawn)[2])) as (answer, _):
            process.send_signal(number)
            rest = answer.read()
        assert process.wait(END_S) == status
    os.close(ours)
    for words in ("600 blocks of 16 tokens", "up to 1,024 tokens", "none: every client that reaches it has access"):
        assert words in drawn
    assert b"the server ends, and this request was not finished in time" in rest
    assert b'"code":"shutdown"' in rest
    assert rest.endswith(b"data: [DONE]\n\n")
