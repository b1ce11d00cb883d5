"""What a server says before its engine takes requests for the first time, and between two engines."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from paged.errors import NoFeed
from paged.serving.feed import snapshots

from .http_client import ask, get  # noqa: TID252
from .serving_process import END_S, START_S, started  # noqa: TID252

PATH, BODY = "/v1/completions", {"prompt": "The with statement", "max_tokens": 4}
# Python imports it before anything else. An engine waits in it until the test lets it begin.
HELD = """
import os, sys, time
if "paged.serving.engine_process" in sys.orig_argv:
    server = os.getppid()
    while not os.path.exists(os.environ["LET_BEGIN"]):
        if os.getppid() != server:
            os._exit(0)
        time.sleep(0.01)
"""


class Held:
    """A server whose engines begin when they are let."""

    def __init__(self, port, process, let_begin, stderr):
        self.port, self.process, self.let_begin, self.stderr = port, process, let_begin, stderr

    def asked(self, body=BODY):
        return asyncio.run(ask(self.port, PATH, body))

    def got(self, path):
        return asyncio.run(get(self.port, path))

    def wait_until(self, status, path="/ready"):
        until = time.monotonic() + START_S
        while True:
            assert self.process.poll() is None and time.monotonic() < until, self.stderr.read_text()
            try:
                if self.got(path).status == status:
                    return
            except (ConnectionError, IndexError):
                pass
            time.sleep(0.02)

    @property
    def engine(self):
        """The process id of the engine."""
        found = subprocess.run(["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True, check=True)
        return int(found.stdout.split()[0])

    @property
    def lines(self):
        """What stands in the log: JSON, but for the line that says what is loaded."""
        return [json.loads(line) for line in self.stderr.read_text().splitlines() if line.startswith("{")]

    def line_of(self, error):
        """The first line about a request that ended with this error; it is written after the answer, by a thread."""
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            for line in self.lines:
                if line.get("error") == error:
                    return line
            time.sleep(0.02)
        raise AssertionError(self.stderr.read_text())


@contextmanager
def held(folder, *arguments):
    """A server that answers, and whose engine has not begun."""
    (folder / "sitecustomize.py").write_text(HELD)
    let_begin = folder / "go"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    with (folder / "stderr").open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "paged", "serve", "--port", str(port), *arguments],
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env={**os.environ, "PYTHONPATH": path, "LET_BEGIN": str(let_begin)},
        )
    server = Held(port, process, let_begin, folder / "stderr")
    try:
        server.wait_until(503)
        yield server
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def starting(tmp_path_factory):
    with held(tmp_path_factory.mktemp("starting")) as server:
        yield server


@pytest.mark.parametrize("path", ["/health", "/ping", "/ready", "/v1/models", "/v1/models/paged", "/dashboard/feed"])
def test_before_the_engine_takes_requests_nothing_says_that_it_does(starting, path):
    heard = starting.got(path)
    assert (heard.status, heard.error["code"]) == (503, "engine_starting")
    assert heard.error["message"] == "the engine is starting."
    assert int(heard.headers["retry-after"]) >= 1


def test_a_request_that_comes_before_the_engine_is_told_when_to_come_and_is_no_error_of_the_server(starting):
    heard = starting.asked()
    assert (heard.status, heard.error["code"]) == (503, "engine_starting")
    assert int(heard.headers["retry-after"]) >= 1
    assert starting.line_of("engine_starting")["level"] == "warning"


@pytest.mark.parametrize("path", ["/", "/docs", "/metrics", "/version", "/load", "/dashboard", "/openapi.json"])
def test_what_needs_no_engine_is_there_before_it(starting, path):
    assert starting.got(path).status == 200


def test_the_first_page_leads_to_what_there_is(starting):
    links = re.findall(r'href="([a-z./1]+)"', starting.got("/").body)
    assert {"dashboard", "docs", "openapi.json", "v1/models", "health", "ready", "metrics"} == set(links)
    assert [link for link in links if starting.got(f"/{link}").status == 404] == []


@pytest.mark.parametrize("path", ["/", "/docs", "/dashboard"])
def test_a_page_takes_nothing_from_elsewhere(starting, path):
    heard = starting.got(path)
    assert "default-src 'none'" in heard.headers["content-security-policy"]
    assert re.findall(r"(?:src|href)=.?(?:https?:)?//[^ >]*", heard.body) == []


def test_top_says_that_the_engine_is_starting(starting):
    with pytest.raises(NoFeed, match=r": the engine is starting\.$"):
        next(snapshots(f"http://127.0.0.1:{starting.port}"))


def test_a_first_start_and_a_death_are_told_as_they_are(tmp_path):
    """One server, for each costs two starts."""
    with held(tmp_path, "--max-restarts", "1") as server:
        begun = time.monotonic()
        time.sleep(1.5)
        server.let_begin.touch()
        took_at_least = time.monotonic() - begun
        server.wait_until(200, "/health")
        assert server.asked().status == 200
        server.let_begin.unlink()

        async def killed():
            long = BODY | {"max_tokens": 900, "ignore_eos": True, "n": 8, "temperature": 1.0}
            asked = asyncio.create_task(ask(server.port, PATH, long))
            while (
                'vllm:num_requests_running{engine="0",model_name="paged"} 1.0'
                not in (await get(server.port, "/metrics")).body
            ):
                await asyncio.sleep(0.01)
            os.kill(server.engine, signal.SIGKILL)
            return await asked

        died = asyncio.run(killed())
        assert (died.status, died.error["code"]) == (503, "engine_died")
        # It takes as long as the first one took.
        assert float(died.headers["retry-after-ms"]) / 1000 >= took_at_least
        assert server.line_of("engine_died")["level"] == "error"
        assert server.got("/health").status == server.got("/v1/models").status == 200
        away = server.asked()
        assert (away.status, away.error["code"]) == (503, "engine_unavailable")
        with pytest.raises(NoFeed, match=r": the engine is restarting\.$"):
            next(snapshots(f"http://127.0.0.1:{server.port}"))
        server.let_begin.touch()
        server.wait_until(200)
        assert server.asked().status == 200
        os.kill(server.engine, signal.SIGKILL)
        server.wait_until(503, "/health")
        assert "retry-after" not in server.asked().headers
        shown = server.got("/metrics").body
        assert 'paged:engine_restarts_total{engine="0",model_name="paged"} 2.0' in shown
        server.process.terminate()
        assert server.process.wait(END_S) == 0


def test_the_engine_knows_the_policies_that_the_front_offers():
    with started("--policy", "static") as server:
        assert asyncio.run(ask(server.port, PATH, BODY)).status == 200


# What no library would do, in both processes: a warning, text of a library in C, and a thread that fails.
ODD = """
import os, sys, threading, time, warnings
def odd():
    import logging
    while not logging.root.handlers:
        time.sleep(0.01)
    warnings.warn("a warning of " + who)
    os.write(2, b"[W123] text of a library\\n") if who == "an engine" else None
    raise RuntimeError("an error of " + who)
name = " ".join(sys.orig_argv)
who = "an engine" if "engine_process" in name else "a front" if "serve" in name else None
if who:
    threading.Thread(target=odd, daemon=True).start()
"""


def test_each_line_of_the_log_is_json_whoever_says_it(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(ODD)
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    wanted = {f"a{kind} of {who}" for kind in (" warning", "n error") for who in ("an engine", "a front")} | {
        "[W123] text"
    }
    with started(env={"PYTHONPATH": path}) as server:
        assert asyncio.run(ask(server.port, PATH, BODY)).status == 200
        os.kill(int(subprocess.check_output(["pgrep", "-P", str(server.process.pid)]).split()[0]), signal.SIGKILL)
        wanted |= {"the engine process died (status -9).", '"status":200'}
        until = time.monotonic() + START_S
        while [each for each in wanted if each not in server.said]:
            assert time.monotonic() < until, server.said
            time.sleep(0.02)
        server.process.terminate()
        server.process.wait(END_S)
        found = [json.loads(line) for line in server.said.splitlines()]
    (error,) = [line for line in found if "an error of a front" in line.get("message", "")]
    assert error["level"] == "critical" and "Traceback" in error["message"]
