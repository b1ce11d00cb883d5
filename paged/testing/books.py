"""The expected outputs of every request, token by token, in plain lists beside a scheduler, and its expected totals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paged.testing.content import Contents
from paged.testing.flight import Flight


@dataclass
class ExpectedSequence:
    """One token stream: everything it knows, what was delivered of it, and why it ended."""

    tokens: list[int]
    limit: int
    """The most tokens, prompt and outputs, that it may have: what the pool holds for it, or the model."""
    outputs: list[int] = field(default_factory=list)
    reason: str | None = None
    starves: bool = False
    """It sampled nothing in its last step, so only `append` can make it go on."""
    computed: int | None = None
    """Tokens that updates computed and nothing took since; None: nothing of it is computed, or that is not known."""
    most: int = 0
    """The most tokens that it ever had computed in batches that ended well."""


class ExpectedRequest:
    """A request and the sequences it owns, from `add` to its last output."""

    def __init__(self, request: Any, limit: int, arrival: float = 0.0) -> None:
        """`limit`: the most tokens, prompt and outputs, that each sequence may have (see `World.limit_of`)."""
        self.request = request
        self.arrival = arrival
        self.namespace = namespace_of(request)
        self.sequences = [
            ExpectedSequence([int(t) for t in request.prompt], limit) for _ in range(request.num_sequences)
        ]
        self.is_aborted = False
        self.was_appended_to = False
        # It was forked, or the engine ended one of its sequences: its answer is not compared with a run alone.
        self.was_steered = False
        # Ended from outside a batch, because memory or model could not hold more of it.
        self.was_cut_short = False
        self.was_saved = False
        # Outputs of sequences that had ended when a fork took their number.
        self.replaced_outputs = 0
        # Some policies reserve more for a request that was preempted.
        self.num_preempted = 0
        # How often a request that stood behind it was admitted before it.
        self.num_passed = 0
        # Tokens that it asked for in a batch that was cancelled: it asks for as many again, whatever was appended.
        self.asked: int | None = None

    @property
    def id(self) -> str:
        """The request's name."""
        return str(self.request.id)

    @property
    def is_live(self) -> bool:
        """Whether some sequence may still receive a token."""
        return not self.is_aborted and None in [s.reason for s in self.sequences]

    @property
    def is_idle(self) -> bool:
        """Whether nothing can become of it until the caller appends tokens."""
        return all(s.starves for s in self.sequences if s.reason is None)

    def end(self, reason: str) -> None:
        """Every sequence that still ran ends now."""
        for sequence in self.sequences:
            sequence.reason = sequence.reason or reason

    def full_length(self, index: int) -> int:
        """Tokens, prompt and outputs, at which a sequence ends at the latest; the last of them is never computed."""
        sequence = self.sequences[index]
        return min(sequence.limit, len(sequence.tokens) + int(self.request.max_tokens) - len(sequence.outputs))

    def append(self, index: int, tokens: Sequence[int], longest: int) -> None:
        """The caller makes a sequence know more tokens; its own limit moves along, up to `longest`."""
        sequence = self.sequences[index]
        sequence.tokens += tokens
        sequence.limit = min(sequence.limit + len(tokens), longest)
        sequence.starves = False
        self.was_appended_to = True

    def fork(self, index: int) -> int:
        """One more sequence goes on from where this one is; returns its number."""
        sequence, forks = self.sequences[index], range(self.request.num_sequences, len(self.sequences))
        number = next((fork for fork in forks if self.sequences[fork].reason is not None), len(self.sequences))
        self.replaced_outputs += sum(len(each.outputs) for each in self.sequences[number : number + 1])
        self.sequences[number : number + 1] = [
            replace(sequence, tokens=sequence.tokens[:], outputs=sequence.outputs[:])
        ]
        self.was_steered = True
        return number

    def accept(self, index: int, sampled: Sequence[int]) -> tuple[list[int], str | None]:
        """Give sampled tokens to one sequence. Return what has to be delivered of them, and any finish reason."""
        sequence, accepted = self.sequences[index], []
        for token in sampled:
            sequence.tokens.append(int(token))
            sequence.outputs.append(int(token))
            accepted.append(int(token))
            sequence.reason = stop_reason(self.request, sequence.outputs, len(sequence.tokens), sequence.limit)
            if sequence.reason is not None:
                break
        sequence.starves = not sampled
        return accepted, sequence.reason


