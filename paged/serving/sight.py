"""The pictures of a running server: structs that leave the engine's process as MessagePack and reach a browser as JSON.

    Snapshot   the whole at one moment: block map, queues, requests, totals, steps, events, prefixes, sessions
    Story      one request from its arrival to its end, with the reason for each wait

Nothing here holds a word or a token of a prompt or an answer.
"""

from __future__ import annotations

import msgspec

from paged.block_manager import GroupStats
from paged.scheduler import SchedulerStats

Moment = tuple[float, str, str]
"""Seconds since a request came, a kind (one of KINDS, or "waits"), a detail."""

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
"""Of events, in the order in which a request may meet them."""


class BlockSight(msgspec.Struct, frozen=True):
    """The blocks of the device; pages, where layers are of several kinds.

    cell_blocks  blocks that one cell of the map stands for; 1 but in large pools
    runs         the map in the order of block ids, as (cell, how many in a row): a request's number, or what `serving.block_map` names below 0
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
    """The disk: blocks of this model that lie there, and those that are still to be written; prompt tokens that came from it."""

    blocks: int
    queued: int
    hit_tokens: int


class SessionSight(msgspec.Struct, frozen=True):
    """A session: its turns that are alive, and what its last turn left.

    waits_for    what its next turn waits for: "tool", "person", or "" where that was not said
    priority     the level at which it is retained, 1 to 3; 0: it is not
    blocks       full blocks of its last turn; device_blocks, host_blocks: those that are there still
    idle_s, expected_in_s, retained_s
                 seconds since that turn ended, to the next one, and that it is retained for; None: there is no such time
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
    """Requests that are alive, by state."""

    waiting: int
    running: int
    paused: int
    swapped: int
    loading: int


class RequestSight(msgspec.Struct, frozen=True):
    """A request that is alive. number is that of the block map's cells. Seconds; reason is why it does not run, "" where it does, and where
    many do not and it is not among the first."""

    id: str
    tenant: str
    number: int
    status: str
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    device_blocks: int
    host_blocks: int
    hit_tokens: int
    preemptions: int
    alive_s: float
    waited_s: float
    reason: str


class StepSight(msgspec.Struct, frozen=True):
    """A step: its number from 1 on, rows, tokens of rows that decode (drafts included) and of prompts, and how long it took. A prompt of which
    one token was left to compute counts among those that decode."""

    number: int
    sequences: int
    decode_tokens: int
    prompt_tokens: int
    seconds: float


class PointSight(msgspec.Struct, frozen=True, array_like=True):
    """The device's blocks at a moment, Unix time, and totals until then."""

    at: float
    used: int
    cached: int
    preemptions: int
    output_tokens: int


class EventSight(msgspec.Struct, frozen=True):
    """What happened: its number from 1 on, Unix time, kind (one of KINDS), request and a detail."""

    number: int
    at: float
    kind: str
    id: str
    detail: str


class PrefixSight(msgspec.Struct, frozen=True):
    """Requests that begin with one block's content, `hash` (8 hexadecimal digits of it), and were admitted: their number, their prompt tokens,
    and those of these that were found in the cache."""

    hash: str
    requests: int
    hit_tokens: int
    prompt_tokens: int


class Snapshot(msgspec.Struct, frozen=True):
    """A server at one moment.

    unix_time, uptime_s  seconds
    block_size           tokens a block
    requests             those that run, then those that were suspended, then those that wait, each in order; 200 at most
    steps                the newest last, 120 at most
    totals               since the engine began
    history              of the last three minutes, the newest last and of this moment, 180 at most; between two points of which blocks and
                         totals are the same nothing happened
    happened             the newest last, 50 at most
    prefixes             the most used first, 12 at most
    groups               of a model whose layers are of several kinds; else empty
    sessions             those whose turns ended last first, 50 at most, of num_sessions
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

    why       why it is where it is, to be acted on
    timeline  in order; of a very long one the beginning and the end, and left_out moments between them are gone
    holders   the other requests that hold blocks, and how many, most first; 20 at most
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
