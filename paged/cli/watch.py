"""Frames of a running simulation, for the live view and the progress lines."""

from collections import deque
from collections.abc import Mapping

import msgspec
import numpy as np
from numpy.typing import NDArray

from paged.block_manager import GroupStats
from paged.serving.block_map import block_cells, groups_of, tables_of
from paged.study.simulator import Simulation, Step

MAX_EVENTS = 40


class Frame(msgspec.Struct, frozen=True):
    """What the live view shows of a step. Counts are of blocks unless the name says tokens, requests or seconds."""

    step: int
    now_s: float
    cells: NDArray[np.int64]
    """The owner of each device block, int64 [blocks], as `block_cells` has it."""
    block_size: int
    used: int
    cached: int
    free: int
    host_blocks: int
    host_used: int
    host_cached: int
    requests: int
    counts: dict[str, int]
    """Requests by state: waiting, running, paused, swapped, finished, rejected."""
    batch_tokens: int
    batch_sequences: int
    token_budget: int
    preemptions_recompute: int
    preemptions_swap: int
    hit_tokens: int
    prompt_tokens: int
    events: tuple[tuple[float, int, str], ...] = ()
    """Events, the latest last: seconds, request's number, text."""
    texts: tuple[tuple[int, str], ...] = ()
    """What a model writes: request's number, and its whole text so far. Empty without a model."""
    groups: tuple[GroupStats, ...] = ()
    """Layer groups if layers are of several kinds: cells and counts are of pages then. Else empty."""


class Watch:
    """Follows a simulation step by step."""

    def __init__(self, simulation: Simulation, texts: Mapping[str, str] | None = None) -> None:
        """Follow a simulation. `texts`: by request id, what a model has written so far; None: there is no model."""
        self._simulation = simulation
        self._texts = texts if texts is not None else {}
        self._events: deque[tuple[float, int, str]] = deque(maxlen=MAX_EVENTS)
        self._seen: set[int] = set()
        layout = simulation.scheduler.manager.layout
        self._groups = () if layout.is_plain else layout.groups
        self._last: Step | None = None

    def note_step(self, step: Step) -> None:
        """Note what happened in this step."""
        self._last = step
        batch = step.batch
        requests = [int(id) for id in batch.ids]
        for id, kind in batch.preempted:
            what = "its tail went to the host" if kind == "swap" else "its tail will be computed again"
            self._note(step, int(id), f"preempted, {what}")
        for request, first in zip(requests, batch.positions[batch.query_start_loc[:-1]].tolist(), strict=True):
            if request not in self._seen:
                self._seen.add(request)
                length = int(self._simulation.trace.prompt_tokens[request])
                hit = f", {first:,} of its tokens were cached" if first else ""
                if first and any(group.kind == "state" for group in self._groups):
                    hit = f", begins at the state kept after {first:,} of them"
                self._note(step, request, f"admitted, prompt of {length:,} tokens{hit}")
            elif str(request) in batch.admitted:
                self._note(step, request, f"is back, {first:,} of its tokens are still there")
        for request in step.ended:
            self._note(step, request, f"finished after {int(self._simulation.trace.output_tokens[request]):,} tokens")

    def _note(self, step: Step, request: int, what: str) -> None:
        self._events.append((step.now_s, request, what))

    def frame(self) -> Frame:
        """Return the frame after the latest step."""
        simulation, scheduler, manager = (
            self._simulation,
            self._simulation.scheduler,
            self._simulation.scheduler.manager,
        )
        stats = scheduler.stats()
        batch = self._last.batch if self._last else None
        return Frame(
            step=simulation.ledger.num_steps,
            now_s=simulation.now_s,
            cells=self._cells(),
            block_size=manager.block_size,
            used=manager.device.num_used,
            cached=manager.device.num_cached,
            free=manager.device.num_free,
            host_blocks=manager.num_host_blocks,
            host_used=manager.host.num_used,
            host_cached=manager.host.num_cached,
            requests=len(simulation.trace),
            counts=scheduler.counts(),
            batch_tokens=batch.num_scheduled_tokens if batch else 0,
            batch_sequences=len(batch.rows) if batch else 0,
            token_budget=scheduler.limits.max_tokens_per_step,
            preemptions_recompute=stats.preemptions_recompute,
            preemptions_swap=stats.preemptions_swap,
            hit_tokens=stats.hit_tokens,
            prompt_tokens=stats.prompt_tokens,
            events=tuple(self._events),
            texts=tuple((int(id), self._texts[id]) for id in scheduler.running_ids() if id in self._texts),
            groups=groups_of(manager),
        )

    def _cells(self) -> NDArray[np.int64]:
        scheduler, manager = self._simulation.scheduler, self._simulation.scheduler.manager
        rows = manager.rows.live
        owners = np.array([int(scheduler.id_of(row) or 0) for row in rows.tolist()], np.int64)
        return block_cells(*tables_of(manager), owners, manager.device.states)
