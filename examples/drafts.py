"""Drafts in an engine of one's own: guesses are computed in the same step as the token before them, and checked there.

Guesses come by prompt lookup. Without host blocks and forks no batch has moves; `one_step_ahead.py` makes them.
"""

from collections.abc import Sequence

import numpy as np

from paged import BlockManager, Request, Scheduler

requests = [Request(id=f"r{i}", prompt=[i, 1, 2, *range(i)], max_tokens=40) for i in range(6)]
scheduler = Scheduler(BlockManager(40, 4), max_tokens_per_step=40, max_sequences=6)
slots, known = np.zeros((40, 4), int), {request.id: list(request.prompt) for request in requests}


def following(context: Sequence[int]) -> int:
    return int(context[-1] + 2 * context[-2] + 3 * context[-3]) % 5


def guess(tokens: list[int], most: int = 3) -> list[int]:
    """What came after the last two tokens, where they stood before."""
    for i in range(len(tokens) - 3, 0, -1):
        if tokens[i - 1 : i + 1] == tokens[-2:]:
            return tokens[i + 1 : i + 1 + most]
    return []


for request in requests:
    scheduler.add(request)
while scheduler.has_unfinished:
    batch = scheduler.schedule(drafts={id: guess(known[id]) for id in scheduler.running_ids()})
    slots.reshape(-1)[batch.slot_mapping] = batch.token_ids
    tokens: list[int] = []
    counts = np.zeros(len(batch.rows), int)
    for i, (row, length) in enumerate(zip(batch.rows, batch.seq_lens, strict=True)):
        context = slots[batch.block_tables[row]].ravel()[:length].tolist()
        for end in range(length - batch.num_drafts[i], length + 1) if batch.samples[i] else ():
            tokens.append(following(context[:end]))
            counts[i] += 1
            if end < length and tokens[-1] != context[end]:
                break
    for output in scheduler.update(batch, tokens, counts):
        known[output.id] += output.token_ids
for request in requests:
    for end in range(len(request.prompt), len(request.prompt) + 40):
        assert known[request.id][end] == following(known[request.id][:end]), request.id
stats = scheduler.stats()
print(
    f"{stats.output_tokens} tokens in {stats.steps} steps; {stats.accepted_tokens} of {stats.drafted_tokens} drafts were right"
)
