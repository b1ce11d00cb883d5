"""Engines that are driven until nothing is left to do."""

from __future__ import annotations


def outputs_of(engine, most_steps=2000):
    """All outputs of each request, by id."""
    found = {}
    for _ in range(most_steps):
        if not engine.has_unfinished:
            return found
        for output in engine.step():
            found.setdefault(output.id, []).append(output)
    raise AssertionError("the engine does not come to an end")


def tokens_of(engine, found=None, most_steps=2000):
    """All tokens of each request, by id; `found` has those that came before, and gets what comes before an error."""
    found = {} if found is None else found
    for _ in range(most_steps):
        if not engine.has_unfinished:
            return found
        for output in engine.step():
            found.setdefault(output.id, []).extend(output.token_ids)
    raise AssertionError("the engine does not come to an end")
