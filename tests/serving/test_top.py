"""`paged top` and the feed that it reads: what is drawn, what a pipe gets, and the one line of each thing that may be wrong."""

import re
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from rich.console import Console

from paged.cli.app import run
from paged.cli.top import draw
from paged.errors import NoFeed
from paged.serving.feed import snapshots

from .serving_process import free_port  # noqa: TID252
from .watched import Load, WatchedServer  # noqa: TID252


@pytest.fixture(scope="module")
def load():
    """A load in which some wait and some were preempted."""
    found = Load(seed=3, num_blocks=96, num_clients=20, longest=120, host_blocks=16)
    while not (found.engine.scheduler.counts()["waiting"] and found.engine.scheduler.stats().preemptions):
        found.step()
    return found


@pytest.fixture(scope="module")
def server(load):
    with WatchedServer(load, every_s=0.05) as found:
        yield found


@pytest.fixture
def top(capsys, monkeypatch):
    monkeypatch.delenv("PAGED_API_KEY", raising=False)

    def call(*arguments):
        status = run(["top", *arguments])
        return status, *capsys.readouterr()

    return call


@pytest.mark.parametrize("address", ["", "/", "/dashboard"])
def test_a_pipe_gets_one_view_in_plain_lines(top, server, load, address):
    status, out, err = top(server.url + address, "--once")
    assert (status, err) == (0, "")
    assert "\x1b" not in out
    assert re.search(r"^requests: \d+ waiting, \d+ running, ", out, re.M)
    waiting = load.engine.scheduler.waiting_ids()[0]
    assert re.search(
        rf"^{waiting} .* waiting .*{re.escape(load.engine.scheduler.explain(waiting, with_holders=False).reason)}$",
        out,
        re.M,
    )
    assert "preempted" in out


def drawn(seen, width, height, colour=False):
    """The lines of a view on a terminal of this size, without colours."""
    console = Console(width=width, height=height, force_terminal=colour, color_system="truecolor" if colour else None)
    with console.capture() as capture:
        console.print(draw(seen, width, height))
    return re.sub(r"\x1b\[[0-9;]*m", "", capture.get()).rstrip("\n").split("\n")


@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 20), (120, 40), (200, 60)])
@pytest.mark.parametrize("colour", [False, True])
def test_a_view_fits_its_terminal_and_says_who_waits(load, width, height, colour):
    lines = drawn(load.watcher.snapshot(), width, height, colour)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    waiting = load.engine.scheduler.waiting_ids()[0]
    (line,) = [line for line in lines if line.startswith(f" ○ {waiting[:12]}…{waiting[-5:]} waiting")]
    assert load.engine.scheduler.explain(waiting, with_holders=False).reason[:4] in line


@pytest.fixture(scope="module")
def hybrid():
    """A load on layers of two kinds, of which one has ended hits."""
    found = Load(seed=4, is_hybrid=True, num_blocks=120, host_blocks=0, num_clients=9, longest=60)
    while not found.watcher.snapshot().groups[1].lost_tokens:
        found.step()
    return found


def test_a_view_splits_pages_by_layer_group_and_says_what_hits_lost(top, hybrid):
    seen = hybrid.watcher.snapshot()
    full, state = seen.groups
    for width, height in ((80, 24), (120, 40)):
        lines = drawn(seen, width, height)
        assert len(lines) <= height
        assert max(map(len, lines)) <= width
        (bar,) = [line for line in lines if line.startswith(" groups ")]
        assert bar.endswith(f"━ {full.used:,} full  ╍ {state.used:,} state")
        assert f" given back in front none   hit tokens lost {state.lost_tokens:,} by state" in lines
        assert any("120 pages, blocks of 8 tokens" in line for line in lines)
    # And a pipe gets a line of each.
    with WatchedServer(hybrid, every_s=0.05) as server:
        _, out, _ = top(server.url)
    words = f"{state.used:,} pages used, {state.cached:,} cached, {state.lost_tokens:,} hit tokens lost"
    assert f"state layers: {words}" in out


def test_a_view_of_a_server_where_nothing_has_happened():
    seen = Load(num_clients=0, num_blocks=10, host_blocks=0).watcher.snapshot()
    assert any("waiting 0" in line for line in drawn(seen, 80, 24))


def test_a_key_is_asked_for_and_refused_and_taken(top, load):
    with WatchedServer(load, key="of-the-admin", every_s=0.05) as server:
        said = f"paged: {server.url}: the server "
        assert top(server.url, "--once") == (2, "", said + "asks for its admin key; give it by --api-key.\n")
        assert top(server.url, "--once", "--api-key", "another") == (2, "", said + "refuses this key.\n")
        assert top(server.url, "--once", "--api-key", "of-the-admin")[0] == 0


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1:{closed}", "no server answers there ("),
        *((url, "that is no address") for url in ("nonsense", "http://[::1", "ftp://127.0.0.1", "http://a b")),
        *((url, "that is no address") for url in ("http://", "http://127.0.0.1:99999")),
    ],
)
def test_where_nothing_answers_or_no_address_is_given_one_line_says_so(top, url, said):
    status, out, err = top(url.format(closed=free_port()), "--once")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert said in err


@pytest.mark.parametrize("key", ["a\nb", "ü"])
def test_a_key_that_no_server_has_is_refused_before_one_is_asked(key):
    with pytest.raises(NoFeed, match="a key is printable ASCII text"):
        next(snapshots(f"http://127.0.0.1:{free_port()}", key))


@pytest.mark.parametrize(
    ("kind", "body", "said"),
    [
        ("text/html", b"<p>hello</p>", "no paged server"),
        ("text/event-stream", b'data: {"unix_time": "noon"}\n\n', "is it of another version?"),
        ("text/event-stream", b"", "the server has ended"),
    ],
)
def test_another_kind_of_server_is_told(kind, body, said):
    class Other(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(body)

    with HTTPServer(("127.0.0.1", 0), Other) as other:
        other.timeout = 600
        thread = Thread(target=other.handle_request)
        thread.start()
        with pytest.raises(NoFeed, match=re.escape(said)):
            next(snapshots(f"http://127.0.0.1:{other.server_port}"))
        thread.join()


def test_the_feed_goes_on_until_its_server_goes_away(load):
    with WatchedServer(load, every_s=0.05) as server:
        feed = snapshots(server.url)
        first, second = next(feed), next(feed)
        assert second.uptime_s > first.uptime_s
    with pytest.raises(NoFeed):
        for _ in feed:
            pass
