"""Sessions: requests that follow one another with pauses. What their last turns left, and when the next ones are expected.

turn ── ended ──────── gap: a tool works, a person reads ──────── next turn
         └ its content is retained; when retained content has to go, the end of the session whose next turn is
           expected last goes first
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Iterable

import msgspec

from paged.block_manager import HOST, NO_BLOCKS, Blocks, Memory, Node, Retained

from .request import Retention

WINDOW = 1000  # gaps of a kind that are remembered
FEWEST = 8  # gaps from which something is guessed
LONGEST = 600.0  # seconds: longer gaps say no more of a session's pace
PACE = 0.3  # how much the last gap counts in a session's pace
GUESS = 30.0  # seconds to the next turn, before gaps are known
LATEST = 0.98  # share of gaps after which a session is no more expected, and its content is retained no longer
PATIENCE = 1800.0  # seconds after which that is so at the earliest
REMEMBERED = 10_000  # sessions


Kind = tuple[str | None, int, int]
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
    """A session: its turns that run or wait, and what its last one left.

    blocks, device_blocks, host_blocks   full blocks of the last turn that ended, and those of them that are there still
    ended_at, expected_in, retained_until  seconds: when it ended, to the next turn, and the end of its retention
    """

    id: str
    live: int
    waits_for: str | None
    priority: int
    blocks: int
    device_blocks: int
    host_blocks: int
    ended_at: float | None
    expected_in: float | None
    retained_until: float | None
    pinned_blocks: int = 0


class Session:
    def __init__(self, session_id: str) -> None:
        self.id, self.live = session_id, 0
        self.waits_for: str | None = None
        self.retention = Retention()
        self.pace: float | None = None
        self.num_output = 0
        self.ended_at: float | None = None
        self.until: float | None = None
        # The last node of each run that its last turn left, the last run first; and how many these are.
        self.way: list[Node] = []
        self.num_blocks = 0
        self.retained: Retained | None = None
        # By place, whether anything can be taken there.
        self.is_loose = [True, True]

    @property
    def kind(self) -> Kind:
        # Long answers are read, or worked on, for longer. Classes of double length, from 64 tokens on.
        outputs = min(max(self.num_output.bit_length() - 7, 0), 5)
        return self.waits_for, outputs, -1 if self.pace is None else int(math.log2(self.pace))


class Sessions:
    """All sessions, in the order in which their last turns ended."""

    def __init__(self, manager: Memory) -> None:
        self._content, self._size = manager.content, manager.block_size
        self._gaps = Gaps()
        self.by_id: OrderedDict[str, Session] = OrderedDict()
        self.now = 0.0
        # By place, of what was put first, what goes last.
        self._first: list[tuple[Blocks, int]] = [(NO_BLOCKS, 0), (NO_BLOCKS, 0)]
        self._content.on_raised(self._choose)

    def begin(self, session_id: str, now: float) -> None:
        """Note that a turn has arrived."""
        session = self.by_id.get(session_id)
        if session is None:
            self._forget_some()
            session = self.by_id[session_id] = Session(session_id)
        if not session.live and session.ended_at is not None:
            gap = max(0.0, now - session.ended_at)
            self._gaps.note(session.kind, gap)
            shown = min(max(gap, 1.0), LONGEST)
            session.pace = shown if session.pace is None else session.pace ** (1 - PACE) * shown**PACE
        session.live += 1

    def end(self, session_id: str, row: int, num_output: int, now: float) -> None:
        """Note that a turn of so many outputs has ended. Row -1: it has no row, or did not finish, so what its last turn left stays."""
        session = self.by_id[session_id]
        session.live -= 1
        if row < 0 or not (way := self._content.way_of(row)):
            return
        self.now = max(self.now, now)
        session.way, session.ended_at, session.is_loose = way, now, [True, True]
        session.num_output = num_output
        session.num_blocks = sum(at + 1 for _, at in way)
        self.by_id.move_to_end(session_id)
        self.retain(session)

    def retain(self, session: Session) -> None:
        """Retain what the session's last turn left, from now on, as its retention says; what was retained is so no more."""
        before, lasts = session.retained, session.retention.lasts
        until = self.now + (self._gaps.latest(session.kind) if lasts is None else lasts)
        session.until = until if until < math.inf else None
        session.retained = None
        if spans := self._content.spans_of(session.way):
            run, _, stop = spans[-1]
            level = int(session.retention.priority)
            session.retained = self._content.retain_node((run, stop - 1), level, session.until)
        if before is not None:
            self._content.retentions.end(before)

    def let_go(self, session: Session) -> int:
        """Let what the session's last turn left go next, as far as nothing goes on behind it. Return its blocks."""
        if session.retained is not None:
            self._content.retentions.end(session.retained)
        session.retained = session.until = None
        return self._content.demote(session.way)

    def forget(self, session: Session) -> None:
        del self.by_id[session.id]

    def expected_in(self, session: Session, now: float) -> float | None:
        """Return the seconds to its next turn; None: one is there, or none was."""
        if session.live or session.ended_at is None:
            return None
        return self._gaps.left(session.kind, max(0.0, now - session.ended_at))

    def reach(self, now: float) -> None:
        self.now = max(self.now, now)

    def view_of(self, session: Session, pinned: int) -> SessionView:
        spans = self._content.spans_of(session.way)
        here, there = self._content.split(spans)
        return SessionView(
            id=session.id,
            live=session.live,
            waits_for=session.waits_for,
            priority=int(session.retention.priority),
            blocks=session.num_blocks,
            device_blocks=sum(stop - first for _, first, stop in here),
            host_blocks=sum(stop - first for _, first, stop in there),
            ended_at=session.ended_at,
            expected_in=self.expected_in(session, self.now),
            retained_until=session.until if session.retained is not None else None,
            pinned_blocks=pinned,
        )

    def violations(self, live: Iterable[str]) -> list[str]:
        counts = {session.id: session.live for session in self.by_id.values() if session.live}
        wanted: dict[str, int] = {}
        for session_id in live:
            wanted[session_id] = wanted.get(session_id, 0) + 1
        return [] if counts == wanted else [f"9: sessions have turns {counts}; requests say {wanted}."]

    def _choose(self, place: int, level: int, num_blocks: int) -> None:
        """Put the ends of those sessions first whose next turns are expected last."""
        if self._content.num_first(place, *self._first[place]) >= num_blocks:
            return
        idle = [
            (self.expected_in(session, self.now) or 0.0, session)
            for session in self.by_id.values()
            if session.is_loose[place] and not session.live and session.retention.priority == level
        ]
        chosen: list[Blocks] = []
        for _, session in sorted(idle, key=lambda each: -each[0]):
            if num_blocks <= 0:
                break
            blocks = self._content.loose_end(place, session.way)
            session.is_loose[place] = len(blocks) > 0
            if len(blocks):
                # What leaves the device may come to the host.
                session.is_loose[HOST] = True
                chosen.append(blocks)
                num_blocks -= len(blocks)
        for number, blocks in enumerate(reversed(chosen)):
            mark = self._content.put_first(place, blocks)
            if not number:
                self._first[place] = blocks, mark

    def _forget_some(self) -> None:
        if len(self.by_id) >= REMEMBERED:
            oldest = next((session for session in self.by_id.values() if not session.live), None)
            if oldest is not None:
                self.let_go(oldest)
                self.forget(oldest)
