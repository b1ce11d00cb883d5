"""Recorded sessions: the turns of a conversation, with pauses for tools and people, and its sub-agents.

A recording says which blocks of a session's prompts were equal, but not what they said.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from paged.errors import InvalidConfig, TraceError
from paged.study.traces.content import MAX_SHARED_IDS
from paged.study.traces.opening import Excerpt
from paged.study.traces.records import Line, json_lines

MOST_BLOCK_TOKENS = 4096
"""Tokens of the largest block that is read."""
SESSIONS_EXCERPT = Excerpt(
    name="agents",
    file="agent_sessions.jsonl",
    summary="12 short sessions of a coding agent, with pauses, sub-agents and the blocks that their prompts share",
    note="excerpt: 12 of 739 sessions, short ones",
    source="callanjfox, kv-cache-tester 94f6046, recorded with claude-code-proxy, github.com/callanjfox/kv-cache-tester",
    licence="Apache-2.0",
)


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt and its answer.

    at_s      when it began, in seconds since its session began, as recorded
    think_s   seconds from the end of the turn before it in its line to its own beginning: the time of tools and people
    answer_s  seconds of its answer, as recorded; None: not known
    spans     int64 [k, 2]: the prompt's full blocks as ranges of ids, the second exclusive. Equal ids of a session are equal content
    stop      why the answer ended: "tool_use", "end_turn", or ""
    """

    at_s: float
    think_s: float
    answer_s: float | None
    prompt_tokens: int
    output_tokens: int
    spans: NDArray[np.int64]
    stop: str

    @property
    def num_blocks(self) -> int:
        """Full blocks of the prompt."""
        return int((self.spans[:, 1] - self.spans[:, 0]).sum())

    @property
    def blocks(self) -> NDArray[np.int64]:
        """Ids of the full blocks, int64 [num_blocks]."""
        return np.concatenate([np.empty(0, np.int64), *(np.arange(*span) for span in self.spans.tolist())])


