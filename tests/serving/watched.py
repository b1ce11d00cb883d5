"""An engine under load with a watcher beside it, and the dashboard's three addresses over it: what tests of the page and of `paged top` look at.

The load is drawn from a seed: conversations over a few shared beginnings, more of them than the pool holds.
"""

import json
import sys
import threading
import time
from contextlib import suppress
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random

import msgspec

from paged import Engine, Hint, SamplingParams
from paged.errors import UnknownRequest
from paged.model.checkpoint import checkpoint_path, hybrid_path
from paged.serving.dashboard import page
from paged.serving.watching import Watcher

TENANTS = ("research", "support", "batch")


class Load:
    """Requests drawn from a seed, on an engine of the model that ships (`is_hybrid`: of its hybrid brother), each step told to a watcher."""

    def __init__(
        self,
        seed=0,
        num_clients=40,
        num_prefixes=6,
        longest=220,
        clock=time.perf_counter,
        *,
        is_hybrid=False,
        **options,
    ):
        sizes = {"num_blocks": 192, "block_size": 8, "host_blocks": 24, "max_tokens_per_step": 96, "max_sequences": 24}
        self.engine = Engine(hybrid_path() if is_hybrid else checkpoint_path(), clock=clock, **(sizes | options))
        self.engine.on_batch = lambda batch: setattr(self, "batch", batch)
        self.watcher = Watcher(self.engine, clock, model="paged")
        self.clock, self.random = clock, Random(seed)
        self.longest, self.num_clients, self.num_added = longest, num_clients, 0
        size = self.engine.manager.block_size
        self.beginnings = [self._ids(size * self.random.randint(1, 8)) for _ in range(num_prefixes)]

    def _ids(self, count):
        return [self.random.randrange(5, self.engine.model.vocabulary_size) for _ in range(count)]

    def add(self, **params):
        self.num_added += 1
        prompt = self.random.choice(self.beginnings) + self._ids(self.random.randint(1, self.longest // 2))
        tokens = SamplingParams(**{"max_tokens": self.random.randint(4, self.longest), "ignore_eos": True, **params})
        # As long as those that the server gives.
        name, tenant = f"cmpl-{self.random.getrandbits(128):032x}-{self.num_added}", self.random.choice(TENANTS)
        now = self.clock()
        self.engine.add_request(prompt, tokens, id=name)
        size = self.engine.manager.block_size
        whole = bytes(json.dumps(prompt[:size]), "ascii") if len(prompt) >= size else None
        self.watcher.came(name, tenant, len(prompt), whole and sha256(whole).hexdigest()[:8], now)
        return name

    def step(self):
        """As many requests as there are clients, and one step; its batch and outputs."""
        counts = self.engine.scheduler.counts()
        alive = sum(counts[state] for state in ("waiting", "running", "paused", "swapped", "loading"))
        if alive < self.num_clients:
            for _ in range(min(self.num_clients - alive, 1 + self.num_clients // 8)):
                self.add()
        began, self.batch = self.clock(), None
        outputs = self.engine.step()
        now = self.clock()
        self.watcher.stepped(self.batch, outputs, now, now - began)
        return self.batch, outputs

    def finish(self):
        while self.engine.has_unfinished:
            self.step()

    def abort(self, name):
        output = self.engine.abort(name)
        if output is not None:
            self.watcher.ended(output, self.clock())
        return output


def with_sessions(folder):
    """A load without requests but those of three sessions: one that waits for a tool and is pinned, one whose turn runs, and a reader."""
    options = {"host_blocks": 32, "host_caching": True, "disk_cache": folder, "max_pinned": 16, "num_blocks": 96}
    load = Load(num_clients=0, **options)
    engine = load.engine
    for name, length in (("research\x1fagent 0", 90), ("research\x1fagent 1", 170), ("\x1freader", 40)):
        engine.add_request(load._ids(length), SamplingParams(max_tokens=8, ignore_eos=True), session_id=name)
        load.finish()
    engine.hint(Hint(action="pin", session="research\x1fagent 0"))
    engine.hint(Hint(action="retain", session="research\x1fagent 0", priority=2, waits_for="tool"))
    engine.hint(Hint(action="retain", session="\x1freader", waits_for="person"))
    engine.add_request(load._ids(20), SamplingParams(max_tokens=60, ignore_eos=True), session_id="research\x1fagent 1")
    load.step()
    engine.disk.store.flush()
    return load


class _Http(ThreadingHTTPServer):
    def handle_error(self, request, client_address):
        # A client that goes in the middle, a browser that is closed say, is no news; anything else is.
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class WatchedServer:
    """GET /dashboard, /dashboard/feed and /requests/{id}, of a load that goes on while `is_going`; with a key if there is one."""

    def __init__(self, load, key=None, every_s=0.5, port=0, is_going=False):
        self.load, self.key, self.every_s = load, key, every_s
        self.is_over, self.between_steps = threading.Event(), threading.Lock()
        self._http = _Http(("127.0.0.1", port), type("Handler", (_Handler,), {"server_of": self}))
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._threads = [threading.Thread(target=self._http.serve_forever, args=(0.05,))]
        if is_going:
            self._threads.append(threading.Thread(target=self._go))

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.is_over.set()
        self._http.shutdown()
        self._http.server_close()
        for thread in self._threads:
            thread.join()

    def _go(self):
        while not self.is_over.is_set():
            with self.between_steps:
                self.load.step()
            time.sleep(0)

    def picture(self):
        with self.between_steps:
            return msgspec.json.encode(self.load.watcher.snapshot())

    def story(self, name):
        with self.between_steps:
            try:
                return 200, msgspec.json.encode(self.load.watcher.story(name))
            except UnknownRequest as error:
                return 404, msgspec.json.encode({"error": {"message": str(error)}})


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_of = None

    def log_message(self, *_):
        pass

    def do_GET(self):
        server, path = self.server_of, self.path
        if path == "/dashboard":
            return self._say(200, page("page"), "text/html; charset=utf-8")
        given = self.headers.get("Authorization")
        if server.key is not None and given != f"Bearer {server.key}":
            status = 401 if given is None else 403
            return self._say(status, b'{"error": {"message": "an admin key is needed", "code": "invalid_api_key"}}')
        if path == "/dashboard/feed":
            return self._feed()
        if path.startswith("/requests/"):
            return self._say(*server.story(path.removeprefix("/requests/")))
        return self._say(404, b"{}")

    def _say(self, status, body, kind="application/json", length=True):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Cache-Control", "no-store")
        self.send_header(*("Content-Length", str(len(body))) if length else ("Connection", "close"))
        self.end_headers()
        self.wfile.write(body)

    def _feed(self):
        self._say(200, b"", "text/event-stream", length=False)
        with suppress(BrokenPipeError, ConnectionResetError):
            while not self.server_of.is_over.is_set():
                self.wfile.write(b"data: " + self.server_of.picture() + b"\n\n")
                self.wfile.flush()
                self.server_of.is_over.wait(self.server_of.every_s)
