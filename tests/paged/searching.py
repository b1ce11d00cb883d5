"""What tests of searches share: made-up models, a search on one of them, and how many blocks an engine comes to hold."""

import torch

from paged.decoding.search import Ahead

VOCABULARY, STOP = 13, 3


def table(seed, heat):
    """Log-probabilities after each two tokens, float32 [13, 13, 13]; tools/search_fixtures.py makes the same."""
    drawn = torch.randn(VOCABULARY, VOCABULARY, VOCABULARY, generator=torch.manual_seed(seed))
    return (drawn * heat).log_softmax(-1)


def hypotheses_of(search, chances, prompt):
    """What a search comes to on a model of two tokens' context."""
    branches = [()]
    while not search.is_over:
        ahead = []
        for tokens in branches:
            before, last = [*prompt, *tokens][-2:]
            values, ids = chances[before, last].topk(min(search.num_candidates, VOCABULARY))
            ahead.append(Ahead(ids.tolist(), values.tolist(), {}))
        branches = [(*branches[place], token) for place, token in search.advance(ahead)]
    return search.hypotheses


def most_used(engine):
    """Blocks that are used at a time, at most, until all has ended."""
    most = 0
    while engine.has_unfinished:
        engine.step()
        most = max(most, engine.manager.device.num_used)
    return most
