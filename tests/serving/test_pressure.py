"""Thousands of random requests on a pool far too small, with clients that leave, deadlines, stops and tenants: what was answered is what a request gets
alone, nothing is left behind, the metrics add up with what clients saw, and readers of KV events know what the engine has.

PAGED_SERVED is the number of requests; `make served` asks for 10,000.
"""

import asyncio
import json
import os
import re

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from paged.serving.kv_index import KvIndex
from paged.serving.kv_subscriber import KvSubscriber

from .http_client import got  # noqa: TID252
from .pressure import press, requests  # noqa: TID252
from .serving_process import free_port, served  # noqa: TID252

NUM = int(os.environ.get("PAGED_SERVED", "300"))


def figure(page: str, name: str, **labels: str) -> float:
    """The sum of a metric's series that have these labels."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    series = re.findall(rf"^{name}{{(.*)}} (\S+)$", page, re.MULTILINE)
    return sum(float(value) for given, value in series if all(each in given for each in wanted))


def followed(subscriber: KvSubscriber, index: KvIndex) -> dict[str, set[object]]:
    """What each medium holds, by an index that has applied all that there is."""
    while (batches := subscriber.take(0.5)) or not subscriber.is_current:
        for seq, batch in batches:
            assert index.apply(seq, batch)
    return {medium: set(index.held(medium)) for medium in ("GPU", "CPU")}


@pytest.mark.slow
def test_answers_are_those_that_requests_get_alone_and_everything_adds_up():
    ports = free_port(), free_port()
    events = {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{ports[0]}", "buffer_steps": 50}
    events["replay_endpoint"] = f"tcp://*:{ports[1]}"
    endpoints = [f"tcp://127.0.0.1:{port}" for port in ports]
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
        with KvSubscriber(*endpoints) as from_the_beginning:
            followed(from_the_beginning, known := KvIndex())
            seen = asyncio.run(press(server.port, asked, NUM, seed=2))
            assert seen.wrong == []
            assert seen.ends["lost"] == 0
            assert seen.whole > NUM / 3
            server.wait_until(lambda: not got(server, "/load").body["server_load"])
            # The latest figures come with a step, so one more is made.
            asyncio.run(press(server.port, asked[:1], 1, seed=3))

            def metrics() -> str:
                return got(server, "/metrics").body

            server.wait_until(
                lambda: (
                    not figure(metrics(), "paged:blocks", state="used")
                    and figure(metrics(), "vllm:generation_tokens_total") >= seen.tokens
                )
            )
            shown = got(server, "/debug/index").body
            held = {
                medium: {int(key[-16:], 16) for key in shown[tier]}
                for tier, medium in (("device", "GPU"), ("host", "CPU"))
            }
            assert followed(from_the_beginning, known) == held
        with KvSubscriber(*endpoints) as late:
            assert followed(late, KvIndex()) == held
        assert got(server, "/debug/check").body == []
        page = metrics()

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
    preempted = figure(page, "vllm:num_preemptions_total")
    print(f"{NUM:,} requests, {seen.whole:,} of them compared: {dict(seen.ends)}, {dict(seen.codes)}")
    print(f"{seen.tokens:,} tokens seen, {preempted:,.0f} preemptions")
