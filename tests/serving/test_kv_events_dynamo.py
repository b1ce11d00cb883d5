"""Dynamo's own index, which picks the replica that has most of a prompt, finds the blocks of a running server: `make dynamo` installs it."""

import asyncio
import json
import time
from typing import Any

import pytest

dynamo = pytest.importorskip("dynamo._core", reason="ai-dynamo-runtime is not installed; `make dynamo` installs it")

from .http_client import ask  # noqa: E402, TID252
from .serving_process import free_port, served  # noqa: E402, TID252

BLOCK = 16
PROMPT = list(range(100, 100 + 4 * BLOCK))


def test_dynamos_index_finds_the_blocks_that_a_server_has():
    ports = free_port(), free_port()
    # Dynamo comes when the first batches are no longer kept, and is told what they add up to.
    events = {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{ports[0]}", "buffer_steps": 2}
    events["replay_endpoint"] = f"tcp://*:{ports[1]}"

    async def complete(prompt: list[int]) -> None:
        answer = await ask(server.port, "/v1/completions", {"prompt": prompt, "max_tokens": 1})
        assert answer.status == 200, answer.body

    async def overlap(service: Any, prompt: list[int]) -> int:
        told = await service.overlap_scores({"model_name": "m", "token_ids": prompt})
        return int(told["workers"][0]["device_blocks"])

    async def found_by(service: Any) -> tuple[int, int, int]:
        for length in (1, 2, 3):
            await complete(PROMPT[: length * BLOCK + 1])
        worker = {"worker_id": 1, "model_name": "m", "endpoint": server.url, "block_size": BLOCK}
        worker["kv_events_endpoints"] = {0: f"tcp://127.0.0.1:{ports[0]}"}
        await service.upsert_worker(worker | {"replay_endpoint": f"tcp://127.0.0.1:{ports[1]}"})
        until, token, newest = time.monotonic() + 60, 300, 0
        # Dynamo asks for what it missed when something new comes, which it hears from when its subscription is there.
        while newest != 1 and time.monotonic() < until:
            token += 1
            await complete([token] * (BLOCK + 1))
            await asyncio.sleep(0.05)
            newest = await overlap(service, [token] * BLOCK)
        return await overlap(service, PROMPT), newest, await overlap(service, [9] * 4 * BLOCK)

    with served(block_size=BLOCK, kv_events_config=json.dumps(events)) as server:
        service = dynamo.SelectionService(indexer_threads=1)
        try:
            assert asyncio.run(found_by(service)) == (3, 1, 0)
        finally:
            service.shutdown()
