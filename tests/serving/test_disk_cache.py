"""A conversation goes on after its server was killed, which takes its engine with it: the next turn finds on the disk what the last one
computed."""

import sqlite3
import time
from contextlib import closing
from pathlib import Path

from .http_client import CHAT, ask, asked, got, run  # noqa: TID252
from .serving_process import END_S, flags, started  # noqa: TID252

SAID = "Explain what the with statement of Python does when the body of it raises an exception. " * 6


def turn(server, messages):
    """The answer to a conversation, and its usage."""
    body = {"messages": messages, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    heard = run(ask(server.port, CHAT, body))
    assert heard.status == 200, heard.error
    return heard.text, heard.body["usage"]


def num_written(folder):
    """Objects of which the index knows."""
    with closing(sqlite3.connect(f"file:{folder}/index.sqlite?mode=ro", uri=True)) as index:
        return index.execute("SELECT count(*) FROM objects").fetchone()[0]


def test_a_server_that_is_killed_takes_its_engine_with_it_and_the_next_turn_finds_the_last_one_on_the_disk(tmp_path):
    folder = tmp_path / "cache"
    options = flags({"disk_cache": folder, "disk_cache_gb": 1})
    messages = [{"role": "user", "content": SAID}]
    with started(*options) as server:
        answer, usage = turn(server, messages)
        num_blocks = (usage["prompt_tokens"] + usage["completion_tokens"] - 1) // 16
        # The writer is a moment behind.
        while num_written(folder) < num_blocks:
            time.sleep(0.01)
        engine = Path(f"/proc/{server.engine}")
        server.process.kill()
        server.process.wait()
    until = time.monotonic() + END_S
    while engine.exists():
        assert time.monotonic() < until, "the engine outlives its server"
        time.sleep(0.01)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And else?"}]
    with started(*options) as server:
        _, again = turn(server, messages)
        cached = again["prompt_tokens_details"]["cached_tokens"]
        # The engine tells its figures when it has nothing left to do.
        of_disk = (
            f'vllm:prompt_tokens_cached_by_source_total{{engine="0",model_name="paged",source="disk"}} {cached:.1f}'
        )
        server.wait_until(lambda: of_disk in got(server, "/metrics").body)
        assert (
            f'vllm:prompt_tokens_cached_total{{engine="0",model_name="paged"}} {cached:.1f}'
            in got(server, "/metrics").body
        )
    assert cached >= usage["prompt_tokens"] // 16 * 16 > 64


def test_a_server_that_starts_again_prefetches_a_prompt_from_the_disk_before_it_is_asked_for(tmp_path):
    options = flags({"disk_cache": tmp_path / "cache", "disk_cache_gb": 1})
    body = {"prompt": SAID, "max_tokens": 1, "temperature": 0}
    with started(*options) as server:
        num_blocks = asked(server, body).body["usage"]["prompt_tokens"] // 16
        # The writer is a moment behind.
        while num_written(tmp_path / "cache") < num_blocks:
            time.sleep(0.01)
    with started(*options) as server:
        outcome = asked(server, {"action": "prefetch", "prompt": SAID}, "/v1/kv_hints").body
        assert outcome["num_tokens"] == num_blocks * 16 and outcome["status"] == "accepted"
        on_device = {"prompt": SAID}
        server.wait_until(lambda: asked(server, on_device, "/explain").body["device_tokens"] == num_blocks * 16)
        usage = asked(server, body).body["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        of_all = f'vllm:prompt_tokens_cached_total{{engine="0",model_name="paged"}} {cached:.1f}'
        server.wait_until(lambda: of_all in got(server, "/metrics").body)
        of_disk = 'vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="paged",source="disk"} 0.0'
        assert of_disk in got(server, "/metrics").body
    assert cached == (usage["prompt_tokens"] - 1) // 16 * 16 > 64
