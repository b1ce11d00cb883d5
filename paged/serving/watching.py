"""A record of an engine's requests: events, the life of each, and snapshots of a moment.

    came ──> admitted ──> first token ──> finished        the reason for each wait between them is noted when it begins
                 └── preempted ──> returned ──┘

Runs in the engine's process and thread.
"""

from __future__ import annotations

import time
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from paged.errors import UnknownRequest
from paged.scheduler import Batch
from paged.serving.block_map import (
    CACHED,
    FREE,
    HELD,
    RETAINED,
    SHARED,
    block_cells,
    groups_of,
    merged,
    runs_of,
    tables_of,
)
from paged.serving.kv_hints import shown
from paged.serving.sight import (
    BlockSight,
    DiskSight,
    EventSight,
    HostSight,
    Moment,
    PointSight,
    PrefixSight,
    QueueSight,
    RequestSight,
    SessionSight,
    Snapshot,
    StepSight,
    Story,
)

if TYPE_CHECKING:
    from paged.engine.engine import Engine
    from paged.engine.results import EngineOutput
    from paged.scheduler import RequestView, SessionView

MAX_CELLS = 16_384
MAX_REQUESTS = 200
MAX_REASONS = 30
MAX_STEPS = 120
MAX_POINTS, POINT_S, HISTORY_S = 180, 2.0, 180.0
"""Points of the history: how many, the time between them while steps run, and the time that they span."""
MAX_EVENTS = 50
MAX_PREFIXES = 12
MAX_SESSIONS = 50
MAX_ENDED = 1000
MAX_HOLDERS = 20
_KEPT_PREFIXES = 4096
_KEPT_MOMENTS = 256
_FIRST_MOMENTS = 16
"""Moments kept of the beginning of a life with more than _KEPT_MOMENTS."""
_REASONS_A_STEP = 8
"""Most reasons computed in a step, since a thousand requests may come at once; later steps compute the others."""
_UNKNOWN = 1 << 32
"""From here on numbers are of requests that `Watcher.came` did not name."""

_ENDS = {"stop": "finished", "length": "finished", "abort": "aborted", "rejected": "rejected", "error": "error"}


@dataclass(slots=True)
class _Life:
    """The record of one request. Times are the engine's clock's; `away_since` is None while it runs."""

    number: int
    tenant: str
    prompt_tokens: int
    prefix: str | None
    came: float
    away_since: float | None
    waited: float = 0.0
    was_admitted: bool = False
    # Whether its reason as the first of the queue is noted.
    has_led: bool = False
    timeline: list[Moment] = field(default_factory=list)
    left_out: int = 0
    # Set when it has ended.
    status: str = ""
    why: str = ""

    def note(self, now: float, kind: str, detail: str) -> None:
        self.timeline.append((round(max(0.0, now - self.came), 4), kind, detail))
        if len(self.timeline) > _KEPT_MOMENTS:
            del self.timeline[_FIRST_MOMENTS]
            self.left_out += 1

    def stop(self, now: float) -> None:
        """Note that it does not run from now on."""
        if self.away_since is None:
            self.away_since = now

    def run(self, now: float) -> float:
        """Note that it runs from now on; return the seconds that it did not."""
        if self.away_since is None:
            return 0.0
        gone, self.away_since = max(0.0, now - self.away_since), None
        self.waited += gone
        return gone


