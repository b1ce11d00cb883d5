"""Prefix hits of conversations that take turns, on layers of several kinds and as if all layers kept all tokens. `results/sessions.md`.

    python benchmarks/sessions.py --out benchmarks/results/sessions

One request at a time: the next session, in turn or drawn, sends its whole history and new tokens. Both sides have pools of the same bytes. A scheduler without a
model: counts alone, so that no machine changes them.
"""

from __future__ import annotations

import argparse
import platform
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from paged import BlockManager, LayerGroup, Request, Scheduler
from paged.model.layer_plan import LayerPlan, plan_layers
from paged.study.hardware import layers_named

WINDOWED = ("gpt-oss-120b", "gemma-3-27b")
HYBRID = "qwen3-next-80b"
POOL_OF = 16
"""Sessions whose last turns a pool holds."""
SESSIONS = (4, 8, 12, 14, 15, 16, 17, 18, 20, 24, 32, 64)
TURNS, FIRST, NEW, OUTPUT, BUDGET = 8, 2_000, 437, 64, 2_048
LENGTH = FIRST + (TURNS - 1) * NEW + TURNS * OUTPUT
REPEATED = 80_000
GOAL, GOAL_OF_SECOND = 0.9, 0.99
Order = Literal["in turn", "drawn"]
ORDERS: tuple[Order, ...] = ("in turn", "drawn")


class Point(NamedTuple):
    """One model and number of sessions: shares of occupancy, and of the history that was found, by order.

    whole       where all layers keep all tokens, in a pool of 16 such sessions
    planned     by plan, in a pool of as many bytes
    own         by plan, in a pool of 16 sessions by plan
    """

    sessions: int
    occupancy: float
    occupancy_by_plan: float
    whole: tuple[float, ...]
    planned: tuple[float, ...]
    own: tuple[float, ...]


def main() -> None:
    """Measure both, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=WINDOWED)
    parser.add_argument("--out", type=Path, default=None, help="write NAME.md")
    arguments = parser.parse_args()
    text = _page({name: _points(name) for name in arguments.only}, _repeated())
    print(text)
    if arguments.out is not None:
        arguments.out.with_suffix(".md").write_text(text, encoding="utf-8")


def groups_of(plan: LayerPlan) -> tuple[LayerGroup, ...]:
    """The plan's groups as memory takes them."""
    return tuple(LayerGroup(each.kind, each.reach, each.pages) for each in plan.groups)


def both_plans(name: str) -> tuple[LayerPlan, LayerPlan]:
    """Of a model: its own, and one in which all layers keep all tokens."""
    layers = layers_named(name).layers
    return plan_layers(layers), plan_layers([msgspec.structs.replace(each, kind="full", reach=0) for each in layers])


