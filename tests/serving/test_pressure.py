"""Thousands of random requests on a pool far too small, with clients that leave, deadlines, stops and tenants: what was answered is what a request gets
alone, nothing is left behind, the metrics add up with what clients saw, and readers of KV events know what the engine has.

PAGED_SERVED is the number of requests; `make served` asks for 10,000.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import time
from threading import Event, Thread

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from paged.serving.kv_index import KvIndex
from paged.serving.kv_subscriber import KvSubscriber

from .http_client import get  # noqa: TID252
from .pressure import press, requests  # noqa: TID252
from .serving_process import served  # noqa: TID252

NUM = int(os.environ.get("PAGED_SERVED", "300"))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Reader(Thread):
    """Follows the KV events, from the beginning or from later on; one that is forgetful stops listening now and then, and asks for what it missed."""

    def __init__(self, ports: tuple[int, int], *, begins_after_s: float, is_forgetful: bool) -> None:
        super().__init__(daemon=True)
        self.index = KvIndex()
        self.failure: BaseException | None = None
        self.num_batches = 0
        self._ports = ports
        self._begins_after_s = begins_after_s
        self._is_forgetful = is_forgetful
        self._random = random.Random(begins_after_s)
        self.is_over = Event()

    def run(self) -> None:
        try:
            time.sleep(self._begins_after_s)
            endpoints = [f"tcp://127.0.0.1:{port}" for port in self._ports]
            while not self.is_over.is_set():
                # A subscriber that is made anew knows nothing: the index does, and is told all again.
                self.index = KvIndex()
                with KvSubscriber(*endpoints) as subscriber:
                    until = time.monotonic() + (self._random.uniform(0.5, 3.0) if self._is_forgetful else 1e9)
                    while time.monotonic() < until and not self.is_over.is_set():
                        self._take(subscriber)
                    # All that was sent before the end.
                    end = time.monotonic() + 600
                    while self.is_over.is_set() and time.monotonic() < end:
                        self._take(subscriber)
                        if subscriber.is_current:
                            self._take(subscriber)
                            return
        except BaseException as error:
            self.failure = error

    def _take(self, subscriber: KvSubscriber) -> None:
        for seq, batch in subscriber.take(0.1):
            self.num_batches += 1
            self.index.apply(seq, batch)


def figure(page: str, name: str, **labels: str) -> float:
    """The sum of a metric's series that have these labels."""
    total = 0.0
    for line in page.splitlines():
        if line.startswith(name + "{") and all(f'{key}="{value}"' in line for key, value in labels.items()):
            total += float(line.rsplit(" ", 1)[1])
    return total


@pytest.mark.slow
def test_answers_are_those_that_requests_get_alone_and_everything_adds_up():
    ports = free_port(), free_port()
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://127.0.0.1:{ports[0]}".replace("127.0.0.1", "*"),
        "replay_endpoint": f"tcp://127.0.0.1:{ports[1]}".replace("127.0.0.1", "*"),
        "buffer_steps": 50,
    }
    asked = requests(min(NUM, 300), seed=1)
    with served(
        # The longest request alone takes 11 of the blocks; 24 would take 150.
        blocks=40,
        host_blocks=16,
        host_caching=True,
        max_sequences=24,
        max_model_len=400,
        max_waiting=60,
        tenant_header="x-tenant",
        kv_events_config=json.dumps(events),
        env={"PAGED_CHECK": "1"} if NUM <= 1000 else {},
    ) as server:
        readers = [
            Reader(ports, begins_after_s=0.0, is_forgetful=False),
            Reader(ports, begins_after_s=1.5, is_forgetful=False),
            Reader(ports, begins_after_s=0.0, is_forgetful=True),
        ]
        for reader in readers:
            reader.start()
        seen = asyncio.run(press(server.port, asked, NUM, seed=2))
        assert seen.wrong == []
        assert seen.ends["lost"] == 0
        assert seen.whole > NUM / 3

        async def look():
            until = time.monotonic() + 600
            while (await get(server.port, "/load")).body["server_load"]:
                assert time.monotonic() < until
                await asyncio.sleep(0.05)
            # The latest figures come with a step, so one more is made.
            await press(server.port, asked[:1], 1, seed=3)
            page = (await get(server.port, "/metrics")).body
            while (
                figure(page, "paged:blocks", state="used") or figure(page, "vllm:generation_tokens_total") < seen.tokens
            ):
                assert time.monotonic() < until, page
                await asyncio.sleep(0.05)
                page = (await get(server.port, "/metrics")).body
            index = (await get(server.port, "/debug/index")).body
            violations = (await get(server.port, "/debug/check")).body
            for reader in readers:
                reader.is_over.set()
            return page, index, violations

        page, index, violations = asyncio.run(look())
        assert violations == []
        for reader in readers:
            reader.join(600)
            assert reader.failure is None
            assert not reader.is_alive()
            assert reader.num_batches > 0
            for tier, medium in (("device", "GPU"), ("host", "CPU")):
                assert set(reader.index.held(medium)) == {int(key[-16:], 16) for key in index[tier]}

    assert figure(page, "paged:blocks", state="used") == 0
    assert figure(page, "paged:blocks", state="free") + figure(page, "paged:blocks", state="cached") == 40
    for state in ("running", "waiting", "paused", "swapped", "loading"):
        assert figure(page, "paged:requests", state=state) == 0
    # What clients saw, and one more; who left may have been answered to the end without seeing it.
    taken = figure(page, "vllm:request_success_total")
    refused = figure(page, "paged:requests_refused_total")
    # Clients that left may have gone before the server had their request.
    assert 0 <= sum(seen.ends.values()) + 1 - taken - refused <= seen.ends["left"]
    assert figure(page, "paged:requests_refused_total", code="overloaded") >= seen.codes["429 overloaded"]
    assert figure(page, "vllm:generation_tokens_total") >= seen.tokens
    assert figure(page, "vllm:request_prompt_tokens_sum") >= seen.prompt_tokens
    assert figure(page, "vllm:num_preemptions_total") > 0
    batches = ", ".join(f"{reader.num_batches:,}" for reader in readers)
    preempted = figure(page, "vllm:num_preemptions_total")
    print(f"{NUM:,} requests, {seen.whole:,} of them compared: {dict(seen.ends)}, {dict(seen.codes)}")
    print(
        f"{seen.tokens:,} tokens seen, {preempted:,.0f} preemptions; batches of KV events that each reader took: {batches}"
    )
