"""The accounts of a simulation: latencies, memory and queues over time, counts; and the result of them."""

import time
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paged import Scheduler
from paged.base.words import counted
from paged.block_manager import Layout
from paged.study.hardware import StepWork
from paged.study.simulator.result import Latencies, Preemptions, SimulationResult, Spread
from paged.study.traces import Trace

UNBOUNDED = 2**30
"""The token budget of a scheduler without a bound."""
MAX_MESSAGES = 10

Times = NDArray[np.float64]


class Memory(NamedTuple):
    """The pool at a moment: blocks (or pages) that sequences hold, their slots with computed KV, and blocks reserved by count."""

    used: int
    filled: int
    reserved: int


class Entry(NamedTuple):
    """A step, or `steps` steps with the same rows. Averages are weighted by time.

    end_s, seconds  virtual time at its end, and its duration
    tokens          computed in all steps
    rows            in flight in a step
    sampled         rows whose logits were computed, over all steps
    context         tokens whose KV was read, over all steps, once for each row that reads them
    pairs           of a computed token and a position that it attends to, over all steps
    held            slots of blocks that sequences hold, on average
    filled          of them, slots with computed KV, each counted once, on average
    promised        slots that policies reserve for sequences beyond what those hold, on average
    cached          slots of cached blocks at the end
    waiting, away   requests at the end: waiting; paused, swapped or loading
    """

    end_s: float
    seconds: float
    steps: int
    tokens: int
    rows: int
    sampled: float
    context: float
    pairs: float
    held: float
    filled: float
    promised: float
    cached: int = 0
    waiting: int = 0
    away: int = 0


