"""The identity of an engine's KV: equal for equal engines, and another one for whatever changes a bit of it."""

import pytest

pytest.importorskip("torch")

from paged import Engine
from paged.engine.disk_identity import identity_of
from paged.model.checkpoint import named_or_shipped
from paged.model.loading import load_model

pytestmark = pytest.mark.parametrize("is_invariant", [True, False], ids=["batch_invariant", "not"])


def engine_of(batch_invariant, change=lambda embedding: None):
    """An engine whose embedding `change` may edit."""
    model = load_model(named_or_shipped("embedded"), dtype="auto", device="cpu")
    change(model.module.model.embed_tokens.packed)
    return Engine(model, num_blocks=4, batch_invariant=batch_invariant)


def identity(engine, batch_invariant):
    return identity_of(engine.runner, engine.manager.layout, batch_invariant=batch_invariant)[0]


def exchange(embedding):
    """Two numbers of one word that no trial has."""
    first, second = embedding[9, 0, 1].item(), embedding[9, 0, 2].item()
    assert first != second
    embedding[9, 0, 1], embedding[9, 0, 2] = second, first


def test_two_engines_of_one_model_share_an_identity_and_one_of_which_two_numbers_are_exchanged_has_another(
    is_invariant,
):
    engines = engine_of(is_invariant), engine_of(is_invariant), engine_of(is_invariant, exchange)
    one, same, other = (identity(engine, is_invariant) for engine in engines)
    assert one == same != other


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("__version__", "99.0"), ("torch.__version__", "99.0"), ("transformers.__version__", "99.0"),
        ("processor", lambda: "another one"),
    ],
)  # fmt: skip
def test_another_version_or_processor_is_another_identity(is_invariant, monkeypatch, name, other):
    engine = engine_of(is_invariant)
    here = identity(engine, is_invariant)
    monkeypatch.setattr(f"paged.engine.disk_identity.{name}", other)
    assert identity(engine, is_invariant) != here
