"""A conversation goes on after its server was killed, which takes its engine with it: the next turn finds on the disk what the last one
computed."""

import sqlite3
from contextlib import closing
from pathlib import Path

from ..driving import wait_until  # noqa: TID252
from .http_client import CHAT, asked, figure, got  # noqa: TID252
from .serving_process import flags, started  # noqa: TID252

SAID = "Explain what the with statement of Python does when the body of it raises an exception. " * 6


def turn(server, messages):
    """The answer to a conversation, and its usage."""
    body = {"messages": messages, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    heard = asked(server, body, CHAT)
    assert heard.status == 200, heard.error
    return heard.text, heard.body["usage"]


def num_written(folder):
    """Objects of which the index knows."""
    with closing(sqlite3.connect(f"file:{folder}/index.sqlite?mode=ro", uri=True)) as index:
        return index.execute("SELECT count(*) FROM objects").fetchone()[0]


def test_a_server_that_is_killed_takes_its_engine_with_it_and_the_next_one_finds_on_the_disk_what_it_computed(tmp_path):
    folder = tmp_path / "cache"
    options = flags({"disk_cache": folder, "disk_cache_gb": 1})
    messages, body = [{"role": "user", "content": SAID}], {"prompt": SAID, "max_tokens": 1, "temperature": 0}
    with started(*options) as server:
        answer, usage = turn(server, messages)
        num_asked = asked(server, body).body["usage"]["prompt_tokens"] // 16
        # The writer is a moment behind.
        num_blocks = num_asked + (usage["prompt_tokens"] + usage["completion_tokens"] - 1) // 16
        wait_until(lambda: num_written(folder) >= num_blocks)
        engine = Path(f"/proc/{server.engine}")
        server.process.kill()
        server.process.wait()
    wait_until(lambda: not engine.exists())
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And else?"}]
    with started(*options) as server:

        def tells(cached, of_disk):
            # The engine tells its figures when it has nothing left to do.
            server.wait_until(lambda: figure(got(server, "/metrics").body, "vllm:prompt_tokens_cached_total") == cached)
            name = "vllm:prompt_tokens_cached_by_source_total"
            assert figure(got(server, "/metrics").body, name, source="disk") == of_disk

        # Of one prompt its next request is foretold, which then reads no disk; of the other it is not.
        outcome = asked(server, {"action": "prefetch", "prompt": SAID}, "/v1/kv_hints").body
        assert (outcome["num_tokens"], outcome["status"]) == (num_asked * 16, "accepted")
        on_device = {"prompt": SAID}
        server.wait_until(lambda: asked(server, on_device, "/explain").body["device_tokens"] == num_asked * 16)
        again = asked(server, body).body["usage"]
        foretold = again["prompt_tokens_details"]["cached_tokens"]
        assert foretold == (again["prompt_tokens"] - 1) // 16 * 16 > 64
        tells(foretold, of_disk=0)
        cached = turn(server, messages)[1]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= usage["prompt_tokens"] // 16 * 16 > 64
        tells(foretold + cached, of_disk=cached)
