"""The walks of docs/architecture.md are what a run does: each function is called by the one before it."""

import re
import sys
from pathlib import Path

import pytest

from paged import BlockManager, Request, Scheduler


def frames_of(frame):
    """What the two rooms have on the stack, outermost first: (qualified name, file)."""
    found = []
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.parent.name in ("scheduler", "block_manager"):
            found.append((frame.f_code.co_qualname, f"{file.parent.name}/{file.name}"))
        frame = frame.f_back
    return found[::-1]


def walk_of(call, last):
    """The stack at the first call of `last` within `call`."""
    found = []

    def watch(frame, event, _):
        if event == "call" and not found and frame.f_code.co_qualname == last:
            found.extend(frames_of(frame))

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def a_sequence_ends():
    scheduler = Scheduler(BlockManager(8, 4))
    scheduler.add(Request(id="a", prompt=[1, 2, 3], max_tokens=1))
    batch = scheduler.schedule()
    return lambda: scheduler.update(batch, [7])


def a_victim_gives():
    scheduler = Scheduler(BlockManager(3, 4, prefix_caching=False), policy="vllm")
    for name in "abc":
        scheduler.add(Request(id=name, prompt=[1, 2, 3, 4], max_tokens=4))
    scheduler.update(scheduler.schedule(), [7, 7, 7])
    return scheduler.schedule


@pytest.mark.parametrize("begun", [a_sequence_ends, a_victim_gives])
def test_a_walk_of_the_page_is_what_a_run_does(repository, begun):
    page = (repository / "docs" / "architecture.md").read_text()
    name = begun.__name__.replace("_", " ")
    written = page.split(f"<!-- walk: {name} -->")[1].split("<!-- walk: end -->")[0]
    walk = re.findall(r"^\d+\. `(.+)`, (.+)$", written, flags=re.MULTILINE)
    frames = walk_of(begun(), walk[-1][0])
    # The guard of a public call stands around it.
    assert [each for each in frames if each[1] != "base/turns.py"] == walk
