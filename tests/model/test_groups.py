"""Models with layers of several kinds, on pages that any group may have: they write what `generate` writes, and their bits do not depend on
how they were cut, though every page that a row gives back is poisoned and taken by another.
"""

import os
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from paged import Engine
from paged.attention import StepTokens
from paged.engine.config import EngineConfig
from paged.engine.memory import DEFAULT_BLOCK_SIZE, block_size_of
from paged.errors import InvalidConfig, UnsupportedModel
from paged.model.capacity import bytes_per_block, layered_pool_for, plan_of, pool_for
from paged.model.hook import Mask, _mask, under_way
from paged.model.kept_layers import Sizes, kept_layers
from paged.model.layer_plan import front
from paged.model.runner import runner_for
from paged.model.states.plan import check_plan
from paged.testing.pressure import differences

ARCHITECTURES = [
    "cohere2", "deepseek_v3", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "glm_moe_dsa", "gpt_oss",
    "llama4_text", "mimo_v2_flash", "minimax_m3_vl_text", "mistral",
]  # fmt: skip
WITH_STATES = [
    "falcon_h1", "jamba", "kimi_linear", "lfm2", "mamba", "mamba2", "minimax", "qwen3_5_text", "qwen3_next",
    "recurrent_gemma", "rwkv", "zaya",
]  # fmt: skip
STATES_IN_CI = ("falcon_h1", "jamba", "lfm2", "mamba", "mamba2", "minimax", "qwen3_next", "rwkv")
MAX_TOKENS = 12


