"""Arrays of running and waiting requests, from which a forecast of admissions begins."""

from __future__ import annotations

import math

import msgspec
import numpy as np
from numpy.typing import NDArray

from .state import State

Counts = NDArray[np.int64]


class Outlook(msgspec.Struct, frozen=True):
    """Running sequences, then suspended ones, which return first, then waiting requests, in order; int64 [n] each.

    num_sequences        of each; 1 for admitted ones
    held                 tokens for which each has slots, or takes them when it enters
    todo                 tokens to compute before the next output; 1 for a decode
    left                 outputs to come of each sequence: by `expected_tokens`, else by the mean of longer ones that
                         ended, else half of what is left of max_tokens
    num_running, num_suspended  sequences of each kind
    mean_output          outputs of a new request; None: none has ended
    max_total            tokens of a sequence, prompt and outputs
    slots, spare         tokens that the pool holds for all of these, and how many of them admission leaves
    block_size           tokens of a block
    max_sequences        that run at a time
    max_tokens_per_step  budget of a step
    chunked              a prompt may be split over steps
    reserves             slots for all outputs are taken when a request enters
    looks_ahead          a request enters only if memory suffices until all have ended
    """

    num_sequences: Counts
    held: Counts
    todo: Counts
    left: Counts
    num_running: int
    num_suspended: int
    mean_output: int | None
    max_total: int
    slots: int
    spare: int
    block_size: int
    max_sequences: int
    max_tokens_per_step: int
    chunked: bool
    reserves: bool
    looks_ahead: bool


def outlook(state: State) -> Outlook:
    manager, columns, books, size = state.manager, state.columns, state.books, state.manager.block_size
    layout, full = manager.layout, max(manager.layout.full_pages, 1)
    running = books.running_rows()
    suspended = np.array([row for request in state.away for row in request.live_rows], np.int64)
    rows = np.concatenate([running, suspended])
    num_rows, reserves = len(rows), state.reservation.reserves
    num, waiting, held = [1] * num_rows, [], []
    for request in state.waiting:
        live = [(tokens, place) for place, tokens in enumerate(request.tokens) if tokens is not None]
        tokens, place = live[0]
        before = request.prompt_len + request.appended[place]
        num.append(len(live))
        waiting.append((len(tokens), before, request.max_total[place], before + (request.request.expected_tokens or 0)))
        held.append(books.to_enter(request) * size // full if reserves else 0)
    in_rows = (
        manager.rows.num_tokens[rows],
        columns.prompt_total[rows],
        columns.max_total[rows],
        columns.expected_total[rows],
    )
    known, before, most, expected = np.hstack([np.array(in_rows), np.array(waiting, np.int64).reshape(-1, 4).T])
    mean = state.lengths.mean_remaining(np.append(known - before, 0), (known - before)[: len(running)])
    guessed = np.where(np.isnan(mean[:-1]), (most - known) // 2, np.rint(mean[:-1])).astype(np.int64)
    left = np.maximum(1, np.minimum(np.where(expected > known, expected - known, guessed), most - known))
    num_sequences = np.array(num, np.int64)
    # A group computes a shared prompt once.
    todo = known * (1 if manager.prefix_caching else num_sequences)
    behind = known[:num_rows] - manager.rows.num_launched[rows]
    todo[:num_rows] = np.maximum(1, behind)
    # Samples of outstanding batches count as received.
    left[:num_rows] = np.maximum(1, left[:num_rows] + np.minimum(0, behind - 1))
    on_device = manager.rows.num_blocks[rows] * size
    kept = np.maximum(books.kept(rows), on_device) if reserves else known[:num_rows]
    of_all = np.concatenate([kept, held if reserves else todo[num_rows:]]).astype(np.int64)
    slots = manager.device.num_available * size + int(on_device.sum())
    if not layout.is_plain:
        # What other groups hold at last is held from the start, of all pages.
        of_all += layout.side_slots(known + left) * num_sequences
        slots = manager.num_blocks * size // full
    return Outlook(
        num_sequences=num_sequences,
        held=of_all,
        todo=todo,
        left=left,
        num_running=len(running),
        num_suspended=len(suspended),
        mean_output=None if math.isnan(mean[-1]) else round(mean[-1]),
        max_total=books.max_total,
        slots=slots,
        spare=books.watermark_blocks * size // full,
        block_size=size,
        max_sequences=state.limits.max_sequences,
        max_tokens_per_step=state.limits.max_tokens_per_step,
        chunked=state.admission.chunked,
        reserves=reserves,
        looks_ahead=state.foresight is not None,
    )
