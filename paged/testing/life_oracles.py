"""Oracles between any two calls of a scheduler, and at the end of everything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paged.testing import invariants
from paged.testing.books import ExpectedRequest, generate_alone
from paged.testing.naive_layers import full_pages, has_states, pages_for

if TYPE_CHECKING:
    from paged.testing.scheduler_rig import SchedulerRig

ENDED = ("finished", "rejected", "aborted")
ALIVE = ("waiting", "loading", "running", "paused", "swapped")
TRANSITIONS: dict[str, tuple[str, ...]] = {
    "waiting": ("loading", "running", "rejected", "aborted", "finished"),
    "loading": ("running", "waiting", "finished", "rejected", "aborted"),
    "running": ("waiting", "paused", "swapped", "finished", "rejected", "aborted"),
    "paused": ("running", "loading", "waiting", "swapped", "finished", "rejected", "aborted"),
    "swapped": ("running", "loading", "waiting", "finished", "rejected", "aborted"),
}
"""From one look to the next. A step may move a request twice: returned and given up again is not among them."""


def violations(rig: SchedulerRig) -> list[str]:
    """The subject's own check, and the invariants of memory and the figures recomputed."""
    found = [f"check(): {violation}" for violation in rig.scheduler.check()]
    # Moves of a cancelled batch, and a batch that loads for an aborted request, may hold blocks beyond the tables.
    moves = rig.carries_moves or any(len(f.batch.moves) or f.loading for f in rig.flights)
    groups = rig.world.groups
    # A state that a batch reads, and not in place, is held until it ends.
    moves |= (bool(rig.flights) and has_states(groups)) or rig.hints.may_hold
    held = [block for blocks, _ in rig.saving.values() for block in blocks]
    contents = set() if groups else rig.contents()
    found += invariants.memory_violations(
        rig.manager, may_hold=bool(moves), groups=groups, held=held, contents=contents
    )
    return found + rig.figures.violations(rig.scheduler)


def waiting_order(rig: SchedulerRig) -> list[str]:
    """11: requests wait by priority, then by arrival; one that waits for tokens from the caller stands anywhere."""
    arrival = {id: number for number, id in enumerate(rig.books)}
    waiting = [id for id in rig.scheduler.waiting_ids() if not rig.books[id].is_idle]
    if getattr(getattr(rig.scheduler, "policy", None), "order", None) == "cached":
        return beyond_lead(rig, waiting)
    expected = sorted(waiting, key=lambda id: (rig.books[id].request.priority, arrival[id]))
    return [f"11: the waiting stand as {waiting}, by priority and arrival {expected}"] if waiting != expected else []


def beyond_lead(rig: SchedulerRig, standing: list[str]) -> list[str]:
    """11, where the cached come first: by priority; none came later than the lead after one that stands behind it."""
    place = {id: (rig.books[id].request.priority, rig.books[id].arrival) for id in standing}
    lead = rig.scheduler.policy.max_lead
    wrong = [
        (id, other)
        for number, id in enumerate(standing)
        for other in standing[number + 1 :]
        if place[id][0] > place[other][0] or (place[id][0] == place[other][0] and place[id][1] > place[other][1] + lead)
    ]
    return [f"11: {wrong[0][0]} stands before {wrong[0][1]}: {place}, a lead of {lead}"] if wrong else []


def states(rig: SchedulerRig, *, is_part: bool = False) -> list[str]:
    """9: every request is in one state, gets there by a legal way, and all add up. `is_part`: another look follows."""
    counts, found = rig.scheduler.counts(), waiting_order(rig)
    tally, explain = dict.fromkeys(ALIVE, 0), getattr(rig.scheduler, "explain", None)
    for number, (id, book) in enumerate(rig.books.items()):
        status = rig.scheduler.status(id)
        if status in tally:
            tally[status] += 1
        last = rig.statuses.get(id, "waiting")
        if status != last and status not in TRANSITIONS.get(last, ()):
            found.append(f"9: {id} went from {last} to {status}")
        rig.statuses[id] = status
        if status != last:
            rig.events[f"became {status}"] += 1
        if book.is_live and status in ENDED and not rig.scheduler.has_unfinished:
            found.append(f"9: {id} is {status}, and nothing said why")
        if book.is_aborted and status != "aborted":
            found.append(f"9: {id} was aborted and is {status}")
        # An explanation names all others: those whose state changed are asked, and the rest take turns.
        is_asked = status != last or (not is_part and (number + rig.num_looks) % len(rig.books) == 0)
        if explain is not None and is_asked and book.is_live and status not in ENDED:
            explanation = explain(id)
            if explanation.status != status or not str(explanation):
                found.append(f"9: explain says {explanation}, status says {status}")
    if any(counts[name] != number for name, number in tally.items()):
        found.append(f"9: counts {counts}; the requests' own states make {tally}")
    if counts["submitted"] != rig.num_added or sum(counts.values()) != 2 * rig.num_added:
        found.append(f"9: {rig.num_added} were submitted; counts {counts}")
    return found


