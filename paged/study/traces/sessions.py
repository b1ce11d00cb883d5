"""Recorded sessions: the turns of a conversation, with pauses for tools and people, and its sub-agents.

A recording says which blocks of a session's prompts were equal, but not what they said.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from paged.base.fields import converted
from paged.errors import TraceError
from paged.study.files import Line, json_lines
from paged.study.limits import MAX_SHARED_IDS, MAX_TOKENS, Id, NotNegative, Tokens, at_least
from paged.study.traces.opening import Excerpt

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


def draw_sessions(
    sessions: Sequence[Session], count: int | None, rng: random.Random, *, spread_s: float
) -> list[Begun]:
    """Draw so many of the sessions (None: all, in order). Each begins at random within `spread_s` seconds. Raises InvalidConfig for more sessions than
    there are, and for a spread that is negative or not finite."""
    converted("spread_s", spread_s, NotNegative)
    drawn = sessions
    if count is not None:
        drawn = rng.sample(list(sessions), at_least("the number of sessions wanted", count, 1, len(sessions)))
    return [Begun(session, rng.uniform(0, spread_s)) for session in drawn]


class _Recorded(msgspec.Struct):
    """A session or a sub-agent, as a line of a file has it. `requests` are turns and sub-agents."""

    requests: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    id: str = ""
    block_size: Annotated[int, Meta(ge=1, le=4096)] = 1
    t: NotNegative = 0.0


class _Request(msgspec.Struct):
    t: NotNegative
    prompt_tokens: Tokens = msgspec.field(name="in")
    output_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] = msgspec.field(name="out")
    blocks: list[tuple[Id, Annotated[int, Meta(ge=1, le=MAX_SHARED_IDS)]]]
    api_s: NotNegative | None = None
    think_s: NotNegative | None = None
    stop: str = ""


def read_sessions(path: str | Path) -> list[Session]:
    """Read the sessions in a JSON Lines file, one a line: `id`, `block_size`, `requests`.

    A request has `t`, `in`, `out`, `blocks`, `api_s`, `think_s` and `stop`, or it is a sub-agent with `t` and `requests`. Raises TraceError with
    file, line and field for bad content and for blocks of two sizes, and OSError if the file cannot be opened.
    """
    sessions: list[Session] = []
    for line in json_lines(Path(path), TraceError):
        recorded = line.read(_Recorded)
        size, lines = recorded.block_size, list[TurnLine]()
        if sessions and size != sessions[0].block_size:
            raise line.error(
                "block_size", f"blocks of {size} tokens, but of {sessions[0].block_size} in the sessions above"
            )
        _add_lines(lines, line, recorded, size, begun=TurnLine(turns=()), at_s=0.0)
        if not lines[0].turns:
            raise line.error("requests", "no request of its own in it")
        most = max((int(turn.spans.max()) for each in lines for turn in each.turns if len(turn.spans)), default=0)
        sessions.append(Session(id=recorded.id, block_size=size, lines=tuple(lines), num_ids=most))
    if not sessions:
        raise TraceError(Path(path), None, None, "no session in it")
    return sessions


def _add_lines(
    lines: list[TurnLine], line: Line, recorded: _Recorded, size: int, *, begun: TurnLine, at_s: float
) -> None:
    """Add a line of turns that began at `at_s`, and after it those of its sub-agents."""
    turns: list[Turn] = []
    agents: list[tuple[Line, _Recorded, TurnLine, float]] = []
    place = len(lines)
    for number, values in enumerate(recorded.requests):
        request = line.part(f"requests[{number}]", values)
        before = turns[-1] if turns else None
        if "requests" not in values:
            turns.append(_turn(request, request.read(_Request), at_s, before, size))
            continue
        agent = request.read(_Recorded)
        begins_s = at_s + agent.t
        waited = begins_s - (at_s if before is None else before.at_s + (before.answer_s or 0.0))
        after = TurnLine(turns=(), parent=place, after=len(turns) - 1, delay_s=max(0.0, waited))
        agents.append((request, agent, after, begins_s))
    lines.append(msgspec.structs.replace(begun, turns=tuple(turns)))
    for request, agent, after, begins_s in agents:
        _add_lines(lines, request, agent, size, begun=after, at_s=begins_s)


def _turn(line: Line, request: _Request, since_s: float, before: Turn | None, size: int) -> Turn:
    at_s, gap = since_s + request.t, 0.0
    if before is not None and (gap := at_s - before.at_s) < 0:
        raise line.error("t", f"begins {-gap:g} s before the request above it")
    for first, stop in request.blocks:
        if stop <= first:
            raise line.error("blocks", f"[{first}, {stop}] is no range; [first, stop] is needed, with first < stop")
    covered = sum(stop - first for first, stop in request.blocks) * size
    if covered > request.prompt_tokens:
        raise line.error(
            "blocks", f"{covered:,} tokens in blocks of {size}, but the prompt has {request.prompt_tokens:,}"
        )
    # A recorded pause after an answer of unknown end counts from an earlier end.
    think_s = max(0.0, gap - (before.answer_s or 0.0)) if before else 0.0
    return Turn(
        at_s=at_s,
        think_s=think_s if request.think_s is None else min(gap, request.think_s),
        answer_s=request.api_s,
        prompt_tokens=request.prompt_tokens,
        output_tokens=max(1, request.output_tokens),
        spans=np.array(request.blocks, np.int64).reshape(-1, 2),
        stop=request.stop,
    )
