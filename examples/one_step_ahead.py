"""An engine of one's own that schedules a step before the one before it has ended: it runs behind, on nothing but the batches.

The stand-in for a model says the checksum of all that a row's KV holds: a wrong table, source or slot gives another token.
"""

import numpy as np
from numpy.typing import NDArray

from paged import Batch, BlockManager, Request, Scheduler

STOPS = tuple(range(0, 97, 16))
requests = [Request(id=f"r{i}", prompt=[i, *range(3 + 4 * i)], max_tokens=20, stop_token_ids=STOPS) for i in range(8)]
scheduler = Scheduler(BlockManager(20, 4, host_blocks=8, host_caching=True), max_tokens_per_step=24, max_sequences=6)
device, host, tables, out = np.zeros((20, 4), int), np.zeros((8, 4), int), np.zeros((64, 20), int), list[Batch]()
sampled, answers = dict[int, NDArray[np.int32]](), {request.id: list[int]() for request in requests}


def checksum(context: NDArray[np.int64]) -> int:
    return int(np.arange(1, len(context) + 1) @ context) % 97


def run(batch: Batch) -> NDArray[np.int32]:
    """What the device does with a batch when its turn comes: moves, changes of tables, unknown tokens, KV, attention."""
    host[batch.moves.device_to_host[:, 1]] = device[batch.moves.device_to_host[:, 0]]
    device[batch.moves.host_to_device[:, 1]] = host[batch.moves.host_to_device[:, 0]]
    device[batch.moves.device_to_device[:, 1]] = device[batch.moves.device_to_device[:, 0]]
    tables[batch.table_rows, batch.table_columns] = batch.table_blocks
    tokens = batch.token_ids.copy()
    for t in (batch.source_batches >= 0).nonzero()[0]:
        tokens[t] = sampled[batch.source_batches[t]][batch.source_places[t]]
    device.reshape(-1)[batch.slot_mapping] = tokens
    read = [device[tables[row]].ravel()[:n] for row, n in zip(batch.rows, batch.seq_lens, strict=True)]
    sampled[batch.number] = np.array([checksum(context) for context in read], np.int32)
    return sampled[batch.number][batch.samples]


for request in requests:
    scheduler.add(request)
while scheduler.has_unfinished:
    out += [batch] if not (batch := scheduler.schedule()).is_empty else []
    if len(out) == 2 or batch.is_empty:
        for output in scheduler.update(out[0], run(out.pop(0))):
            answers[output.id] += output.token_ids
for request in requests:
    known = [*request.prompt, checksum(np.array(request.prompt))]
    while known[-1] not in STOPS and len(known) < len(request.prompt) + 20:
        known.append(checksum(np.array(known)))
    assert answers[request.id] == known[len(request.prompt) :], request.id
stats = scheduler.stats()
print(f"{stats.output_tokens} tokens as alone; {stats.preemptions} preemptions, {stats.voided_tokens} tokens void")
