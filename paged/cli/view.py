"""The live view of `paged demo`: frames of a simulation, as lines of coloured text for terminals from 80 columns and 24 lines.

Every state has a sign of its own as well, so that the picture reads without colour.
"""

from collections import deque
from collections.abc import Mapping

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from paged.block_manager import MemoryStats
from paged.scheduler import SchedulerStats
from paged.serving.block_map import CACHED, FREE, HELD, RETAINED, SHARED, block_cells, tables_of
from paged.study.simulator import Simulation, Step

MAX_EVENTS = 40


class Frame(msgspec.Struct, frozen=True):
    """What the live view shows of a step."""

    step: int
    now_s: float
    cells: NDArray[np.int64]
    """The owner of each device block, int64 [blocks], as `block_cells` has it."""
    block_size: int
    memory: MemoryStats
    requests: int
    counts: dict[str, int]
    """Requests by state: waiting, running, paused, swapped, finished, rejected."""
    batch_tokens: int
    batch_sequences: int
    token_budget: int
    totals: SchedulerStats
    events: tuple[tuple[float, int, str], ...] = ()
    """Events, the latest last: seconds, request's number, text."""
    texts: tuple[tuple[int, str], ...] = ()
    """What a model writes: request's number, and its whole text so far. Empty without a model."""


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
        simulation, scheduler = self._simulation, self._simulation.scheduler
        manager = scheduler.manager
        batch = self._last.batch if self._last else None
        return Frame(
            step=simulation.ledger.num_steps,
            now_s=simulation.now_s,
            cells=self._cells(),
            block_size=manager.block_size,
            memory=manager.stats(),
            requests=len(simulation.trace),
            counts=scheduler.counts(),
            batch_tokens=batch.num_scheduled_tokens if batch else 0,
            batch_sequences=len(batch.rows) if batch else 0,
            token_budget=scheduler.limits.max_tokens_per_step,
            totals=scheduler.stats(),
            events=tuple(self._events),
            texts=tuple((int(id), self._texts[id]) for id in scheduler.running_ids() if id in self._texts),
        )

    def _cells(self) -> NDArray[np.int64]:
        scheduler, manager = self._simulation.scheduler, self._simulation.scheduler.manager
        rows = manager.rows.live
        owners = np.array([int(scheduler.id_of(row) or 0) for row in rows.tolist()], np.int64)
        return block_cells(*tables_of(manager), owners, manager.device.states)


MAX_WIDTH = 120
OWNED = "█"
SIGNS = {SHARED: "▓", CACHED: "▒", RETAINED: "▒", HELD: "░", FREE: "·"}
COLOURS = {SHARED: "#ffffff", CACHED: "#6b7280", RETAINED: "#9ca3af", HELD: "#9ca3af", FREE: "#4b5563"}
PALETTE = (
    "#5b8ff9", "#f6903d", "#5ad8a6", "#e8684a", "#9270ca", "#f6bd16", "#6dc8ec", "#ff99c3",
    "#9fb40f", "#269a99", "#d3adf7", "#c97b63", "#76d0a3", "#b37feb", "#e0c068", "#4f9da6",
)  # fmt: skip
STATES = {"waiting": "#f6bd16", "running": "#5ad8a6", "paused": "#6dc8ec", "swapped": "#b37feb"}
GOOD, TIGHT, DIM, EDGE = "#5ad8a6", "#e8684a", "#9ca3af", "#4b5563"
LINES_BESIDE_THE_MAP = 9
"""Title, two borders, four bars, two lines of counts."""
MIN_EVENTS = 3


