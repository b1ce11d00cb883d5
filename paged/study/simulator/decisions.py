"""The decisions of each step, as a log to write and compare."""

from collections.abc import Sequence
from itertools import zip_longest

import msgspec

from paged.study.simulator.simulation import Step


class Decision(msgspec.Struct, frozen=True):
    """A step of the log.

    step       number, from 1
    end_s      when it ended, in seconds since the first arrival
    skipped    steps with the same rows that ran since the entry before and are not in the log
    requests   ids of its requests, and `tokens`, the computed tokens of each
    admitted   ids of admitted requests, returning ones included
    preempted  (id, "recompute" or "swap")
    ended      ids of the requests that ended with it
    """

    step: int
    end_s: float
    skipped: int
    requests: tuple[str, ...]
    tokens: tuple[int, ...]
    admitted: tuple[str, ...]
    preempted: tuple[tuple[str, str], ...]
    ended: tuple[str, ...]


def decision_of(step: Step) -> Decision:
    """Return the entry of a step."""
    batch = step.batch
    return Decision(
        step=step.number,
        end_s=step.now_s,
        skipped=step.skipped,
        requests=tuple(batch.ids.tolist()),
        tokens=tuple(batch.num_tokens.tolist()),
        admitted=batch.admitted,
        preempted=batch.preempted,
        ended=tuple(map(str, step.ended)),
    )


def differences(first: Sequence[Decision], second: Sequence[Decision], *, most: int = 10) -> list[str]:
    """Compare two logs entry by entry. Return a sentence for each entry that differs, at most `most`; empty if they are identical."""
    found: list[str] = []
    for number, (one, other) in enumerate(zip_longest(first, second), 1):
        if len(found) == most:
            break
        if one is None or other is None:
            found.append(f"step {number}: the logs have {len(first):,} and {len(second):,} entries")
            break
        fields = [name for name in Decision.__struct_fields__ if getattr(one, name) != getattr(other, name)]
        if fields:
            told = "; ".join(f"{name} {getattr(one, name)!r} and {getattr(other, name)!r}" for name in fields)
            found.append(f"step {number}: {told}")
    return found
