"""What is worth keeping between the turns of recorded agent sessions: LRU by block, session ids, hints, and what knowing the future would give.

    python benchmarks/session_study.py agent_sessions.jsonl --out benchmarks/results/session_study

Four memories of 430k tokens (blocks of 64): 20 and 60 sessions on a device of 6,700 blocks, 60 with a host tier of 4 × and with a disk of 20 × on top.
Shares are of the prompts' full blocks, with nothing taking any time ("bounds"); times to first token are of a closed loop on a virtual clock, of its
first `--until` seconds. Sessions and their beginnings are drawn as `session_bounds.py` draws them: 20 and then 60, from one generator a seed.
What has been found is kept in NAME.json after each run; a second call goes on from there. NAME.svg is the plot.
"""

from __future__ import annotations

import argparse
import platform
import random
from collections import OrderedDict
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

import paged
from paged.study.simulator import KEEPS, Device, SessionRun, Tiers
from paged.study.simulator.sessions import blocks_if_all_kept, blocks_offline
from paged.study.traces import Begun, draw_sessions, read_sessions

BLOCKS, SPREAD_S, LONGEST_PAUSE_S = 6_700, 1_800.0, 1_800.0
MODEL, DEVICE, BUDGET = "llama-3.1-8b", "h100", 8_192
COLOURS = {"lru": "#59636e", "sessions": "#b36b00", "hints": "#0072b2"}
CACHED_FIRST = "hints, paged-cached"
"""Hints, under the policy that admits first who finds most cached; of the closed loop alone."""
NAMES = {"lru": "use alone", "sessions": "session ids", "hints": "hints"}
LINES = {
    "kept": ("", "everything kept"),
    "offline": ("6 3", "offline order"),
    "offline, room for the prompt": ("2 3", "the same, with room for a prompt while it is computed"),
}
"""Dashes and names of what needs no scheduler."""


class Row(NamedTuple):
    """A number of sessions, and a memory."""

    name: str
    sessions: int
    host_blocks: int = 0
    disk_blocks: int = 0

    def tiers(self) -> Tiers:
        return Tiers(device_blocks=BLOCKS, host_blocks=self.host_blocks, disk_blocks=self.disk_blocks)


ROWS = (
    Row("20 sessions, 430k tokens", 20),
    Row("60 sessions, 430k tokens", 60),
    Row("60, host tier of 4 ×", 60, 4 * BLOCKS),
    Row("60, disk of 20 × on top", 60, 4 * BLOCKS, 20 * BLOCKS),
)


@lru_cache
def drawn(path: str, seed: int) -> dict[int, list[Begun]]:
    """The sessions of each number, as session_bounds.py draws them."""
    sessions, rng = read_sessions(path), random.Random(seed)
    return {count: draw_sessions(sessions, count, rng, spread_s=SPREAD_S) for count in (20, 60)}


def prompts_of(begun: list[Begun]) -> list[tuple[int, np.ndarray]]:
    """Session and blocks of each turn, in the order of time of the recording."""
    events, base = [], 0
    for number, each in enumerate(begun):
        clock, before = each.begins_s, None
        for line, place in each.session.turns:
            turn = each.session.lines[line].turns[place]
            clock += 0 if before is None else min(turn.at_s - before, LONGEST_PAUSE_S)
            before = turn.at_s
            events.append((clock, number, turn.blocks + base))
        base += each.session.num_ids
    return [(number, blocks) for _, number, blocks in sorted(events, key=lambda event: event[0])]


def lru(prompts: list[tuple[int, np.ndarray]], capacity: int) -> int:
    """Blocks that hit where the least recently used goes, children before parents, after each prompt."""
    cache: OrderedDict[int, bool] = OrderedDict()
    hits = 0
    for _, blocks in prompts:
        ids = blocks.tolist()
        hits += next((n for n, block in enumerate(ids) if block not in cache), len(ids))
        for block in reversed(ids):
            cache[block] = True
            cache.move_to_end(block)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hits


def offline_with_room(prompts: list[tuple[int, np.ndarray]], capacity: int) -> int:
    """The offline order where a prompt has to lie in the memory while it is computed: others make room for it first, and it cannot be longer than that."""
    following: dict[int, int] = {}
    after = [0] * len(prompts)
    for place in range(len(prompts) - 1, -1, -1):
        after[place] = following.get(prompts[place][0], len(prompts))
        following[prompts[place][0]] = place
    held: dict[int, np.ndarray] = {}
    next_turn: dict[int, int] = {}
    size = hits = 0
    for place, (session, blocks) in enumerate(prompts):
        have, blocks = held.get(session, blocks[:0]), blocks[: capacity - 1]
        common = min(len(have), len(blocks))
        differs = have[:common] != blocks[:common]
        hits += int(differs.argmax()) if differs.any() else common
        size += len(blocks) - len(have)
        held[session], next_turn[session] = blocks, after[place]
        for other in sorted(held, key=lambda each: -next_turn[each]):
            if other != session and size > capacity:
                left = max(0, len(held[other]) - (size - capacity))
                size -= len(held[other]) - left
                held[other] = held[other][:left]
    return hits