def render(frame: Frame, title: str, width: int, height: int) -> RenderableType:
    """Return the frame as text in at most `width` columns and `height` lines."""
    width = min(width, MAX_WIDTH)
    beside = LINES_BESIDE_THE_MAP + bool(frame.memory.groups)
    map_lines = block_map(frame.cells, width - 4, max(height - beside - MIN_EVENTS, 3))
    num_left = max(height - beside - len(map_lines), 0)
    # Two thirds of the lines left show what a model writes.
    num_events = min(num_left, max(MIN_EVENTS, num_left // 3)) if frame.texts else num_left
    lines: list[RenderableType] = [
        _headline(frame, title, width),
        framed(map_lines, _device(frame), width),
        *_bars(frame, width),
        *_groups(frame, width),
        _states(frame),
        _pressure(frame),
    ]
    return Group(*lines, *_writing(frame, width, num_left - num_events), *_events(frame, width, num_events))


def _device(frame: Frame) -> str:
    pages = f"pages for layers of {len(frame.memory.groups)} kinds, " if frame.memory.groups else ""
    return f"device: {len(frame.cells)} {pages}blocks of {frame.block_size} tokens"


def colour_of(request: int) -> str:
    """Return the colour of a request: another one for each of 16 requests in order of arrival."""
    return PALETTE[request % len(PALETTE)]


def _headline(frame: Frame, title: str, width: int) -> Text:
    clock = f"step {frame.step:,} · {frame.now_s:6.2f} s"
    room = width - len(clock) - 3
    shown = title if len(title) <= room else title[: room - 1] + "…"
    return Text.assemble((" " + shown.ljust(room + 1), "bold"), (clock, DIM), no_wrap=True)


def block_map(cells: NDArray[np.int64], width: int, max_lines: int) -> list[Text]:
    """Return the map: a cell a block, of two columns if they fit, else of one; a cell for every few blocks if even these do not fit."""
    cell_width = 2 if len(cells) * 2 <= (width // 2) * 2 * max_lines else 1
    per_line = width // cell_width
    every = max(-(-len(cells) // (per_line * max_lines)), 1)
    shown = cells[::every]
    per_line = _even_split(len(shown), per_line, max_lines)
    lines = []
    for start in range(0, len(shown), per_line):
        line = Text(no_wrap=True)
        for cell in shown[start : start + per_line].tolist():
            sign = SIGNS.get(cell, OWNED)
            # A free block is a dot with room around it; others fill their columns.
            line.append(
                sign * cell_width if sign != SIGNS[FREE] else sign.ljust(cell_width),
                COLOURS.get(cell) or colour_of(cell),
            )
        lines.append(line)
    return lines


def framed(map_lines: list[Text], title: str, width: int) -> Panel:
    """Return a map of blocks with its title and legend."""
    return Panel(
        Group(*map_lines),
        title=Text(title, style="bold"),
        title_align="left",
        subtitle=_legend(),
        subtitle_align="left",
        border_style=EDGE,
        width=width,
    )


def _even_split(count: int, most: int, max_lines: int) -> int:
    """Return the cells a line, at most `most`: as many as fill the last line, if that takes less than a fifth of the width."""
    most = min(most, count)
    for per_line in range(most, most * 4 // 5, -1):
        if count % per_line == 0 and count // per_line <= max_lines:
            return per_line
    num_lines = -(-count // most)
    return -(-count // num_lines)


def _legend() -> Text:
    legend = Text()
    for request in range(4):
        legend.append(OWNED, colour_of(request))
    legend.append(" one request's  ", DIM)
    for state, words in ((SHARED, "shared"), (CACHED, "cached"), (FREE, "free")):
        legend.append(SIGNS[state], COLOURS[state])
        legend.append(f" {words}  ", DIM)
    legend.rstrip()
    return legend


def bar(name: str, parts: list[tuple[float, str, str]], words: str, width: int) -> Text:
    """Return a named bar of parts (share of the whole, sign, colour), with words to its right."""
    length = max(width - 11 - 36, 10)
    line = Text(f" {name:<9} ", style=DIM, no_wrap=True)
    drawn = 0
    share = 0.0
    for part, sign, colour in parts:
        share += part
        end = round(min(share, 1.0) * length)
        line.append(sign * (end - drawn), colour)
        drawn = end
    line.append("─" * (length - drawn), EDGE)
    line.append("  " + words, "default")
    line.truncate(width, overflow="ellipsis")
    return line


def pool_bars(device: tuple[int, int, int], host: tuple[int, int], host_blocks: int, width: int) -> list[Text]:
    """Return bars of the device's blocks (used, cached, free), and of the host's (used, cached) if it has any."""
    used, cached = device[0] / sum(device), device[1] / sum(device)
    parts = [(used, "━", TIGHT if used > 0.95 else GOOD), (cached, "━", COLOURS[CACHED])]
    bars = [bar("device", parts, f"{used:4.0%} used, {device[1]:,} cached, {device[2]:,} free", width)]
    if host_blocks:
        held, kept = host[0] / host_blocks, host[1] / host_blocks
        words = f"{held:4.0%} used, {host[1]:,} cached, of {host_blocks:,}"
        bars.append(bar("host", [(held, "━", STATES["swapped"]), (kept, "━", COLOURS[CACHED])], words, width))
    return bars


def _bars(frame: Frame, width: int) -> list[Text]:
    memory = frame.memory
    device, host = (memory.used, memory.cached, memory.free), (memory.host_used, memory.host_cached)
    bars = pool_bars(device, host, memory.host_blocks, width)
    share = frame.batch_tokens / frame.token_budget
    words = f"{frame.batch_tokens:4} tokens, {frame.batch_sequences} sequences"
    bars.append(bar("batch", [(share, "━", PALETTE[0])], words, width))
    ended = frame.counts.get("finished", 0) + frame.counts.get("rejected", 0)
    words = f"{ended:4} of {frame.requests} requests ended"
    bars.append(bar("progress", [(ended / frame.requests, "━", DIM)], words, width))
    return bars


def _groups(frame: Frame, width: int) -> list[Text]:
    """Return what each layer group holds, if there are several."""
    if not frame.memory.groups:
        return []
    line = Text(" pages     ", style=DIM, no_wrap=True)
    for each in frame.memory.groups:
        kind = each.group.kind
        line.append(f"{each.used:<4}", "bold default")
        line.append(f"{kind}, {each.group.pages} a {'state' if kind == 'state' else 'block'}   ", DIM)
    line.rstrip()
    line.truncate(width, overflow="ellipsis")
    return [line]


def _states(frame: Frame) -> Text:
    line = Text(" requests  ", style=DIM, no_wrap=True)
    for state, colour in STATES.items():
        line.append("● ", colour)
        line.append(f"{state} ", DIM)
        line.append(f"{frame.counts.get(state, 0):<5}", "bold default")
    return line


def _pressure(frame: Frame) -> Text:
    line = Text(" preempted ", style=DIM, no_wrap=True)
    for number, words in (
        (frame.totals.preemptions_recompute, " by recompute, "),
        (frame.totals.preemptions_swap, " by swap   prefix hits "),
        (frame.totals.hit_tokens, f" of {frame.totals.prompt_tokens:,} tokens"),
    ):
        line.append(f"{number:,}", "bold default").append(words)
    return line


def _writing(frame: Frame, width: int, count: int) -> list[Text]:
    """Return the ends of what the first `count` running requests have written: always `count` lines, so that the view does not move."""
    if not frame.texts:
        return []
    lines = []
    for request, text in frame.texts[:count]:
        line = Text(f" #{request:<4}", style=f"bold {colour_of(request)}", no_wrap=True)
        room = max(width - 7, 8)
        flat = " ".join(text.split())
        line.append(flat if len(flat) <= room else "…" + flat[1 - room :], "default not bold")
        line.truncate(width)
        lines.append(line)
    return lines + [Text("")] * (count - len(lines))


def _events(frame: Frame, width: int, count: int) -> list[Text]:
    lines = []
    for when, request, what in frame.events[-count:] if count else ():
        line = Text(f" {when:7.2f} s ", style=DIM, no_wrap=True)
        line.append(f"#{request:<4}", f"bold {colour_of(request)}")
        line.append(what, TIGHT if what.startswith("preempted") else "default")
        line.truncate(width, overflow="ellipsis")
        lines.append(line)
    return lines
