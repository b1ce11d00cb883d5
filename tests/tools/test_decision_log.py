"""tools/decision_log.py: the same worlds give the same decisions, other decisions other digests, and the worlds use everything."""

from collections import Counter

from paged import POLICIES, Scheduler

TOOL = "decision_log"
RUNS = [(f"world-{number}", policy, None) for number in range(3) for policy in POLICIES]


def test_a_line_stands_for_a_hundred_steps(tool):
    found = [line.split()[:3] for line in tool.digests(RUNS[0])]
    num_steps = sum(1 for _ in tool.steps_of(*RUNS[0]))
    assert found == [["world-0", RUNS[0][1], str(first)] for first in range(0, num_steps, tool.STEPS)]


def test_a_run_has_the_same_digests_each_time_and_another_decision_others(tool, monkeypatch):
    run = ("world-0", "paged", None)
    before, schedule = tool.digests(run), Scheduler.schedule
    assert tool.digests(run) == before
    monkeypatch.setattr(Scheduler, "schedule", lambda self, now=0.0, drafts=None: schedule(self, now))
    assert tool.digests(run) != before


EVENTS = [
    "preempted by recompute", "preempted by swap", "drafts", "tokens of batches that are out", "loads", "to the host",
    "to the device", "copies", "add", "update", "cancel", "abort", "finish", "fork", "append", "loaded", "reset_cache",
    "events", "add NeverFits", "fork InvalidRequest", "append RequestInFlight", "update WrongTokens",
]  # fmt: skip


def test_the_worlds_use_everything(tool):
    """Each call, in each way in which it comes out."""
    found = Counter()
    for run in RUNS:
        for step in tool.steps_of(*run):
            for name, outcome, *_ in step:
                found[f"{name} {outcome}" if isinstance(outcome, str) else name] += 1
                if name != "schedule":
                    continue
                preempted, (_, _, _, sources, _, _, _, _, drafts, *_), moved = outcome[3], outcome[5:], outcome[-4:]
                found.update(f"preempted by {how}" for _, how in preempted)
                found.update({"drafts": any(drafts), "tokens of batches that are out": max(sources, default=-1) >= 0})
                found.update(dict(zip(("loads", "to the host", "to the device", "copies"), map(bool, moved))))
    assert [event for event in EVENTS if not found[event]] == [], found


def test_traces_run_through_the_simulator(tool):
    skipped, batch, ended = next(iter(tool.steps_of("azure", "paged", None)))
    assert (skipped, batch[0], ended) == (0, 1, ())
