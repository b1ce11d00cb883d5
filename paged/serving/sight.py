"""What the dashboard shows of a running server, as structs: MessagePack between the processes, JSON in a browser.

    Snapshot   the whole at one moment: block map, queues, requests, totals, steps, events, prefixes, sessions
    Story      one request from its arrival to its end, with the reason for each wait

They hold no word and no token of a prompt or an answer.
"""

from __future__ import annotations

import msgspec

from paged.block_manager import GroupStats
from paged.scheduler import RequestView, SchedulerStats

Moment = tuple[float, str, str]
"""Seconds since a request came, a kind (one of KINDS, or "waits"), and a detail."""

KINDS = (
    "came",
    "admitted",
    "first_token",
    "preempted_recompute",
    "preempted_swap",
    "returned",
    "finished",
    "aborted",
    "rejected",
    "error",
)
"""Kinds of events, in the order in which they may happen to a request."""


class BlockSight(msgspec.Struct, frozen=True):
    """The blocks of the device; pages if layers are of several kinds.

    cell_blocks  blocks that one cell of the map stands for; 1 but in large pools
    runs         the map in the order of block ids, as (cell, number of equal ones): a cell is a request's number, or a state of `serving.block_map`, below 0
    free, cached, retained, shared, own, held
                 blocks by state, exact; `own` are in one sequence's table, `held` in none
    """

    cell_blocks: int
    runs: list[tuple[int, int]]
    free: int
    cached: int
    retained: int
    shared: int
    own: int
    held: int


class HostSight(msgspec.Struct, frozen=True):
    """The blocks of the host: free, with content that may come back (cached), and those of suspended requests (used)."""

    free: int
    cached: int
    used: int


class DiskSight(msgspec.Struct, frozen=True):
    """The disk: blocks of this model on it, blocks still to be written, and prompt tokens that came from it."""

    blocks: int
    queued: int
    hit_tokens: int


class SessionSight(msgspec.Struct, frozen=True):
    """A session: its live turns, and what its last turn left.

    waits_for    what its next turn waits for: "tool", "person", or "" if that is unknown
    priority     the level at which it is retained, 1 to 3; 0: it is not
    blocks       full blocks of its last turn; device_blocks, host_blocks: those that are still there
    idle_s, expected_in_s, retained_s
                 seconds since that turn ended, until the next one, and until retention ends; None: there is no such time
    """

    id: str
    tenant: str
    live: int
    waits_for: str
    priority: int
    blocks: int
    device_blocks: int
    host_blocks: int
    pinned_blocks: int
    idle_s: float | None
    expected_in_s: float | None
    retained_s: float | None


class QueueSight(msgspec.Struct, frozen=True):
    """Live requests by state."""

    waiting: int
    running: int
    paused: int
    swapped: int
    loading: int


class RequestSight(RequestView, frozen=True):
    """A live request: the scheduler's view of it, its tenant, its cells in the block map, its times, and what it waits for.

    number  its cells in the block map have it
    reason  why it does not run; "" if it runs, and of all but the first of those that do not
    """

    tenant: str
    number: int
    alive_s: float
    waited_s: float
    reason: str


class StepSight(msgspec.Struct, frozen=True):
    """A step: its number from 1 on, rows, tokens of rows that decode (with drafts) and of prompts, and its seconds. The last token of a
    prompt, computed alone, counts as a decode."""

    number: int
    sequences: int
    decode_tokens: int
    prompt_tokens: int
    seconds: float


class PointSight(msgspec.Struct, frozen=True, array_like=True):
    """The device's blocks at the Unix time `at`, and totals until then."""

    at: float
    used: int
    cached: int
    preemptions: int
    output_tokens: int


class EventSight(msgspec.Struct, frozen=True):
    """An event: its number from 1 on, Unix time, kind (one of KINDS), request and a detail."""

    number: int
    at: float
    kind: str
    id: str
    detail: str


class PrefixSight(msgspec.Struct, frozen=True):
    """Admitted requests that begin with the same block, of which `hash` is a digest (8 hexadecimal digits): their number, their prompt
    tokens, and those of them that were in the cache."""

    hash: str
    requests: int
    hit_tokens: int
    prompt_tokens: int


class Snapshot(msgspec.Struct, frozen=True):
    """A server at one moment.

    unix_time, uptime_s  seconds
    block_size           tokens a block
    requests             running ones, then suspended ones, then waiting ones, each in order; at most 200
    steps                at most 120, the newest last
    totals               since the engine began
    history              points of the last three minutes, at most 180; the newest, of this moment, last
    happened             at most 50 events, the newest last
    prefixes             at most 12, the most used first
    groups               layer groups of a model whose layers are of several kinds; else empty
    sessions             at most 50 of num_sessions, the latest ended turns first
    pinned               blocks that hints have pinned
    disk                 None: there is none
    """

    unix_time: float
    uptime_s: float
    model: str
    policy: str
    block_size: int
    num_blocks: int
    host_blocks: int
    max_tokens_per_step: int
    max_sequences: int
    blocks: BlockSight
    host: HostSight
    queues: QueueSight
    requests: list[RequestSight]
    totals: SchedulerStats
    steps: list[StepSight]
    history: list[PointSight]
    happened: list[EventSight]
    prefixes: list[PrefixSight]
    groups: tuple[GroupStats, ...] = ()
    sessions: list[SessionSight] = []
    num_sessions: int = 0
    pinned: int = 0
    disk: DiskSight | None = None


class Story(msgspec.Struct, frozen=True):
    """One request's life. status is the scheduler's, or "error".

    why       why it is in this status
    timeline  in order; a very long one lacks left_out moments behind its beginning
    holders   at most 20 other requests that hold blocks, and how many, most first
    """

    id: str
    tenant: str
    status: str
    prompt_tokens: int
    came_at: float
    why: str
    timeline: list[Moment]
    left_out: int
    holders: list[tuple[str, int]]
