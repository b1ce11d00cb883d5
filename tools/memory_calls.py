"""Count the calls from the scheduler into the memory layer: in a steady step, and in a step with one admission.

A step is one `schedule` and one `update`. Counted are methods called and properties read on objects of `block_manager`,
public or not, by functions of `scheduler`. Plain attributes, functions of modules, and calls of values that
memory returned are not counted. Each step is taken as often as a block has tokens, so that rows begin a block in some
of them; the largest count is reported.

    python tools/memory_calls.py                                        # both numbers, and the names
    python tools/memory_calls.py --most-steady 4 --most-admission 7     # exit status 1 above either
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from paged import BlockManager, Request, Scheduler, block_manager, scheduler

MEMORY = f"{Path(block_manager.__file__).parent}/"
DECISIONS = f"{Path(scheduler.__file__).parent}/"
# What these files define is data that memory returned or that the scheduler keeps by itself, not memory.
VALUES = frozenset(f"{MEMORY}{name}.py" for name in ("growing", "moves", "stats"))
BLOCK_SIZE = 16


def counted(step: Callable[[], None]) -> Counter[str]:
    """Run the step; return the calls that it made from `scheduler` on objects of `block_manager`, by qualified name."""
    calls: Counter[str] = Counter()

    def look(frame: FrameType, event: str, _: Any) -> None:
        code, caller = frame.f_code, frame.f_back
        if event != "call" or caller is None:
            return
        if not (code.co_filename.startswith(MEMORY) and caller.f_code.co_filename.startswith(DECISIONS)):
            return
        if code.co_filename not in VALUES and code.co_varnames[:1] == ("self",):
            calls[f"{type(frame.f_locals['self']).__name__}.{code.co_name}"] += 1

    sys.setprofile(look)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls


class World:
    """A scheduler of `num_rows` rows that decode, staggered over their blocks, with room for as many more."""

    def __init__(self, num_rows: int, policy: str) -> None:
        steps = 3 * BLOCK_SIZE
        num_blocks = 2 * (num_rows + steps) * (-(-(2 * BLOCK_SIZE + 4 * steps) // BLOCK_SIZE))
        self.scheduler = Scheduler(
            BlockManager(num_blocks, BLOCK_SIZE),
            policy=policy,
            max_tokens_per_step=64 * num_rows + 1024,
            max_sequences=2 * (num_rows + steps),
        )
        self.num_added = 0
        self.now = 0.0
        self.max_tokens = 4 * steps
        for number in range(num_rows):
            self.add(BLOCK_SIZE + number % BLOCK_SIZE)
        # The prompts, and what the first decodes prepare.
        for _ in range(BLOCK_SIZE):
            self.step()

    def add(self, num_tokens: int) -> None:
        """One more request, whose prompt begins like none before it."""
        prompt = np.arange(num_tokens, dtype=np.int32) + 1000 * self.num_added
        self.scheduler.add(Request(id=str(self.num_added), prompt=prompt, max_tokens=self.max_tokens))
        self.num_added += 1

    def step(self) -> None:
        """One step, a second after the last one, in which every row that samples gets token 7."""
        self.now += 1.0
        batch = self.scheduler.schedule(now=self.now)
        self.scheduler.update(batch, np.full(int(np.count_nonzero(batch.samples)), 7, np.int32))

    def largest(self, *, admits: bool) -> Counter[str]:
        """The calls of the step that made most of them, of as many as a block has tokens."""
        found = []
        for _ in range(BLOCK_SIZE):
            before = len(self.scheduler.running_ids())
            if admits:
                self.add(BLOCK_SIZE + 1)
            found.append(counted(self.step))
            assert len(self.scheduler.running_ids()) == before + admits, "the step is not the one that is to be counted"
        return max(found, key=Counter.total)


def main() -> None:
    """Print both numbers and the names; exit with 1 above a limit that was given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=64, help="rows that decode (64)")
    parser.add_argument("--policy", default="paged", help="the scheduler's policy (paged)")
    parser.add_argument("--most-steady", type=int, default=None, help="the limit of a steady step")
    parser.add_argument("--most-admission", type=int, default=None, help="the limit of a step with one admission")
    asked = parser.parse_args()
    world = World(asked.rows, asked.policy)
    is_over = False
    for name, admits, limit in (
        ("a steady step", False, asked.most_steady),
        ("a step with one admission", True, asked.most_admission),
    ):
        calls = world.largest(admits=admits)
        print(f"{name}: {calls.total()} calls into memory" + ("" if limit is None else f", at most {limit} allowed"))
        for call, count in sorted(calls.items(), key=lambda item: (-item[1], item[0])):
            print(f"  {count} × {call}")
        is_over |= limit is not None and calls.total() > limit
    sys.exit(is_over)


if __name__ == "__main__":
    main()
