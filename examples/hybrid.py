"""An engine of one's own with layers of three kinds in one pool: one keeps all tokens, one a window, one a state.

The stand-in for a model adds up what the three hold: another row's page, or a state of another length, gives another token.
"""

import numpy as np

from paged import Batch, BlockManager, LayerGroup, Request, Scheduler

SIZE, REACH, NUM_PAGES, NUM_TOKENS = 4, 6, 36, 13
FACTORS = np.arange(3, 11).reshape(2, SIZE)  # a state is eight numbers, in two pages
GROUPS = (LayerGroup("full"), LayerGroup("window", reach=REACH), LayerGroup("state", pages=2))
scheduler = Scheduler(BlockManager(NUM_PAGES, SIZE, groups=GROUPS), max_tokens_per_step=24, max_sequences=6)
# A page holds four numbers of whichever layer has it. The last one belongs to no row and stays zero: -1 in a table reads it.
pages = np.zeros((NUM_PAGES + 1, SIZE), int)


def run(batch: Batch) -> list[int]:
    """Every layer writes what the batch computes; then each row reads all that its next token rests on."""
    full, window, state = batch.groups or ()
    sources, copies = batch.moves.device_to_device.T  # blocks in which a row ended are copied for the next turn
    pages[copies] = pages[sources]
    rows, (columns, offsets) = np.arange(len(batch.rows)).repeat(batch.num_tokens), divmod(batch.positions, SIZE)
    is_new = batch.slot_mapping >= 0  # the rest is there already, and another row may read it
    pages[full.tables[rows, columns, 0][is_new], offsets[is_new]] = batch.token_ids[is_new]
    pages[window.tables[rows, columns, 0], offsets] = batch.token_ids**2 % 89
    states = pages[state.read]  # all of them, before one is written
    for row, token in zip(rows, batch.token_ids, strict=True):
        states[row] = (states[row] * FACTORS + token) % 9_973
    pages[state.write] = states
    sums = states.sum(axis=(1, 2))
    for i, (of_full, of_window, end) in enumerate(zip(full.tables, window.tables, batch.seq_lens, strict=True)):
        sums[i] += pages[of_full].ravel()[:end] @ np.arange(end) + pages[of_window].ravel()[:end][-REACH:].sum()
    return [int(number) % 97 for number in sums[batch.samples]]


def alone(tokens: list[int]) -> int:
    """The token that comes next, without any memory."""
    states = [0] * FACTORS.size
    for token in tokens:
        states = [(number * factor + token) % 9_973 for factor, number in enumerate(states, 3)]
    seen = [token**2 % 89 for token in tokens[-REACH:]]
    return (sum(states) + sum(i * token for i, token in enumerate(tokens)) + sum(seen)) % 97


talks, begins = {f"talk {i}": [i, *range(3 + 3 * i)] for i in range(6)}, list[str]()
for talk, known in talks.items():
    scheduler.add(Request(id=talk, prompt=known, max_tokens=NUM_TOKENS))
while scheduler.has_unfinished:
    batch = scheduler.schedule()
    for output in scheduler.update(batch, run(batch)):
        known = talks[talk := output.id.removesuffix(" again")]
        for token in output.token_ids:
            assert token == alone(known), output.id
            known.append(token)
        if output.usage and output.id == talk:
            known += [1, 2, 3]
            scheduler.add(Request(id=f"{talk} again", prompt=known, max_tokens=NUM_TOKENS, priority=-1))
        elif output.usage and output.usage.hit_tokens:
            begins.append(f"{talk} at {output.usage.hit_tokens} of {output.usage.prompt_tokens}")
assert scheduler.check() == []
assert not pages[-1].any()
stats = scheduler.stats()
print(f"{stats.output_tokens} tokens in {NUM_PAGES} pages, each as without memory; {stats.preemptions} preemptions")
print(f"second turns that began where a state was kept: {', '.join(begins)}")
