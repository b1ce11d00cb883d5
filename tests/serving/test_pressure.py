"""Thousands of random requests on a pool far too small, with clients that leave, deadlines, stops and tenants: what was answered is what a request gets
alone, nothing is left behind, the metrics add up with what clients saw, and readers of KV events know what the engine has.

PAGED_SERVED is the number of requests; `make served` asks for 10,000.
"""

import asyncio
import json
import os
import random
from collections import Counter
from typing import NamedTuple

import pytest

from paged import LLM, SamplingParams
from paged.serving.kv_index import KvIndex
from paged.serving.kv_subscriber import KvSubscriber

from .http_client import TEXT, ask, figure, got, num_open  # noqa: TID252
from .serving_process import free_port, served  # noqa: TID252
from .tiny_engine import shown  # noqa: TID252

NUM = int(os.environ.get("PAGED_SERVED", "150"))
TENANTS = ("big", "middle", "small")
BEGINNINGS = (
    "The with statement is used to", "A list is a sequence, and a sequence", "An exception is raised when the",
    "Return a new dictionary whose keys are",
)  # fmt: skip
STOPS = ("the", ".", "\n", " of ")


class Asked(NamedTuple):
    """A request that may come, and what its answer is when nothing else runs."""

    body: dict
    text: str
    finish_reason: str


def requests(count, seed):
    """So many different requests, and their answers: an engine with ample memory gives them, alone."""
    random_, bodies = random.Random(seed), []
    for number in range(count):
        beginning = random_.choice(BEGINNINGS)
        # Prompts share beginnings of different lengths, so that blocks are shared, and told apart by their ends.
        prompt = (beginning + " ") * random_.choice((1, 1, 2, 4, 8)) + random_.choice(("a", "b", "c")) + str(number)
        body = {"prompt": prompt, "max_tokens": random_.choice((1, 4, 16, 40, 80)), "temperature": 0}
        if random_.random() < 0.5:
            body |= {"temperature": random_.choice((0.5, 1.0)), "seed": random_.randrange(2**32)}
            body |= random_.choice(({}, {}, {"top_p": 0.9}))
        body |= random_.choice(({}, {}, {"stop": random_.choice(STOPS)}))
        body |= random_.choice(({}, {}, {}, {}, {"ignore_eos": True}))
        body |= random_.choice(({}, {}, {}, {}, {"presence_penalty": 0.5}))
        bodies.append(body)
    params = [SamplingParams(**{name: value for name, value in body.items() if name != "prompt"}) for body in bodies]
    alone = LLM().generate([body["prompt"] for body in bodies], params, use_tqdm=False)
    return [Asked(body, found.text, found.finish_reason) for body, found in zip(bodies, alone, strict=True)]


async def press(port, asked, num, seed, *, at_once=150):
    """Send so many requests, of which `at_once` are open at a time, and look at every answer: what became of them."""
    random_, seen = random.Random(seed), Seen()
    room = asyncio.Semaphore(at_once)

    async def one(one_, how, body, tenant):
        async with room:
            heard = await ask(port, TEXT, body, headers={"x-tenant": tenant}, **how)
            if heard.status == 429 and heard.error is not None and heard.error["code"] == "overloaded":
                seen.note(one_, heard, how)
                await asyncio.sleep(float(heard.headers["retry-after-ms"]) / 1000)
                heard = await ask(port, TEXT, body, headers={"x-tenant": tenant}, **how)
            seen.note(one_, heard, how)

    tasks = []
    for _ in range(num):
        one_, how = random_.choice(asked), {}
        body = {**one_.body, "stream": random_.random() < 0.7}
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        kind = random_.random()
        if kind < 0.15 and body["stream"]:
            how["leave_after"] = random_.randrange(1, 12)
        elif kind < 0.25:
            how["leave_at_s"] = random_.choice((0.001, 0.02, 0.2, 1.0))
        elif kind < 0.35:
            body["deadline_s"] = random_.choice((0.01, 0.2, 1.0))
        elif kind < 0.4:
            how["read_every_s"] = 0.01
        tenant = random_.choices(TENANTS, (10, 3, 1))[0]
        tasks.append(asyncio.create_task(one(one_, how, body, tenant)))
    await asyncio.gather(*tasks)
    return seen


