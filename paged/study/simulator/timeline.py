"""How memory and queues looked over virtual time, and their averages weighted by it.

One entry a step, or a stretch of steps.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Entry(NamedTuple):
    """A step, or as many as `steps` with the same rows. Averages are weighted by time.

    end_s, seconds  virtual time at its end, and its duration
    tokens          computed in it
    rows            in flight, a step
    sampled         rows whose logits were computed, of all steps together
    context         tokens whose KV was read, of all steps together, each once for each row that reads it
    pairs           of a computed token and a position that it attends to, of all steps together
    held            slots of blocks that sequences hold, on average
    filled          of them, slots with computed KV, each counted once, on average
    promised        slots that policies keep for sequences beyond what those hold
    cached          slots of cached blocks at the end
    waiting, away   requests at the end: waiting; paused, swapped or loading
    """

    end_s: float
    seconds: float
    steps: int
    tokens: int
    rows: int
    sampled: float
    context: float
    pairs: float
    held: float
    filled: float
    promised: float
    cached: int
    waiting: int
    away: int


FIELDS = Entry._fields


class Timeline:
    """Entries in order, kept as columns."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []

    def add(self, entry: Entry) -> None:
        """The latest entry."""
        self._entries.append(entry)

    def __len__(self) -> int:
        return len(self._entries)

    def columns(self) -> dict[str, NDArray[np.float64]]:
        """By name in `FIELDS`, float64 [entries]."""
        table = np.array(self._entries, np.float64).reshape(-1, len(FIELDS))
        return dict(zip(FIELDS, table.T, strict=True))

    def weighted(self, *, while_waiting: bool = False) -> Iterator[tuple[str, float]]:
        """(name, mean weighted by time) of rows, held, filled, promised, over all, or over what ran while a request waited."""
        columns = self.columns()
        weights = columns["seconds"]
        if while_waiting:
            weights = weights * (columns["waiting"] > 0)
        total = float(weights.sum())
        for name in ("rows", "held", "filled", "promised"):
            yield name, float((columns[name] * weights).sum()) / total if total else 0.0