def scheduler_of(plan: LayerPlan, num_bytes: int) -> Scheduler:
    """An empty pool of so many bytes."""
    manager = BlockManager(num_bytes // plan.page_bytes, plan.block_size, groups=groups_of(plan))
    return Scheduler(manager, max_tokens_per_step=BUDGET)


def served(scheduler: Scheduler, id: str, prompt: NDArray[np.int32], answer: NDArray[np.int32]) -> int:
    """Serve one request, whose output is `answer`, to its end. Return the tokens of its prompt that were found."""
    before, written = scheduler.stats().hit_tokens, 0
    scheduler.add(Request(id=id, prompt=prompt, max_tokens=len(answer)))
    while scheduler.has_unfinished:
        batch = scheduler.schedule()
        sampled = int(np.count_nonzero(batch.samples))
        scheduler.update(batch, answer[written : written + sampled])
        written += sampled
    return scheduler.stats().hit_tokens - before


def share_found(plan: LayerPlan, num_bytes: int, num_sessions: int, order: Order) -> float:
    """Let so many sessions take `TURNS` turns each. Return which share was found of what they had sent or got before."""
    scheduler, random = scheduler_of(plan, num_bytes), np.random.default_rng(0)
    turns = np.tile(np.arange(num_sessions), TURNS)
    if order == "drawn":
        random.shuffle(turns)
    histories = [np.empty(0, np.int32) for _ in range(num_sessions)]
    found = seen = 0
    for number, session in enumerate(turns.tolist()):
        history = histories[session]
        new, answer = (random.integers(0, 50_000, size, np.int32) for size in (NEW if len(history) else FIRST, OUTPUT))
        prompt = np.concatenate([history, new])
        found += served(scheduler, str(number), prompt, answer)
        seen += len(history)
        histories[session] = np.concatenate([prompt, answer])
    return found / seen


def _points(name: str) -> list[Point]:
    planned, whole = both_plans(name)
    of_whole, of_plan = whole.held_bytes(LENGTH), planned.held_bytes(LENGTH)
    return [
        Point(
            count,
            count / POOL_OF,
            count * of_plan / (POOL_OF * of_whole),
            *(
                tuple(share_found(plan, POOL_OF * held, count, order) for order in ORDERS)
                for plan, held in ((whole, of_whole), (planned, of_whole), (planned, of_plan))
            ),
        )
        for count in SESSIONS
    ]


def _repeated() -> list[tuple[str, int, list[int]]]:
    """Pool in words, its pages, and the tokens found of one prompt at each sighting: in an empty pool, and in one that is full of others."""
    plan = plan_layers(layers_named(HYBRID).layers)
    found = []
    for name, times, others in (("empty", 4, 0), ("full of other prompts", 2, 3)):
        num_bytes, random = times * plan.held_bytes(REPEATED), np.random.default_rng(1)
        scheduler = scheduler_of(plan, num_bytes)
        answer = np.zeros(1, np.int32)
        for number in range(others):
            served(scheduler, f"other {number}", random.integers(0, 50_000, REPEATED, np.int32), answer)
        prompt = random.integers(0, 50_000, REPEATED, np.int32)
        hits = [served(scheduler, str(number), prompt, answer) for number in range(4)]
        found.append((name, scheduler.manager.num_blocks, hits))
    return found


def _page(points: dict[str, list[Point]], repeated: list[tuple[str, int, list[int]]]) -> str:
    lines = [
        "# Prefix hits of sessions that take turns",
        "",
        f"Python {platform.python_version()}, numpy {np.__version__}; counts, so that no machine changes them and runs do not differ.",
        "",
        "```",
        "python benchmarks/sessions.py --out benchmarks/results/sessions",
        "```",
        "",
        f"Each session has {TURNS} turns: a first prompt of {FIRST:,} tokens, then {NEW} new ones a turn behind the whole history, outputs of {OUTPUT}, {LENGTH:,} tokens in the end.",
        f"One request at a time, {BUDGET:,} tokens a step, default policy. Sessions come *in turn*, or *drawn* by lot. Cells: the share of the history, prompts and",
        "outputs of earlier turns, that a prompt found.",
        "",
        "* occupancy: what all sessions hold in the end, over the pool",
        "* all kept: all layers keep all tokens",
        "* ratio: by plan over all kept; –: nothing was found with all kept",
        "",
        "A session of which a part is evicted finds the rest with all kept. By plan it finds nothing once a block of its window is gone.",
    ]
    for name, of_model in points.items():
        planned, _ = both_plans(name)
        groups = ", ".join(f"{group.name}: {group.pages}" for group in planned.groups)
        lines += [
            "",
            f"## {name}",
            "",
            f"Blocks of {planned.block_size} tokens; pages a block: {groups}.",
            "",
            f"**The same pool**: the bytes of {POOL_OF} sessions with all kept. Goal: at least {GOAL} × at every occupancy.",
            "",
            "| sessions | occupancy | by plan | in turn: all kept | by plan | ratio | drawn: all kept | by plan | ratio |",
            "|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
            *(
                f"| {each.sessions} | {each.occupancy:.2f} | {each.occupancy_by_plan:.2f} | {_cells(each.whole, each.planned)} |"
                for each in of_model
            ),
            "",
            f"**The same occupancy**: by plan with the bytes of {POOL_OF} sessions by plan, a pool that is so much smaller.",
            "",
            "| sessions | occupancy of both | in turn: all kept | by plan | ratio | drawn: all kept | by plan | ratio |",
            "|--:|--:|--:|--:|--:|--:|--:|--:|",
            *(f"| {each.sessions} | {each.occupancy:.2f} | {_cells(each.whole, each.own)} |" for each in of_model),
        ]
    lines += [
        "",
        f"## The same prompt again: {HYBRID}",
        "",
        f"Tokens found of one prompt of {REPEATED:,} that comes four times. Goal: {GOAL_OF_SECOND:.0%} at the second sighting.",
        "",
        "| pool | pages | first | second | third | fourth | second, share |",
        "|---|--:|--:|--:|--:|--:|--:|",
        *(
            f"| {name} | {pages:,} | {' | '.join(f'{hit:,}' for hit in hits)} | {hits[1] / REPEATED:.2%} |"
            for name, pages, hits in repeated
        ),
    ]
    return "\n".join(lines) + "\n"


def _cells(whole: tuple[float, ...], other: tuple[float, ...]) -> str:
    """By order: both shares and their ratio."""
    return " | ".join(
        f"{one:.1%} | {two:.1%} | {f'{two / one:.2f} ×' if one >= 0.0005 else '–'}"
        for one, two in zip(whole, other, strict=True)
    )


if __name__ == "__main__":
    main()
