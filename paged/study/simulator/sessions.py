"""Recorded sessions on the real scheduler, as a closed loop: a turn begins its recorded pause after the last one ended.

sessions ──> turns ──> scheduler, on a device and a host ──> ended: a hint, and the next turn after its pause
               └─ content on disk that memory lacks: loading ──┘

Without a cost model turns begin at their recorded times, and nothing takes any time. The hits are then those of the order of eviction alone, and compare
with orders that know the future: these are *bounds*. The two orders at the end take one prompt after another; memory for decoding and scheduling is
left out.
"""

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from paged import Batch, BlockManager, Costs, LayerGroup, Request, Scheduler
from paged.base.fields import AtLeast0, Finite, converted
from paged.block_manager import Layout
from paged.errors import InvalidConfig, SimulationStuck
from paged.scheduler import Hint, Policy
from paged.study.hardware import CostModel, Spans, StepWork, Tiling
from paged.study.limits import MAX_SHARED_IDS, NotNegative, at_least, between, check
from paged.study.simulator.arrivals import Arrivals
from paged.study.simulator.result import Percentiles
from paged.study.simulator.simulation import Simulation, Step
from paged.study.traces import Trace
from paged.study.traces.content import segment_tokens
from paged.study.traces.sessions import Begun, Turn

Keeps = Literal["lru", "sessions", "hints"]
KEEPS: tuple[Keeps, ...] = ("lru", "sessions", "hints")
"""What decides which content is kept: use alone; each request's session; or hints at the end of each turn."""
TURN_GROUPS = ((1, 1), (2, 5), (6, 20), (21, math.inf))
"""First and last turn of each group, from 1, whose times to first token are reported together."""
WAITS: dict[str, Literal["tool", "person"]] = {"tool_use": "tool", "end_turn": "person"}
"""What the next turn waits for, by a turn's `stop`."""