class Timeline:
    """Entries in order, one for each step or stretch of steps."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []

    def add(self, entry: Entry) -> None:
        """Add the latest entry."""
        self._entries.append(entry)

    def __len__(self) -> int:
        return len(self._entries)

    def columns(self) -> dict[str, Times]:
        """Return the entries as columns by field, float64 [entries]."""
        table = np.array(self._entries, np.float64).reshape(-1, len(Entry._fields))
        return dict(zip(Entry._fields, table.T, strict=True))

    def weighted(self, *, while_waiting: bool = False) -> dict[str, float]:
        """Return means of rows, held, filled and promised, weighted by time, over all entries or over those after which a request waited."""
        columns = self.columns()
        weights = columns["seconds"]
        if while_waiting:
            weights = weights * (columns["waiting"] > 0)
        total = float(weights.sum())
        names = ("rows", "held", "filled", "promised")
        return {name: float((columns[name] * weights).sum()) / total if total else 0.0 for name in names}


class Ledger:
    """Enters every step once, alone or in a stretch."""

    def __init__(
        self, trace: Trace, scheduler: Scheduler, price_per_hour: float | None, latencies: Latencies | None = None
    ) -> None:
        self._trace = trace
        self._scheduler = scheduler
        self._price_per_hour = price_per_hour
        self.latencies = latencies or Latencies(len(trace))
        self.timeline = Timeline()
        self.num_steps = self.num_skipped = 0
        self.output_tokens = 0
        self.busy_s = 0.0
        self._peak_used = 0
        self._checked_steps = self._violations = 0
        self._messages: list[str] = []
        self._started = time.perf_counter()

    def memory(self) -> Memory:
        """Return the pool as it is now. Slots that several sequences share count once: only last and reserved blocks have empty slots."""
        manager = self._scheduler.manager
        used, size = manager.device.num_used, manager.block_size
        empty = manager.rows.num_blocks * np.int64(size)
        empty -= manager.rows.num_computed
        # A swapped row has computed more than its table holds.
        np.maximum(empty, 0, out=empty)
        # The last blocks of all groups are equally empty.
        return Memory(used, used * size - int(empty.sum()) * manager.layout.block_pages, self._scheduler.num_reserved)

    def step(
        self, memory: Memory, sampled: NDArray[np.int64], *, end_s: float, seconds: float, rows: int, work: StepWork
    ) -> None:
        """Enter a step that began with this memory: its work, its number of rows, and a token for each request of `sampled`."""
        manager, tokens = self._scheduler.manager, int(work.computed_tokens)
        self.latencies.tokens(sampled, end_s)
        self.output_tokens += len(sampled)
        self.num_steps += 1
        self.busy_s += seconds
        self._peak_used = max(self._peak_used, memory.used)
        entry = Entry(
            end_s=end_s,
            seconds=seconds,
            steps=1,
            tokens=tokens,
            rows=rows,
            sampled=float(work.sampled_rows),
            context=float(work.context_tokens),
            pairs=float(work.attended_pairs),
            held=memory.used * manager.block_size,
            filled=memory.filled + tokens * manager.layout.block_pages,
            promised=memory.reserved * manager.block_size,
        )
        self.timeline.add(self._with_ends(entry))

    def stretch(
        self,
        memory: Memory,
        requests: NDArray[np.int64],
        times: Times,
        seconds: Times,
        drawn: NDArray[np.int64],
        *,
        rows: int,
        context: float,
    ) -> None:
        """Enter steps of so many rows that ended at `times` after `seconds` each, [steps], each with a token for each of these requests. The first
        began with this memory, and each step drew so many blocks. In all they read the KV of `context` tokens."""
        steps = len(times)
        self.latencies.steady_tokens(requests, times)
        self.output_tokens += steps * len(requests)
        self.num_steps += steps
        self.num_skipped += steps
        # Added one after the other: the same sum, to the last bit, as step by step.
        self.busy_s = float(np.add.accumulate(np.concatenate([[self.busy_s], seconds]))[-1])
        risen = drawn.cumsum()
        used = memory.used + risen
        # Drawn blocks come out of the reserved ones, if any.
        taken = memory.reserved - self._scheduler.num_reserved if memory.reserved else 0
        self._peak_used = max(self._peak_used, int(used[-1]))
        total, size = float(seconds.sum()), self._scheduler.manager.block_size
        weights = seconds / total if total else np.full(steps, 1 / steps)
        entry = Entry(
            end_s=float(times[-1]),
            seconds=total,
            steps=steps,
            tokens=steps * rows,
            rows=rows,
            sampled=steps * len(requests),
            context=context,
            pairs=context,
            held=float(used @ weights) * size,
            filled=memory.filled + rows * float(np.arange(1, steps + 1) @ weights),
            promised=(memory.reserved - taken * float(risen @ weights) / max(1, int(risen[-1]))) * size,
        )
        self.timeline.add(self._with_ends(entry))

    def checked(self, violations: list[str], *, ends_step: bool) -> None:
        """Count violations that `check()` found; with `ends_step` also a checked step."""
        self._violations += len(violations)
        self._checked_steps += ends_step
        self._messages.extend(
            f"step {self.num_steps + 1}: {message}" for message in violations[: MAX_MESSAGES - len(self._messages)]
        )

    def _with_ends(self, entry: Entry) -> Entry:
        """Return the entry with the fields at its end, which is now."""
        counts, manager = self._scheduler.counts(), self._scheduler.manager
        return entry._replace(
            cached=manager.device.num_cached * manager.block_size,
            waiting=counts["waiting"],
            away=counts["loading"] + counts["paused"] + counts["swapped"],
        )

    def result(self, num_added: int) -> SimulationResult:
        """Return the figures so far, with `num_added` requests that have come."""
        scheduler, manager = self._scheduler, self._scheduler.manager
        stats, counts, limits = scheduler.stats(), scheduler.counts(), scheduler.limits
        budget = None if limits.max_tokens_per_step == UNBOUNDED else limits.max_tokens_per_step
        makespan = self.latencies.last_token_s
        mean = self.timeline.weighted()
        too_long = self._trace.num_left_out
        moved = (stats.swapped_out_blocks + stats.swapped_in_blocks) * manager.block_size
        wall = time.perf_counter() - self._started
        slots = manager.num_blocks * manager.block_size
        cost = None
        if self._price_per_hour is not None and self.output_tokens:
            cost = self._price_per_hour * makespan / 3600 / self.output_tokens * 1e6
        return SimulationResult(
            trace=self._trace.name,
            policy=scheduler.policy.name,
            num_blocks=manager.num_blocks,
            block_size=manager.block_size,
            groups=groups_of(manager.layout),
            host_blocks=manager.num_host_blocks,
            max_tokens_per_step=budget,
            max_sequences=limits.max_sequences,
            prefix_caching=manager.prefix_caching,
            requests=num_added + too_long,
            finished=counts["finished"],
            rejected=counts["rejected"] + too_long,
            steps=self.num_steps,
            skipped_steps=self.num_skipped,
            makespan_s=makespan,
            busy_s=self.busy_s,
            prompt_tokens=stats.prompt_tokens,
            output_tokens=self.output_tokens,
            throughput=self.output_tokens / makespan if makespan else 0.0,
            requests_per_s=counts["finished"] / makespan if makespan else 0.0,
            **self.latencies.percentiles(),
            preemptions=Preemptions(recompute=stats.preemptions_recompute, swap=stats.preemptions_swap),
            max_preemptions=stats.max_preemptions,
            memory=_spread(mean, slots),
            memory_while_waiting=_spread(self.timeline.weighted(while_waiting=True), slots),
            peak_block_usage=self._peak_used / manager.num_blocks,
            mean_block_usage=mean["held"] / slots,
            row_occupancy=mean["rows"] / limits.max_sequences,
            token_occupancy=None if budget is None else stats.computed_tokens / max(1, stats.steps * budget),
            hit_tokens=stats.hit_tokens,
            prefix_hit_rate=stats.hit_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0,
            computed_tokens=stats.computed_tokens,
            wasted_tokens=stats.recomputed_tokens,
            swapped_out_blocks=stats.swapped_out_blocks,
            swapped_in_blocks=stats.swapped_in_blocks,
            waste=(stats.recomputed_tokens + moved) / stats.computed_tokens if stats.computed_tokens else 0.0,
            cost_per_million_tokens=cost,
            checked_steps=self._checked_steps,
            violations=self._violations,
            violation_messages=tuple(self._messages),
            wall_s=wall,
            us_per_step=wall / self.num_steps * 1e6 if self.num_steps else 0.0,
        )


def groups_of(layout: Layout) -> tuple[str, ...]:
    """Return the pages of each kind of layer, in words; empty if a block is of all layers."""
    found = []
    for group in () if layout.is_plain else layout.groups:
        name = f"{group.kind} {group.reach:,}" if group.reach else group.kind
        found.append(f"{name}: {counted(group.pages, 'page')} a {'sequence' if group.kind == 'state' else 'block'}")
    return tuple(found)


def _spread(mean: dict[str, float], slots: int) -> Spread:
    kept = mean["held"] + mean["promised"]
    return Spread(of_held=mean["filled"] / kept if kept else 0.0, of_pool=mean["filled"] / slots)
