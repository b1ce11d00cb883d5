"""Draw README's two pictures into docs/images: block tables of a real run under pressure, and host costs as they were measured.

    python tools/readme_pictures.py

Both follow from what is committed: the run is played anew, the costs are read from benchmarks/results/host-cost.json.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from paged import BlockManager, Request, Scheduler

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
COSTS = ROOT / "benchmarks" / "results" / "host-cost.json"
# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00")
SHARED, OUTLINE, TEXT, QUIET = "#424a53", "#d0d7de", "#1f2328", "#59636e"
PROMPTS_AND_OUTPUTS = ((5, 20), (9, 16), (3, 24), (7, 18), (6, 12))
STEP = 14
SIZE, GAP = 30, 4


class Look(NamedTuple):
    """Block ids of each request's table, those of its tail on the host, and what the scheduler says of one that does not run."""

    tables: dict[str, list[int]]
    on_host: dict[str, list[int]]
    reasons: dict[str, str]
    num_blocks: int
    host_blocks: int


def run() -> Look:
    """Five requests that share 16 tokens, on a pool that is too small for them; as it is in step 14."""
    scheduler = Scheduler(BlockManager(num_blocks=24, block_size=4, host_blocks=8), max_tokens_per_step=24)
    ids, rows = "abcde", {}
    on_host: dict[int, list[int]] = {}
    for number, (own, outputs) in enumerate(PROMPTS_AND_OUTPUTS):
        prompt = [*range(100, 116), *(200 + 10 * number + each for each in range(own))]
        scheduler.add(Request(id=ids[number], prompt=prompt, max_tokens=outputs))
    manager = scheduler.manager
    tables: dict[str, list[int]] = {}
    for _ in range(STEP):
        before = dict(tables)
        batch = scheduler.schedule()
        rows |= dict(zip(batch.ids.tolist(), batch.rows.tolist(), strict=True))
        tables = {
            id: manager.rows.block_tables[row, : manager.rows.num_blocks[row]].tolist() for id, row in rows.items()
        }
        copied = dict(batch.moves.device_to_host.tolist())
        for id, table in before.items():
            gone = [copied[block] for block in table[len(tables[id]) :] if block in copied]
            on_host[id] = gone + on_host.get(id, [])
        scheduler.update(batch, np.full(int(batch.samples.sum()), 7, np.int32))
    reasons = {id: str(scheduler.explain(id)) for id in ids if id not in batch.ids.tolist()}
    return Look(tables, on_host, reasons, manager.num_blocks, manager.host.num_blocks)


def square(x: float, y: float, label: object, colour: str, *, dashed: bool = False) -> str:
    """A block with its number; a dashed one lies on the host."""
    fill, ink = ("none", colour) if dashed else (colour, "#ffffff")
    dashes = ' stroke-dasharray="4 3"' if dashed else ""
    return (
        f'<rect x="{x}" y="{y}" width="{SIZE}" height="{SIZE}" rx="4" fill="{fill}" stroke="{colour}" stroke-width="1.5"{dashes}/>'
        f'<text x="{x + SIZE / 2}" y="{y + SIZE / 2 + 4}" text-anchor="middle" font-size="12" fill="{ink}">{label}</text>'
    )


def words(x: float, y: float, text: str, *, colour: str = TEXT, size: int = 13, anchor: str = "start") -> str:
    """A line of text, its left end, middle or right end here."""
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}" text-anchor="{anchor}">{text}</text>'