class Seen:
    """What became of all requests: how many ended in which way, and every sentence that should not be."""

    def __init__(self):
        self.ends, self.codes, self.wrong = Counter(), Counter(), []
        self.tokens = self.prompt_tokens = 0

    def note(self, one_, heard, how):
        """Count how a request ended, and what is wrong with it."""
        wrong, error = self.wrong, heard.error
        if heard.is_whole:
            self.ends["whole"] += 1
            self.tokens += heard.usage["completion_tokens"]
            self.prompt_tokens += heard.usage["prompt_tokens"]
            if (heard.text, heard.finish_reason) != one_[1:]:
                wrong.append(f"{heard.text!r} ({heard.finish_reason}) is answered to {one_}.")
            return
        if error is not None:
            self.ends["refused" if heard.status != 200 else "ended with an error"] += 1
            self.codes[f"{heard.status} {error['code']}"] += 1
            if heard.status not in (200, 429, 504):
                wrong.append(f"status {heard.status}, {error}, is answered to {one_}.")
            if heard.status == 429 and "retry-after" not in heard.headers:
                wrong.append("429 does not say when to come again.")
        elif "leave_after" in how or "leave_at_s" in how:
            self.ends["left"] += 1
        else:
            wrong.append(f"the connection ended without an answer (status {heard.status}).")
        if heard.status == 200 and heard.body is None and not one_.text.startswith(heard.text):
            wrong.append(f"{heard.text!r} is no beginning of {one_.text!r}.")


def followed(subscriber, index):
    """What each medium holds, by an index that has applied all that there is."""
    while (batches := subscriber.take(0.5)) or not subscriber.is_current:
        for seq, batch in batches:
            assert index.apply(seq, batch)
    return shown(index)


@pytest.mark.slow
def test_answers_are_those_that_requests_get_alone_and_everything_adds_up():
    ports = free_port(), free_port()
    events = {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{ports[0]}", "buffer_steps": 50}
    events["replay_endpoint"] = f"tcp://*:{ports[1]}"
    endpoints = [f"tcp://127.0.0.1:{port}" for port in ports]
    asked = requests(min(NUM, 300), seed=1)
    # The longest request alone takes 11 of the blocks; 24 would take 150.
    sizes = {"blocks": 18, "host_blocks": 16, "host_caching": True, "max_sequences": 24, "max_model_len": 400}
    options = sizes | {"max_waiting": 60, "tenant_header": "x-tenant", "kv_events_config": json.dumps(events)}
    with served(**options, env={"PAGED_CHECK": "1"} if NUM <= 1000 else {}) as server:
        with KvSubscriber(*endpoints) as from_the_beginning:
            followed(from_the_beginning, known := KvIndex())
            seen = asyncio.run(press(server.port, asked, NUM, seed=2))
            assert seen.wrong == []
            assert seen.ends["whole"] > NUM / 3
            server.wait_until(lambda: not num_open(server))
            # The latest figures come with a step, so one more is made.
            asyncio.run(press(server.port, asked[:1], 1, seed=3))

            def told(name, **labels):
                return figure(got(server, "/metrics").body, name, **labels)

            server.wait_until(lambda: not told("paged:blocks", state="used"))
            server.wait_until(lambda: told("vllm:generation_tokens_total") >= seen.tokens)
            tiers = got(server, "/debug/index").body
            held = {
                medium: {int(key[-16:], 16) for key in tiers[tier]}
                for tier, medium in (("device", "GPU"), ("host", "CPU"))
            }
            assert followed(from_the_beginning, known) == held
        with KvSubscriber(*endpoints) as late:
            assert followed(late, KvIndex()) == held
        assert got(server, "/debug/check").body == []
        page = got(server, "/metrics").body

    assert figure(page, "paged:blocks", state="used") == 0
    assert figure(page, "paged:blocks", state="free") + figure(page, "paged:blocks", state="cached") == 18
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
    preempted = figure(page, "vllm:num_preemptions_total")
    assert preempted > 0
    print(f"{NUM:,} requests, {seen.ends['whole']:,} of them compared: {dict(seen.ends)}, {dict(seen.codes)}")
    print(f"{seen.tokens:,} tokens seen, {preempted:,.0f} preemptions")
