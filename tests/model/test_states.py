"""State layers of transformers' modules on states that lie elsewhere: the text of `generate`, and bits that do not depend on how rows are cut."""

import copy
import json
import os
from itertools import cycle
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from paged.errors import UnsupportedModel
from paged.model.hook import ATTENTION, follow_layers, register, under_way
from paged.model.native.experts import pack_experts
from paged.model.native.packed import pack_linears
from paged.model.states.layer import follow_states
from paged.model.states.plan import check_plan

VOCABULARY, OUTPUTS, TILE, CLOSE = 120, 4, 32, 1e-3
FAMILIES = json.loads(Path(__file__).with_name("state_families.json").read_text())
PROMPTS = [torch.randint(3, VOCABULARY, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (37, 7, 12)]
CUTS = {"whole": [99], "pieces": [5, 1, 8, 3, 12], "single": [1]}


class Rows:
    """Rows of a model, their states and their K and V by hand: a step runs so many tokens of each."""

    def __init__(self, module, layers, is_invariant):
        self.module, self.layers, self.is_invariant = module, layers, is_invariant
        self.tile = TILE if is_invariant else None
        self.states, self.kv, self.done = {}, {}, {}

    def step(self, shares):
        """Logits [tokens, vocabulary] of each share, (row, tokens), in tiles."""
        flat = [(row, token) for row, tokens in shares for token in tokens]
        tile = self.tile or len(flat)
        logits = torch.cat([self._tile(flat[i : i + tile], tile) for i in range(0, len(flat), tile)])
        return logits.split([len(tokens) for _, tokens in shares])

    def _tile(self, flat, places):
        rows = sorted({row for row, _ in flat}, key=[row for row, _ in flat].index)
        counts = [sum(its == row for its, _ in flat) for row in rows]
        starts = [sum(counts[:i]) for i in range(len(rows) + 1)]
        positions = [self.done.get(row, 0) + i for row, count in zip(rows, counts, strict=True) for i in range(count)]
        is_new = [row not in self.done for row in rows]
        self.done |= {row: self.done.get(row, 0) + count for row, count in zip(rows, counts, strict=True)}
        padding = [0] * (places - len(flat))
        ids = torch.tensor([[token for _, token in flat] + padding])
        under = Pass(self, rows, starts, is_new, positions)
        with torch.inference_mode(), under_way(under):
            out = self.module(input_ids=ids, position_ids=torch.tensor([positions + padding]), use_cache=False)
        return out.logits[0, : len(flat)]


class Pass:
    """A forward pass of such rows, and the states of them: what a row has not written reads as NaN."""

    is_long = None

    def __init__(self, of, rows, starts, is_new, positions):
        self.of, self.rows, self.starts, self.is_new, self.positions = of, rows, starts, is_new, positions
        self.is_invariant = of.is_invariant
        self.states = self

    def read(self, unit, piece):
        its = self.of.layers[unit].pieces[piece]
        nothing = torch.full(its.shape, torch.nan, dtype=its.dtype)
        return torch.stack([self.of.states.get((row, unit, piece), nothing) for row in self.rows])

    def write(self, unit, piece, states):
        self.of.states |= {(row, unit, piece): state.clone() for row, state in zip(self.rows, states, strict=True)}

    def pages_of(self, unit):
        return None

    def attend(self, layer, queries, keys, values, options):
        out = torch.zeros(*queries.shape[:2], values.shape[-1])
        for i, row in enumerate(self.rows):
            for token in range(self.starts[i], self.starts[i + 1]):
                kept = self.of.kv.setdefault((row, layer), [])
                kept.append((keys[token], values[token]))
                assert len(kept) == self.positions[token] + 1
                k, v = (
                    torch.stack(each, 1).repeat_interleave(queries.shape[1] // keys.shape[1], 0)
                    for each in zip(*kept[-(options.window or len(kept)) :], strict=True)
                )
                scores = options.capped((k * queries[token][:, None]).sum(-1) * options.scale)
                out[token] = (scores.softmax(-1)[..., None] * v).sum(1)
        return out

    def refuse(self, what):
        raise AssertionError(what)


# All of them: `make architectures`.
IN_CI = ("qwen3_next", "mamba", "mamba2", "lfm2", "minimax", "rwkv")


@pytest.fixture(scope="module", params=FAMILIES if os.environ.get("PAGED_ALL_FAMILIES") else IN_CI)
def models(request):
    """A model of random weights with transformers' attention, and one with ours, whose state layers go by the pass under way."""
    config = CONFIG_MAPPING[request.param](**FAMILIES[request.param])
    register()
    torch.manual_seed(0)
    make = AutoModelForCausalLM.from_config
    theirs = make(copy.deepcopy(config), attn_implementation="eager", dtype=torch.float32).eval()
    ours = make(config, attn_implementation=ATTENTION, dtype=torch.float32).eval()
    with torch.no_grad():
        for path, weights in theirs.named_parameters():
            if weights.dim() > 1 and "A_log" not in path:
                weights.normal_(0, 0.1)
    ours.load_state_dict(theirs.state_dict())
    theirs.generation_config.eos_token_id = None
    follow_layers(ours)
    layers = follow_states(ours)
    pack_linears(ours)
    pack_experts(ours)
    first = Rows(ours, layers, is_invariant=True)
    first.step([(0, [5])])
    return theirs, ours, layers


@pytest.fixture(scope="module")
def expected(models):
    """What transformers writes after each prompt, and its logits [tokens, vocabulary] without any cache."""
    texts, logits = [], []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = models[0].generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=OUTPUTS, do_sample=False)
        texts.append(out[0, len(prompt) :].tolist())
        with torch.no_grad():
            logits.append(models[0](input_ids=out[:, :-1], use_cache=False).logits[0])
    return texts, logits


def apart(ours, theirs):
    """The largest difference, as a part of the largest number."""
    return float((ours - theirs).abs().max() / theirs.abs().max())


def written(rows, cuts, order):
    """Greedy text behind each prompt, and all logits; rows take turns, each with so many tokens in turn."""
    left, found, logits = [list(each) for each in PROMPTS], [[] for _ in PROMPTS], [[] for _ in PROMPTS]
    sizes = cycle(cuts)
    while going := [row for row in order if len(found[row]) < OUTPUTS]:
        shares = [(row, left[row][: next(sizes)]) for row in going]
        for (row, tokens), its in zip(shares, rows.step(shares), strict=True):
            logits[row].append(its)
            left[row] = left[row][len(tokens) :]
            if not left[row]:
                left[row] = [int(its[-1].argmax())]
                found[row] += left[row]
    return found, [torch.cat(each) if each else None for each in logits]


def test_answers_are_generate_s_and_bits_do_not_depend_on_cuts_nor_on_other_rows(models, expected):
    alone = [written(Rows(*models[1:], is_invariant=True), CUTS["whole"], [row]) for row in range(len(PROMPTS))]
    for cuts in CUTS.values():
        found, logits = written(Rows(*models[1:], is_invariant=True), cuts, [2, 0, 1])
        assert found == expected[0]
        assert all(torch.equal(its, alone[row][1][row]) for row, its in enumerate(logits))
    assert max(map(apart, logits, expected[1])) < CLOSE


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_chunks_answer_as_generate_does(models, expected, cuts):
    found, logits = written(Rows(*models[1:], is_invariant=False), cuts, [1, 0, 2])
    assert found == expected[0]
    assert max(map(apart, logits, expected[1])) < CLOSE


def test_a_row_has_the_same_bits_among_many(models):
    rows = Rows(*models[1:], is_invariant=True)
    together = [rows.step([(row, [token + row % 5]) for row in range(TILE)]) for token in (7, 50)]
    for row in (0, 3, 17, TILE - 1):
        alone = Rows(*models[1:], is_invariant=True)
        for token, logits in zip((7, 50), together, strict=True):
            assert torch.equal(alone.step([(row, [token + row % 5])])[0], logits[row])


def test_layers_keep_what_their_configuration_says(models, tmp_path):
    _, ours, layers = models
    check_plan(layers, ours.config, tmp_path)
    with pytest.raises(UnsupportedModel, match="its state layers keep other than their configuration says"):
        check_plan(layers[:-1], ours.config, tmp_path)
