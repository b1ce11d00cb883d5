"""What a server says before its engine takes requests for the first time, and between two engines."""

import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from paged.errors import NoFeed
from paged.serving.feed import snapshots

from .http_client import LONG, TEXT, Heard, asked, figure, got, num_open  # noqa: TID252
from .serving_process import END_S, Served, free_port, imported_first, launched  # noqa: TID252

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

# An engine waits until the test lets it begin.
HELD = """
import os, sys, time
if "paged.serving.engine_process" in sys.orig_argv:
    server = os.getppid()
    while not os.path.exists(os.environ["LET_BEGIN"]):
        if os.getppid() != server:
            os._exit(0)
        time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def go(tmp_path_factory):
    """The file that lets engines begin."""
    return tmp_path_factory.mktemp("starting") / "go"


@pytest.fixture(scope="module")
def starting(go):
    """A server that answers, and whose engines begin when there is the file `go`; both say what no library would. Each costs a start: the tests with
    it run in this order, and the last one lets it begin, and ends it."""
    port, env = free_port(), imported_first(go.parent, HELD + ODD) | {"LET_BEGIN": str(go)}
    with launched("--port", str(port), "--max-restarts", "1", env=env) as (process, said):
        server = Served(f"http://127.0.0.1:{port}", port, process, said)
        server.wait_until(lambda: status_of(server, "/ready") == 503)
        yield server


def status_of(server, path):
    """None while nobody listens."""
    with suppress(ConnectionError):
        return got(server, path).status


def level_of(server, error):
    """Of the first line about a request that ended with this error; it is written after the answer, by a thread."""
    server.wait_until(lambda: any(line.get("error") == error for line in server.lines))
    return next(line["level"] for line in server.lines if line.get("error") == error)


@pytest.mark.parametrize(
    "path", ["/health", "/ping", "/ready", "/v1/models", "/v1/models/paged", "/dashboard/feed", TEXT]
)
def test_before_the_engine_takes_requests_nothing_says_that_it_does_and_it_is_told_when_to_come(starting, path):
    heard = asked(starting) if path == TEXT else got(starting, path)
    assert (heard.status, heard.error["code"]) == (503, "engine_starting")
    assert heard.error["message"] == "the engine is starting."
    assert int(heard.headers["retry-after"]) >= 1


def test_a_request_that_comes_before_the_engine_is_no_error_of_the_server(starting):
    asked(starting)
    assert level_of(starting, "engine_starting") == "warning"
    with pytest.raises(NoFeed, match=r": the engine is starting\.$"):
        next(snapshots(starting.url))


@pytest.mark.parametrize("path", ["/", "/docs", "/metrics", "/version", "/load", "/dashboard", "/openapi.json"])
def test_what_needs_no_engine_is_there_before_it_and_a_page_takes_nothing_from_elsewhere(starting, path):
    heard = got(starting, path)
    assert heard.status == 200
    if "html" in heard.headers["content-type"]:
        assert "default-src 'none'" in heard.headers["content-security-policy"]
        assert re.findall(r"(?:src|href)=.?(?:https?:)?//[^ >]*", heard.body) == []


def test_the_first_page_leads_to_what_there_is(starting):
    links = re.findall(r'href="([a-z./1]+)"', got(starting, "/").body)
    assert {"dashboard", "docs", "openapi.json", "v1/models", "health", "ready", "metrics"} == set(links)
    assert [link for link in links if got(starting, f"/{link}").status == 404] == []


def test_a_death_fails_what_had_begun_and_what_waited_is_served_and_each_line_of_the_log_is_json(starting, go):
    server = starting
    with ThreadPoolExecutor(12) as threads:
        # The first start takes so long at least.
        time.sleep(1.5)
        go.touch()
        server.wait_until(lambda: status_of(server, "/health") == 200)
        assert asked(server).status == 200
        go.unlink()

        heard = [Heard() for _ in range(12)]

        def ask(number):
            body = LONG | {"prompt": f"{number}", "stream": number > 0}
            return threads.submit(asked, server, body, heard=heard[number])

        # While the engine stands still all come, the first one before the others: then eight begin together, however fast it is.
        os.kill(server.engine, signal.SIGSTOP)
        tasks = [ask(0)]
        server.wait_until(lambda: num_open(server) == 1)
        tasks += [ask(number) for number in range(1, 12)]
        server.wait_until(lambda: num_open(server) == 12)
        os.kill(server.engine, signal.SIGCONT)
        # All eight seats are taken, and their first tokens have come.
        server.wait_until(lambda: sum(bool(each.times) for each in heard) == 7)
        os.kill(server.engine, signal.SIGKILL)
        died = tasks[0].result()
        assert (died.status, died.error["code"]) == (503, "engine_died")
        # It takes as long as the first one took.
        assert float(died.headers["retry-after-ms"]) >= 1500
        assert level_of(server, "engine_died") == "error"
        assert got(server, "/health").status == got(server, "/v1/models").status == 200
        away = asked(server)
        assert (away.status, away.error["code"]) == (503, "engine_unavailable")
        with pytest.raises(NoFeed, match=r": the engine is restarting\.$"):
            next(snapshots(server.url))
        go.touch()
        server.wait_until(lambda: status_of(server, "/ready") == 200)
        assert asked(server).status == 200
        for task in tasks:
            task.result()
        assert [each.error["code"] for each in heard if each.error] == ["engine_died"] * 8
        assert all(each.is_whole for each in heard if not each.error), "what waited"
        os.kill(server.engine, signal.SIGKILL)
        server.wait_until(lambda: status_of(server, "/health") == 503)
        gone = asked(server)
        assert (gone.status, gone.error["code"]) == (503, "engine_unavailable")
        assert "retry-after" not in gone.headers
        assert figure(got(server, "/metrics").body, "paged:engine_restarts_total") == 2
        wanted = [f"a{kind} of {who}" for kind in (" warning", "n error") for who in ("an engine", "a front")]
        wanted += ["[W123] text", "the engine process died (status -9).", '"status":200']
        server.wait_until(lambda: all(each in server.said for each in wanted))
        server.process.terminate()
        assert server.process.wait(END_S) == 0
        lines = server.lines
        assert len(lines) == len(server.said.splitlines())
    (error,) = [line for line in lines if "an error of a front" in line.get("message", "")]
    assert error["level"] == "critical" and "Traceback" in error["message"]
