"""Models with state layers on pages that any group may have: they write what `generate` writes, and their bits do not depend on how they were cut, though
states move to other pages with every step, and every page that goes back is poisoned and taken by another.
"""

import json
import os
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from paged.attention import StepTokens
from paged.errors import UnsupportedModel
from paged.model.capacity import layered_pool_for, plan_of, pool_for
from paged.model.layer_plan import front
from paged.model.loading import load_model
from paged.model.runner import runner_for

FAMILIES = json.loads(Path(__file__).with_name("state_families.json").read_text())["on_pages"]
OUTPUTS, PAGES = 8, 800
PROMPTS = [np.random.default_rng(n).integers(3, 97, n).tolist() for n in (1, 5, 20, 47)]
CUTS = [5, 1, 8, 3, 12]


class Memory:
    """Pages handed out by lot, the tables of a few rows, and their states: read where the last step wrote, and written elsewhere."""

    def __init__(self, model, seed):
        self.plan = plan_of(model, block_size=4)
        self.pool = layered_pool_for(model, self.plan, num_blocks=PAGES)
        self.pool.poison(torch.arange(PAGES))
        self.random = np.random.default_rng(seed)
        self.free = list(range(PAGES))
        self.blocks, self.states, self.done = {}, {}, {}

    def run(self, runner, shares):
        """Logits [tokens, vocabulary] of each share, (row, tokens)."""
        rows = [row for row, _ in shares]
        counts = np.array([len(tokens) for _, tokens in shares])
        starts = np.array([self.done.get(row, 0) for row in rows])
        tables, states = [], None
        for i, group in enumerate(self.plan.groups):
            if group.kind == "state":
                states = self._states(rows, group.pages)
                tables.append(None)
            else:
                tables.append(self._tables(rows, starts, starts + counts, i, group))
        step = StepTokens.of_groups(
            np.concatenate([np.arange(a, a + n) for a, n in zip(starts, counts, strict=True)]),
            np.concatenate([[0], counts.cumsum()]),
            starts + counts,
            tuple(tables),
            self.pool.block_size,
            states,
        )
        ids = np.array([token for _, tokens in shares for token in tokens], np.int32)
        logits = runner.forward(step, ids, np.ones(len(ids), np.bool_))
        self._ran(rows, starts + counts, states)
        return logits.split(counts.tolist())

    def _states(self, rows, pages):
        read = np.array([self.states.get(row, [-1] * pages) for row in rows], np.int32)
        write = np.array([[self._drawn() for _ in range(pages)] for _ in rows], np.int32)
        return read, write

    def _tables(self, rows, starts, ends, i, group):
        table = np.full((len(rows), -(-max(ends) // 4), group.pages), -1, np.int32)
        for place, (row, start, end) in enumerate(zip(rows, starts, ends, strict=True)):
            held = self.blocks.setdefault((row, i), {})
            first = front(group.kind, group.reach, int(start)) // 4
            for column in [each for each in held if each < first]:
                self._give_back(held.pop(column))
            for column in range(first, -(-end // 4)):
                table[place, column] = held.setdefault(
                    column, held.get(column) or [self._drawn() for _ in range(group.pages)]
                )
        return table

    def _ran(self, rows, ends, states):
        self.done |= dict(zip(rows, ends.tolist(), strict=True))
        if states is not None:
            for row, write in zip(rows, states[1].tolist(), strict=True):
                self._give_back(self.states.get(row, []))
                self.states[row] = write

    def _drawn(self):
        return self.free.pop(int(self.random.integers(len(self.free))))

    def _give_back(self, pages):
        self.pool.poison(torch.tensor(pages, dtype=torch.int64))
        self.free += pages


# All of them: `make architectures`.
IN_CI = ("qwen3_next", "mamba2", "lfm2")


@pytest.fixture(scope="module", params=FAMILIES if os.environ.get("PAGED_ALL_FAMILIES") else IN_CI)
def model(request, saved):
    return load_model(saved(CONFIG_MAPPING[request.param](**FAMILIES[request.param]), 0.15))


def written(model, cuts, order, *, batch_invariant, seed=0):
    """Greedy text behind each prompt, and all logits; rows take turns, each with so many tokens in turn."""
    memory = Memory(model, seed)
    runner = runner_for(model, memory.pool, batch_invariant=batch_invariant)
    left, found, logits = [list(each) for each in PROMPTS], [[] for _ in PROMPTS], [[] for _ in PROMPTS]
    sizes = cycle(cuts)
    while going := [row for row in order if len(found[row]) < OUTPUTS]:
        shares = [(row, left[row][: next(sizes)]) for row in going]
        for (row, tokens), its in zip(shares, memory.run(runner, shares), strict=True):
            logits[row].append(its)
            left[row] = left[row][len(tokens) :]
            if not left[row]:
                left[row] = [int(its[-1].argmax())]
                found[row] += left[row]
    return found, [torch.cat(each) if each else None for each in logits]


def test_the_text_is_that_of_generate_and_bits_depend_neither_on_cuts_nor_on_pages(model, generate):
    texts = generate(model.path, PROMPTS, [OUTPUTS] * len(PROMPTS))
    found, logits = written(model, CUTS, [2, 0, 3, 1], batch_invariant=True)
    assert found == texts
    assert len({token for text in texts for token in text}) >= 3
    for row in range(len(PROMPTS)):
        alone = written(model, [99], [row], batch_invariant=True, seed=1)[1][row]
        assert torch.equal(alone, logits[row])
    assert written(model, CUTS, [1, 3, 0, 2], batch_invariant=False, seed=2)[0] == texts


def test_a_pool_of_blocks_of_all_layers_is_refused(model):
    with pytest.raises(UnsupportedModel, match="keep"):
        pool_for(model, num_blocks=4, block_size=4)
