import pytest

pytest.importorskip("torch")

from paged import Engine
from paged.testing.tiny_model import tiny_model

from .asking import Memory, ask  # noqa: TID252


@pytest.fixture
def made():
    """made(...): an engine of blocks of 4; with `store`, on that one."""
    engines = []

    def make(store=None, **options):
        if store is not None:
            options["open_store"] = lambda *_: store
        usual = {"block_size": 4, "num_blocks": 40, "max_tokens_per_step": 16}
        engines.append(Engine(tiny_model(64), **usual | options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def filled(made):
    """A store in which an engine has left an answer to PROMPT, and that answer."""
    store = Memory()
    return store, ask(made(store))


@pytest.fixture
def store(filled):
    """That store."""
    return filled[0]
