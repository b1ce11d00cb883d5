"""The expected totals of a scheduler, counted from its batches.

A scheduler without `stats` is left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paged.testing.books import ExpectedRequest
from paged.testing.flight import Flight


class Figures:
    """Tokens computed, cancelled, delivered and void, preemptions, and tokens that were computed again."""

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
