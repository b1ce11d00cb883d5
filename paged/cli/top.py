"""`paged top`: a running server in the terminal: its blocks, its queues, why requests wait, and events. Coloured text, or plain lines in a pipe."""

import re
from datetime import datetime
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from paged.base.words import counted
from paged.block_manager import LayerGroup
from paged.cli.show import as_time, console, figures, table
from paged.cli.view import DIM, GOOD, PALETTE, STATES, TIGHT, bar, block_map, colour_of, framed, pool_bars
from paged.serving.feed import snapshots
from paged.serving.sight import RequestSight, Snapshot

MAX_WIDTH = 160
LINES_BESIDE = 9
"""Headline, borders and legend of the map, three bars, states, totals, the table's head."""
MIN_LINES = 6
"""Lines of requests and events."""
LONGEST_NAME = 18
SIGNS = {"running": "●", "waiting": "○", "paused": "◐", "swapped": "◇", "loading": "◌"}
_KINDS = {
    "first_token": "first token",
    "preempted_recompute": "preempted, to recompute",
    "preempted_swap": "preempted, by swap",
    "returned": "is back",
}
"""Words for kinds of events; other kinds are words."""
_HARD = ("preempted_recompute", "preempted_swap", "rejected", "error")
_STATES = ("own", "shared", "cached", "retained", "held", "free")


def top(
    url: Annotated[str, typer.Argument(help="The server's address.")] = "http://127.0.0.1:8000",
    api_key: Annotated[str | None, typer.Option("--api-key", envvar="PAGED_API_KEY", help="The server's admin key, if it has one.", show_envvar=True)] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one view and end.")] = False,
) -> None:  # fmt: skip
    """Watch a running server: the request of each block, running requests, waiting requests and their reasons.

    Reads what the server's dashboard reads, twice a second, until Ctrl-C. In a pipe it prints one view in plain lines.

    Example: `paged top http://127.0.0.1:8000`
    """
    out, feed = console(), snapshots(url, api_key)
    seen = next(feed)
    if not out.is_terminal:
        print_plain(seen)
    elif once:
        out.print(draw(seen, out.width, out.height - 1))
    else:
        with Live(draw(seen, out.width, out.height), console=out, screen=True, auto_refresh=False) as live:
            for seen in feed:
                live.update(draw(seen, out.width, out.height), refresh=True)