def bounds(path: str, seed: int, row: Row) -> dict[str, float]:
    """Shares by orders that need no scheduler."""
    begun = drawn(path, seed)[row.sessions]
    prompts, capacity = prompts_of(begun), BLOCKS + row.host_blocks
    total = sum(len(blocks) for _, blocks in prompts)
    ids = sum(each.session.num_ids for each in begun)
    return {
        "turns": len(prompts),
        "lru": lru(prompts, capacity) / total,
        "offline": blocks_offline(prompts, capacity) / total,
        "offline, room for the prompt": offline_with_room(prompts, capacity) / total,
        "kept": blocks_if_all_kept(prompts, ids) / total,
    }


def simulated(path: str, seed: int, row: Row, keeps: Any, until_s: float | None) -> dict[str, Any]:
    """What the real scheduler makes of it; `until_s` None: within the bounds."""
    cost_model = None if until_s is None else Device(model=MODEL, device=DEVICE).cost_model()
    run = SessionRun(
        drawn(path, seed)[row.sessions],
        row.tiers(),
        cost_model,
        keeps="hints" if keeps == CACHED_FIRST else keeps,
        policy="paged-cached" if keeps == CACHED_FIRST else "paged",
        longest_pause_s=LONGEST_PAUSE_S,
        max_tokens_per_step=BUDGET,
        until_s=until_s or float("inf"),
    )
    found = run.run()
    return {**msgspec.to_builtins(found), "hit": found.hit}


def main() -> None:
    """Run what is not in the file yet, and write page, figures and plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace")
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--timed-seeds", type=int, nargs="*", default=[1], help="of the closed loop")
    parser.add_argument("--until", type=float, default=5_400.0, help="seconds of the closed loop")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--rows", type=int, nargs="*", default=list(range(len(ROWS))), help="which rows, from 0")
    parser.add_argument("--out", type=Path, required=True, help="NAME: writes NAME.md, NAME.json and NAME.svg")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {}
    file = arguments.out.with_suffix(".json")
    if file.exists():
        figures = msgspec.json.decode(file.read_bytes())["figures"]
    asked: dict[str, tuple[Any, ...]] = {}
    for seed in arguments.seeds:
        for row in (ROWS[place] for place in arguments.rows):
            asked[f"{row.name} | {seed} | bounds"] = (bounds, arguments.trace, seed, row)
            for keeps in (*KEEPS, CACHED_FIRST):
                if keeps != CACHED_FIRST:
                    asked[f"{row.name} | {seed} | {keeps}"] = (simulated, arguments.trace, seed, row, keeps, None)
                if seed in arguments.timed_seeds:
                    name = f"{row.name} | {seed} | {keeps} timed"
                    asked[name] = (simulated, arguments.trace, seed, row, keeps, arguments.until)
    about = {
        "command": f"python benchmarks/session_study.py agent_sessions.jsonl --until {arguments.until:g}",
        "machine": f"{platform.machine()}, Python {platform.python_version()}, paged {paged.__version__}",
        "model": f"{MODEL} on {DEVICE}",
        "until_s": arguments.until,
    }
    with ProcessPoolExecutor(arguments.jobs) as pool:
        futures = {pool.submit(*call): name for name, call in asked.items() if name not in figures}
        for future in as_completed(futures):
            figures[futures[future]] = future.result()
            print(futures[future], round(figures[futures[future]].get("hit", 0.0), 4), flush=True)
            file.write_bytes(msgspec.json.format(msgspec.json.encode({"about": about, "figures": figures}), indent=1))
    arguments.out.with_suffix(".md").write_text(page(figures, about), encoding="utf-8")
    arguments.out.with_suffix(".svg").write_text(plot(figures), encoding="utf-8")


def mean_of(figures: dict[str, Any], row: Row, what: str, field: str) -> float | None:
    """Over the seeds; None: not run."""
    found = [
        each[field]
        for name, each in figures.items()
        if (parts := name.split(" | "))[0] == row.name and parts[2] == what
    ]
    return float(np.mean(found)) if found else None


def worst_ratio(figures: dict[str, Any], row: Row, keeps: str) -> float | None:
    """The smallest share of the offline order's, over the seeds."""
    ratios = [
        each["hit"] / figures[f"{row.name} | {seed} | bounds"]["offline"]
        for name, each in figures.items()
        if (parts := name.split(" | "))[0] == row.name
        and parts[2] == keeps
        and f"{row.name} | {(seed := parts[1])} | bounds" in figures
    ]
    return min(ratios) if ratios else None


def shown(value: float | None, form: str = ".3f") -> str:
    return "–" if value is None else format(value, form)


