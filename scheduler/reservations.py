"""What a request needs before it may enter or return, and what it reserves: the strategies of `reservation` and `layout`.

Knows how many tokens and blocks each policy asks for. Does not decide who enters, and frees nothing for anyone.
"""

from __future__ import annotations

from paged.scheduler.request import RequestState
from paged.scheduler.state import State


def is_due(state: State, request: RequestState) -> bool:
    """Whether it was preempted so often that it re-enters only with its worst case reserved."""
    bound = state.policy.max_preemptions
    return bound is not None and request.preemptions >= bound


def reserved_tokens(state: State, request: RequestState, sequence: int) -> int:
    """Tokens, prompt and outputs, for which a sequence reserves blocks when it enters.

    A hint of its length that was reached, or never given, is none: max_tokens stands in for it.
    """
    known, most = request.tokens[sequence], request.max_total[sequence]
    row = request.rows[sequence]
    num_known = len(known) if known is not None else int(state.manager.num_tokens[row])
    match state.policy.reservation:
        case "prompt":
            return num_known
        case "context":
            return max(most, state.max_total_of(len(request.rows)))
        case "longest":
            # Of its batch, once it is in one.
            return max(most, state.batch_total) if row >= 0 else most
        case "expected" | "pow2" as reservation:
            outputs = request.request.expected_tokens
            before = request.prompt_len + request.appended[sequence]
            if outputs is None or num_known - before >= outputs:
                return most
            if reservation == "pow2":
                outputs = 1 << (outputs - 1).bit_length()
            return min(most, before + outputs)
    return most


def reserve(state: State, request: RequestState, sequence: int, row: int) -> None:
    """A sequence that has just got its row reserves as the policy says; there is room."""
    total = reserved_tokens(state, request, sequence)
    if state.counts_reserved:
        state.columns.reserved[row] = total
        return
    if state.regions is not None:
        state.regions.take(row, state.blocks_for(total))
    state.manager.reserve(row, state.blocks_for(total))


def blocks_to_enter(state: State, request: RequestState) -> int:
    """Blocks that a waiting request needs in all, shared ones included: its prompt, or what it reserves."""
    reserves_all = is_due(state, request)
    if len(request.rows) == 1 and not state.reserves:
        tokens = request.tokens[0]
        return state.blocks_for(request.max_total[0] if reserves_all or tokens is None else len(tokens))
    live = [sequence for sequence, tokens in enumerate(request.tokens) if tokens is not None]
    blocks = 0
    for sequence in live:
        total = reserved_tokens(state, request, sequence)
        blocks += state.blocks_for(max(total, request.max_total[sequence]) if reserves_all else total)
    # What the first sequence computes the others share.
    return blocks if reserves_all else blocks - state.blocks_shared(len(live), request.prompt_len)


def region_sizes(state: State, request: RequestState) -> list[int]:
    """Blocks of the contiguous region that each sequence of a waiting request takes."""
    live = [sequence for sequence, tokens in enumerate(request.tokens) if tokens is not None]
    return [state.blocks_for(reserved_tokens(state, request, sequence)) for sequence in live]


def has_regions(state: State, request: RequestState) -> bool:
    """Whether the regions of a waiting request are free, where it takes any."""
    return state.regions is None or state.regions.fits(region_sizes(state, request))


def blocks_to_return(state: State, request: RequestState) -> int:
    """Blocks that a paused or swapped request takes from what is available before it may run again."""
    manager = state.manager
    needed = manager.blocks_to_return(request.live_rows)
    for sequence, row in enumerate(request.rows):
        if row < 0:
            continue
        target = request.max_total[sequence] if is_due(state, request) else state.spoken_for(row)
        on_device, on_host = int(manager.num_table_blocks[row]), manager.num_host_tail(row)
        needed += max(0, state.blocks_for(target) - on_device - on_host)
    return needed


def begin_whole_batch(state: State, requests: list[RequestState]) -> None:
    """These requests, which wait, are a batch: note what its rows have in common."""
    known = [len(tokens) for request in requests for tokens in request.tokens if tokens is not None]
    if state.policy.composition == "lockstep":
        state.first_tokens = max(known) if state.policy.padding == "left" else min(known)
    if state.policy.reservation == "longest":
        state.batch_total = common_total(state, requests)


def common_total(state: State, requests: list[RequestState]) -> int:
    """Tokens to which each row of such a batch is preallocated: the longest prompt, or what stands for it in one that comes
    again, and the largest max_tokens; a batch of one request takes what that can use."""
    if len(requests) == 1:
        return max(requests[0].max_total)
    longest = max(request.prompt_len + max(request.appended) for request in requests)
    total = longest + max(request.request.max_tokens for request in requests)
    most = state.limits.max_model_len
    return total if most is None else min(total, most)
