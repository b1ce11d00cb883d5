"""The expected totals of a scheduler, counted from its batches.

A scheduler without `stats` is left alone.
"""

from __future__ import annotations

from typing import Any

from paged.testing.flight import Flight, Key


class Figures:
    """Tokens computed, cancelled, delivered and void, preemptions, and tokens that were computed again."""

    def __init__(self) -> None:
        self.steps = self.computed_tokens = self.cancelled_tokens = self.output_tokens = self.preemptions = 0
        self.recomputed_tokens = self.voided_tokens = self.drafted_tokens = 0
        # The most tokens that each sequence ever had computed in batches that ended well.
        self.most: dict[Key, int] = {}

    def scheduled(self, batch: Any) -> None:
        """A batch was decided."""
        self.preemptions += len(batch.preempted)

    def computed(self, flight: Flight) -> None:
        """A batch ended as computed."""
        batch = flight.batch
        self.steps += len(flight.keys) > 0
        self.computed_tokens += len(batch.token_ids)
        for index, key in enumerate(flight.keys):
            self.drafted_tokens += flight.drafts(index)
            if index in flight.void:
                self.voided_tokens += int(batch.num_tokens[index])
            if not flight.stands(index):
                continue
            stop, most = flight.end(index), self.most.get(key, 0)
            start = int(batch.seq_lens[index]) - int(batch.num_tokens[index])
            self.recomputed_tokens += max(0, min(most, stop) - start)
            self.most[key] = max(most, stop)

    def cancelled(self, batch: Any) -> None:
        """A batch was taken back."""
        self.cancelled_tokens += len(batch.token_ids)

    def goes_on_as(self, key: Key, other: Key) -> None:
        """The first sequence is what the second one is."""
        self.most[key] = self.most.get(other, 0)

    def forget(self, id: str) -> None:
        """The id stands for no request, or for another one, from now on."""
        for key in [key for key in self.most if key[0] == id]:
            del self.most[key]

    def violations(self, scheduler: Any) -> list[str]:
        """Totals that differ. Tokens that were found in the cache and lost before their sequence ran may count as recomputed, too."""
        stats = getattr(scheduler, "stats", None)
        if stats is None:
            return []
        shown, found = stats(), []
        for name in (
            "steps",
            "computed_tokens",
            "cancelled_tokens",
            "output_tokens",
            "preemptions",
            "voided_tokens",
            "drafted_tokens",
        ):
            if getattr(shown, name, None) not in (None, getattr(self, name)):
                found.append(f"stats(): {name} {getattr(shown, name)}, counted from its batches {getattr(self, name)}")
        if getattr(shown, "recomputed_tokens", self.recomputed_tokens) < self.recomputed_tokens:
            found.append(
                f"stats(): recomputed_tokens {shown.recomputed_tokens}; {self.recomputed_tokens} were computed in batches before"
            )
        return found