def page(figures: dict[str, Any], about: dict[str, Any]) -> str:
    """The tables, in Markdown."""
    seeds = sorted({name.split(" | ")[1] for name in figures})
    lines = [
        "# Sessions: what is kept between turns",
        "",
        f"`{about['command']}`; {about['machine']}; seeds {', '.join(seeds)}. Counts of decisions and virtual seconds: no machine changes them.",
        "",
        "Share of the prompts' full blocks that hit; decode, compute and loading take no time. Means over the seeds; × is of the offline column, mean (worst).",
        "",
        "| sessions, memory | seeds | LRU by block, no scheduler | our scheduler, LRU | session ids alone | × | with hints | × | offline | offline, room for the prompt | all kept | all kept, as far as a prompt fits |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in ROWS:
        offline = mean_of(figures, row, "bounds", "offline")
        seeds_of = [name for name in figures if name.startswith(f"{row.name} |") and name.endswith("| bounds")]
        cells = [row.name, str(len(seeds_of))]
        cells += [shown(mean_of(figures, row, what, field)) for what, field in (("bounds", "lru"), ("lru", "hit"))]
        for keeps in ("sessions", "hints"):
            hit, worst = mean_of(figures, row, keeps, "hit"), worst_ratio(figures, row, keeps)
            is_known = hit is not None and offline is not None and worst is not None
            cells += [shown(hit), f"{hit / offline:.3f} ({worst:.3f})" if is_known else "–"]
        for what in ("offline", "offline, room for the prompt", "kept"):
            cells.append(shown(mean_of(figures, row, "bounds", what)))
        cells.append(shown(mean_of(figures, row, "lru", "reachable")))
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        f"A closed loop, the first {about['until_s']:,.0f} virtual seconds, {about['model']}, {BUDGET:,} tokens a step; a turn that still waits counts as long as it has.",
        "",
        "| sessions, memory | keeps | turns | hit | device | host | disk | all kept | computed twice, M tokens | TTFT p50, s | p90, s |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in ROWS:
        for keeps in (*KEEPS, CACHED_FIRST):
            of = [
                each
                for name, each in figures.items()
                if name.startswith(f"{row.name} |") and name.endswith(f"| {keeps} timed")
            ]
            if of:
                each = of[0]
                shares = " | ".join(f"{each[name]:.3f}" for name in ("hit", "device", "host", "disk", "kept"))
                times = (
                    f"{each['computed_twice'] / 1e6:,.1f} | {each['ttft_s']['p50']:,.1f} | {each['ttft_s']['p90']:,.1f}"
                )
                lines.append(f"| {row.name} | {keeps} | {each['turns']:,} | {shares} | {times} |")
    return "\n".join(lines) + "\n"


def words(x: float, y: float, text: str, *, size: int = 12, colour: str = "#1f2328", anchor: str = "start") -> str:
    """A line of text, its left end, middle or right end here."""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" text-anchor="{anchor}">{text}</text>'


def bound(x: float, stop: float, y: float, dashes: str) -> str:
    """A line for what no scheduler reached."""
    look = f'stroke="#d55e00" stroke-width="1.5" stroke-dasharray="{dashes}"'
    return f'<line x1="{x:.1f}" x2="{stop:.1f}" y1="{y:.1f}" y2="{y:.1f}" {look}/>'


def plot(figures: dict[str, Any]) -> str:
    """Bars of what hit within the bounds, with lines for what orders that know the future reach, and for everything kept."""
    left, top, high, wide, bar = 60, 46, 240, 190, 34
    width = left + wide * len(ROWS) + 20
    parts = [words(left, 24, "Share of the prompts' blocks that hit, by what says what is kept", size=15)]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = top + high * (1 - share)
        parts.append(f'<line x1="{left}" x2="{width - 20}" y1="{y}" y2="{y}" stroke="#d0d7de"/>')
        parts.append(words(left - 8, y + 4, f"{share:g}", colour="#59636e", anchor="end"))
    for place, row in enumerate(ROWS):
        x = left + place * wide + 24
        for number, keeps in enumerate(KEEPS):
            hit = mean_of(figures, row, keeps, "hit")
            if hit is not None:
                at, y = x + number * (bar + 10), top + high * (1 - hit)
                size = f'width="{bar}" height="{high * hit:.1f}"'
                parts.append(f'<rect x="{at}" y="{y:.1f}" {size} fill="{COLOURS[keeps]}"/>')
                parts.append(
                    words(at + bar / 2, top + high - 8, f"{hit:.2f}", size=11, colour="#ffffff", anchor="middle")
                )
        for what, (dashes, _) in LINES.items():
            if (share := mean_of(figures, row, "bounds", what)) is not None:
                parts.append(bound(x - 10, x + 3 * bar + 30, top + high * (1 - share), dashes))
        parts.append(words(x + 61, top + high + 20, row.name, anchor="middle"))
    y = top + high + 46
    for place, (keeps, name) in enumerate(NAMES.items()):
        x = left + 150 * place
        parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{COLOURS[keeps]}"/>')
        parts.append(words(x + 18, y, name))
    for place, (dashes, name) in enumerate(LINES.values()):
        x = left + 150 * place
        parts += [bound(x, x + 26, y + 18, dashes), words(x + 32, y + 22, name)]
    height = y + 40
    frame = f'x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8" fill="#ffffff" stroke="#d0d7de"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'font-family="system-ui, sans-serif"><title>Hits of sessions</title><rect {frame}/>{"".join(parts)}</svg>\n'
    )


if __name__ == "__main__":
    main()
