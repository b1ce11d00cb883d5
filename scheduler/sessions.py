"""Sessions: requests that follow one another with pauses. What their last turns left, and when the next ones are expected.

turn ── ended ──────── gap: a tool works, a person reads ──────── next turn
         └ its content is retained; when retained content has to go, the end of the session whose next turn is
           expected last goes first
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
FEWEST = 8  # gaps from which something is guessed
LONGEST = 600.0  # seconds: longer gaps say no more of a session's pace
PACE = 0.3  # how much the last gap counts in a session's pace
GUESS = 30.0  # seconds to the next turn, before gaps are known
LATEST = 0.98  # share of gaps after which a session is no more expected, and its content is retained no longer
PATIENCE = 1800.0  # seconds after which that is so at the earliest
REMEMBERED = 10_000  # sessions


WaitsFor = Literal["tool", "person"] | None
Kind = tuple[WaitsFor, int, int]
"""Of a gap: what the session waits for, the class of its last outputs, and of its pace; -1: whatever it is."""


class Gaps:
    """The times from the end of a turn to the next one, by kind."""

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
        """Return the seconds to the next turn: the median of gaps of this kind that were longer than `elapsed`."""
        for each in _wider(kind):
            _, ordered = self._last.get(each, ((), []))
            at = bisect_right(ordered, elapsed)
            if len(ordered) - at >= FEWEST:
                return ordered[(at + len(ordered)) // 2] - elapsed
        # As long again as it took (Lindy).
        return max(elapsed, GUESS)

    def latest(self, kind: Kind) -> float:
        """Return the seconds after which a turn is no more expected."""
        _, ordered = self._last.get(_wider(kind)[-1], ((), []))
        return max(PATIENCE, ordered[int(LATEST * len(ordered))]) if len(ordered) >= FEWEST else PATIENCE


def _wider(kind: Kind) -> tuple[Kind, Kind, Kind]:
    waits_for, outputs, _ = kind
    return kind, (waits_for, outputs, -1), (waits_for, -1, -1)


class SessionView(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A session. live: its turns that run or wait. Of the last turn that ended: its full blocks, how many of them the
    device and the host have, and when it ended; when the next one is expected, and until when what it left is retained,
    seconds. pinned_blocks: by hints that name it."""

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
        # The last node of each run that its last turn left, the last run first; and how many nodes these are.
        self.way: list[Node] = []
        self.num_blocks = 0
        self.retained: Retained | None = None
        self.until = 0.0
        # Places where it has nothing that could go.
        self.empty = set[int]()

    @property
    def kind(self) -> Kind:
        # Long answers are read, or worked on, for longer. Classes of double length, from 64 tokens on.
        outputs = min(max(self.num_output.bit_length() - 7, 0), 5)
        return self.waits_for, outputs, int(math.log2(self.pace)) if self.pace else -1


class Sessions:
    """All sessions, in the order in which they began or their last turns ended. `clock` tells the time of the last call."""

    def __init__(self, manager: Memory, clock: Callable[[], float]) -> None:
        self._content, self.now, self._gaps = manager.content, clock, Gaps()
        self.by_id: OrderedDict[str, Session] = OrderedDict()
        # By place and level, what was put first.
        self._first: dict[tuple[int, int], tuple[Blocks, Blocks]] = {}
        self._content.on_raised(self._choose)

    def begin(self, session_id: str, now: float) -> None:
        """Note that a turn has arrived."""
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
        """Note that a turn of so many outputs has left this way. None: it did not finish, and what the last one left stays."""
        session = self.by_id[session_id]
        session.live -= 1
        if way is not None:
            session.way, session.ended_at, session.num_output = way, self.now(), num_output
            session.num_blocks = sum(at + 1 for _, at in session.way)
            self.by_id.move_to_end(session_id)
            self._retain(session)

    def expect(self, session: Session, waits_for: WaitsFor, retention: Retention) -> bool:
        """Note what the next turn waits for, and how long it is waited for. Return whether that counts from now on."""
        session.waits_for, session.retention = waits_for, retention
        if session.live or session.ended_at is None:
            return False
        self._retain(session)
        return True

    def _retain(self, session: Session) -> None:
        """Retain what the session's last turn left from now on, and what it had retained no longer."""
        before, retention = session.retained, session.retention
        session.until = self.now() + (self._gaps.latest(session.kind) if retention.lasts is None else retention.lasts)
        session.empty.clear()
        session.retained = self._content.retain_way(session.way, int(retention.priority), session.until, was_left=True)
        if before is not None:
            self._content.retentions.end(before)

    def let_go(self, session: Session) -> int:
        """Let what the session's last turn left go next, as far as nothing goes on behind it. Return its blocks."""
        if session.retained is not None:
            self._content.retentions.end(session.retained)
        session.retained = None
        return self._content.demote(session.way)[1]

    def forget(self, session: Session) -> None:
        del self.by_id[session.id]

    def _expected_in(self, session: Session, now: float) -> float:
        assert session.ended_at is not None, "a session between two turns"
        return self._gaps.left(session.kind, max(0.0, now - session.ended_at))

    def view_of(self, session: Session, pinned: int) -> SessionView:
        here, there = self._content.split(self._content.spans_of(session.way))
        is_over = session.live or session.ended_at is None
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
            expected_at=None if is_over else self.now() + self._expected_in(session, self.now()),
            retained_until=None if session.retained is None or session.until <= self.now() else session.until,
        )

    def violations(self, live: list[str]) -> list[str]:
        counts = {session.id: session.live for session in self.by_id.values() if session.live}
        return [] if counts == Counter(live) else [f"9: sessions have turns {counts}; requests say {Counter(live)}."]

    def _choose(self, place: int, level: int, num_blocks: int) -> None:
        """Put the ends of those sessions first whose next turns are expected last."""
        if self._content.num_first(place, *self._first.get((place, level), (NO_BLOCKS, NO_BLOCKS))) >= num_blocks:
            return
        # Of many sessions at once for more blocks, because all of them are looked at.
        num_blocks = max(num_blocks, len(self.by_id) >> 6)
        idle = [s for s in self.by_id.values() if s.way and not s.live and s.retention.priority == level]
        now = self.now()
        waits = [(self._expected_in(session, now), session) for session in idle if place not in session.empty]
        chosen: list[Blocks] = []
        for _, session in sorted(waits, key=itemgetter(0), reverse=True):
            if parts := self._content.loose_end(place, session.way, level):
                chosen += parts
                num_blocks -= sum(map(len, parts))
                # What leaves the device may come to the host.
                session.empty.discard(HOST)
            elif not self._content.is_any_there(place, session.way):
                session.empty.add(place)
            if num_blocks <= 0:
                break
        self._first[place, level] = self._content.put_first(place, chosen)
