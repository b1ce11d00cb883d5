"""What is evicted, and in which order, beside a model of sessions in plain Python.

One request at a time, so that each step can be followed: a turn comes, takes what is cached of its prompt, evicts what it lacks, and
leaves its content to its session. The model has the naive manager's content, levels as lists, and gaps that are sorted anew each time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from unittest.mock import patch

from hypothesis import HealthCheck, given, settings, strategies as st

from paged import BlockManager, Hint, Request, Scheduler
from paged.scheduler import sessions as ours
from paged.testing.machines import num_examples
from paged.testing.naive_content import NaivePool
from paged.testing.naive_model import NaiveManager

NUM_BLOCKS = 9
REMEMBERED = 4


class Queue(NaivePool):
    """Knows which cached blocks were put first, last, and have stayed there."""

    def __init__(self, num_blocks):
        super().__init__(num_blocks)
        self.first = set()

    def hold(self, block):
        self.first.discard(block)
        super().hold(block)

    def touch(self, node):
        self.first.discard(self.resident.get(node))
        super().touch(node)

    def put_first(self, blocks):
        self.cached = blocks + [block for block in self.cached if block not in blocks]

    def evict(self, missing, choose):
        for level in range(4):
            queue = [block for block in self.cached if self.level(block.node) == level]
            if missing > 0 and queue:
                if level:
                    choose(level, missing)
                    queue = [block for block in self.cached if self.level(block.node) == level]
                for block in queue[:missing]:
                    self.cached.remove(block)
                    self.first.discard(block)
                    del self.resident[block.node]
                    self.free += 1
                missing -= len(queue[:missing])


@dataclass(eq=False)
class Session:
    id: str
    nodes: list = field(default_factory=list)
    waits_for: str | None = None
    priority: int = 1
    lasts: float | None = None
    pace: float | None = None
    ended_at: float | None = None
    retention: int | None = None

    @property
    def kinds(self):
        """From the narrowest on: of this pace, where it has shown one, and of any; all turns here are short."""
        paces = [None] if self.pace is None else [int(math.log2(self.pace)), None]
        return [(self.waits_for, pace) for pace in paces]


class Model(NaiveManager):
    def __init__(self):
        super().__init__(NUM_BLOCKS, 1)
        self.device = Queue(NUM_BLOCKS)
        self.device.level = self.level
        self.sessions, self.gaps, self.number, self.now = [], [], 0, 0.0

    def of(self, id):
        return next((session for session in self.sessions if session.id == id), None)

    def forget_dead(self):
        super().forget_dead()
        lives = self.living_nodes()
        for session in self.sessions:
            session.nodes = [node for node in session.nodes if node in lives]

    def expected_in(self, session):
        elapsed = self.now - session.ended_at
        for kind in session.kinds:
            longer = sorted(gap for kinds, gap in self.gaps if kind in kinds and gap > elapsed)
            if len(longer) >= ours.FEWEST:
                return longer[len(longer) // 2] - elapsed
        return max(elapsed, ours.GUESS)

    def patience(self, session):
        gaps = sorted(gap for kinds, gap in self.gaps if session.kinds[-1] in kinds)
        return max(ours.PATIENCE, gaps[int(ours.LATEST * len(gaps))]) if len(gaps) >= ours.FEWEST else ours.PATIENCE

    def loose_end(self, session):
        """Its last nodes that are cached and that nothing goes on behind, last one first."""
        found = []
        for node in reversed(session.nodes):
            block = self.device.resident.get(node)
            behind = [n for n, tokens in self.device.resident if tokens[:-1] == node[1]]
            children = [tokens for _, tokens in self.device.resident if tokens[:-1] == node[1] and tokens]
            if block is None and not behind:
                continue
            if (
                block is None
                or block.refs
                or any((node[0], tokens) not in [b.node for b in found] for tokens in children)
            ):
                break
            found.append(block)
        return found

    def choose(self, level, missing):
        if len(self.device.first) >= missing:
            return
        idle = [each for each in self.sessions if each.ended_at is not None and each.priority == level]
        chosen = []
        for session in sorted(idle, key=self.expected_in, reverse=True):
            if missing <= 0:
                break
            blocks = [block for block in self.loose_end(session) if self.level(block.node) == level]
            chosen += [blocks] if blocks else []
            missing -= len(blocks)
        for blocks in reversed(chosen):
            self.device.put_first(blocks)
        if chosen:
            self.device.first = set(chosen[-1])

    def turn(self, id, prompt):
        self.expire(self.now)
        session = self.of(id)
        if id is not None and session is None:
            if len(self.sessions) >= REMEMBERED:
                self.end(self.sessions[0])
            self.sessions.append(session := Session(id))
        if id is not None and session.ended_at is not None:
            gap = self.now - session.ended_at
            self.gaps.append((session.kinds, gap))
            shown = min(max(gap, 1.0), ours.LONGEST)
            session.pace = shown if session.pace is None else session.pace ** (1 - ours.PACE) * shown**ours.PACE
            # While it lives, it is no candidate.
            session.ended_at = None
        self.number += 1
        row = self.number
        self.add(row, prompt, None)
        wanted = len(prompt) - len(self.rows[row].table)
        self.device.evict(wanted - self.device.free, self.choose)
        self.allocate([row], [wanted])
        self.announce([row])
        self.next_batch()
        self.confirm()
        if session is not None:
            session.nodes, session.ended_at = self.prefix(prompt, None), self.now
            self.sessions.remove(session)
            self.sessions.append(session)
            self.keep(session)
        self.free([row])
        self.forget_dead()

    def keep(self, session):
        before, self.number = session.retention, self.number + 1
        session.retention = self.number
        until = self.now + (self.patience(session) if session.lasts is None else session.lasts)
        if session.nodes:
            nodes = [node for node in session.nodes if node in self.device.resident]
            self.retain(session.retention, nodes, session.priority, until)
        self.drop(before)

    def drop(self, number):
        if number in self.retentions:
            self.ends[number] = -math.inf
            self.expire(-math.inf)

    def demote(self, session):
        blocks = self.loose_end(session)
        nodes = {block.node for block in blocks}
        for number, (kept, level) in list(self.retentions.items()):
            self.retentions[number] = [node for node in kept if node not in nodes], level
        for block in blocks:
            self.device.first.discard(block)
        self.device.put_first(blocks)

    def end(self, session):
        self.drop(session.retention)
        self.demote(session)
        self.sessions.remove(session)


class Pair:
    """Ours and the model, told the same."""

    def __init__(self):
        self.manager = BlockManager(NUM_BLOCKS, 1)
        self.scheduler = Scheduler(self.manager, max_tokens_per_step=64, max_sequences=4)
        self.model, self.now, self.num = Model(), 0.0, 0
        self.prompts = {}

    def turn(self, id, prompt):
        self.num += 1
        self.scheduler.add(Request(id=f"r{self.num}", prompt=prompt, max_tokens=1, session_id=id), now=self.now)
        self.model.turn(id, prompt)
        while self.scheduler.has_unfinished:
            batch = self.scheduler.schedule(now=self.now)
            self.scheduler.update(batch, [0] * int(batch.samples.sum()), now=self.now)
        self.prompts[id] = prompt

    def hint(self, action, id, priority, lasts, waits_for):
        outcome = self.scheduler.hint(
            Hint(action=action, session=id, priority=priority, lasts=lasts, waits_for=waits_for), now=self.now
        )
        session = self.model.of(id)
        if session is None:
            assert outcome.status == "missing"
            return
        if action == "retain":
            session.waits_for, session.priority, session.lasts = waits_for, priority, lasts
            self.model.keep(session)
        elif action == "demote":
            self.model.demote(session)
        else:
            self.model.end(session)

    def compare(self):
        contents = {
            tuple(int.from_bytes(token, "little") for token in path[1:]) for path in self.manager.cached_contents()
        }
        assert contents == {tokens for _, tokens in self.model.device.resident}
        assert self.scheduler.check() == []
        views = {view.id: view for view in self.scheduler.sessions(99)}
        assert [*views] == [session.id for session in reversed(self.model.sessions)]
        for session in self.model.sessions:
            view = views[session.id]
            assert (view.waits_for, view.priority) == (session.waits_for, session.priority)
            assert view.expected_at == self.model.now + self.model.expected_in(session)


NAMES = ("a", "b", "c", "d", "e", "f")
names = st.sampled_from(NAMES)
turns = st.tuples(
    st.just("turn"),
    st.sampled_from([None, *NAMES]),
    st.sampled_from(["on", "on", "on", "new", "of another"]),
    st.lists(st.integers(0, 2), min_size=1, max_size=4),
)
hints = st.tuples(
    st.sampled_from(["retain", "retain", "retain", "demote", "end"]),
    names,
    st.sampled_from([1, 1, 1, 2]),
    st.sampled_from([None, None, None, 20.0]),
    st.sampled_from(["tool", "person", None]),
)
programs = st.lists(
    st.tuples(st.sampled_from([0.0, 1.0, 7.0, 45.0, 700.0]), st.one_of(turns, turns, hints)), max_size=40
)


@settings(max_examples=num_examples(300), deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(programs)
def test_what_is_evicted_is_what_a_naive_model_of_sessions_evicts(program):
    run(program)


def is_clean(program):
    """Whether ours does what the model does."""
    try:
        run(program)
    except Exception:
        return False
    return True


# Some of what comes here is known well enough to be guessed from, and sessions are forgotten.
@patch.multiple(ours, REMEMBERED=REMEMBERED, FEWEST=2)
def run(program):
    pair = Pair()
    for gap, (verb, id, *rest) in program:
        pair.now += gap
        pair.model.now = pair.now
        if verb == "turn":
            kind, more = rest
            number = 10 + (0 if id is None else 1 + NAMES.index(id))
            before = pair.prompts.get(id, [number]) if kind != "new" else [number, 7]
            if kind == "of another":
                before = next(iter(pair.prompts.values()), [number])[:3]
            pair.turn(id, (before + more)[-NUM_BLOCKS + 2 :] if kind == "new" else (before + more)[: NUM_BLOCKS - 2])
        else:
            pair.hint(verb, id, *rest)
        pair.compare()
