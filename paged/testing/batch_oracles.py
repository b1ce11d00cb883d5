"""Oracles for every scheduled batch, whatever the policy: limits, order, shares found, progress.

They compare the public state before a step with the batch that it decided. Each sentence begins with its invariant.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from paged.testing.flight import Flight, Key, Path
from paged.testing.life_oracles import beyond_lead
from paged.testing.reserving import RESERVES_ALL

if TYPE_CHECKING:
    from paged.testing.scheduler_rig import SchedulerRig

NUM_PASSING = 4
"""So many requests behind the head of the queue may be admitted before it, where the policy has `max_passes`."""


@dataclass
class Before:
    """The public state just before a step is decided."""

    waiting: list[str]
    contents: set[Path]
    pending: set[Path]
    """What batches that are out are the first to compute."""
    decoding: set[str]
    """Running requests of one sequence, not about to end, that have one token to compute or undecided drafts."""
    is_quiet: bool
    """No batch outstanding, nothing awaited from elsewhere."""


def keys_of(batch: Any) -> list[Key]:
    """(request id, sequence) of each row."""
    return list(zip(batch.ids.tolist(), batch.sequences.tolist(), strict=True))


def observe(rig: SchedulerRig) -> Before:
    """Take down what the oracles compare with."""
    return Before(
        waiting=rig.scheduler.waiting_ids(),
        contents=contents(rig),
        pending={path for flight in rig.flights for path in flight.published},
        decoding={
            id
            for id in rig.live
            if rig.statuses.get(id) == "running"
            and rig.books[id].request.num_sequences == 1
            # Of a request that was forked the first one may have ended.
            and rig.books[id].sequences[0].reason is None
            and (rig.is_undecided((id, 0)) or rig.progress((id, 0)) == len(rig.foreseen((id, 0))) - 1)
            and len(rig.foreseen((id, 0))) < rig.books[id].full_length(0)
        },
        is_quiet=not rig.flights and not rig.loads,
    )


def violations(rig: SchedulerRig, before: Before, flight: Flight) -> list[str]:
    """Everything that is wrong with a batch that was just scheduled."""
    batch = flight.batch
    found = limits(rig, flight) + order(rig, before, batch) + progress(rig, before, batch)
    found += victims(rig, before, batch) + promises(rig, batch) + admission(rig, before, batch)
    return found or foreseen_tokens(rig, flight) + resent_rows(rig, flight) + hits(rig, before, flight)


def limits(rig: SchedulerRig, flight: Flight) -> list[str]:
    """8: token budget, rows and chunks; no sequence has ended, comes twice, or is computed past its full length."""
    world, batch, keys, found = rig.world, flight.batch, flight.keys, []
    if int(batch.num_tokens.sum()) > world.max_tokens_per_step:
        found.append(f"8: {int(batch.num_tokens.sum())} tokens in a step of {world.max_tokens_per_step}")
    if len(keys) > world.max_sequences:
        found.append(f"8: {len(keys)} rows, max_sequences {world.max_sequences}")
    chunks = [int(count) - flight.drafts(place) for place, count in enumerate(batch.num_tokens)]
    if world.max_chunk is not None and max(chunks, default=0) > world.max_chunk:
        found.append(f"8: chunks {chunks}, max_chunk {world.max_chunk}")
    if len(set(keys)) < len(keys):
        found.append(f"8: a sequence is twice in a batch: {keys}")
    if (batch.num_tokens < 1).any() or len(batch.token_ids) != batch.query_start_loc[-1 if len(keys) else 0]:
        found.append(f"8: counts {batch.num_tokens.tolist()} for {len(batch.token_ids)} packed tokens")
    for place, (id, sequence) in enumerate(keys):
        book = rig.books.get(id)
        if book is None or book.is_aborted or book.sequences[sequence].reason is not None:
            found.append(f"8: {id}/{sequence} has ended and is scheduled")
        elif int(batch.seq_lens[place]) >= (full := book.full_length(sequence)):
            found.append(f"8: {id}/{sequence} computes token {int(batch.seq_lens[place])} of {full}, its last")
    return found


def order(rig: SchedulerRig, before: Before, batch: Any) -> list[str]:
    """11: an admitted request stood before all that still wait, but for those that it may pass. Requests that return
    come before it, and it preempts none."""
    entered = [id for id in batch.admitted if id in before.waiting]
    found = []
    still_waits = {id for id in before.waiting if rig.scheduler.status(id) == "waiting" and not rig.books[id].is_idle}
    ahead = [id for id in before.waiting if id in entered or id in still_waits]
    found += _overtaken(rig, entered, ahead)
    # A request that waits for tokens from the caller makes room where no other could go on. One that waited before lost
    # its blocks in an update, and is only reported now. One that gave way to a request which this step ended stays out.
    at_work = [id for id, _ in batch.preempted if not rig.books[id].is_idle and id not in before.waiting]
    others_run = any(id not in entered for id, _ in keys_of(batch))
    if entered and at_work and others_run:
        found.append(f"11: {entered} were admitted in a step that preempted {at_work}")
    if entered:
        # A group that waits for tokens from the caller may be away for as long.
        left_out = [
            id for id in rig.live if rig.scheduler.status(id) in ("paused", "swapped") and not rig.books[id].is_idle
        ]
        if left_out:
            found.append(f"11: {entered} were admitted before {left_out} returned")
    return found


def _overtaken(rig: SchedulerRig, entered: list[str], ahead: list[str]) -> list[str]:
    """11, for those who entered, in that order, of a queue that was `ahead`."""
    policy = getattr(rig.scheduler, "policy", None)
    if policy is not None and policy.order == "cached":
        # What is cached changes within a step. The lead holds whatever it is.
        return beyond_lead(rig, [*entered, *(id for id in ahead if id not in entered)])
    most = getattr(policy, "max_passes", 0)
    if not most:
        wrong = set(ahead[: len(entered)]) != set(entered)
        return [f"11: {entered} were admitted; in order wait {ahead}"] if wrong else []
    found, queue = [], list(ahead)
    for id in entered:
        place = queue.index(id)
        if place:
            passed = rig.books[queue[0]]
            passed.num_passed += 1
            rig.events["passed another"] += 1
            if place > NUM_PASSING or passed.num_passed > most:
                times = f"for the {passed.num_passed}. time; {most} are allowed"
                found.append(f"11: {id}, {place} places behind {queue[0]}, was admitted before it {times}")
        queue.remove(id)
    return found


def victims(rig: SchedulerRig, before: Before, batch: Any) -> list[str]:
    """11, where the `policy` takes from the latest: no request runs on behind one that gave way.

    Checked for requests that were decoding. The worst case of one that was preempted before may be reserved.
    """
    policy = getattr(rig.scheduler, "policy", None)
    if policy is None or policy.victim != "latest" or not batch.preempted:
        return []
    arrival = {id: number for number, id in enumerate(rig.books)}

    def place(id: str) -> tuple[int, int]:
        return 0 if policy.order == "fcfs" else rig.books[id].request.priority, arrival[id]

    ran_on = [
        id
        for id in rig.live
        if rig.statuses.get(id) == rig.scheduler.status(id) == "running"
        and id not in batch.admitted
        and not rig.books[id].num_preempted
    ]
    found = []
    for id, _ in batch.preempted:
        behind = [other for other in ran_on if place(other) > place(id)]
        if id in before.decoding and behind:
            found.append(f"11: {id} gave way, and {behind} behind it run on")
    return found


def promises(rig: SchedulerRig, batch: Any) -> list[str]:
    """8: where all that a request may need is reserved, only one that waits for tokens from the caller gives way.

    Appended tokens are not reserved, and the cancel of a batch may take what others share of it.
    """
    if rig.world.policy not in RESERVES_ALL or not batch.preempted:
        return []
    if any(verb in ("append", "cancel") for verb, _ in rig.calls):
        return []
    gave_way = [id for id, _ in batch.preempted if not rig.books[id].is_idle]
    return [f"8: {gave_way} gave way, though all that they need was reserved"] if gave_way else []


def progress(rig: SchedulerRig, before: Before, batch: Any) -> list[str]:
    """10: with nothing outstanding a step computes something, unless all wait for tokens or have just ended."""
    if len(batch.rows) or not before.is_quiet or len(batch.loads) or rig.carries_moves or rig.saving:
        return []
    statuses = {id: rig.scheduler.status(id) for id in rig.live}
    unable = {"loading", "finished", "rejected"}
    if rig.world.policy in RESERVES_ALL and "loading" in statuses.values():
        # All that is free may be reserved for what loads.
        unable.add("waiting")
    able = [id for id, status in statuses.items() if status not in unable and not rig.books[id].is_idle]
    return [f"10: a step without tokens, though {able} could run: {rig.scheduler.counts()}"] if able else []


def admission(rig: SchedulerRig, before: Before, batch: Any) -> list[str]:
    """10, where the `policy` admits by the prompt: the first that waits comes in if its blocks are there beside those
    that the running ones still need and the watermark, and an admitted request leaves these.

    Checked where nothing else decides: no batch is outstanding, no request is paused or loads, none was preempted.
    """
    policy, world, manager = getattr(rig.scheduler, "policy", None), rig.world, rig.manager
    if policy is None or policy.strategies is not None or (policy.reservation, policy.chunked) != ("prompt", True):
        return []
    if world.drafts or world.groups:
        # Drafts take what is available after all else; what layers of several kinds need, they need only for a while.
        return []
    if not before.is_quiet or len(batch.loads) or rig.carries_moves or rig.saving:
        return []
    statuses = {id: rig.scheduler.status(id) for id in rig.live}
    if not set(statuses.values()) <= {"waiting", "running"} or any(rig.books[id].num_preempted for id in rig.live):
        return []
    rows, size = manager.rows.live.tolist(), world.block_size
    owed = sum(max(0, -(-int(manager.rows.num_tokens[row]) // size) - len(manager.table(row))) for row in rows)
    kept = int(policy.watermark * world.capacity)
    if policy.foresight != "none":
        # Errors of many guesses cancel: from 16 rows on less is kept.
        kept = int(kept * min(1.0, math.sqrt(16 / max(1, len(rows)))))
    entered = [id for id in batch.admitted if statuses.get(id) == "running"]
    # The watermark does not hold up a request that comes in alone, and a group is admitted by what it will share.
    is_ordinary = len(entered) > 1 or (entered and any(id not in entered for id, _ in keys_of(batch)))
    has_groups = any(rig.books[id].request.num_sequences > 1 for id in rig.live)
    found = []
    if is_ordinary and not has_groups and owed + kept > manager.device.num_available:
        found.append(
            f"10: {entered} came in; {manager.device.num_available} blocks are left, {owed} owed, {kept} kept free"
        )
    waiting = [id for id in rig.scheduler.waiting_ids() if not rig.books[id].is_idle]
    if not waiting or len(batch.token_ids) >= world.max_tokens_per_step or len(rows) >= world.max_sequences:
        return found
    request = rig.books[waiting[0]].request
    if policy.foresight != "none":
        # What is there now does not decide.
        return found
    if request.num_sequences == 1 and not request.num_computed:
        needed = -(-len(rig.known(waiting[0], 0)[1]) // size)
        if needed + owed + (kept if rows else 0) <= manager.device.num_available:
            left = f"{manager.device.num_available} are left, {owed} owed, {kept} kept free"
            found.append(f"10: {waiting[0]} waits for {needed} blocks; {left}")
    return found


def foreseen_tokens(rig: SchedulerRig, flight: Flight) -> list[str]:
    """A row samples exactly when the batch computes the last token that is known or being sampled. It computes nothing
    again, and names the batch that samples each unknown token. Behind undecided drafts it computes known tokens alone
    and samples none; its own drafts are the first of those proposed."""
    batch, found = flight.batch, []
    sources = list(zip(batch.source_batches.tolist(), batch.source_places.tolist(), strict=True))
    for index, key in enumerate(flight.keys):
        tokens = rig.foreseen(key)
        stop, num_drafts = flight.end(index), flight.drafts(index)
        start, guessed = flight.start(index), flight.drafted(index)
        first, last = batch.query_start_loc[index : index + 2].tolist()
        if guessed != rig.proposed.get(key, [])[:num_drafts]:
            found.append(f"{key}: drafts {guessed}; proposed are {rig.proposed.get(key)}")
        if rig.is_undecided(key):
            if batch.samples[index] or stop > len(rig.known(*key)[1]):
                found.append(f"{key}: computes up to {stop} and samples behind drafts that are undecided")
            continue
        if num_drafts and not batch.samples[index]:
            found.append(f"{key}: has {num_drafts} drafts and does not sample")
        # One that waits for tokens from the caller may rebuild what a preemption took, and does not sample again.
        starves = rig.books[key[0]].sequences[key[1]].starves
        if bool(batch.samples[index]) != (stop == len(tokens) and not starves):
            found.append(f"{key}: samples {bool(batch.samples[index])} at {stop} of {len(tokens)} tokens")
        done = rig.progress(key) or 0
        if start < done:
            found.append(f"{key}: computes position {start} again; {done} are computed and nothing took them")
        wanted = [(-1, -1) if isinstance(token, int) else token for token in tokens[start:stop]]
        if (said := sources[first:last]) != wanted + [(-1, -1)] * num_drafts:
            found.append(f"{key}: tokens {start} to {stop - 1} come from {said}; they are sampled in {wanted}")
    return found


def resent_rows(rig: SchedulerRig, flight: Flight) -> list[str]:
    """Where the engine has to know all tokens of a row that it is sent again: no request comes in while its samples are
    out, and an unknown token is computed in the batch after its own, in the same row, whose table has only grown."""
    if not rig.world.resumes_known:
        return []
    batch, earlier, found = flight.batch, rig.flights[-1] if rig.flights else None, []
    for id in batch.admitted:
        keys = [(id, sequence) for sequence in range(len(rig.books[id].sequences))]
        if any(other.sources(key) for other in rig.flights for key in keys):
            found.append(f"{id} comes in while its samples are out")
    bounds = batch.query_start_loc.tolist()
    for place, (key, row) in enumerate(zip(flight.keys, batch.rows.tolist(), strict=True)):
        sources = set(batch.source_batches[bounds[place] : bounds[place + 1]].tolist()) - {-1}
        if not sources:
            continue
        if earlier is None or sources != {batch.number - 1} or earlier.number != batch.number - 1:
            found.append(f"{key}: batch {batch.number} computes what batches {sorted(sources)} sample")
            continue
        ends = dict(zip(earlier.batch.rows.tolist(), earlier.batch.seq_lens.tolist(), strict=True))
        num_blocks = -(-ends.get(row, 0) // rig.world.block_size)
        if not num_blocks or not np.array_equal(earlier.tables[row][:num_blocks], flight.tables[row][:num_blocks]):
            found.append(f"{key}: computes what is still to be sampled, with other blocks than in the batch before")
    return found


def hits(rig: SchedulerRig, before: Before, flight: Flight) -> list[str]:
    """A row begins behind the longest prefix that was there throughout the step, or is computed before it.

    Content that is resident before and after the step was so in between. So is what batches that are out compute for
    sequences that kept it. A row earlier in the batch shows its full blocks, if no other has or computes them.
    """
    world, batch = rig.world, flight.batch
    found: list[str] = []
    if world.groups:
        # What each group keeps, and so a hit's length, is not visible from outside; every read shows that it is right.
        for index, key in enumerate(flight.keys):
            start = flight.start(index)
            is_hit = rig.progress(key) is None and start > 0
            rig.events["hit"] += is_hit
            rig.events["hit within a block"] += is_hit and start % world.block_size > 0
        return found
    if not world.prefix_caching or not flight.keys:
        return found
    there = before.contents & contents(rig)
    for earlier in rig.flights:
        there |= {path for path, key in earlier.published.items() if earlier.end_of(key) is not None}
    computing: set[Path] = set()
    for index, (id, sequence) in enumerate(flight.keys):
        namespace, tokens = rig.known(id, sequence)
        size, stop = world.block_size, flight.end(index)
        start = flight.start(index)
        own = paths(rig, namespace, tokens, min(max(stop, len(tokens) - 1), len(tokens)) // size)
        request = rig.books[id].request
        shared = 0
        while request.reads_cache and shared < (len(tokens) - 1) // size and own[shared] in there | computing:
            shared += 1
        if rig.progress((id, sequence)) is None:
            rig.events["hit"] += start > 0
            rig.events["shared in flight"] += any(path in computing for path in own[: start // size])
            rig.events["shared with a batch that is out"] += any(
                path in before.pending for path in own[: start // size]
            )
            # A row that got its blocks at admission had to find what it shares then. One that came back with blocks of
            # its own gains nothing from the same content elsewhere; if it does not write the cache, full ones are, too.
            came_back = start % size > 0 or (world.preallocates and id not in batch.admitted)
            has_own = rig.books[id].sequences[sequence].most > 0 or request.num_computed > 0
            came_back |= not request.writes_cache and has_own
            if start < shared * size and not came_back:
                found.append(f"{id}/{sequence} begins at {start}, though its first {shared * size} tokens are there")
        if world.host_blocks or not request.writes_cache:
            # A node may live on the host alone: that is not visible from outside, and it is not announced again.
            continue
        if rig.progress((id, sequence)) is not None and any(
            path in before.pending or path in computing for path in own[: start // size]
        ):
            # It may have computed the same by itself, and stand on no node of the other one: what follows is no node
            # before that other batch has ended.
            continue
        for path in own[start // size : stop // size]:
            if path in before.contents or path in before.pending or path in computing:
                break
            computing.add(path)
            flight.published[path] = id, sequence
    return found


def contents(rig: SchedulerRig) -> set[Path]:
    """Content that a row can begin behind: on the device, and on the host if it keeps what leaves the device."""
    if rig.world.groups:
        return set()
    found = rig.contents()
    # While copies of a cancelled batch are still to run, nothing else is copied.
    if rig.world.keeps_content_on_host and not rig.carries_moves:
        return found | rig.contents("host")
    return found


def paths(rig: SchedulerRig, namespace: object, tokens: Sequence[int], num_blocks: int) -> list[Path]:
    """The content of each of the first blocks of a sequence, as `cached_contents` spells it."""
    size, root = 4 * rig.world.block_size, rig.cache.root(namespace)
    data = np.array(tokens, np.int32).tobytes()
    blocks = [data[i * size : (i + 1) * size] for i in range(num_blocks)]
    return [(root, *blocks[: i + 1]) for i in range(num_blocks)]