def ended_outside(rig: SchedulerRig, id: str, outputs: dict[int, tuple[list[int], str | None]]) -> list[str]:
    """Outputs, by sequence, of a request that sampled none of them: right only if it ended outside a batch, whole."""
    book = rig.books.get(id)
    if book is None or book.is_aborted:
        return [f"{id} received {outputs}, though it is gone"]
    live = [number for number, sequence in enumerate(book.sequences) if sequence.reason is None]
    reasons = {reason for _, reason in outputs.values()}
    if sorted(outputs) != live or any(tokens for tokens, _ in outputs.values()) or len(reasons) > 1:
        return [f"{id} received {outputs}; its live sequences are {live}, and nothing was sampled for them"]
    reason, needed = reasons.pop(), blocks_to_go_on(rig, id)
    limit = rig.world.limit_of(book.request)
    if reason == "rejected":
        is_right = book.was_appended_to and any(len(book.sequences[n].tokens) >= limit for n in live)
    else:
        is_right = reason == "length" and needed > rig.world.capacity
    if not is_right:
        return [f"{id} ended with {reason}; it needs {needed} blocks, and {limit} tokens a sequence fit"]
    rig.events[f"ended outside a batch: {reason}"] += 1
    book.end(str(reason))
    book.was_cut_short = True
    return []


def blocks_to_go_on(rig: SchedulerRig, id: str) -> int:
    """Blocks for all tokens of a request's live sequences; equal full blocks count once where content is shared."""
    book, size = rig.books[id], rig.world.block_size
    groups = rig.world.groups
    distinct: set[object] = set()
    for number, sequence in enumerate(s for s in book.sequences if s.reason is None):
        for end in range(0, len(sequence.tokens), size):
            is_shared = rig.world.prefix_caching and end + size <= len(sequence.tokens) - 1
            distinct.add(tuple(sequence.tokens[: end + size]) if is_shared else (number, "own", end))
    if groups:
        sides = [group for group in groups if group.kind != "full"]
        live = [sequence for sequence in book.sequences if sequence.reason is None]
        beside = sum(pages_for(sides, len(sequence.tokens), size) for sequence in live)
        return len(distinct) * full_pages(groups) + beside + len(live) * rig.world.spare_pages
    return len(distinct)


def usage(book: ExpectedRequest, output: Any) -> list[str]:
    """The usage in the last output of a request, where there is one, as far as it can be known without the memory."""
    counted = {
        "prompt_tokens": len(book.request.prompt),
        "output_tokens": sum(len(sequence.outputs) for sequence in book.sequences) + book.replaced_outputs,
        "preemptions": book.num_preempted,
    }
    if not book.request.reads_cache:
        counted["hit_tokens"] = 0
    took = getattr(output, "usage", None)
    said = {name: getattr(took, name, None) for name in counted}
    wrong = [name for name in counted if said[name] not in (None, counted[name])]
    return [f"{book.id} reports {name} {said[name]}; there were {counted[name]}" for name in wrong]


def drain_bound(rig: SchedulerRig) -> int:
    """Steps within which everything has to end: some for each token that is still to come, or to be computed again."""
    tokens = sum(
        len(sequence.tokens) + rig.books[id].request.max_tokens
        for id in rig.live
        for sequence in rig.books[id].sequences
    )
    return 60 + 12 * tokens


def at_rest(rig: SchedulerRig) -> list[str]:
    """12: nothing is held and nothing lives."""
    found = invariants.memory_at_rest(rig.manager)
    counts = rig.scheduler.counts()
    if any(counts[name] for name in ALIVE):
        found.append(f"12: requests are left: {counts}")
    return found


def received(rig: SchedulerRig, book: ExpectedRequest) -> list[str]:
    """A request that nothing disturbed got exactly what it would have got alone with ample memory."""
    if book.is_aborted or book.was_appended_to or book.was_cut_short or book.was_steered:
        return []
    found = []
    for number, sequence in enumerate(book.sequences):
        alone = generate_alone(book.request, number, rig.world.vocabulary, rig.world.limit_of(book.request))
        if (sequence.outputs, sequence.reason) != alone:
            found.append(f"{book.id}/{number} got {sequence.outputs} ({sequence.reason}), alone {alone}")
    return found
