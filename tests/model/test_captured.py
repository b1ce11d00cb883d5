"""Captured decodes: the numbers of each step reach the tensors that a graph reads.

What stands in for a graph here runs the captured pass again, on those tensors alone; `make gpu` runs real ones.
"""

import numpy as np
import pytest

from paged import SamplingParams
from paged.attention import get_backend
from paged.engine.engine import Engine
from paged.errors import PagedWarning
from paged.model import runner
from paged.model.captured import Captured, CapturedDecodes
from paged.testing.engine_world import EngineRequest
from paged.testing.pressure import answers_of, differences


class Renewing:
    """torch_gather, whose plan of a step can be replaced by that of another one."""

    name, is_invariant, piece = "renewing", False, 1

    def __init__(self):
        self._theirs = get_backend("torch_gather")

    def check(self, shape):
        self._theirs.check(shape)

    def prepare(self, step, pool):
        return [self._theirs.prepare(step, pool)]

    def renew(self, plan, step, pool):
        plan[:] = self.prepare(step, pool)

    def attend(self, queries, pool, layer, plan, options):
        return self._theirs.attend(queries, pool, layer, plan[0], options)


def stand_in(self, step, inputs):
    plan = self._backend.prepare(step, self._pool)
    logits = self._forward(step, inputs, plan)
    return Captured(lambda: logits.copy_(self._forward(step, inputs, plan)), inputs, plan, logits)


def engine_of(model, decodes=None, **options):
    engine = Engine(
        model,
        num_blocks=options.pop("num_blocks", 60),
        block_size=4,
        backend="torch_gather",
        batch_invariant=False,
        max_sequences=8,
        **options,
    )
    if decodes is not None:
        engine.runner.backend = Renewing()
        engine.runner._decodes = decodes(engine.runner._decoded, engine.runner.backend, engine.pool)
    return engine


def requests():
    words = np.random.default_rng(3)
    lengths = [1, 2, 3, 9, 17, 30]
    return [
        EngineRequest(id=str(length), prompt=words.integers(3, 97, length).tolist(), max_tokens=4 + length % 20)
        for length in lengths
    ]


@pytest.mark.parametrize("options", [{}, {"num_blocks": 14, "host_blocks": 20}, {"steps_ahead": 1}], ids=str)
def test_replayed_decodes_give_what_decodes_give(loaded, monkeypatch, options):
    monkeypatch.setattr(CapturedDecodes, "_captured", stand_in)
    model = loaded("llama")
    engine = engine_of(model, CapturedDecodes, **options)
    found, wanted = answers_of(engine, requests()), answers_of(engine_of(model, **options), requests())
    assert found.tokens == wanted.tokens and not found.violations
    for who, rows in wanted.logits.items():
        np.testing.assert_allclose(np.array(found.logits[who]), np.array(rows), rtol=1e-4, atol=1e-4)
    shapes = set(engine.runner._decodes.graphs)
    assert len(shapes) > 3 and all(n.bit_count() == columns.bit_count() == 1 for n, columns in shapes)
    assert engine.pool.pages.on_device[-1].eq(0).all()
    engine.close()


def test_the_logits_of_one_decode_outlive_the_next(loaded, monkeypatch):
    monkeypatch.setattr(CapturedDecodes, "_captured", stand_in)
    engine = engine_of(loaded("llama"), CapturedDecodes)
    kept = []
    engine.on_logits = lambda id, place, row: kept.append((row, row.clone()))
    engine.add_request([5, 6, 7], SamplingParams(max_tokens=6, ignore_eos=True))
    while engine.has_unfinished:
        engine.step()
    assert len(kept) == 6 and all(row.equal(copy) for row, copy in kept)
    engine.close()


def test_where_capturing_fails_it_is_said_once_and_decodes_go_on(loaded, monkeypatch):
    def fail(self, step, inputs):
        raise RuntimeError("operation not permitted when stream is capturing\nmore of it")

    monkeypatch.setattr(CapturedDecodes, "_captured", fail)
    model = loaded("llama")
    engine = engine_of(model, CapturedDecodes)
    with pytest.warns(PagedWarning, match=r"decodes run uncaptured, which is slower: operation .* capturing$") as said:
        found = answers_of(engine, requests())
    assert len(said) == 1
    assert not differences(found, answers_of(engine_of(model), requests()))
    engine.close()


@pytest.mark.parametrize(
    ("architecture", "is_plain"), [("llama", True), ("gpt2", True), ("deepseek_v3", False), ("falcon", False)]
)
def test_captured_are_models_whose_attention_a_backend_does_on_k_and_v(loaded, architecture, is_plain):
    assert runner._is_plain(loaded(architecture)) == is_plain
