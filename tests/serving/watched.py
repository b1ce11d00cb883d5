"""An engine under load with a watcher beside it, and the dashboard's three addresses over it: what tests of the page and of `paged top` look at.

The load is drawn from a seed: conversations over a few shared beginnings, more of them than the pool holds.
"""

import json
import sys
import threading
import time
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Empty, Queue
from random import Random

import msgspec

from paged import Engine, SamplingParams
from paged.errors import UnknownRequest
from paged.model.checkpoint import checkpoint_path
from paged.serving.dashboard import page
from paged.serving.watching import Watcher

TENANTS = ("research", "support", "batch")


class Load:
    """Requests drawn from a seed, on an engine of the model that ships, each step told to a watcher."""

    def __init__(
        self, seed=0, num_clients=40, num_prefixes=6, longest=220, on_step=None, clock=time.perf_counter, **options
    ):
        sizes = {"num_blocks": 192, "block_size": 8, "host_blocks": 24, "max_tokens_per_step": 96, "max_sequences": 24}
        self.engine = Engine(checkpoint_path(), clock=clock, **(sizes | options))
        self.watcher = Watcher(self.engine, clock, model="paged")
        self.clock, self.random = clock, Random(seed)
        self.on_step = on_step
        self.batch = None
        self.engine.on_batch = self._note
        size = self.engine.manager.block_size
        self.beginnings = [self._ids(size * self.random.randint(1, 8)) for _ in range(num_prefixes)]
        self.longest = longest
        self.num_clients = num_clients
        self.num_added = 0
        self.batches = []

    def _note(self, batch):
        self.batch = batch

    def _ids(self, count):
        return [self.random.randrange(5, self.engine.model.vocabulary_size) for _ in range(count)]

    def add(self, **params):
        """One more request."""
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

    def abort(self, name):
        """End a request."""
        output = self.engine.abort(name)
        if output is not None:
            self.watcher.ended(output, self.clock())
        return output


class _Http(ThreadingHTTPServer):
    def handle_error(self, request, client_address):
        # A client that goes in the middle, a browser that is closed say, is no news; anything else is.
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class WatchedServer:
    """GET /dashboard, /dashboard/feed and /requests/{id}, of a load that goes on while `is_going`; with a key if there is one."""

    def __init__(self, load, key=None, every_s=0.5, port=0, pause_s=0.0):
        self.load, self.key, self.every_s, self.pause_s = load, key, every_s, pause_s
        self.is_going = threading.Event()
        self._ends = threading.Event()
        self._asked = Queue()
        self._http = _Http(("127.0.0.1", port), type("Handler", (_Handler,), {"server_of": self}))
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._threads = [
            threading.Thread(target=self._http.serve_forever, args=(0.05,)),
            threading.Thread(target=self._run),
        ]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._ends.set()
        self._http.shutdown()
        self._http.server_close()
        for thread in self._threads:
            thread.join()

    @property
    def has_ended(self):
        """Whether feeds are to end."""
        return self._ends.is_set()

    def ask(self, what):
        """`what()` between two steps, in the engine's thread."""
        answer = Queue()
        self._asked.put((what, answer))
        kind, found = answer.get(timeout=600)
        if kind is Exception:
            raise found
        return found

    def _run(self):
        while not self._ends.is_set():
            if self.is_going.is_set():
                self.load.step()
            try:
                what, answer = (
                    self._asked.get(timeout=self.pause_s if self.is_going.is_set() else 0.02)
                    if (self.pause_s or not self.is_going.is_set())
                    else self._asked.get_nowait()
                )
            except Empty:
                continue
            try:
                answer.put((None, what()))
            except Exception as error:
                answer.put((Exception, error))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_of = None

    def log_message(self, *_):
        pass

    def do_GET(self):
        server, path = self.server_of, self.path
        if path == "/dashboard":
            return self._say(200, page(), "text/html; charset=utf-8")
        given = self.headers.get("Authorization")
        if server.key is not None and given != f"Bearer {server.key}":
            status = 401 if given is None else 403
            return self._say(status, b'{"error": {"message": "an admin key is needed", "code": "invalid_api_key"}}')
        if path == "/dashboard/feed":
            return self._feed()
        if path.startswith("/requests/"):
            try:
                story = server.ask(lambda: server.load.watcher.story(path.removeprefix("/requests/")))
            except UnknownRequest as error:
                return self._say(404, msgspec.json.encode({"error": {"message": str(error)}}))
            return self._say(200, msgspec.json.encode(story))
        return self._say(404, b"{}")

    def _say(self, status, body, kind="application/json"):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _feed(self):
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-store")
        self.send_header("Connection", "close")
        self.end_headers()
        try:
            while not self.server_of.has_ended:
                snapshot = self.server_of.ask(self.server_of.load.watcher.snapshot)
                self.wfile.write(b"data: " + msgspec.json.encode(snapshot) + b"\n\n")
                self.wfile.flush()
                self.server_of._ends.wait(self.server_of.every_s)
        except (BrokenPipeError, ConnectionResetError):
            pass