class Tiers(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes in blocks; and for reads, seconds before the first byte and bytes a second. The link to the host has the device's rate. The disk holds each
    full block of a computed prompt, and evicts the least recently used. Raises InvalidConfig."""

    device_blocks: Annotated[int, Meta(ge=2)]
    host_blocks: AtLeast0 = 0
    disk_blocks: AtLeast0 = 0
    host_latency_s: NotNegative = 10e-6
    disk_latency_s: NotNegative = 100e-6
    disk_bytes_per_s: Finite = 12e9

    def __post_init__(self) -> None:
        check(self)


class SessionResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of sessions.

    keeps            of KEEPS
    sessions, turns, shortened
                     numbers; shortened: prompts that the device cannot hold, whose ends were left out and count as missed
    prompt_blocks    full blocks of the prompts, as recorded
    device, host, disk
                     shares of them that hit in each tier
    kept             share that would hit if nothing were ever evicted; reachable: the same of prompts as far as the device can hold them
    offline          share that would hit by the offline order in device and host, which needs no room for a prompt while it is computed, nor for
                     windows and states
    computed_twice   prompt tokens that had been computed before, preemptions included
    preemptions      of requests
    ttft_s           of all turns; ttft_by_turn: of each of TURN_GROUPS
    makespan_s       virtual seconds
    violations       of invariants, if they were checked; violation: the first
    """

    keeps: Keeps
    sessions: int
    turns: int
    shortened: int
    prompt_blocks: int
    device: float
    host: float
    disk: float
    kept: float
    reachable: float
    offline: float
    computed_twice: int
    preemptions: int
    ttft_s: Percentiles
    ttft_by_turn: tuple[Percentiles, ...]
    makespan_s: float
    violations: int = 0
    violation: str = ""

    @property
    def hit(self) -> float:
        """Share of the prompts' blocks that hit anywhere."""
        return self.device + self.host + self.disk


class _Timeless:
    """A cost model by which nothing takes any time, and copies pay."""

    tiling: Tiling | None = None
    spans: Spans = ()

    def seconds(self, work: StepWork) -> Any:
        return 0.0 * work.computed_tokens

    def costs(self, block_size: int) -> Costs:
        return Costs(seconds_per_swapped_block=1e-9, seconds_per_token=1.0)


class _WithLatency:
    """A cost model with the latency of copies between device and host."""

    def __init__(self, step: CostModel, latency_s: float) -> None:
        self._step, self._latency_s = step, latency_s
        self.tiling, self.spans, self.costs = step.tiling, step.spans, step.costs

    def seconds(self, work: StepWork) -> Any:
        return self._step.seconds(work) + self._latency_s * (work.moved_tokens > 0)


class _Lines:
    """All turns as numbers, in the order of their sessions and lines. Line `line` has turns `first[line]` to `first[line + 1]` − 1.

    session  of each line
    base     int64 [sessions + 1]: added to block ids, so that sessions share nothing
    """

    def __init__(self, begun: Sequence[Begun]) -> None:
        self.turns: list[Turn] = []
        self.first = [0]
        self.session: list[int] = []
        self.line_of: list[int] = []
        self.children: dict[tuple[int, int], list[tuple[int, float]]] = {}
        self.base = np.cumsum([0, *(each.session.num_ids for each in begun)])
        if self.base[-1] >= MAX_SHARED_IDS:
            raise InvalidConfig(f"{self.base[-1]:,} different blocks; at most {MAX_SHARED_IDS:,} have ids")
        for number, each in enumerate(begun):
            own = len(self.session)
            for line in each.session.lines:
                place = len(self.session)
                if line.parent >= 0:
                    self.children.setdefault((own + line.parent, line.after), []).append((place, line.delay_s))
                self.session.append(number)
                self.line_of += [place] * len(line.turns)
                self.turns += line.turns
                self.first.append(len(self.turns))

    def is_last(self, turn: int) -> bool:
        return turn + 1 == self.first[self.line_of[turn] + 1]

    def place(self, turn: int) -> int:
        """Return the number of a turn in its line, from 0."""
        return turn - self.first[self.line_of[turn]]

    def blocks(self, turn: int) -> NDArray[np.int64]:
        return self.turns[turn].blocks + self.base[self.session[self.line_of[turn]]]


class _Coming(Arrivals):
    """Arrivals of turns, and ends of disk reads, in order of time."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace, None)
        # Time, a number that keeps the order at one time, and the turn.
        self._turns: list[tuple[float, int, int]] = []
        # Time, turn and tokens.
        self.reads: list[tuple[float, int, int]] = []
        self._num_put = 0

    def put(self, at: float, turn: int) -> None:
        heappush(self._turns, (at, self._num_put, turn))
        self._num_put += 1

    @property
    def are_left(self) -> bool:
        return bool(self._turns)

    def next_turn_s(self) -> float:
        return self._turns[0][0] if self._turns else math.inf

    def next_s(self) -> float:
        return min(self.next_turn_s(), self.reads[0][0] if self.reads else math.inf)

    def take(self) -> int:
        self.num_added += 1
        return heappop(self._turns)[2]


class _Disk:
    """Blocks by content, the least recently used first. It reads the blocks of one prompt after another."""

    def __init__(self, tiers: Tiers, block_bytes: int, *, takes_time: bool) -> None:
        self._most = tiers.disk_blocks
        self._latency_s = tiers.disk_latency_s if takes_time else 0.0
        self.block_s = block_bytes / tiers.disk_bytes_per_s if takes_time else 0.0
        self._held: OrderedDict[int, None] = OrderedDict()
        self._free_s = 0.0

    def look_up(self, blocks: NDArray[np.int64]) -> int:
        """Return how many leading blocks are on the disk; they count as used."""
        ids, held = blocks.tolist(), self._held
        found = next((place for place, each in enumerate(ids) if each not in held), len(ids))
        self._use(ids[:found])
        return found

    def write(self, blocks: NDArray[np.int64]) -> None:
        self._use(blocks.tolist())
        while len(self._held) > self._most:
            self._held.popitem(last=False)

    def _use(self, ids: list[int]) -> None:
        # The last first, so that a prompt's end is evicted first.
        for each in reversed(ids):
            self._held[each] = None
            self._held.move_to_end(each)

    def read(self, now: float, num_blocks: int) -> float:
        """Read so many blocks. Return when they have been read."""
        self._free_s = max(now, self._free_s) + self._latency_s + num_blocks * self.block_s
        return self._free_s


class SessionRun:
    """A simulation of sessions, by a cost model, or without one of the bounds."""

    def __init__(
        self,
        begun: Sequence[Begun],
        tiers: Tiers,
        cost_model: CostModel | None,
        *,
        keeps: Keeps = "hints",
        longest_pause_s: float = 1800.0,
        until_s: float = math.inf,
        token_bytes: int = 131_072,
        policy: str | Policy = "paged",
        max_tokens_per_step: int = 2048,
        max_sequences: int = 64,
        seed: int = 0,
        check: bool = False,
        groups: Sequence[LayerGroup] = (LayerGroup("full"),),
    ) -> None:
        """`longest_pause_s`: longer pauses are cut. `until_s`: the run ends then. `token_bytes`: K and V of a token. `seed` chooses tokens; no result
        depends on it. `groups`: the kinds of layers; with several, device blocks are pages. Raises InvalidConfig, and UnsupportedByLayers for a host or
        disk tier with several kinds."""
        converted("keeps", keeps, Keeps)
        between("longest_pause_s", longest_pause_s, 0, math.inf)
        converted("until_s", until_s, Annotated[float, Meta(gt=0)])
        at_least("the number of sessions", len(begun), 1)
        self._begun, self._tiers, self._keeps, self._seed = begun, tiers, keeps, seed
        self._longest_pause_s, self._until_s, self._is_bound = longest_pause_s, until_s, cost_model is None
        self._size = begun[0].session.block_size
        self._layout = Layout(groups, self._size, keeps=True)
        if tiers.host_blocks or tiers.disk_blocks:
            # Copies are priced by block, not by page.
            self._layout.refuse("a tier under the device (host_blocks, disk_blocks)")
        self._lines = lines = _Lines(begun)
        step = _Timeless() if cost_model is None else _WithLatency(cost_model, tiers.host_latency_s)
        outputs = [1 if self._is_bound else turn.output_tokens for turn in lines.turns]
        self._kept = [self._num_kept(turn, output) for turn, output in zip(lines.turns, outputs, strict=True)]
        prompts = [self._num_tokens(number) for number in range(len(lines.turns))]
        trace = Trace.from_lengths(np.zeros(len(prompts)), prompts, outputs, name="sessions")
        manager = BlockManager(
            tiers.device_blocks,
            self._size,
            host_blocks=tiers.host_blocks,
            host_caching=tiers.host_blocks > 0,
            groups=groups,
        )
        self.scheduler = Scheduler(
            manager,
            policy=policy,
            max_tokens_per_step=max(prompts) if self._is_bound else max_tokens_per_step,
            max_sequences=max_sequences,
            costs=step.costs(self._size),
        )
        self._coming = _Coming(trace)
        self._disk = None
        if tiers.disk_blocks:
            self._disk = _Disk(tiers, token_bytes * self._size, takes_time=not self._is_bound)
        self._num_read = self._num_ended = 0
        self._order: list[int] = []
        self._simulation = Simulation(
            trace,
            self.scheduler,
            step,
            check=check,
            fast_forward=not self._is_bound,
            prompt_of=self._prompt,
            shared=self._coming,
            as_asked=self._as_asked,
        )
        self._begin()

    def steps(self) -> Iterator[Step]:
        """Run to the end, and yield each step. Raises SimulationStuck."""
        simulation, scheduler, coming = self._simulation, self.scheduler, self._coming
        while (coming.are_left or scheduler.has_unfinished) and simulation.now_s < self._until_s:
            if not scheduler.has_unfinished:
                simulation.now_s = max(simulation.now_s, coming.next_s())
            self._deliver()
            if simulation.skip_ahead():
                self._deliver()
            batch = scheduler.schedule(simulation.now_s)
            if not batch.is_empty:
                work = simulation.work_of(batch)
                step = simulation.finish(batch, work, float(simulation.cost_model.seconds(work)))
                self._ended(batch, step)
                yield step
            elif batch.has_outputs or coming.next_s() == math.inf:
                simulation.nothing_ran(batch)
            else:
                # All requests wait for the disk, or for memory that reads fill.
                simulation.now_s = max(simulation.now_s, coming.next_s())
        # Turns that came meanwhile count as waiting.
        self._deliver()
        if self._num_ended < len(self._lines.turns) and simulation.now_s < self._until_s:
            raise SimulationStuck(f"{len(self._lines.turns) - self._num_ended:,} turns never ended")

    def run(self) -> SessionResult:
        """Run to the end. Raises SimulationStuck."""
        for _ in self.steps():
            pass
        return self.result()

    def result(self) -> SessionResult:
        """Return the figures so far of the turns with a first token. Times to first token also count turns that still wait, as long as they have."""
        lines, size, num_ids = self._lines, self._size, int(self._lines.base[-1])
        figures, stats, run = self.scheduler.manager.stats(), self.scheduler.stats(), self._simulation.result()
        ttft, has_first = self.ttft_of_each(), np.isfinite(self._simulation.latencies.first)
        seen = [turn for turn in self._order if has_first[turn]]
        prompts = [(lines.session[lines.line_of[turn]], lines.blocks(turn)) for turn in seen]
        whole = max(1, sum(len(blocks) for _, blocks in prompts))
        device = (figures.device_hit_tokens + figures.pending_hit_tokens) // size
        host = figures.host_hit_tokens // size
        held = [(session, blocks[: self._kept[turn]]) for turn, (session, blocks) in zip(seen, prompts, strict=True)]
        reachable = blocks_if_all_kept(held, num_ids)
        capacity = self._tiers.device_blocks // (self._layout.full_pages or 1) + self._tiers.host_blocks
        places = np.array([lines.place(turn) + 1 for turn in range(len(ttft))])
        groups = [(places >= first) & (places <= last) & ~np.isnan(ttft) for first, last in TURN_GROUPS]
        return SessionResult(
            keeps=self._keeps,
            sessions=len(self._begun),
            turns=len(seen),
            shortened=sum(self._kept[turn] < lines.turns[turn].num_blocks for turn in seen),
            prompt_blocks=whole,
            device=device / whole,
            host=host / whole,
            disk=self._num_read / whole,
            kept=blocks_if_all_kept(prompts, num_ids) / whole,
            reachable=reachable / whole,
            offline=blocks_offline(prompts, capacity) / whole,
            computed_twice=max(0, reachable - device - host - self._num_read) * size + stats.recomputed_tokens,
            preemptions=stats.preemptions_recompute + stats.preemptions_swap,
            ttft_s=Percentiles.of(ttft[~np.isnan(ttft)]),
            ttft_by_turn=tuple(Percentiles.of(ttft[group]) for group in groups),
            makespan_s=self._simulation.latencies.last_token_s,
            violations=run.violations,
            violation=next(iter(run.violation_messages), ""),
        )

    def ttft_of_each(self) -> NDArray[np.float64]:
        """Return the seconds to the first token of each turn in the order of sessions and lines, float64 [turns]: the wait so far if there is no token
        yet, NaN if the turn has not come."""
        ttft, arrived = self._simulation.latencies.ttft.copy(), self._simulation.latencies.arrival
        waits = np.isnan(ttft) & ~np.isnan(arrived)
        ttft[waits] = np.maximum(0.0, self._simulation.now_s - arrived[waits])
        return ttft

    def _num_kept(self, turn: Turn, output: int) -> int:
        """Return the full blocks of a prompt that the device can hold beside its rest and its output."""
        most = self._layout.tokens_in(self._tiers.device_blocks) - output - 1
        return min(turn.num_blocks, max(0, most // self._size - 1))

    def _num_tokens(self, number: int) -> int:
        """Return the tokens of a prompt: its full blocks and at least one more, since the last token of a prompt is always computed."""
        turn, kept = self._lines.turns[number], self._kept[number]
        rest = turn.prompt_tokens - kept * self._size if kept == turn.num_blocks else 1
        return kept * self._size + min(max(1, rest), self._size)

    def _prompt(self, number: int) -> NDArray[np.int32]:
        contents = np.append(self._lines.blocks(number)[: self._kept[number]], MAX_SHARED_IDS + number)
        lengths = np.full(len(contents), self._size, np.int64)
        lengths[-1] = self._num_tokens(number) - self._size * (len(contents) - 1)
        return segment_tokens(contents, lengths, self._seed)

    def _as_asked(self, request: Request) -> Request:
        number = int(request.id)
        if self._keeps != "lru":
            request = msgspec.structs.replace(request, session_id=self._session_id(number))
        if self._disk is None:
            return request
        # Also if memory has as much now, since it may be evicted while the request waits.
        found = self._disk.look_up(self._lines.blocks(number)[: self._kept[number]])
        if not found or self._disk.block_s > self.scheduler.costs.seconds_per_token * self._size:
            return request
        return msgspec.structs.replace(request, num_computed=found * self._size)

    def _session_id(self, number: int) -> str:
        """Return the id of a turn's line: a sub-agent keeps other content than its parent."""
        return str(self._lines.line_of[number])

    def _begin(self) -> None:
        """Schedule the first turns; for bounds all turns, at their recorded times."""
        lines, place = self._lines, 0
        for each in self._begun:
            session, clock, before = each.session, each.begins_s, None
            if self._is_bound:
                for line, number in session.turns:
                    at_s = session.lines[line].turns[number].at_s
                    clock += 0 if before is None else min(at_s - before, self._longest_pause_s)
                    before = at_s
                    self._coming.put(clock, lines.first[place + line] + number)
            else:
                self._coming.put(clock, lines.first[place])
                self._begin_agents(place, -1, clock)
            place += len(session.lines)

    def _begin_agents(self, line: int, after: int, now: float) -> None:
        """Schedule the first turns of sub-agents that begin when this turn of a line has ended."""
        for child, delay_s in self._lines.children.get((line, after), ()):
            begins, first = now + min(delay_s, self._longest_pause_s), self._lines.first
            if first[child] < first[child + 1]:
                self._coming.put(begins, first[child])
            self._begin_agents(child, -1, begins)

    def _deliver(self) -> None:
        """Add the turns that have come, and let turns go on whose blocks were read."""
        coming, now = self._coming, self._simulation.now_s
        while coming.next_s() <= now:
            if coming.reads and coming.reads[0][0] <= coming.next_turn_s():
                _, turn, num_tokens = heappop(coming.reads)
                self.scheduler.loaded(str(turn), num_tokens)
                self._num_read += num_tokens // self._size
            else:
                arrival = coming.next_turn_s()
                turn = coming.take()
                self._order.append(turn)
                self._simulation.add(turn, arrival)

    def _ended(self, batch: Batch, step: Step) -> None:
        """Read what a batch loads, and schedule what follows the turns that ended with it."""
        now = self._simulation.now_s
        if len(batch.loads):
            assert self._disk is not None, "only the disk has what is loaded"
            rows, counts = np.unique(batch.loads[:, 0], return_counts=True)
            for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
                turn = int(self.scheduler.id_of(row) or -1)
                heappush(self._coming.reads, (self._disk.read(now, count), turn, count * self._size))
        for turn in step.ended:
            self._num_ended += 1
            if self._disk is not None:
                self._disk.write(self._lines.blocks(turn)[: self._kept[turn]])
            if self._keeps == "hints":
                self._hint(turn, now)
            if not self._is_bound:
                self._go_on(turn, now)

    def _hint(self, turn: int, now: float) -> None:
        session = self._session_id(turn)
        if self._lines.is_last(turn):
            hint = Hint(action="end", session=session)
        else:
            hint = Hint(action="retain", session=session, waits_for=WAITS.get(self._lines.turns[turn].stop))
        self.scheduler.hint(hint, now)

    def _go_on(self, turn: int, now: float) -> None:
        lines = self._lines
        if not lines.is_last(turn):
            self._coming.put(now + min(lines.turns[turn + 1].think_s, self._longest_pause_s), turn + 1)
        self._begin_agents(lines.line_of[turn], lines.place(turn), now)


Prompts = Sequence[tuple[int, NDArray[np.int64]]]
"""In order of arrival: the session, and block ids, int64 [n]; equal ids are equal content."""


def blocks_if_all_kept(prompts: Prompts, num_ids: int) -> int:
    """Return the blocks of prompts that hit if nothing is ever evicted; ids are below `num_ids`."""
    seen, hits = np.zeros(num_ids, np.bool_), 0
    for _, blocks in prompts:
        hits += _first(~seen[blocks])
        seen[blocks] = True
    return hits


def blocks_offline(prompts: Prompts, capacity: int) -> int:
    """Return the blocks that hit if eviction takes the end of the session whose next turn is last. Turns are known beforehand.

    The order is not proven to be the best. Only the last prompt of a session is kept, so it is no bound if sub-agents' prompts come between.
    """
    following: dict[int, int] = {}
    after = [0] * len(prompts)
    for place in range(len(prompts) - 1, -1, -1):
        session = prompts[place][0]
        after[place] = following.get(session, len(prompts))
        following[session] = place
    held: dict[int, int] = {}
    next_turn: dict[int, int] = {}
    latest: dict[int, NDArray[np.int64]] = {}
    size = hits = 0
    for place, (session, blocks) in enumerate(prompts):
        have = latest.get(session, blocks[:0])[: held.get(session, 0)]
        common = min(len(have), len(blocks))
        hits += _first(have[:common] != blocks[:common])
        size += len(blocks) - len(have)
        held[session], latest[session], next_turn[session] = len(blocks), blocks, after[place]
        for other in sorted(held, key=lambda each: (next_turn[each], each != session), reverse=True):
            cut = min(max(0, size - capacity), held[other])
            held[other], size = held[other] - cut, size - cut
            if size <= capacity:
                break
    return hits


def _first(is_missing: NDArray[np.bool_]) -> int:
    """Return how many entries come before the first True."""
    return int(is_missing.argmax()) if is_missing.any() else len(is_missing)