def draw(seen: Snapshot, width: int, height: int) -> RenderableType:
    """Return the view in at most `width` columns and `height` lines."""
    width = min(width, MAX_WIDTH)
    num_lines = max((height - LINES_BESIDE - 2 * bool(seen.groups) - MIN_LINES) // 2, 2)
    map_lines = block_map(_cells(seen), width - 4, num_lines)
    blocks = framed(map_lines, f"device: {_blocks_of(seen)}", width)
    lines: list[RenderableType] = [*_bars(seen, width), *_groups(seen, width), _states(seen), _totals(seen)]
    num_left = max(height - 3 - len(map_lines) - len(lines) - 2, 0)
    num_events = min(len(seen.happened), num_left // 3)
    requests = _requests(seen, width, num_left - num_events)
    every: list[RenderableType] = [_headline(seen), blocks, *lines, *requests, *_events(seen, num_events)]
    for line in every:
        if isinstance(line, Text):
            line.truncate(width, overflow="ellipsis")
    return Group(*every)


def print_plain(seen: Snapshot) -> None:
    """Print the view for a pipe: every figure and every request."""
    q, t = seen.queues, seen.totals
    last = seen.steps[-1] if seen.steps else None
    pairs = [
        ("server", f"{seen.model}, policy {seen.policy}, up {as_time(seen.uptime_s)}"),
        ("requests", ", ".join(f"{getattr(q, name)} {name}" for name in q.__struct_fields__)),
        ("device", f"{_blocks_of(seen)}: {_by_state(seen)}"),
    ]
    if seen.host_blocks:
        pairs.append(("host", f"{seen.host.used:,} used, {seen.host.cached:,} cached, {seen.host.free:,} free"))
    for each in seen.groups:
        words = f"{each.used:,} pages used, {each.cached:,} cached"
        words += f", {each.passed:,} given back in front" if each.group.reach else ""
        words += f", {each.lost_tokens:,} hit tokens lost" if each.group.kind != "full" else ""
        pairs.append((each.group.name, words))
    if last is not None:
        words = f"{last.decode_tokens} tokens of decodes and {last.prompt_tokens} of prompts, of {seen.max_tokens_per_step}, in {as_time(last.seconds)}"
        pairs.append(("last step", words))
    pairs += [
        ("preempted", f"{t.preemptions_recompute} by recompute, {t.preemptions_swap} by swap"),
        ("prefix hits", f"{t.hit_tokens:,} of {t.prompt_tokens:,} tokens"),
        ("ended", f"{t.finished:,} finished, {t.aborted:,} aborted, {t.rejected:,} rejected"),
    ]
    figures("server", pairs)
    columns = ["request", "tenant", "state", "prompt", "output", "blocks", "waited", "reason"]
    rows = [
        [
            each.id,
            each.tenant,
            each.status,
            f"{each.prompt_tokens:,}",
            f"{each.output_tokens:,}/{each.max_tokens:,}",
            f"{each.device_blocks:,}",
            as_time(each.waited_s),
            each.reason,
        ]
        for each in seen.requests
    ]
    if rows:
        table("requests", columns, rows, right=(3, 4, 5, 6))
    if seen.prefixes:
        found = [
            [each.hash, str(each.requests), f"{each.hit_tokens:,}/{each.prompt_tokens:,}"] for each in seen.prefixes
        ]
        table("prefixes", ["prefix", "requests", "found"], found, right=(1, 2))
    if seen.happened:
        happened = [
            [_clock(each.at), each.id, _KINDS.get(each.kind, each.kind), each.detail]
            for each in reversed(seen.happened)
        ]
        table("events", ["at", "request", "event", "detail"], happened)


def _cells(seen: Snapshot) -> NDArray[np.int64]:
    states, lengths = zip(*seen.blocks.runs, strict=True)
    return np.repeat(np.array(states, np.int64), lengths)


def _blocks_of(seen: Snapshot) -> str:
    if seen.groups:
        return f"{counted(seen.num_blocks, 'page')}, blocks of {seen.block_size} tokens"
    return f"{counted(seen.num_blocks, 'block')} of {seen.block_size} tokens"


def _by_state(seen: Snapshot) -> str:
    words = {"own": "one request's"}
    return ", ".join(f"{getattr(seen.blocks, name):,} {words.get(name, name)}" for name in _STATES)


def _short(name: str) -> str:
    """Return a name without its middle if it is long."""
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 6]}…{name[-5:]}"


def _clock(unix_time: float) -> str:
    return datetime.fromtimestamp(unix_time).strftime("%H:%M:%S")


def _headline(seen: Snapshot) -> Text:
    about = f"  policy {seen.policy} · up {as_time(seen.uptime_s)} · {_clock(seen.unix_time)}"
    return Text.assemble((f" {seen.model}", "bold"), (about, DIM), no_wrap=True)


def _bars(seen: Snapshot, width: int) -> list[Text]:
    blocks = seen.blocks
    device = (blocks.own + blocks.shared + blocks.held, blocks.cached + blocks.retained, blocks.free)
    bars = pool_bars(device, (seen.host.used, seen.host.cached), seen.host_blocks, width)
    if seen.steps:
        last, budget = seen.steps[-1], seen.max_tokens_per_step
        parts = [(last.decode_tokens / budget, "━", GOOD), (last.prompt_tokens / budget, "╍", STATES["waiting"])]
        words = f"{last.decode_tokens} + {last.prompt_tokens} of {budget} tokens, {as_time(last.seconds)}"
        bars.append(bar("last step", parts, words, width))
    return bars


