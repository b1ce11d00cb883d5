"""Engines and schedulers that are driven until nothing is left to do, and rows of a manager that are computed."""

from __future__ import annotations

import time
from functools import partial


def driven(engine, most_steps=2000):
    """All outputs that are still to come; nothing may be violated after any step."""
    outputs = []
    for _ in range(most_steps):
        if not engine.has_unfinished:
            return outputs
        outputs += engine.step()
        assert engine.check() == []
    raise AssertionError("the engine does not come to an end")


def wait_until(is_so, limit_s=600.0):
    """Come back as soon as it is so. The limit only ends a wait for what never comes."""
    until = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < until, "it never came to that"
        time.sleep(0.01)


def outputs_of(engine):
    """All outputs of each request, by id."""
    found = {}
    for output in driven(engine):
        found.setdefault(output.id, []).append(output)
    return found


def tokens_of(engine, found=None, most_steps=2000):
    """All tokens of each request, by id; `found` has those that came before, and gets what comes before an error."""
    found = {} if found is None else found
    for _ in range(most_steps):
        if not engine.has_unfinished:
            return found
        for output in engine.step():
            found.setdefault(output.id, []).extend(output.token_ids)
    raise AssertionError("the engine does not come to an end")


def computed(manager, tokens, counts=(), **wishes):
    """A row that has computed these tokens, so many in each batch, or all in one."""
    row = manager.add(tokens, **wishes)
    for count in counts or [int(manager.rows.num_tokens[row] - manager.rows.num_computed[row])]:
        manager.allocate([row], [count])
        manager.confirm()
    return row


def step(scheduler, token=7, now=0.0):
    """One step in which every row that samples gets the same token; nothing may be violated after it. Its batch."""
    batch = scheduler.schedule(now=now)
    if not batch.is_empty:
        scheduler.update(batch, [token] * int(batch.samples.sum()), now=now)
    assert scheduler.check() == []
    return batch


def steps_of(scheduler, token=7, now=0.0, most_steps=2000):
    """The batches of a scheduler that is stepped until nothing is unfinished."""
    batches = []
    while scheduler.has_unfinished:
        assert len(batches) < most_steps, f"no end after {most_steps} steps: {scheduler.counts()}"
        batches.append(step(scheduler, token, now))
    return batches


def around(owner, name):
    """Call the decorated function in the place of a method, with that method before its arguments."""

    def replace(function):
        setattr(owner, name, partial(function, getattr(owner, name)))

    return replace
