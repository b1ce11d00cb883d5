"""Agents that pause for tools, on a server whose memory they press on: without hints, and with them.

paged serve --blocks 220 --max-num-seqs 8        # in another terminal
python examples/agent.py http://127.0.0.1:8000/v1
"""

import asyncio
import os
import sys
import time
from statistics import median
from typing import Any

from openai import AsyncOpenAI

NUM_AGENTS, NUM_TURNS, PAUSE_S = 4, 5, 0.2
Turn = tuple[float, int, int]  # seconds to its first token, prompt tokens, those of them that were cached


def hints(session: str, *, is_last: bool) -> dict[str, Any]:
    """What a turn says of the content that it leaves: keep it, a tool works now; or let it go, no turn comes."""
    keep = {"directives": [{"start": 0, "end": None, "priority": 50}], "waits_for": "tool"}
    kind, payload = ("kv.deref", {}) if is_last else ("kv.retain", keep)
    action = {"action_id": "a1", "action_type": kind, "action_version": "1.0", "payload": payload}
    return {"session_id": session, "kv_hints": {"protocol_version": "0.1", "message_id": "m1", "actions": [action]}}


async def ask(client: AsyncOpenAI, messages: list[Any], more: dict[str, Any]) -> tuple[str, Turn]:
    began, first_s, text = time.perf_counter(), 0.0, ""
    how: Any = {"stream": True, "stream_options": {"include_usage": True}, "extra_body": {"ignore_eos": True, **more}}
    stream = await client.chat.completions.create(model="paged", messages=messages, max_tokens=16, **how)
    async for piece in stream:
        if piece.choices and piece.choices[0].delta.content:
            first_s = first_s or time.perf_counter() - began
            text += piece.choices[0].delta.content
    usage: Any = piece.usage
    return text, (first_s, usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens)


async def agent(client: AsyncOpenAI, name: str, *, with_hints: bool) -> list[Turn]:
    """A conversation that grows by what tools bring. Each tool asks the model something of its own, which comes only once."""
    messages, turns = [{"role": "user", "content": f"You are {name}. Fix the test that fails. " * 12}], []
    for number in range(NUM_TURNS):
        text, turn = await ask(client, messages, hints(name, is_last=number == NUM_TURNS - 1) if with_hints else {})
        turns.append(turn)
        once = f"{name} has read in step {number}: return self.value, or raise KeyError. " * 14
        await ask(client, [{"role": "user", "content": once}], {})
        await asyncio.sleep(PAUSE_S)
        found = f"Line {number} of the file: with open(path) as file, return file.read(). " * 3
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": found}]
    return turns


async def main(url: str) -> dict[str, float]:
    """The share of later turns' prompts that was cached, without hints and with them."""
    shares = {}
    async with AsyncOpenAI(base_url=url, api_key=os.environ.get("PAGED_API_KEY", "none")) as client:
        for words, with_hints in (("without hints", False), ("with hints", True)):
            names = [f"agent {number} {words}" for number in range(NUM_AGENTS)]
            every = await asyncio.gather(*(agent(client, name, with_hints=with_hints) for name in names))
            later = [turn for turns in every for turn in turns[1:]]
            shares[words] = sum(cached for _, _, cached in later) / sum(length for _, length, _ in later)
            ttft_ms = 1000 * median(first_s for first_s, _, _ in later)
            print(
                f"{words:14} TTFT of later turns {ttft_ms:4.0f} ms, {shares[words]:4.0%} of their prompts were cached"
            )
    return shares


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