def panel(width: int, height: int, title: str, parts: list[str]) -> str:
    """A picture that reads on a light and on a dark page."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
            f'font-family="system-ui, sans-serif"><title>{title}</title>',
            f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8" fill="#ffffff" stroke="{OUTLINE}"/>',
            *parts,
            "</svg>\n",
        ]
    )


def block_tables(look: Look) -> str:
    """The tables of all requests over the pool that they lie in."""
    parts = [words(20, 30, "Block tables of five requests, 14 steps into a run", size=15)]
    left, top, step = 112, 62, SIZE + GAP
    counts = np.bincount([block for table in look.tables.values() for block in table], minlength=look.num_blocks)
    owners = {}
    for number, (id, table) in enumerate(look.tables.items()):
        y, state = top + number * (SIZE + 12), "is paused" if id in look.reasons else "runs"
        parts.append(words(20, y + 20, f"{id} {state}"))
        for column, block in enumerate(table):
            owners[block] = COLOURS[number] if counts[block] == 1 else SHARED
            parts.append(square(left + column * step, y, block, owners[block]))
        gone = look.on_host[id]
        parts += [
            square(left + (len(table) + column) * step, y, f"h{block}", COLOURS[number], dashed=True)
            for column, block in enumerate(gone)
        ]
        if gone:
            x = left + (len(table) + len(gone)) * step + 10
            parts.append(words(x, y + 20, f"its tail of {len(gone)} blocks was copied to the host", colour=QUIET))
    num_shared = int((counts > 1).sum())
    parts.append(
        words(
            left,
            top - 10,
            f"the same {num_shared * 4} tokens: {num_shared} blocks, computed and kept once",
            colour=QUIET,
            size=12,
        )
    )
    y = top + len(look.tables) * (SIZE + 12) + 34
    parts.append(words(20, y - 10, f"the pool: {look.num_blocks} blocks of 4 tokens", colour=QUIET))
    parts += [square(20 + block * step, y, block, owners.get(block, OUTLINE)) for block in range(look.num_blocks)]
    y += SIZE + 34
    parts.append(words(20, y - 10, f"host memory: {look.host_blocks} blocks", colour=QUIET))
    theirs = {block: COLOURS[number] for number, gone in enumerate(look.on_host.values()) for block in gone}
    parts += [
        square(20 + block * step, y, f"h{block}", theirs.get(block, OUTLINE), dashed=True)
        for block in range(look.host_blocks)
    ]
    return panel(20 + look.num_blocks * step + 16, y + SIZE + 20, "Block tables under memory pressure", parts)


def host_costs() -> str:
    """Microseconds of vLLM's scheduler and ours for the same work, on a logarithmic scale."""
    names = {
        "decode 1024, caching on": "a decode step of 1,024 rows",
        "decode 4096, caching on": "a decode step of 4,096 rows",
        "churn, caching on": "requests that come and go, a token",
        "pressure, caching on": "the same, 40 % of the memory, a token",
        "prefix, caching on": "long shared prefixes, a token",
    }
    cells = {cell["cell"]: cell for cell in json.loads(COSTS.read_text(encoding="utf-8"))["cells"]}
    left, width, least, most = 310, 420, 0.5, 100_000.0

    def length(value: float) -> float:
        return width * math.log(value / least) / math.log(most / least)

    parts = [words(20, 30, "Host time of the scheduler (logarithmic; shorter is better)", size=15)]
    for number, (cell, name) in enumerate(names.items()):
        y = 56 + number * 52
        parts.append(words(left - 12, y + 24, name, anchor="end"))
        theirs, ours = (median(run[cells[cell]["metric"]] for run in cells[cell][side]) for side in ("vllm", "ours"))
        for row, (value, colour, text) in enumerate(
            (
                (theirs, "#8c959f", f"vLLM {in_units(theirs)}"),
                (ours, COLOURS[0], f"paged {in_units(ours)}, {theirs / ours:.0f} × less"),
            )
        ):
            parts.append(
                f'<rect x="{left}" y="{y + row * 20}" width="{length(value):.1f}" height="16" rx="2" fill="{colour}"/>'
            )
            parts.append(words(left + length(value) + 8, y + row * 20 + 13, text, size=12))
    return panel(890, 56 + len(names) * 52 + 10, "Host time of the scheduler beside vLLM's", parts)


def in_units(microseconds: float) -> str:
    """Such a time in words."""
    if microseconds >= 1000:
        return f"{microseconds / 1000:.1f} ms"
    return f"{microseconds:.0f} µs" if microseconds >= 20 else f"{microseconds:.2f} µs"


PICTURES = {"block-tables.svg": lambda: block_tables(run()), "host-cost.svg": host_costs}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (IMAGES / name).write_text(draw(), encoding="utf-8")
