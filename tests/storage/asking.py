"""What tests of an engine with a disk below its memory share: a store in a dictionary, and how an answer is asked for."""

from threading import Event

import numpy as np

from paged import SamplingParams
from paged.storage import StoreStats

from ..driving import driven  # noqa: TID252

PROMPT = [7 * place % 61 + 1 for place in range(43)]


class Memory:
    """A store in a dictionary, which waits with what it reads for `may_read`, and gives `breaks` blocks at most."""

    def __init__(self):
        self.blocks, self.may_read, self.breaks = {}, Event(), 10**9
        self.may_read.set()

    def look_up(self, keys):
        return next((place for place, key in enumerate(keys) if key not in self.blocks), len(keys))

    def read(self, keys, into):
        assert self.may_read.wait(60)
        count = min(len(keys), self.breaks)
        for place in range(count):
            into[place] = self.blocks[keys[place]]
        return count

    def write(self, keys, copy):
        places = [place for place, key in enumerate(keys) if key not in self.blocks]
        if places:
            self.blocks.update(zip([keys[place] for place in places], copy(places), strict=True))
        return len(keys)

    def stats(self):
        return StoreStats(held=len(self.blocks))

    def close(self):
        pass


def begun(engine, prompt, id, max_tokens=6, **options):
    """Add a request; the list in which its logits come to lie."""
    logits = []
    engine.on_logits = lambda of, _, row: logits.append(row.numpy().copy()) if of == id else None
    engine.add_request(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True), id=id, **options)
    return logits


def ask(engine, prompt=PROMPT, id="a", max_tokens=6, **options):
    """Tokens, logits and cached tokens of an answer."""
    logits = begun(engine, prompt, id, max_tokens, **options)
    outputs = driven(engine)
    tokens = [token for output in outputs for token in output.token_ids]
    return tokens, np.array(logits), outputs[-1].usage.hit_tokens


def assert_same(found, expected, cached=None):
    """Two answers are equal bit by bit; the first one computed all but `cached` tokens of its prompt, if that is given."""
    assert found[0] == expected[0]
    assert np.array_equal(found[1], expected[1])
    assert cached in (None, found[2])
