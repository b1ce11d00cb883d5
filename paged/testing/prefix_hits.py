"""The number of prompt tokens that have to be prefix hits: a manager that forgets hits is wrong, and looks right.

Prompts are served one after the other, in a pool that holds everything or evicts what was used least recently.
`expected_hits` predicts, by the naive model; `hit_violations` serves the prompts on a manager or a scheduler and
compares. While several prompts run at once, the rigs check hits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paged.base.arguments import checked_integer
from paged.errors import InvalidConfig
from paged.testing.content import typed
from paged.testing.naive_model import NaiveManager, NoRoom
from paged.testing.protocol import KVManager, StepScheduler

Prompts = Sequence[Sequence[int]]


def expected_hits(
    prompts: Prompts,
    block_size: int,
    *,
    num_blocks: int | None = None,
    outputs: Prompts | None = None,
    namespaces: Sequence[object] | None = None,
) -> list[int]:
    """Prompt tokens of each prompt that are hits, when each is served to its end before the next.

    num_blocks   of the pool; None: as many as hold everything. Evicted is what was used least recently, children first
    outputs      what each one generates; their content is cached, too, all but the last token's. None: one token each
    namespaces   of each prompt; only equal ones share. None: all are one

    Only full blocks are hits, and at least one token of a prompt is computed. Raises ValueError for a prompt that the
    pool does not hold; InvalidConfig, which is one, for a block size below 1, and for more or fewer `outputs` or
    `namespaces` than prompts.
    """
    checked_integer("block_size", block_size, 1)
    for name, given in (("outputs", outputs), ("namespaces", namespaces)):
        if given is not None and len(given) != len(prompts):
            raise InvalidConfig(f"{name} have to be as many as the prompts, {len(prompts)}; got {len(given)}.")
    known = [[int(token) for token in prompt] for prompt in prompts]
    later = [[int(token) for token in output[:-1]] for output in outputs] if outputs else [[] for _ in known]
    if num_blocks is None:
        num_blocks = sum(-(-len(a + b) // block_size) for a, b in zip(known, later, strict=True))
    naive, hits = NaiveManager(num_blocks, block_size), []
    for number, (prompt, generated) in enumerate(zip(known, later, strict=True)):
        hits.append(naive.add(number, prompt, typed(namespaces[number] if namespaces else None)))
        try:
            _compute(naive, number)
            for token in generated:
                naive.append(number, [token])
                _compute(naive, number)
        except NoRoom:
            num_tokens = len(naive.rows[number].tokens)
            raise ValueError(f"prompt {number}: {num_blocks} blocks do not hold its {num_tokens} tokens.") from None
        naive.free([number])
    return hits


def hit_violations(subject: Any, prompts: Prompts) -> list[str]:
    """Serve the prompts on a new `KVManager` or `StepScheduler`, one after the other. Return a sentence for each that
    has other hits than expected, and for one that a scheduler does not end.

    A scheduler must not preallocate: blocks drawn for outputs evict content. Raises TypeError for what is neither,
    ValueError for a prompt that the pool does not hold.
    """
    is_scheduler = isinstance(subject, StepScheduler)
    if not is_scheduler and not isinstance(subject, KVManager):
        raise TypeError(f"{type(subject).__name__} is neither a KVManager nor a StepScheduler of paged.testing.")
    manager = subject.manager if is_scheduler else subject
    expected = expected_hits(prompts, manager.block_size, num_blocks=manager.num_blocks)
    found: list[str] = []
    for number, (prompt, had_to_be) in enumerate(zip(prompts, expected, strict=True)):
        tokens = [int(token) for token in prompt]
        hits = _scheduler_hits(subject, f"prompt {number}", tokens) if is_scheduler else _manager_hits(subject, tokens)
        if hits is None:
            return [*found, f"prompt {number}, {list(prompt)}: not served after {_most_steps(prompt)} steps"]
        if hits != had_to_be:
            found.append(f"prompt {number}, {list(prompt)}: {hits} tokens were hits; {had_to_be} had to be")
    return found


def _compute(naive: NaiveManager, number: int) -> None:
    row = naive.rows[number]
    naive.next_batch()
    naive.allocate([number], [len(row.tokens) - row.computed])
    naive.confirm()


def _manager_hits(manager: Any, prompt: list[int]) -> int:
    row = manager.add(prompt)
    hits = int(manager.rows.num_computed[row])
    manager.allocate([row], [len(prompt) - hits])
    manager.confirm()
    manager.free([row])
    return hits


def _most_steps(prompt: Sequence[int]) -> int:
    return 60 + 12 * len(prompt)


def _scheduler_hits(scheduler: Any, id: str, prompt: list[int]) -> int | None:
    """The tokens before the first one that is computed; None if the prompt is not served to its end."""
    from paged import Request

    scheduler.add(Request(id=id, prompt=prompt, max_tokens=1))
    first = None
    for _ in range(_most_steps(prompt)):
        if not scheduler.has_unfinished:
            break
        batch = scheduler.schedule()
        if first is None and len(batch.rows):
            first = int(batch.seq_lens[0] - batch.num_tokens[0])
        if not batch.is_empty:
            scheduler.update(batch, np.zeros(int(batch.samples.sum()), np.int32))
    return None if scheduler.has_unfinished else first
