"""Drafts: guessed tokens after the known ones, computed in the same step as the token before them.

    row 3 | known ... 17 | drafts 5 9 2 |   update: 5 and 9 were right, 4 follows → known ... 17 5 9 4, 1 slot reused

Drafts get only the budget, memory and length that all else leaves. A state has seen all drafts of a share or none: if
one was wrong, a row with states falls back to the start of its share, and computes again what is known by then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from paged.base.arguments import Tokens, int64_array, tokens_below
from paged.base.growing import rising_from
from paged.errors import InvalidTokens, WrongDrafts

from .request import RequestState, Status
from .rows import Counts
from .state import State, Step

UNKNOWN_DRAFT = -1
"""A draft that the engine itself guesses when the batch runs. It gets a slot; its token is -1 in the batch, too."""


class Drafts(msgspec.Struct, frozen=True, eq=False):
    """Drafts of k rows: rows, counts int64 [k]; token_ids int32 [counts.sum()], packed, ids or UNKNOWN_DRAFT."""

    rows: Counts
    counts: Counts
    token_ids: Tokens


def validated_drafts(state: State, drafts: Drafts | Mapping[Any, Any]) -> Drafts | None:
    """Return the drafts as arrays; None if there are none. In a mapping, keys are request ids or (id, sequence), values
    are token ids. Raises WrongDrafts, also for a row whose request does not run."""
    if isinstance(drafts, Mapping):
        drafts = _by_rows(state.requests, drafts)
    if not isinstance(drafts, Drafts):
        raise WrongDrafts(f"drafts have to be a Drafts, or a mapping from request ids to token ids; got {drafts!r}.")
    size = state.limits.vocabulary_size
    rows, counts, tokens = int64_array(drafts.rows), int64_array(drafts.counts), _tokens(size, drafts.token_ids)
    if rows is None or counts is None or rows.shape != counts.shape or rows.ndim != 1:
        raise WrongDrafts(
            f"drafts: rows and counts have to be integers, a count a row; got {drafts.rows!r}, {drafts.counts!r}."
        )
    if len(counts) and (int(counts.min()) < 0 or int(counts.max()) > len(tokens)):
        raise WrongDrafts(f"drafts: counts from {int(counts.min())} to {int(counts.max())} for {len(tokens)} tokens.")
    if int(counts.sum()) != len(tokens):
        raise WrongDrafts(f"drafts: counts add up to {int(counts.sum())}; there are {len(tokens)} tokens.")
    running = state.running.rows()
    if rows.tobytes() != running.tobytes() and (len(np.unique(rows)) < len(rows) or not np.isin(rows, running).all()):
        _refuse(state, rows)
    return Drafts(rows, counts, tokens) if len(tokens) else None


def place_drafts(state: State, step: Step, drafts: Drafts) -> None:
    """Add drafts to the decodes of this step, as full lengths, and the rest of budget and memory, allow."""
    rows, manager = step.decodes, state.manager
    if not len(rows) or state.composition.one_token_each or step.budget <= 0:
        return
    size = manager.block_size
    proposed, first = drafts.counts, drafts.counts.cumsum() - drafts.counts
    if drafts.rows.tobytes() != rows.tobytes():
        place = np.full(len(manager.rows.num_tokens), -1, np.int64)
        place[drafts.rows] = np.arange(len(drafts.rows))
        place = place[rows]
        proposed, first = np.where(place >= 0, proposed[place], 0), first[place]
    ends = step.decode_starts + 1
    # Drafts and the token after them fit into the row's full length.
    wanted = np.minimum(proposed, np.maximum(state.columns.max_total[rows] - ends - 1, 0))
    if state.columns.not_sampling:
        wanted = np.where(np.isin(rows, list(state.columns.not_sampling)), 0, wanted)
    if int(wanted.sum()) > step.budget:
        wanted = np.clip(step.budget - (wanted.cumsum() - wanted), 0, wanted)
    have = np.maximum(manager.rows.num_blocks[rows], (ends + size - 1) // size)
    # Slots of each row for drafts without more pages.
    room = have * size - ends
    needs = np.maximum(wanted - room + size - 1, 0) // size
    pages = needs * manager.layout.block_pages
    if manager.layout.states:
        draws_states = manager.draws_states(rows)
        pages += ((wanted > 0) & draws_states) * np.int64(manager.layout.state_pages)
        room[draws_states] = 0
    # Admitted requests' needs and the watermark come before drafts.
    available = max(0, state.books.num_free())
    if int(pages.sum()) > available:
        fits = pages.cumsum() <= available
        wanted, needs = np.where(fits, wanted, np.minimum(room, wanted)), np.where(fits, needs, 0)
    total = int(wanted.sum())
    if not total:
        return
    manager.lengthen(rows, ends + wanted, have, needs)
    tokens = drafts.token_ids
    if total < len(tokens) or proposed is not drafts.counts:
        tokens = tokens[rising_from(first, wanted)]
    step.lengthen(wanted, tokens)


def _by_rows(requests: Mapping[str, RequestState], drafts: Mapping[Any, Any]) -> Drafts:
    rows, parts = [], []
    for key, tokens in drafts.items():
        request_id, sequence = key if isinstance(key, tuple) and len(key) == 2 else (key, 0)
        request = requests.get(request_id) if isinstance(request_id, str) else None
        if request is None or not isinstance(sequence, int) or not 0 <= sequence < len(request.rows):
            raise WrongDrafts(f"drafts: {key!r} is no sequence of a request that is alive.")
        if request.status is not Status.RUNNING or request.rows[sequence] < 0:
            raise _not_running(request)
        rows.append(request.rows[sequence])
        parts.append(_tokens(None, tokens))
    counts = np.array([len(part) for part in parts], np.int64)
    return Drafts(np.array(rows, np.int64), counts, np.concatenate([np.empty(0, np.int32), *parts]))


def _not_running(request: RequestState) -> WrongDrafts:
    return WrongDrafts(f'drafts: request "{request.id}" is {request.status.value}; only those that run take drafts.')


def _tokens(vocabulary_size: int | None, values: Any) -> Tokens:
    try:
        array = int64_array(values)
        if array is None or array.ndim != 1:
            return tokens_below(values, vocabulary_size)
        tokens_below(array[array != UNKNOWN_DRAFT], vocabulary_size)
        return array.astype(np.int32)
    except (InvalidTokens, TypeError) as error:
        raise WrongDrafts(f"drafts: {error}") from None


def _refuse(state: State, rows: Counts) -> None:
    """Raise WrongDrafts for the first of these rows that may not have drafts; there is one."""
    owners = state.columns.owner
    for place, row in enumerate(rows.tolist()):
        request = owners[row] if 0 <= row < len(owners) else None
        if request is None:
            raise WrongDrafts(f"drafts: row {row} serves no request.")
        if request.status is not Status.RUNNING:
            raise _not_running(request)
        if row in rows[:place]:
            raise WrongDrafts(f"drafts: row {row} is listed twice.")