class Watcher:
    """Records arrivals, steps and ends, which the engine's caller reports; makes a Snapshot, or one request's Story.

    engine  `Engine.on_batch` gives the batch that `stepped` takes
    clock   seconds; `now` is of this clock
    model   the name to show; None: that of the model's folder
    wall    Unix time

    The caller serialises calls, with those of the engine. It keeps the lengths of prompts, and nothing of answers.
    """

    def __init__(
        self,
        engine: Engine,
        clock: Callable[[], float],
        *,
        model: str | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._engine, self._scheduler = engine, engine.scheduler
        self._clock, self._wall = clock, wall
        self._model = model if model is not None else engine.model.path.name
        self._began = clock()
        self._alive: dict[str, _Life] = {}
        self._ended: OrderedDict[str, _Life] = OrderedDict()
        # New requests: neither admitted, nor with a noted reason.
        self._fresh: dict[str, None] = {}
        # Admitted requests without a token.
        self._awaited: dict[str, None] = {}
        self._head: str | None = None
        self._steps: deque[StepSight] = deque(maxlen=MAX_STEPS)
        self._stepped_at = self._began
        # Their times are of the engine's clock.
        self._points = deque([self._point(self._began)], maxlen=MAX_POINTS - 2)
        self._events: deque[tuple[float, int, str, str, str]] = deque(maxlen=MAX_EVENTS)
        # By hash: requests, hit tokens, prompt tokens; the latest use last.
        self._prefixes: OrderedDict[str, list[int]] = OrderedDict()
        self._num_came = self._num_steps = self._num_events = 0

    def came(self, request_id: str, tenant: str, num_prompt_tokens: int, prefix: str | None, now: float) -> None:
        """Note that the engine took a request at `now`. `prefix`: 8 hexadecimal digits for its first block; None: it has no full block."""
        self._keep_points(now)
        self._ended.pop(request_id, None)
        self._num_came += 1
        life = self._alive[request_id] = _Life(self._num_came, tenant, num_prompt_tokens, prefix, now, now)
        self._fresh[request_id] = None
        self._note(request_id, life, now, "came", f"prompt of {num_prompt_tokens:,} tokens")

    def refused(self, request_id: str, tenant: str, num_prompt_tokens: int, why: str, now: float) -> None:
        """Note a refused request; `why` is a sentence."""
        self._num_came += 1
        life = _Life(self._num_came, tenant, num_prompt_tokens, None, now, now)
        self._note(request_id, life, now, "rejected", why)
        self._end(request_id, life, "rejected", why)

    def stepped(self, batch: Batch | None, outputs: Iterable[EngineOutput], now: float, seconds: float) -> None:
        """Note a step that took `seconds` and ended at `now`. `batch` is the one that ran; None: none did. Only a request's first and last
        of `outputs` matter."""
        if batch is not None:
            self._count(batch, seconds)
            for request_id, how in batch.preempted:
                self._preempted(request_id, how, now)
            for request_id in batch.admitted:
                self._admitted(request_id, now)
            if self._fresh:
                self._note_reasons(now)
            self._note_first(now)
        self._stepped_at = now
        self._keep_points(now)
        awaited = self._awaited
        for output in outputs:
            if output.finished:
                self.ended(output, now)
            elif awaited and output.token_ids and output.id in awaited:
                self._first_token(output.id, self._alive[output.id], now)

    def ended(self, output: EngineOutput, now: float) -> None:
        """Note a request's last output: of a step, or of an abort. Does nothing for a request that has ended already."""
        request_id, reason = output.id, output.finish_reason or ""
        life = self._alive.pop(request_id, None)
        if life is None:
            return
        kind = _ENDS[reason]
        usage = output.usage
        if not life.was_admitted and usage is not None and usage.output_tokens:
            # The step that admitted it was cancelled, and the same step, tried again, was its last.
            self._begins(request_id, life, usage.hit_tokens, now)
        if output.token_ids and request_id in self._awaited:
            self._first_token(request_id, life, now)
        self._fresh.pop(request_id, None)
        self._awaited.pop(request_id, None)
        life.run(now)
        wrote = f"{0 if usage is None else usage.output_tokens:,} tokens"
        if kind == "finished":
            detail = f"{'at a stop' if reason == 'stop' else 'by its length'}, after {wrote}"
        elif kind == "aborted":
            detail = f"after {wrote}"
        elif kind == "rejected":
            detail = self._reason_of(request_id)
        else:
            detail = output.error or ""
        self._note(request_id, life, now, kind, detail)
        self._end(request_id, life, kind, detail)

    def snapshot(self) -> Snapshot:
        """Return what the dashboard shows now."""
        engine, scheduler = self._engine, self._scheduler
        manager, limits, now, unix_time = engine.manager, scheduler.limits, self._clock(), self._wall()
        counts, offset = scheduler.counts(), unix_time - now
        prefixes = sorted(self._prefixes.items(), key=lambda item: (-item[1][0], -item[1][1], item[0]))
        return Snapshot(
            unix_time=round(unix_time, 3),
            uptime_s=round(now - self._began, 3),
            model=self._model,
            policy=scheduler.policy.name,
            block_size=manager.block_size,
            num_blocks=manager.num_blocks,
            host_blocks=manager.num_host_blocks,
            max_tokens_per_step=limits.max_tokens_per_step,
            max_sequences=limits.max_sequences,
            blocks=self._blocks(),
            host=HostSight(manager.host.num_free, manager.host.num_cached, manager.host.num_used),
            queues=QueueSight(**{name: counts[name] for name in QueueSight.__struct_fields__}),
            requests=self._requests(now),
            totals=scheduler.stats(),
            steps=list(self._steps),
            history=[
                msgspec.structs.replace(point, at=round(point.at + offset, 3))
                for point in (*self._points, *self._newest_points(now))
                if point.at > now - HISTORY_S or point is self._points[-1]
            ],
            happened=[EventSight(number, round(at + offset, 3), *rest) for at, number, *rest in self._events],
            prefixes=[PrefixSight(prefix, *counts) for prefix, counts in prefixes[:MAX_PREFIXES]],
            groups=groups_of(manager),
            sessions=[_sight_of_session(view, now) for view in scheduler.sessions(MAX_SESSIONS)],
            num_sessions=scheduler.num_sessions,
            pinned=scheduler.num_pinned,
            disk=self._disk(),
        )

    def story(self, request_id: str) -> Story:
        """Return one request's life so far. Raises UnknownRequest for one that never came, or ended longer than MAX_ENDED requests ago."""
        life = self._alive.get(request_id)
        holders: list[tuple[str, int]] = []
        if life is not None:
            # The scheduler knows of a search's first request alone, and not after it has ended.
            try:
                found = self._scheduler.explain(request_id)
                status, why, holders = found.status, str(found), list(found.holders[:MAX_HOLDERS])
            except UnknownRequest:
                status, why = "running", f'request "{request_id}" is running: its search goes on.'
        else:
            life = self._ended.get(request_id)
            if life is None:
                raise UnknownRequest(request_id)
            status, why = life.status, life.why
        came_at = round(life.came + self._wall() - self._clock(), 3)
        head = request_id, life.tenant, status, life.prompt_tokens, came_at, why
        return Story(*head, list(life.timeline), life.left_out, holders)

    def _count(self, batch: Batch, seconds: float) -> None:
        self._num_steps += 1
        rows, tokens = len(batch.rows), batch.num_scheduled_tokens
        decodes = tokens
        if tokens != rows:
            # A row that decodes computes its newest token, and the drafts behind it.
            decodes = int(batch.num_tokens[batch.num_tokens - batch.num_drafts == 1].sum())
        self._steps.append(StepSight(self._num_steps, rows, decodes, tokens - decodes, round(seconds, 6)))

    def _point(self, at: float) -> PointSight:
        manager, stats = self._engine.manager, self._scheduler.stats()
        preemptions = stats.preemptions_recompute + stats.preemptions_swap
        return PointSight(at, manager.device.num_used, manager.device.num_cached, preemptions, stats.output_tokens)

    def _newest_points(self, now: float) -> list[PointSight]:
        """Return the points to add: now, and before it the end of the last step, since nothing changes during a pause."""
        ends = [self._stepped_at] if self._points[-1].at < self._stepped_at < now else []
        return [self._point(at) for at in (*ends, now)]

    def _keep_points(self, now: float) -> None:
        if now >= self._points[-1].at + POINT_S:
            self._points.extend(self._newest_points(now))

    def _preempted(self, request_id: str, how: str, now: float) -> None:
        life = self._life_of(request_id)
        if life is not None:
            life.stop(now)
            life.has_led = request_id == self._scheduler.next_id
        self._note(request_id, life, now, f"preempted_{how}", self._reason_of(request_id))

    def _admitted(self, request_id: str, now: float) -> None:
        life = self._life_of(request_id)
        if life is None:
            self._note(request_id, None, now, "admitted", "")
        elif life.was_admitted:
            # A request that only lost its place in a step is not among the preempted ones.
            kept_all = life.away_since is None
            detail = "it had lost its place and none of its blocks" if kept_all else f"after {life.run(now):.2f} s"
            self._note(request_id, life, now, "returned", detail)
        else:
            try:
                hit_tokens = self._scheduler.request(request_id).hit_tokens
            except UnknownRequest:
                # Its first step was its last: `ended`, in the same step, has the usage.
                return
            self._begins(request_id, life, hit_tokens, now)

    def _begins(self, request_id: str, life: _Life, hit_tokens: int, now: float) -> None:
        """Note that a request was admitted for the first time."""
        life.was_admitted = True
        life.run(now)
        self._fresh.pop(request_id, None)
        self._awaited[request_id] = None
        found = f"{hit_tokens:,} of its {life.prompt_tokens:,} prompt tokens were in the cache"
        self._note(request_id, life, now, "admitted", found)
        self._count_prefix(life, hit_tokens)

    def _first_token(self, request_id: str, life: _Life, now: float) -> None:
        del self._awaited[request_id]
        self._note(request_id, life, now, "first_token", f"after {now - life.came:.2f} s")

    def _note_reasons(self, now: float) -> None:
        """Note why each new request waits that is not in this step."""
        for request_id in list(islice(self._fresh, _REASONS_A_STEP)):
            life = self._alive[request_id]
            if self._is_waiting(request_id):
                life.note(now, "waits", self._reason_of(request_id))
                life.has_led = request_id == self._scheduler.next_id
            # The others are in a batch that has not ended.
            del self._fresh[request_id]

    def _note_first(self, now: float) -> None:
        """Note why the first of the queue waits, when another one becomes the first: until then it waited for those before it."""
        head = self._scheduler.next_id
        if head == self._head:
            return
        self._head = head
        life = None if head is None or head in self._fresh else self._life_of(head)
        if head is not None and life is not None and not life.has_led:
            life.has_led = True
            life.note(now, "waits", self._reason_of(head))

    def _is_waiting(self, request_id: str) -> bool:
        try:
            return self._scheduler.status(request_id) == "waiting"
        except UnknownRequest:
            return False

    def _reason_of(self, request_id: str) -> str:
        try:
            return self._scheduler.explain(request_id, with_holders=False).reason
        except UnknownRequest:
            return ""

    def _life_of(self, request_id: str) -> _Life | None:
        """Return the life that a request of the scheduler belongs to. The id of a search's branch begins with its owner's."""
        found = self._alive.get(request_id)
        return found if found is not None else self._alive.get(request_id.rpartition("/branch-")[0])

    def _number_of(self, request_id: str) -> int:
        life = self._life_of(request_id)
        return life.number if life is not None else _UNKNOWN + zlib.crc32(request_id.encode())

    def _note(self, request_id: str, life: _Life | None, now: float, kind: str, detail: str) -> None:
        self._num_events += 1
        self._events.append((now, self._num_events, kind, request_id, detail))
        if life is not None:
            life.note(now, kind, detail)

    def _end(self, request_id: str, life: _Life, status: str, detail: str) -> None:
        life.status = status
        spoken = detail if detail.endswith(".") else f"{detail}."
        life.why = f'request "{request_id}" is {status}: {spoken}' if detail else f'request "{request_id}" is {status}.'
        self._ended[request_id] = life
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    def _count_prefix(self, life: _Life, hit_tokens: int) -> None:
        if life.prefix is None:
            return
        counts = self._prefixes.setdefault(life.prefix, [0, 0, 0])
        counts[0] += 1
        counts[1] += hit_tokens
        counts[2] += life.prompt_tokens
        self._prefixes.move_to_end(life.prefix)
        if len(self._prefixes) > _KEPT_PREFIXES:
            self._prefixes.popitem(last=False)

    def _blocks(self) -> BlockSight:
        manager, scheduler = self._engine.manager, self._scheduler
        rows = manager.rows.live
        owners = np.array([self._number_of(scheduler.id_of(row) or "") for row in rows.tolist()], np.int64)
        cells = block_cells(*tables_of(manager), owners, manager.device.states, manager.device.levels)
        counts = {state: int(np.count_nonzero(cells == state)) for state in (FREE, CACHED, RETAINED, SHARED, HELD)}
        size = -(-len(cells) // MAX_CELLS)
        return BlockSight(
            cell_blocks=size,
            runs=runs_of(merged(cells, size)),
            free=counts[FREE],
            cached=counts[CACHED],
            retained=counts[RETAINED],
            shared=counts[SHARED],
            own=len(cells) - sum(counts.values()),
            held=counts[HELD],
        )

    def _disk(self) -> DiskSight | None:
        disk = self._engine.disk
        if disk is None:
            return None
        store = disk.store.stats()
        return DiskSight(store.held, store.queued, disk.stats().loaded * self._engine.manager.block_size)

    def _requests(self, now: float) -> list[RequestSight]:
        found, num_reasons = [], 0
        for view in self._scheduler.requests(MAX_REQUESTS):
            reason = ""
            if view.status != "running" and num_reasons < MAX_REASONS:
                num_reasons += 1
                reason = self._scheduler.explain(view.id, with_holders=False).reason
            found.append(self._sight_of(view, reason, now))
        return found

    def _sight_of(self, view: RequestView, reason: str, now: float) -> RequestSight:
        life = self._life_of(view.id)
        alive_s = waited_s = 0.0
        if life is not None:
            alive_s = max(0.0, now - life.came)
            waited_s = life.waited + (0.0 if life.away_since is None else max(0.0, now - life.away_since))
        return RequestSight(
            **msgspec.structs.asdict(view),
            tenant="" if life is None else life.tenant,
            number=self._number_of(view.id),
            alive_s=round(alive_s, 3),
            waited_s=round(waited_s, 3),
            reason=reason,
        )


def _sight_of_session(view: SessionView, now: float) -> SessionSight:
    tenant, session_id = shown(view.id)
    same = ("live", "blocks", "device_blocks", "host_blocks", "pinned_blocks")
    ended, until = view.ended_at, view.retained_until
    return SessionSight(
        **{name: getattr(view, name) for name in same},
        id=session_id,
        tenant=tenant,
        waits_for=view.waits_for or "",
        priority=0 if until is None else view.priority,
        idle_s=None if ended is None or view.live else round(max(0.0, now - ended), 3),
        expected_in_s=None if view.expected_at is None else round(max(0.0, view.expected_at - now), 3),
        retained_s=None if until is None else round(max(0.0, until - now), 3),
    )
