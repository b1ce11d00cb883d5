"""The pressure oracle: answers under memory pressure are those without it, tokens and logits, to the last bit.

`pressure_differences` runs the same requests on an engine in two worlds, one where each has room for itself and one
where they are in each other's way, and says what differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from paged.testing.engine_world import EngineRequest, submit
from paged.testing.protocol import capabilities_of

# A request's id and the number of one of its sequences.
Who = tuple[str, int]
Conditions = TypeVar("Conditions")


@dataclass(slots=True)
class Answers:
    """By request and sequence: its tokens, the logits [vocabulary] of each if the engine shows them, and why it ended.
    What pressure did, and what the engine's own check found."""

    tokens: dict[Who, list[int]] = field(default_factory=dict)
    logits: dict[Who, list[NDArray[Any]]] = field(default_factory=dict)
    reasons: dict[Who, str] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    recomputed: int = 0
    swapped: int = 0
    hit_tokens: int = 0
    host_hit_tokens: int = 0
    steps: int = 0

    def expect(self, who: Who) -> None:
        """A sequence that is to be answered."""
        self.tokens[who], self.logits[who] = [], []

    def see(self, who: Who, place: int, row: Any) -> None:
        """The logits that output `place` of a sequence is chosen from; those of a step that failed are forgotten."""
        rows = self.logits[who]
        del rows[place:]
        rows.append(array_of(row).copy())

    def take(self, output: Any) -> None:
        """What a step brought for one sequence. One that is not to be answered, or has ended, is a violation."""
        who = (output.id, getattr(output, "sequence", 0))
        if who not in self.tokens or who in self.reasons:
            self.violations.append(f"request {name(who)}: it received {output} and is not served.")
            return
        self.tokens[who] += [int(token) for token in output.token_ids]
        if output.finish_reason is not None:
            self.reasons[who] = output.finish_reason

    def add(self, others: Answers) -> None:
        """Answers of other requests, and what was found with them."""
        self.tokens |= others.tokens
        self.logits |= others.logits
        self.reasons |= others.reasons
        self.violations += others.violations


def array_of(row: Any) -> NDArray[Any]:
    """Logits on any device, as numpy has them."""
    return np.asarray(row.cpu() if hasattr(row, "cpu") else row)


def serve(engine: Any, answers: Answers, most_steps: int) -> None:
    """Step until the engine has nothing left, or so many steps are over; what comes goes into `answers`."""
    while engine.has_unfinished and answers.steps < most_steps:
        answers.steps += 1
        for output in engine.step():
            answers.take(output)


def answers_of(engine: Any, requests: Sequence[EngineRequest], most_steps: int = 10_000) -> Answers:
    """All requests on an engine that has nothing to do, submitted together."""
    able, answers = capabilities_of(engine), Answers()
    if able.logits:
        engine.on_logits = lambda id, place, row: answers.see((id, 0), place, row)
    for request in requests:
        answers.expect((request.id, 0))
        submit(engine, request, able)
    serve(engine, answers, most_steps)
    if able.check:
        answers.violations += engine.check()
    return answers


def answers_in_turn(engine: Any, requests: Sequence[EngineRequest], most_steps: int = 10_000) -> Answers:
    """The same, each request once the one before has ended; so many steps for each."""
    alone = Answers()
    for request in requests:
        alone.add(answers_of(engine, [request], most_steps))
    return alone


def pressure_differences(
    build: Callable[[Conditions], Any],
    requests: Sequence[EngineRequest],
    ample: Conditions,
    tight: Conditions,
    *,
    most_steps: int = 10_000,
) -> list[str]:
    """Return the differences of the answers under pressure, as sentences; empty if there are none.

    `build(ample)` makes an engine that serves the requests one after the other: it should have room for the largest and
    cache nothing. `build(tight)` makes one that gets all at once. Compared are tokens, finish reasons and, where the
    engine shows them, logits, bit by bit. What `check()` of either finds is a difference, too, and a request that does
    not end within `most_steps` steps. What the engine raises goes through.
    """
    alone = answers_in_turn(build(ample), requests, most_steps)
    pressed = answers_of(build(tight), requests, most_steps)
    return differences(pressed, alone) + pressed.violations + alone.violations


def differences(ours: Answers, theirs: Answers) -> list[str]:
    """Every sequence whose tokens, logits or ends are not the same bits in both, in a sentence."""
    found = []
    for who, tokens in theirs.tokens.items():
        if who not in ours.reasons or who not in theirs.reasons:
            found.append(f"request {name(who)}: it has not ended.")
        elif ours.tokens[who] != tokens:
            found.append(f"request {name(who)}: tokens {ours.tokens[who]} instead of {tokens}.")
        elif ours.reasons[who] != theirs.reasons[who]:
            found.append(f"request {name(who)}: it ended by {ours.reasons[who]} instead of {theirs.reasons[who]}.")
        else:
            found += _logits_differ(who, ours.logits[who], theirs.logits[who])
    return found


def _logits_differ(who: Who, ours: list[NDArray[Any]], theirs: list[NDArray[Any]]) -> list[str]:
    if len(ours) != len(theirs):
        return [f"request {name(who)}: logits of {len(ours)} outputs instead of {len(theirs)}."]
    for place, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a.tobytes() != b.tobytes():
            off = float(np.abs(a - b).max())
            return [f"request {name(who)}: the logits of its output {place} differ by up to {off:.3g}."]
    return []


def name(who: Who) -> str:
    """A sequence, as a sentence calls it."""
    request_id, sequence = who
    return f"{request_id}, sequence {sequence}" if sequence else request_id
