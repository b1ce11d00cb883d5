"""A server whose model is split over two processes: it answers OpenAI's client, and goes on when one of them is killed."""

import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paged.model.threads import usable_cores

from ..driving import wait_until  # noqa: TID252
from .http_client import LONG, USUAL, Heard, asked, num_open  # noqa: TID252
from .serving_process import started  # noqa: TID252

pytestmark = pytest.mark.skipif(usable_cores() < 2, reason="two ranks want two cores")
openai = pytest.importorskip("openai")


def rank_of(engine):
    (rank,) = subprocess.check_output(["pgrep", "-P", str(engine)], text=True).split()
    return int(rank)


def lives(process):
    try:
        state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_openais_client_is_answered_before_and_after_a_rank_is_killed_and_nothing_waits_for_ever():
    def go(server, threads):
        heard = [Heard() for _ in range(6)]

        def begin(number, body):
            return threads.submit(asked, server, body | {"prompt": f"{number}"}, heard=heard[number])

        tasks = [begin(number, LONG) for number in range(2)]
        # Both seats are taken, and their first tokens have come.
        server.wait_until(lambda: all(each.times for each in heard[:2]))
        tasks += [begin(number, USUAL) for number in range(2, 6)]
        server.wait_until(lambda: num_open(server) == 6)
        os.kill(rank_of(server.engine), signal.SIGKILL)
        return [task.result() for task in tasks]

    # The line of docs/scaling.md.
    options = ("--tensor-parallel-size", "2", "--max-sequences", "2")
    with ThreadPoolExecutor(6) as threads, started(*options) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
            answer = client.completions.create(model="paged", **USUAL)
            heard = go(server, threads)
            died = [each.error["code"] for each in heard if each.error is not None]
            assert died == ["engine_died"] * 2
            assert all(each.is_whole for each in heard if each.error is None)
            after = client.completions.create(model="paged", **USUAL)
        assert after.choices[0].text == answer.choices[0].text == asked(server, USUAL).text
        said = "RanksFailed: A model that is split over 2 ranks cannot go on: the process of rank 1 ended"
        assert said in server.said
        engine, rank = server.engine, rank_of(server.engine)
        server.process.terminate()
        assert server.process.wait(600) == 0
    wait_until(lambda: not (lives(engine) or lives(rank)))
