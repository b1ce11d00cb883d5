"""The requests that are alive, as an operator sees them in a list: figures of each, in the order in which they are served.

Reads everything and changes nothing.
"""

from __future__ import annotations

from itertools import chain, islice

import msgspec

from .request import RequestState
from .state import State


class RequestView(msgspec.Struct, frozen=True, gc=False):
    """A request that is alive. Tokens and blocks of all its sequences together; max_tokens is that of each sequence.

    device_blocks are entries of its block tables, so that a block which two of its sequences share counts twice. hit_tokens were found in
    the prefix cache at its first admission.
    """

    id: str
    status: str
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    device_blocks: int
    host_blocks: int
    hit_tokens: int
    preemptions: int


def listed(state: State, limit: int) -> list[RequestView]:
    """Up to `limit` requests: those that run, those that were suspended, those that wait, and those that wait for append()."""
    waiting = [] if not state.waiting.num else [state.waiting.head(), *state.waiting.behind(limit)]
    every = chain(state.running, state.away, waiting, state.parked.values())
    return [view_of(state, request) for request in islice(every, limit)]


def view_of(state: State, request: RequestState) -> RequestView:
    """The figures of one that is alive."""
    manager = state.manager
    num_output, blocks, host_blocks = request.num_output, 0, 0
    for row, known, appended in zip(request.rows, request.tokens, request.appended, strict=True):
        if row < 0 and known is None:
            # The sequence has ended, and its outputs are counted.
            continue
        total = len(known) if known is not None else manager.rows.num_tokens.item(row)
        num_output += total - request.prompt_len - appended
        if row >= 0:
            blocks += manager.rows.num_blocks.item(row)
            host_blocks += manager.tiers.num_on_host(row)
    return RequestView(
        request.request.id,
        request.status.value,
        request.prompt_len,
        num_output,
        request.request.max_tokens,
        blocks,
        host_blocks,
        request.hit_tokens,
        request.preemptions,
    )
