"""A batch between `schedule` and its end, as an engine that runs late keeps it: tables, tokens, and what is void.

schedule   plans, tables as they are shown
run        tables from reported changes alone, tokens where the batch says
update     what is not void is delivered
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged.testing.shadow_groups import View
from paged.testing.shadow_kv import Slots

Key = tuple[str, int]
"""One sequence: the request's id and its number in the request."""
Source = tuple[int, int]
"""The batch that will sample a token, and the place among its rows."""
Path = tuple[object, ...]
"""Content of a block: the namespace, then the tokens of each block up to it."""
Mirror = dict[tuple[int, int], int]
"""Block tables that are kept from a scheduler's reported changes alone: (row, column) to block."""


@dataclass
class Flight:
    """One batch that is out."""

    batch: Any
    keys: list[Key]
    # The block tables of its rows as they were when it was scheduled.
    tables: dict[int, NDArray[np.int64]]
    # Where layers are of several kinds, the pages of its rows in each group, as they were then.
    views: list[View]
    # Of each sequence, its namespace and its tokens, those that are to be sampled among them, and drafts.
    plans: dict[Key, tuple[object, list[int | Source]]] = field(default_factory=dict)
    # Requests that it lists blocks for, for KV that comes from elsewhere.
    loading: list[str] = field(default_factory=list)
    has_moved: bool = False
    has_run: bool = False
    attended: dict[int, Slots] = field(default_factory=dict)
    # What it sampled, by place; known to the engine once the batch has run.
    sampled: dict[int, int] = field(default_factory=dict)
    # The same of places with drafts: those that were right, as far as they were, and the token after them.
    right: dict[int, list[int]] = field(default_factory=dict)
    # How many drafts its update accepted, by place.
    accepted: dict[int, int] = field(default_factory=dict)
    # Places whose sequence ended before them, or got no token on which they rest: nothing of them is delivered.
    void: set[int] = field(default_factory=set)
    # Places whose sequence gave up what they compute.
    lost: set[int] = field(default_factory=set)
    # Blocks that a later batch's copies, or a load, wrote after its forward pass: no row that counts has them.
    rewritten: set[int] = field(default_factory=set)
    # Content of blocks that it is the first to compute, with the sequence that does.
    published: dict[Path, Key] = field(default_factory=dict)

    @property
    def number(self) -> int:
        """The batch's."""
        return int(self.batch.number)

    def drafts(self, place: int) -> int:
        """How many of the tokens of a place are guesses."""
        drafts = getattr(self.batch, "num_drafts", None)
        return 0 if drafts is None else int(drafts[place])

    def drafted(self, place: int) -> list[int]:
        """These guesses, the last of the tokens of the place."""
        stop = int(self.batch.query_start_loc[place + 1])
        return list(self.batch.token_ids[stop - self.drafts(place) : stop].tolist())

    @property
    def has_drafts(self) -> bool:
        """Whether any of its tokens is a guess."""
        return any(self.drafts(place) for place in range(len(self.keys)))

    def start(self, place: int) -> int:
        """Tokens that the sequence there had computed before it."""
        return int(self.batch.seq_lens[place]) - int(self.batch.num_tokens[place])

    def end(self, place: int) -> int:
        """Tokens that the sequence there has computed with it; of its drafts only those that an update accepted."""
        return int(self.batch.seq_lens[place]) - self.drafts(place) + self.accepted.get(place, 0)

    def is_wrong(self, place: int) -> bool:
        """Whether drafts there were not accepted, once it has been updated."""
        return self.drafts(place) > self.accepted.get(place, 0)

    def is_undecided(self, key: Key) -> bool:
        """Whether it has drafts of the sequence: how long that will be, its update says."""
        return any(
            other == key and self.drafts(place) and place not in self.void for place, other in enumerate(self.keys)
        )

    def sources(self, key: Key) -> list[Source]:
        """What it samples for a sequence: nothing, or one token."""
        return [
            (self.number, place)
            for place, other in enumerate(self.keys)
            if other == key and self.batch.samples[place] and place not in self.void
        ]

    def end_of(self, key: Key) -> int | None:
        """Tokens that a sequence has computed with it; None if the sequence computes nothing here that stands."""
        for place, other in enumerate(self.keys):
            if other == key and self.stands(place):
                return self.end(place)
        return None

    def stands(self, place: int) -> bool:
        """Whether what is computed there is the sequence's."""
        return place not in self.void and place not in self.lost

    def make_void(self, keys: Iterable[Key], beyond: int = 0) -> None:
        """What it computes of these sequences past their first `beyond` tokens counts for nothing."""
        gone = set(keys)
        self.void |= {place for place, key in enumerate(self.keys) if key in gone and self.end(place) > beyond}

    def lose(self, id: str, sequence: int | None = None) -> None:
        """The request, or one sequence of it, gave up blocks."""
        self.lost |= {
            place for place, key in enumerate(self.keys) if key[0] == id and (sequence is None or key[1] == sequence)
        }

    def rests_on(self) -> set[Source]:
        """The samples that some of its tokens are."""
        batches, places = self.batch.source_batches.tolist(), self.batch.source_places.tolist()
        return {(batch, place) for batch, place in zip(batches, places, strict=True) if batch >= 0}

    def learn(self, source: Source, token: int) -> None:
        """An earlier batch has run: the token that it sampled there."""
        for _, tokens in self.plans.values():
            for position, each in enumerate(tokens):
                if each == source:
                    tokens[position] = token

    def known(self, id: str, sequence: int) -> tuple[object, list[int]]:
        """Namespace and tokens of one of its sequences, when all batches before it have run."""
        namespace, tokens = self.plans[id, sequence]
        return namespace, [token if isinstance(token, int) else -1 for token in tokens]

    def apply_changes(self, mirror: Mirror) -> None:
        """What the batch says of the block tables, in its order."""
        batch = self.batch
        for row, column, block in zip(
            batch.table_rows.tolist(), batch.table_columns.tolist(), batch.table_blocks.tolist(), strict=True
        ):
            mirror[row, column] = block

    def mirrored(self, mirror: Mirror, block_size: int) -> tuple[list[str], dict[int, NDArray[np.int64]]]:
        """The tables of its rows as the changes make them, and where they differ from those that the batch showed."""
        found, tables = [], {}
        for place, row in enumerate(self.batch.rows.tolist()):
            num_blocks = -(-int(self.batch.seq_lens[place]) // block_size)
            shown = self.tables[row][:num_blocks].tolist()
            made = [mirror.get((row, column), -1) for column in range(num_blocks)]
            if shown != made:
                found.append(f"row {row}: block table {shown}; its reported changes make it {made}")
            tables[row] = np.array(made, np.int64)
        return found, tables
