"""What was decided in each step, as a log that can be written down and compared."""

from collections.abc import Sequence
from itertools import zip_longest

import msgspec

from paged.study.simulator.simulation import Step


class Decision(msgspec.Struct, frozen=True):
    """A step of the log.

    step       its number, from 1
    end_s      when it ended: seconds since the first arrival
    skipped    steps like it, with the same rows, that ran since the one before and are not in the log
    requests   who was in it, by id, and `tokens`, how many of each were computed
    admitted   ids that came in, returning ones among them
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
    """The entry of a step."""
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
    """Where two logs differ, a sentence an entry, at most `most`; empty where they are identical, entry by entry."""
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
