"""Sessions: requests that follow one another with pauses. What the last turn left, and when the next one is expected.

turn ── ended ──────── gap: a tool works, a person reads ──────── next turn
         └ its content is retained; if retained content has to be evicted, the first is the end of what that
           session left whose next turn is expected last
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from operator import itemgetter
from typing import Literal

import msgspec

from paged.block_manager import HOST, NO_BLOCKS, Blocks, Memory, Node, Retained, num_nodes

from .request import Retention

WINDOW = 1000  # gaps of a kind that are remembered
FEWEST = 8  # fewest gaps of a kind from which one is guessed
LONGEST = 600.0  # seconds: in a session's pace, a longer gap counts as so long
PACE = 0.3  # weight of the last gap in a session's pace, 0 to 1
GUESS = 30.0  # seconds to the next turn, before gaps are known
LATEST = 0.98  # a session is expected, and its content retained, until it pauses for longer than this share of gaps
PATIENCE = 1800.0  # seconds for which it is expected at least
REMEMBERED = 10_000  # most sessions that are known


WaitsFor = Literal["tool", "person"] | None
Kind = tuple[WaitsFor, int, int]
"""Of a gap: what the session waits for; the class of its last turn's outputs, and of its pace, -1: of any class."""


class Gaps:
    """Gaps: seconds from the end of a turn to the next one, by kind. Each counts for wider kinds, too."""

    def __init__(self) -> None:
        # The last gaps of each kind, in order of time and sorted.
        self._last: dict[Kind, tuple[deque[float], list[float]]] = {}

    def note(self, kind: Kind, gap: float) -> None:
        for each in dict.fromkeys(_wider(kind)):
            last, ordered = self._last.setdefault(each, (deque(), []))
            last.append(gap)
            insort(ordered, gap)
            if len(last) > WINDOW:
                del ordered[bisect_right(ordered, last.popleft()) - 1]

    def left(self, kind: Kind, elapsed: float) -> float:
        """Return the seconds to the next turn if `elapsed` have passed: by the median of longer gaps of this kind."""
        for each in _wider(kind):
            _, ordered = self._last.get(each, ((), []))
            at = bisect_right(ordered, elapsed)
            if len(ordered) - at >= FEWEST:
                return ordered[(at + len(ordered)) // 2] - elapsed
        # As long again as it has lasted (Lindy).
        return max(elapsed, GUESS)

    def latest(self, kind: Kind) -> float:
        """Return the seconds after which the next turn is no longer expected."""
        _, ordered = self._last.get(_wider(kind)[-1], ((), []))
        return max(PATIENCE, ordered[int(LATEST * len(ordered))]) if len(ordered) >= FEWEST else PATIENCE


def _wider(kind: Kind) -> tuple[Kind, Kind, Kind]:
    waits_for, outputs, _ = kind
    return kind, (waits_for, outputs, -1), (waits_for, -1, -1)


class SessionView(msgspec.Struct, frozen=True, kw_only=True):
    """A session; times in seconds. live: its turns that run or wait. blocks: full blocks of its last turn that ended.
    device_blocks, host_blocks: how many of them the device has, and how many more the host. expected_at: when the next
    turn is expected. retained_until: when retention ends. pinned_blocks: pinned by hints that name the session."""

    id: str
    live: int
    waits_for: str | None
    priority: int
    blocks: int
    device_blocks: int
    host_blocks: int
    pinned_blocks: int
    ended_at: float | None
    expected_at: float | None
    retained_until: float | None


class Session:
    def __init__(self, session_id: str) -> None:
        self.id, self.live, self.retention = session_id, 0, Retention()
        self.waits_for: WaitsFor = None
        self.pace, self.num_output = 0.0, 0
        self.ended_at: float | None = None
        # The way that its last turn left (the last node of each run, the last run first), and the number of its nodes.
        self.way: list[Node] = []
        self.num_blocks = 0
        self.retained: Retained | None = None
        self.until = 0.0
        # Places where it has no content that could be evicted.
        self.empty = set[int]()

    @property
    def kind(self) -> Kind:
        # Long answers are read, or worked on, for longer. Classes: below 128 tokens, 256, … 2,048, and more.
        outputs = min(max(self.num_output.bit_length() - 7, 0), 5)
        return self.waits_for, outputs, int(math.log2(self.pace)) if self.pace else -1


class Sessions:
    """All sessions, in the order in which they began or their last turns ended. `clock`: the scheduler's time."""

    def __init__(self, manager: Memory, clock: Callable[[], float]) -> None:
        self._content, self.now, self._gaps = manager.content.ways, clock, Gaps()
        self.by_id: OrderedDict[str, Session] = OrderedDict()
        # By place and level, the blocks that were put first last time, and their marks (see `num_first`).
        self._first: dict[tuple[int, int], tuple[Blocks, Blocks]] = {}
        self._content.on_raised(self._choose)

    def begin(self, session_id: str, now: float) -> None:
        """Note that a turn has arrived. Of too many sessions, the oldest without a live turn is forgotten."""
        session = self.by_id.get(session_id)
        if session is None:
            if len(self.by_id) >= REMEMBERED and (oldest := next((s for s in self.by_id.values() if not s.live), None)):
                self.let_go(oldest)
                self.forget(oldest)
            session = self.by_id[session_id] = Session(session_id)
        if not session.live and session.ended_at is not None:
            gap = max(0.0, now - session.ended_at)
            self._gaps.note(session.kind, gap)
            shown = min(max(gap, 1.0), LONGEST)
            session.pace = session.pace ** (1 - PACE) * shown**PACE if session.pace else shown
        session.live += 1

    def end(self, session_id: str, way: list[Node] | None, num_output: int) -> None:
        """Note that a turn with so many outputs ended and left this way. None: it was cut off, and left nothing new."""
        session = self.by_id[session_id]
        session.live -= 1
        if way is not None:
            session.way, session.ended_at, session.num_output = way, self.now(), num_output
            session.num_blocks = sum(at + 1 for _, at in session.way)
            self.by_id.move_to_end(session_id)
            self._retain(session)

    def expect(self, session: Session, waits_for: WaitsFor, retention: Retention) -> bool:
        """Note what the next turn waits for, and how to retain content. Return False if a turn must end first."""
        session.waits_for, session.retention = waits_for, retention
        if session.live or session.ended_at is None:
            return False
        self._retain(session)
        return True

    def _retain(self, session: Session) -> None:
        """Retain what the session's last turn left, instead of what was retained for it before."""
        before, retention = session.retained, session.retention
        session.until = self.now() + (self._gaps.latest(session.kind) if retention.lasts is None else retention.lasts)
        session.empty.clear()
        session.retained = self._content.retain_way(session.way, int(retention.priority), session.until, was_left=True)
        if before is not None:
            self._content.retentions.end(before)

    def let_go(self, session: Session) -> int:
        """Let what the last turn left be evicted next, but for content that others continue. Return its blocks."""
        if session.retained is not None:
            self._content.retentions.end(session.retained)
        session.retained = None
        return self._content.demote(session.way)[1]

    def forget(self, session: Session) -> None:
        del self.by_id[session.id]

    def _expected_in(self, session: Session) -> float:
        assert session.ended_at is not None, "a session between two turns"
        return self._gaps.left(session.kind, max(0.0, self.now() - session.ended_at))

    def view_of(self, session: Session, pinned: int) -> SessionView:
        here, there = self._content.split(self._content.spans_of(session.way))
        is_live_or_new = session.live or session.ended_at is None
        return SessionView(
            id=session.id,
            live=session.live,
            waits_for=session.waits_for,
            priority=int(session.retention.priority),
            blocks=session.num_blocks,
            device_blocks=num_nodes(here),
            host_blocks=num_nodes(there),
            pinned_blocks=pinned,
            ended_at=session.ended_at,
            expected_at=None if is_live_or_new else self.now() + self._expected_in(session),
            retained_until=None if session.retained is None or session.until <= self.now() else session.until,
        )

    def violations(self, live: list[str]) -> list[str]:
        counts = {session.id: session.live for session in self.by_id.values() if session.live}
        return [] if counts == Counter(live) else [f"9: sessions have turns {counts}; requests say {Counter(live)}."]

    def _choose(self, place: int, level: int, num_blocks: int) -> None:
        """Put loose ends first in the order of eviction: those of sessions whose next turns are expected last."""
        if self._content.num_first(place, *self._first.get((place, level), (NO_BLOCKS, NO_BLOCKS))) >= num_blocks:
            return
        # With many sessions, for more blocks at a time, because all sessions are looked at.
        num_blocks = max(num_blocks, len(self.by_id) >> 6)
        idle = [s for s in self.by_id.values() if s.way and not s.live and s.retention.priority == level]
        waits = [(self._expected_in(session), session) for session in idle if place not in session.empty]
        chosen: list[Blocks] = []
        for _, session in sorted(waits, key=itemgetter(0), reverse=True):
            if parts := self._content.loose_end(place, session.way, level):
                chosen += parts
                num_blocks -= sum(map(len, parts))
                # Content that leaves the device may come to the host.
                session.empty.discard(HOST)
            elif not self._content.is_any_there(place, session.way):
                session.empty.add(place)
            if num_blocks <= 0:
                break
        self._first[place, level] = self._content.put_first(place, chosen)