def _groups(seen: Snapshot, width: int) -> list[Text]:
    """Return what sequences hold of each layer group, if there are several, what windows gave back, and what hits lost."""
    if not seen.groups:
        return []
    signs = ["━╍═┅"[i % 4] for i in range(len(seen.groups))]
    parts = [
        (each.used / seen.num_blocks, sign, PALETTE[i])
        for i, (each, sign) in enumerate(zip(seen.groups, signs, strict=True))
    ]
    line = bar("groups", parts, "", width)
    for i, each in enumerate(seen.groups):
        line.append(f"{signs[i]} {each.used:,} {_name(each.group)}  ", PALETTE[i])
    line.rstrip()
    back = ", ".join(f"{each.passed:,} pages of {_name(each.group)}" for each in seen.groups if each.passed)
    lost = ", ".join(f"{each.lost_tokens:,} by {_name(each.group)}" for each in seen.groups if each.lost_tokens)
    below = Text(" given back in front ", style=DIM, no_wrap=True)
    below.append(back or "none", "default").append("   hit tokens lost ").append(lost or "none", "default")
    return [line, below]


def _name(group: LayerGroup) -> str:
    return f"{group.kind} {group.reach:,}" if group.reach else group.kind


def _states(seen: Snapshot) -> Text:
    line = Text(" requests  ", style=DIM, no_wrap=True)
    for name in seen.queues.__struct_fields__:
        line.append(f"{SIGNS[name]} {name} ", STATES.get(name, DIM))
        line.append(f"{getattr(seen.queues, name):<4} ", "bold default")
    return line


def _totals(seen: Snapshot) -> Text:
    t = seen.totals
    line = Text(" preempted ", style=DIM, no_wrap=True)
    line.append(f"{t.preemptions_recompute} by recompute, {t.preemptions_swap} by swap", "default")
    line.append("   prefix hits ")
    line.append(f"{t.hit_tokens / max(t.prompt_tokens, 1):.0%}", "default")
    line.append("   swapped ")
    line.append(f"{t.swapped_out_blocks:,} out, {t.swapped_in_blocks:,} in", "default")
    return line


def _requests(seen: Snapshot, width: int, count: int) -> list[Text]:
    """Return lines of requests. Those that do not run come first, with their reasons."""
    if count < 2:
        return []
    away = [each for each in seen.requests if each.status != "running"]
    running = [each for each in seen.requests if each.status == "running"]
    # At most half of the lines, unless running requests leave more.
    num_away = min(len(away), max((count - 1) // 2, count - 1 - len(running)))
    shown = [*away[:num_away], *running[: count - 1 - num_away]]
    widest = min(max((len(each.id) for each in shown), default=7), LONGEST_NAME)
    head = f" {'request':<{widest + 2}} {'state':<8} {'waited':>8}  {'output':>11} {'blocks':>6}, or why it waits"
    return [Text(head, style=DIM, no_wrap=True), *(_request(each, widest) for each in shown)]


def _request(each: RequestSight, widest: int) -> Text:
    name = _short(each.id)
    colour = colour_of(each.number) if each.device_blocks else DIM
    line = Text(f" {SIGNS[each.status]} {name:<{widest}} ", style=colour, no_wrap=True)
    line.append(f"{each.status:<8} {as_time(each.waited_s):>8}  ", "default")
    if each.reason:
        # Its reason, in place of the little output and memory that it has.
        line.append(re.sub('"([^"]+)"', lambda found: f'"{_short(found[1])}"', each.reason), DIM)
    else:
        output = f"{each.output_tokens:,}/{each.max_tokens:,}"
        line.append(f"{output:>11} {each.device_blocks:>6,}", "default")
    return line


def _events(seen: Snapshot, count: int) -> list[Text]:
    lines = []
    for each in reversed(seen.happened[-count:] if count else []):
        line = Text(f" {_clock(each.at)} ", style=DIM, no_wrap=True)
        line.append(f"{_short(each.id)} ", "default")
        line.append(f"{_KINDS.get(each.kind, each.kind)} ", f"bold {TIGHT}" if each.kind in _HARD else "bold default")
        line.append(each.detail)
        lines.append(line)
    return lines
