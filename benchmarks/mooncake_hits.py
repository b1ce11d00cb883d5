"""Prefix hits on a whole Mooncake trace, to the token: what the scheduler found against what the trace's hash ids say.

    python benchmarks/mooncake_hits.py mooncake_conversation.jsonl

Requests go one after another through `BlockManager` and `Scheduler` with memory for all of them; each ends after one token and leaves
its prompt cached. The other count never sees a token: it walks the raw `hash_ids` of the file. Prompts are made one at a time. The
trace (59 minutes of a chat service, 144.8 million prompt tokens) is published at https://github.com/kvcache-ai/Mooncake.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

from paged import BlockManager, Request, Scheduler
from paged.study.traces import read_trace

HASHED_TOKENS = 512


def hits_by_hash_ids(path: Path, block_size: int, limit: int | None) -> int:
    """Hit tokens by the file alone: the longest prefix of known ids, in full blocks, at least one token of a prompt left out."""
    known: dict[int, int] = {}
    hits = 0
    with path.open() as lines:
        for number, line in enumerate(lines):
            if number == limit:
                break
            record = json.loads(line)
            prompt_tokens = record["input_length"]
            # The last id stands for what is left of the prompt, so a known id may be known for fewer tokens than are wanted.
            wanted = [
                (id, min(HASHED_TOKENS, prompt_tokens - HASHED_TOKENS * i)) for i, id in enumerate(record["hash_ids"])
            ]
            found = 0
            for id, tokens in wanted:
                found += min(known.get(id, 0), tokens)
                if known.get(id, 0) < tokens:
                    break
            hits += min(found, prompt_tokens - 1) // block_size * block_size
            for id, tokens in wanted:
                known[id] = max(known.get(id, 0), tokens)
    return hits


def hits_by_scheduler(path: Path, block_size: int, limit: int | None) -> tuple[int, int]:
    """Hit tokens and prompt tokens of the same requests, run to their end one after another by the scheduler."""
    trace = read_trace(path, limit=limit)
    prompt_tokens = trace.prompt_tokens
    num_blocks = int((-(-(prompt_tokens + 1) // block_size)).sum())
    longest = int(prompt_tokens.max())
    scheduler = Scheduler(BlockManager(num_blocks, block_size), max_tokens_per_step=longest, max_sequences=1)
    hits = 0
    for number in range(len(trace)):
        scheduler.add(Request(id=str(number), prompt=trace.prompt(number), max_tokens=1))
        while scheduler.has_unfinished:
            batch = scheduler.schedule()
            tokens = np.zeros(int(np.count_nonzero(batch.samples)), np.int32)
            for output in scheduler.update(batch, tokens):
                if output.usage is not None:
                    hits += output.usage.hit_tokens
    return hits, int(prompt_tokens.sum())


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Compare the scheduler's prefix hits with a Mooncake trace's hash ids."
    )
    parser.add_argument("trace", type=Path, help="a Mooncake trace, JSON Lines")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--limit", type=int, default=None, help="only the first so many requests")
    arguments = parser.parse_args()
    expected = hits_by_hash_ids(arguments.trace, arguments.block_size, arguments.limit)
    started = time.perf_counter()
    found, prompt_tokens = hits_by_scheduler(arguments.trace, arguments.block_size, arguments.limit)
    seconds = time.perf_counter() - started
    print(f"prompt tokens       {prompt_tokens:>13,}")
    print(f"hits by hash_ids    {expected:>13,}  {expected / prompt_tokens:.2%}")
    print(f"hits by scheduler   {found:>13,}  in {seconds:.1f} s")
    print("equal, to the token" if found == expected else f"DIFFERENT by {found - expected:,} tokens")
    return 0 if found == expected else 1


if __name__ == "__main__":
    sys.exit(main())