class Memory:
    """Pages handed out by lot, and the tables of a few rows, a group at a time."""

    def __init__(self, model, *, block_size=4, num_blocks=400, seed=0, page_bytes=None):
        self.plan = plan_of(model, block_size=block_size, page_bytes=page_bytes)
        self.pool = layered_pool_for(model, self.plan, num_blocks=num_blocks)
        self.pool.poison(torch.arange(num_blocks))
        self.random = np.random.default_rng(seed)
        self.free = list(range(num_blocks))
        # Of each row and group, pages by column.
        self.held = {}
        self.done = {}

    def step(self, counts):
        """A step of so many tokens of each row."""
        for row, count in counts.items():
            start = self.done.setdefault(row, 0)
            for i, group in enumerate(self.plan.groups):
                pages = self.held.setdefault((row, i), {})
                if group.kind == "state":
                    # Behind 0: the state that is read; 1: the one that is written, on other pages or the same.
                    in_place = 0 in pages and self.random.random() < 0.5
                    pages[1] = pages[0] if in_place else [self._drawn() for _ in range(group.pages)]
                    continue
                first = front(group.kind, group.reach, start) // group.block_tokens
                for column in range(first, -(-(start + count) // group.block_tokens)):
                    if column not in pages:
                        pages[column] = [self._drawn() for _ in range(group.pages)]
        starts = [self.done[row] for row in counts]
        numbers = np.array(list(counts.values()))
        return StepTokens.of_groups(
            np.concatenate([np.arange(start, start + n) for start, n in zip(starts, numbers, strict=True)]),
            np.concatenate([[0], numbers.cumsum()]),
            np.array(starts) + numbers,
            tuple(self._table(list(counts), i) for i in range(len(self.plan.groups))),
            self.pool.block_size,
            self._states(list(counts)),
        )

    def _states(self, rows):
        i = self.pool.state_group
        if i is None:
            return None
        none = [-1] * self.plan.groups[i].pages
        return tuple(np.array([self.held[row, i].get(at, none) for row in rows], np.int32) for at in (0, 1))

    def ran(self, counts):
        """What lies before a row's fronts goes back, and is NaN."""
        for row, count in counts.items():
            self.done[row] += count
            for i, group in enumerate(self.plan.groups):
                if group.kind == "state":
                    pages = self.held[row, i]
                    if 0 in pages and pages[0] is not pages[1]:
                        self._give_back(row, i, [0])
                    pages[0] = pages.pop(1)
                    continue
                first = front(group.kind, group.reach, self.done[row]) // group.block_tokens
                self._give_back(row, i, [column for column in self.held[row, i] if column < first])

    def close(self, row):
        for i in range(len(self.plan.groups)):
            self._give_back(row, i, list(self.held[row, i]))

    def _give_back(self, row, group, columns):
        pages = [page for column in columns for page in self.held[row, group].pop(column)]
        self.pool.poison(torch.tensor(pages, dtype=torch.int64))
        self.free += pages

    def _drawn(self):
        return self.free.pop(int(self.random.integers(len(self.free))))

    def _table(self, rows, i):
        width = max((max(self.held[row, i]) + 1 for row in rows), default=0)
        table = np.full((len(rows), width, self.plan.groups[i].pages), -1, np.int32)
        for place, row in enumerate(rows):
            for column, pages in self.held[row, i].items():
                table[place, column] = pages
        return table


def prompts():
    """1, 5, 20 and 61 tokens."""
    words = np.random.default_rng(1)
    return [words.integers(3, 97, length).tolist() for length in (1, 5, 20, 61)]


def run(model, *, chunks, backend="torch_gather", batch_invariant=True, seed=0, texts=None, page_bytes=None):
    """Greedy text after each prompt, and the logits after each of its tokens; or logits of given texts. Prompts are cut by `chunks`, in turn."""
    memory = Memory(model, seed=seed, page_bytes=page_bytes)
    runner = runner_for(model, memory.pool, backend=backend, batch_invariant=batch_invariant)
    known = [list(each) for each in (texts or prompts())]
    ends = [len(each) if texts else len(each) + MAX_TOKENS for each in known]
    logits = [[] for _ in known]
    turn = 0
    while going := [row for row in range(len(known)) if len(logits[row]) < ends[row] - (0 if texts else 1)]:
        counts = {}
        for row in going:
            counts[row] = min(chunks[(turn + row) % len(chunks)], len(known[row]) - len(logits[row]))
        turn += 1
        step = memory.step(counts)
        ids = [known[row][len(logits[row]) + i] for row, count in counts.items() for i in range(count)]
        found = runner.forward(step, np.array(ids, np.int32), np.ones(step.num_tokens, np.bool_))
        memory.ran(counts)
        for row, its in zip(counts, found.split(list(counts.values())), strict=True):
            logits[row] += list(its)
            if len(logits[row]) == len(known[row]) and not texts:
                known[row].append(int(its[-1].argmax()))
            if len(logits[row]) == ends[row]:
                memory.close(row)
    return SimpleNamespace(
        texts=[text[len(prompt) :] for text, prompt in zip(known, prompts(), strict=True)] if not texts else None,
        logits=[torch.stack(each) for each in logits],
        known=known,
    )


@pytest.fixture(scope="module")
def generated(checkpoint, generate):
    return cache(lambda architecture: generate(checkpoint(architecture), prompts(), [MAX_TOKENS] * 4))


# All of them: `make architectures`.
ALL = bool(os.environ.get("PAGED_ALL_FAMILIES"))
IN_CI = (
    "deepseek_v3", "gemma3_text", "gemma3n_text", "glm_moe_dsa", "llama4_text", "mimo_v2_flash", "minimax_m3_vl_text",
)  # fmt: skip
CHOSEN = ARCHITECTURES if ALL else IN_CI
CASES = [
    *((each, "native") for each in CHOSEN),
    *((each, "torch_gather") for each in (CHOSEN if ALL else ("gemma3_text", "glm_moe_dsa", "llama4_text"))),
    # No backend attends.
    ("diffllama", "torch_gather"),
    # Nor here, and attention has states within.
    ("inkling_text", "torch_gather"),
    # And keeps an entry of several tokens; or chooses by embeddings of all positions, and embeds n-grams.
    ("deepseek_v4", "torch_gather"),
    ("qwen4_exp_text", "torch_gather"),
    # Their states are read and written by one code.
    *((each, "torch_gather") for each in (WITH_STATES if ALL else STATES_IN_CI)),
]
PACKED = [
    ("gemma3_text", "native"), ("glm_moe_dsa", "native"), ("llama4_text", "torch_gather"), ("jamba", "torch_gather"),
    ("inkling_text", "torch_gather"), ("deepseek_v4", "torch_gather"),
]  # fmt: skip
PACKED = CASES if ALL else PACKED
REFERENCE = [("gemma3_text", "reference"), ("llama4_text", "reference")]


def assert_is_that_of_generate(found, architecture, generated):
    assert found.texts == generated(architecture)
    assert sum(len(set(text)) for text in found.texts) >= 4 * len(found.texts)


@pytest.mark.parametrize(
    ("architecture", "backend", "batch_invariant"),
    [*((*each, False) for each in PACKED), *((*each, True) for each in REFERENCE)],
)
def test_the_text_is_that_of_generate(architecture, backend, batch_invariant, loaded, generated):
    found = run(loaded(architecture), chunks=(5, 1, 2, 8, 3), backend=backend, batch_invariant=batch_invariant)
    assert_is_that_of_generate(found, architecture, generated)


@pytest.mark.parametrize(("architecture", "backend"), CASES)
def test_the_text_is_that_of_generate_and_bits_depend_neither_on_chunks_nor_on_pages(
    architecture, backend, loaded, generated
):
    model = loaded(architecture)
    some = run(model, chunks=(5, 1, 8, 3), backend=backend)
    assert_is_that_of_generate(some, architecture, generated)
    known = [each[:-1] for each in some.known]
    other = run(model, chunks=(64, 7), backend=backend, seed=1, texts=known)
    for row in range(len(known)):
        assert torch.equal(some.logits[row], other.logits[row]), row
    # The longest alone.
    alone = run(model, chunks=(1000,), backend=backend, seed=2, texts=known[-1:])
    assert torch.equal(some.logits[-1], alone.logits[0])


# A window, chunks, short convolutions and gated delta rules beside full layers: in each what a request keeps grows.
SWAPPED = ("gemma3_text", "llama4_text", "lfm2", "qwen3_next") if ALL else ("gemma3_text", "lfm2")


@pytest.mark.parametrize("architecture", SWAPPED)
def test_requests_that_go_to_the_host_and_come_back_answer_as_each_does_alone(architecture, loaded, short_memory):
    memory, model = short_memory(24), loaded(architecture)
    assert not differences(memory.check(model), memory.check(model, steps_ahead=1))


def test_a_window_of_a_layer_that_attends_by_itself_frees_its_front(loaded):
    groups = plan_of(loaded("inkling_text"), block_size=4).groups
    assert [(each.kind, each.reach) for each in groups] == [("window", 7), ("full", 0), ("state", 0)]


def test_a_block_is_a_whole_number_of_compressed_entries(loaded, tmp_path):
    model, refused = loaded("deepseek_v4"), r"block_size is 6; .* an entry of every 2 and of every 4 .* block_size=8"
    with pytest.raises(InvalidConfig, match=refused):
        Engine(model, block_size=6, num_blocks=50)
    # Before weights are read: these cannot be.
    model.module.config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(InvalidConfig, match=refused):
        Engine(tmp_path, block_size=6)
    assert block_size_of(EngineConfig.of(tmp_path), [1, 4, 128], tmp_path) == 128
    assert block_size_of(EngineConfig.of(tmp_path), [1, 1], tmp_path) == DEFAULT_BLOCK_SIZE


@pytest.mark.parametrize(("architecture", "page_bytes"), [("deepseek_v3", 256), ("glm_moe_dsa", 512)])
def test_latents_of_a_block_may_lie_on_several_pages(architecture, page_bytes, loaded, generated):
    found = run(loaded(architecture), chunks=(5, 1, 8, 3), page_bytes=page_bytes)
    assert_is_that_of_generate(found, architecture, generated)


@pytest.mark.parametrize("architecture", [*CHOSEN, "deepseek_v4", *WITH_STATES])
def test_the_plan_keeps_what_the_configuration_says(architecture, loaded):
    model = loaded(architecture)
    plan, said = plan_of(model, block_size=16), kept_layers(model.module.config, Sizes(element=4, state=4))
    assert {(group.kind, group.reach) for group in plan.groups} == {(each.kind, each.reach) for each in said}
    for length in (1, 5, 64, 100):
        # Units of states are rounded up.
        kept = sum(each.kept_bytes(length) for each in said)
        assert kept <= plan.kept_bytes(length) <= 1.02 * kept


def test_state_layers_that_keep_other_than_the_configuration_says_are_refused(loaded, tmp_path):
    model = loaded("lfm2")
    check_plan(model.state_layers, model.module.config, tmp_path)
    with pytest.raises(UnsupportedModel, match="its state layers keep other than their configuration says"):
        check_plan(model.state_layers[:-1], model.module.config, tmp_path)


def test_a_decoder_of_llama_s_family_with_windows_alone_is_one_call(loaded, monkeypatch):
    model = loaded("mistral")
    memory = Memory(model)
    runner = runner_for(model, memory.pool)
    monkeypatch.setattr(runner.backend, "attend", None)
    assert [group.kind for group in memory.plan.groups] == ["window"]
    step = memory.step({0: 5})
    assert runner.forward(step, np.arange(3, 8, dtype=np.int32), np.ones(5, np.bool_)).isfinite().all()


class Refused(Exception):
    """What a layer wants."""


def refused(what, **_):
    raise Refused(what)


def test_a_mask_says_chunks_by_the_configuration_and_what_may_be_either_is_refused():
    chunks, both = SimpleNamespace(attention_chunk_size=8), SimpleNamespace(attention_chunk_size=8, sliding_window=8)
    assert _mask(config=chunks, local_size=8) == Mask(None, 8)
    assert _mask(config=chunks, local_size=5) == Mask(5)
    assert _mask(config=SimpleNamespace(), local_size=8) == Mask(8)
    with under_way(SimpleNamespace(refuse=refused)), pytest.raises(Refused, match="a window and chunks of one size"):
        _mask(config=both, local_size=8)


@pytest.mark.parametrize("architecture", ["gemma4_text", "mamba2"])
def test_blocks_of_all_layers_are_refused_where_layers_are_not_alike(architecture, loaded):
    for ask in (lambda model: pool_for(model, num_blocks=1, block_size=4), lambda model: bytes_per_block([model], 4)):
        with pytest.raises(
            UnsupportedModel, match="its layers keep states, K and V of several shapes, or attend through"
        ):
            ask(loaded(architecture))