def namespace_of(request: Any) -> object:
    """What tells the KV of two requests with equal tokens apart."""
    return ("request", request.salt, request.adapter, request.extra_key)


def stop_reason(request: Any, outputs: Sequence[int], num_tokens: int, limit: int) -> str | None:
    """Why a sequence ends after its last output, or None.

    EOS and stop ids count from the `min_tokens`-th output on, and win over the length when both hold.
    """
    stops = {request.eos_token_id, *request.stop_token_ids}
    if len(outputs) >= request.min_tokens and outputs[-1] in stops:
        return "stop"
    return "length" if len(outputs) >= request.max_tokens or num_tokens >= limit else None


def generate_alone(request: Any, index: int, vocabulary: int, limit: int) -> tuple[list[int], str]:
    """The outputs and finish reason of one sequence alone: a loop around the stand-in model, without memory."""
    contents, tokens, outputs = Contents(), [int(t) for t in request.prompt], []
    while True:
        context = contents.path(namespace_of(request), tokens).tolist()
        token = contents.next_token(context, index, vocabulary)
        tokens.append(token)
        outputs.append(token)
        reason = stop_reason(request, outputs, len(tokens), limit)
        if reason is not None:
            return outputs, reason


class Figures:
    """Tokens computed, cancelled, delivered and void, preemptions, and tokens that were computed again, counted from
    batches. A scheduler without `stats` is left alone."""

    def __init__(self) -> None:
        self.steps = self.computed_tokens = self.cancelled_tokens = self.output_tokens = self.preemptions = 0
        self.voided_tokens = self.drafted_tokens = self.accepted_tokens = self.max_preemptions = 0
        self._recomputed_tokens = 0

    def preempted(self, book: ExpectedRequest) -> None:
        """A request was preempted once more."""
        book.num_preempted += 1
        self.preemptions += 1
        self.max_preemptions = max(self.max_preemptions, book.num_preempted)

    def computed(self, flight: Flight, books: Mapping[str, ExpectedRequest]) -> None:
        """A batch ended as computed."""
        batch = flight.batch
        self.steps += len(flight.keys) > 0
        self.computed_tokens += len(batch.token_ids)
        for place, (id, number) in enumerate(flight.keys):
            self.drafted_tokens += flight.drafts(place)
            if place in flight.void:
                self.voided_tokens += int(batch.num_tokens[place])
            else:
                self.accepted_tokens += flight.accepted.get(place, 0)
            if flight.stands(place):
                stop, sequence = flight.end(place), books[id].sequences[number]
                self._recomputed_tokens += max(0, min(sequence.most, stop) - flight.start(place))
                sequence.most = max(sequence.most, stop)

    def cancelled(self, batch: Any) -> None:
        """A batch was taken back."""
        self.cancelled_tokens += len(batch.token_ids)

    def violations(self, scheduler: Any) -> list[str]:
        """Totals that differ. Tokens that were found in the cache and lost before their sequence ran may count as
        recomputed, too."""
        stats = getattr(scheduler, "stats", None)
        if stats is None:
            return []
        shown, found = stats(), []
        for name, counted in vars(self).items():
            if not name.startswith("_") and (said := getattr(shown, name, None)) not in (None, counted):
                found.append(f"stats(): {name} {said}, counted from its batches {counted}")
        least = self._recomputed_tokens
        if (said := getattr(shown, "recomputed_tokens", least)) < least:
            found.append(f"stats(): recomputed_tokens {said}; {least} were computed in batches before")
        return found
