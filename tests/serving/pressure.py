"""Thousands of requests at a server whose memory is far too small, from clients that leave, run out of time and compete; and what has to hold then.

What may be asked is a few hundred different requests, so that each one's answer is known: an engine with ample memory
gave it, alone.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec

from paged import LLM, SamplingParams

from .http_client import Heard, ask  # noqa: TID252

TENANTS = ("big", "middle", "small")
_BEGINNINGS = (
    "The with statement is used to",
    "A list is a sequence, and a sequence",
    "An exception is raised when the",
    "Return a new dictionary whose keys are",
)
_STOPS = ("the", ".", "\n", " of ")


class Asked(msgspec.Struct, frozen=True):
    """A request that may come, and what its answer is when nothing else runs."""

    body: dict[str, Any]
    text: str
    finish_reason: str


@dataclass
class Seen:
    """What became of all requests: how many ended in which way, and every sentence that should not be."""

    ends: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    prompt_tokens: int = 0
    whole: int = 0
    wrong: list[str] = field(default_factory=list)


def requests(count: int, seed: int) -> list[Asked]:
    """So many different requests, and their answers."""
    random_ = random.Random(seed)
    bodies = []
    for number in range(count):
        beginning = random_.choice(_BEGINNINGS)
        # Prompts share beginnings of different lengths, so that blocks are shared, and told apart by their ends.
        prompt = (beginning + " ") * random_.choice((1, 1, 2, 4, 8)) + random_.choice(("a", "b", "c")) + str(number)
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": random_.choice((1, 4, 16, 40, 80)), "temperature": 0}
        if random_.random() < 0.5:
            body |= {"temperature": random_.choice((0.5, 1.0)), "seed": random_.randrange(2**32)}
            if random_.random() < 0.3:
                body |= {"top_p": 0.9}
        if random_.random() < 0.3:
            body |= {"stop": random_.choice(_STOPS)}
        if random_.random() < 0.2:
            body |= {"ignore_eos": True}
        if random_.random() < 0.2:
            body |= {"presence_penalty": 0.5}
        bodies.append(body)
    params = [SamplingParams(**{name: value for name, value in body.items() if name != "prompt"}) for body in bodies]
    alone = LLM().generate([body["prompt"] for body in bodies], params, use_tqdm=False)
    return [Asked(body, found.text, found.finish_reason) for body, found in zip(bodies, alone, strict=True)]


async def press(port: int, asked: list[Asked], num: int, seed: int, *, at_once: int = 150) -> Seen:
    """Send so many requests, of which `at_once` are open at a time, and look at every answer."""
    random_, seen = random.Random(seed), Seen()
    room = asyncio.Semaphore(at_once)

    async def one(number: int, one_: Asked, how: dict[str, Any], body: dict[str, Any], tenant: str) -> None:
        async with room:
            heard = await ask(port, "/v1/completions", body, headers={"x-tenant": tenant}, **how)
            if heard.status == 429 and heard.error is not None and heard.error["code"] == "overloaded":
                _judge(seen, one_, heard, how, number)
                await asyncio.sleep(float(heard.headers["retry-after-ms"]) / 1000)
                heard = await ask(port, "/v1/completions", body, headers={"x-tenant": tenant}, **how)
            _judge(seen, one_, heard, how, number)

    tasks = []
    for number in range(num):
        one_ = random_.choice(asked)
        how: dict[str, Any] = {}
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
        tasks.append(asyncio.create_task(one(number, one_, how, body, tenant)))
    await asyncio.gather(*tasks)
    return seen


def _judge(seen: Seen, one_: Asked, heard: Heard, how: dict[str, Any], number: int) -> None:
    """Count how a request ended, and say what is wrong with it."""
    error = heard.error
    if heard.is_whole:
        seen.ends["whole"] += 1
        seen.whole += 1
        usage = heard.usage
        assert usage is not None, "it was asked for"
        seen.tokens += usage["completion_tokens"]
        seen.prompt_tokens += usage["prompt_tokens"]
        if heard.text != one_.text or heard.finish_reason != one_.finish_reason:
            seen.wrong.append(
                f"request {number}: {heard.text!r} ({heard.finish_reason}); alone it is {one_.text!r} ({one_.finish_reason})."
            )
        return
    if error is not None:
        seen.ends["refused" if heard.status != 200 else "ended with an error"] += 1
        seen.codes[f"{heard.status} {error['code']}"] += 1
        if heard.status not in (200, 429, 504):
            seen.wrong.append(f"request {number}: status {heard.status}, {error}.")
        if heard.status == 429 and "retry-after" not in heard.headers:
            seen.wrong.append(f"request {number}: 429 does not say when to come again.")
    elif "leave_after" in how or "leave_at_s" in how:
        seen.ends["left"] += 1
    else:
        seen.ends["lost"] += 1
        seen.wrong.append(f"request {number}: the connection ended without an answer (status {heard.status}).")
    if heard.status == 200 and heard.body is None and not one_.text.startswith(heard.text):
        seen.wrong.append(f"request {number}: {heard.text!r} is no beginning of {one_.text!r}.")