class TurnLine(msgspec.Struct, frozen=True, kw_only=True):
    """Turns that follow one another: a session's own, or those of a sub-agent.

    parent, after  a sub-agent begins `delay_s` seconds after turn `after` of line `parent` has ended; −1: after its session began
    """

    turns: tuple[Turn, ...]
    parent: int = -1
    after: int = -1
    delay_s: float = 0.0


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded session: its own line, then those of its sub-agents. `num_ids`: one more than the largest block id."""

    id: str
    block_size: int
    lines: tuple[TurnLine, ...]
    num_ids: int

    @property
    def turns(self) -> list[tuple[int, int]]:
        """Line and number of each turn, in recorded order."""
        places = [(line, number) for line, each in enumerate(self.lines) for number in range(len(each.turns))]
        return sorted(places, key=lambda place: self.lines[place[0]].turns[place[1]].at_s)


class Begun(msgspec.Struct, frozen=True):
    """A session and its beginning, in seconds."""

    session: Session
    begins_s: float


def open_sessions(name: str | Path) -> list[Session]:
    """Open the sessions in a file, or those named `agents`, which ship with the package; a file comes first. Raises TraceError or OSError."""
    path = Path(name)
    if str(name) == SESSIONS_EXCERPT.name and not path.exists():
        path = SESSIONS_EXCERPT.path
    return read_sessions(path)


def read_sessions(path: str | Path) -> list[Session]:
    """Read the sessions in a JSON Lines file, one a line: `id`, `block_size`, `requests`.

    A request has `t`, `in`, `out`, `blocks`, `api_s`, `think_s` and `stop`, or it is a sub-agent with `t` and `requests`. Raises TraceError with
    file, line and field for bad content and for blocks of two sizes, and OSError if the file cannot be opened.
    """
    sessions: list[Session] = []
    for line in json_lines(Path(path)):
        sessions.append(_session(line))
        if sessions[-1].block_size != sessions[0].block_size:
            problem = (
                f"blocks of {sessions[-1].block_size} tokens, but of {sessions[0].block_size} in the sessions above"
            )
            raise line.error("block_size", problem)
    if not sessions:
        raise TraceError(str(path), None, None, "no session in it")
    return sessions


def draw_sessions(
    sessions: Sequence[Session], count: int | None, rng: random.Random, *, spread_s: float
) -> list[Begun]:
    """Draw so many of the sessions (None: all, in order). Each begins at random within `spread_s` seconds. Raises InvalidConfig for more sessions than
    there are, and for a spread that is negative or not finite."""
    if count is not None and not 1 <= count <= len(sessions):
        raise InvalidConfig(f"{count} sessions were asked for; the file has {len(sessions)}")
    if not 0 <= spread_s < float("inf"):
        raise InvalidConfig(f"sessions begin within {spread_s} s; it must be a finite number, 0 or more")
    drawn = sessions if count is None else rng.sample(list(sessions), count)
    return [Begun(session, rng.uniform(0, spread_s)) for session in drawn]


def _session(line: Line) -> Session:
    size = line.whole("block_size", least=1, most=MOST_BLOCK_TOKENS)
    lines: list[TurnLine] = []
    _add_lines(lines, line, size, begun=TurnLine(turns=()), at_s=0.0)
    if not lines[0].turns:
        raise line.error("requests", "no request of its own in it")
    most = max((int(turn.spans.max()) for each in lines for turn in each.turns if len(turn.spans)), default=0)
    return Session(id=line.name("id"), block_size=size, lines=tuple(lines), num_ids=most)


def _add_lines(lines: list[TurnLine], line: Line, size: int, *, begun: TurnLine, at_s: float) -> None:
    """Add a line of turns that began at `at_s`, and after it those of its sub-agents."""
    requests = line.values.get("requests")
    if not isinstance(requests, list) or not requests:
        raise line.error("requests", "a list of requests is needed, with at least one")
    turns: list[Turn] = []
    agents: list[tuple[Line, str, TurnLine, float]] = []
    place = len(lines)
    for number, values in enumerate(requests):
        name = f"requests[{number}]"
        if not isinstance(values, dict):
            raise line.error(name, "not a JSON object")
        request = Line(line.path, line.number, values)
        try:
            begins_s = at_s + request.seconds("t")
            before = turns[-1] if turns else None
            if "requests" in values:
                waited = begins_s - (at_s if before is None else before.at_s + (before.answer_s or 0.0))
                after = TurnLine(turns=(), parent=place, after=len(turns) - 1, delay_s=max(0.0, waited))
                agents.append((request, name, after, begins_s))
            else:
                turns.append(_turn(request, begins_s, before, size))
        except TraceError as error:
            raise line.error(f"{name}.{error.column}", error.problem) from None
    lines.append(msgspec.structs.replace(begun, turns=tuple(turns)))
    for request, name, after, begins_s in agents:
        try:
            _add_lines(lines, request, size, begun=after, at_s=begins_s)
        except TraceError as error:
            raise line.error(f"{name}.{error.column}", error.problem) from None


def _turn(request: Line, at_s: float, before: Turn | None, size: int) -> Turn:
    if before is not None and at_s < before.at_s:
        raise request.error("t", f"begins {before.at_s - at_s:g} s before the request above it")
    prompt_tokens = request.tokens("in")
    spans = _spans(request)
    covered = int((spans[:, 1] - spans[:, 0]).sum()) * size
    if covered > prompt_tokens:
        raise request.error("blocks", f"{covered:,} tokens in blocks of {size}, but the prompt has {prompt_tokens:,}")
    gap = 0.0 if before is None else at_s - before.at_s
    answer_s = request.seconds("api_s") if request.says("api_s") else None
    # A recorded pause after an answer of unknown end counts from an earlier end.
    think_s = min(gap, request.seconds("think_s")) if request.says("think_s") else max(0.0, gap - _answer_s(before))
    return Turn(
        at_s=at_s,
        think_s=think_s,
        answer_s=answer_s,
        prompt_tokens=prompt_tokens,
        output_tokens=max(1, request.tokens("out", at_least=0)),
        spans=spans,
        stop=request.name("stop"),
    )


def _answer_s(turn: Turn | None) -> float:
    return 0.0 if turn is None or turn.answer_s is None else turn.answer_s


def _spans(request: Line) -> NDArray[np.int64]:
    spans: Any = request.values.get("blocks")
    if not isinstance(spans, list):
        raise request.error("blocks", "a list of ranges of ids is needed")
    for span in spans:
        is_range = isinstance(span, list) and len(span) == 2 and all(type(each) is int for each in span)
        if not is_range or not 0 <= span[0] < span[1] <= MAX_SHARED_IDS:
            needed = f"[first, stop] is needed, with 0 ≤ first < stop ≤ {MAX_SHARED_IDS:,}"
            raise request.error("blocks", f"{str(span)[:40]} is no range; {needed}")
    return np.array(spans, np.int64).reshape(-1, 2)
