"""Batches and their outputs: frozen structs of arrays, which go to the engine and to the caller. And totals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from paged.block_manager import GroupTables, Moves
from paged.block_manager.flights import Flight

from .request import FINISH_REASONS, Counted, RequestState, RequestUsage

_Array = TypeVar("_Array", bound=NDArray[Any])


def read_only(array: _Array) -> _Array:
    """Return the array, made read-only."""
    array.setflags(write=False)
    return array


# `Batch.loads` where there are none.
NO_LOADS: NDArray[np.int32] = read_only(np.empty((0, 3), np.int32))


class Left(NamedTuple):
    """A share that outlives its row. It is void if its sequence ended, or if it needs a token that did not come."""

    request: RequestState
    sequence: int
    is_void: bool


class Ticket(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The scheduler's own record of a batch, which an engine cannot change: it gets copies, or read-only arrays. Only
    `Outstanding` changes `gone` and `recomputed`."""

    owner: object  # identifies the scheduler
    rows: NDArray[np.int64]  # [n], as in Batch
    version: int  # `Running.version` of the rows; -1: not all running rows are in the batch
    ends: NDArray[np.int64]  # [n]; tokens of each row after the step, without drafts
    samples: NDArray[np.bool_]  # [n], as in Batch
    num_samples: int
    flight: Flight | None  # the memory layer's record; None: the batch is empty
    # How many drafts each row has behind its last token, and their ids, packed; None: there are none.
    draft_counts: NDArray[np.int64] | None
    draft_tokens: NDArray[np.int32] | None
    gone: dict[int, Left]  # by place: shares that are void, or whose sequence gave the row back
    recomputed: dict[int, int]  # by place: how many of the row's tokens had been computed before

    def place_of(self, row: int) -> int:
        """Return the place of a row; -1 if it has none, or its share is gone."""
        found = (self.rows == row).nonzero()[0]
        return int(found[0]) if len(found) and int(found[0]) not in self.gone else -1

    def places_sampled(self) -> NDArray[np.int64]:
        """Return the places, rising, of rows that sample and are not gone."""
        samples = self.samples.copy()
        samples[list(self.gone)] = False
        return samples.nonzero()[0]

    @property
    def all_sample(self) -> bool:
        return self.num_samples == len(self.rows)


class Batch(msgspec.Struct, frozen=True, eq=False, kw_only=True, gc=False):
    """What one step computes: T tokens of n rows. `torch.from_numpy` takes each array without a copy.

    First make the moves (device→host, host→device, device→device). Then run the forward pass, which writes every K and
    V of the batch before any token attends.

    number        counts the scheduler's batches from 1
    rows          int64 [n]; indices into block_tables. A row stands behind rows of this batch whose blocks it shares
    num_tokens    int64 [n]; how many tokens of each row this step computes
    query_start_loc  int64 [n + 1]; row i has the packed tokens query_start_loc[i] to query_start_loc[i + 1] - 1
    token_ids     int32 [T]; -1 where an outstanding batch samples the token, and for a draft that the engine guesses
    source_batches, source_places  int64 [T]; the batch that samples the token, and its row's place there; else -1, -1
    positions     int64 [T]; place of each token in its sequence, from 0
    slot_mapping  int64 [T]; block * block_size + offset; -1: nowhere, it is there already (`GroupTables.written_from`)
    seq_lens      int64 [n]; tokens of each row after this step: its last token attends to so many
    samples       bool [n]; whether to sample a token after the row's last one
    num_drafts    int64 [n]; how many of a row's last tokens are drafts. A row with drafts samples after each of its
                  last num_drafts + 1 tokens, and `update` takes the drafts that were right and the token after them
    ids, sequences  object [n], int64 [n]; each row's request id, and which sequence of the request it is
    block_tables  int32 [rows, columns]; a read-only view, valid until the next `schedule`: not for engines that lag
    table_rows, table_columns, table_blocks  all changes of block tables since the last batch, in order. An engine with
                  tables of its own applies them when the batch runs, and needs nothing else
    groups        a GroupTables for each layer group, valid as long as block_tables. None if all layers are full and a
                  block is a page
    moves         copies to make first
    loads         int32 [k, 3]: of each block whose KV exists elsewhere, its row, first token and block id
    has_outputs   whether requests ended outside a batch: the update of this one delivers their outputs
    preempted     (id, "recompute" or "swap") of each request that lost blocks
    admitted      ids of the requests that entered or returned
    ticket        the scheduler's own record

    Read-only, because they are shared: num_tokens, samples, num_drafts, ids, sequences, source_batches, source_places,
    table changes, moves and loads; and query_start_loc if all rows decode.
    """

    number: int
    rows: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    query_start_loc: NDArray[np.int64]
    token_ids: NDArray[np.int32]
    source_batches: NDArray[np.int64]
    source_places: NDArray[np.int64]
    positions: NDArray[np.int64]
    slot_mapping: NDArray[np.int64]
    seq_lens: NDArray[np.int64]
    samples: NDArray[np.bool_]
    num_drafts: NDArray[np.int64]
    ids: NDArray[np.object_]
    sequences: NDArray[np.int64]
    block_tables: NDArray[np.int32]
    table_rows: NDArray[np.int64]
    table_columns: NDArray[np.int64]
    table_blocks: NDArray[np.int32]
    moves: Moves
    loads: NDArray[np.int32]
    ticket: Ticket
    groups: tuple[GroupTables, ...] | None = None
    has_outputs: bool = False
    preempted: tuple[tuple[str, str], ...] = ()
    admitted: tuple[str, ...] = ()

    @property
    def num_scheduled_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to run, move or deliver; such a batch needs no end."""
        return self.ticket.flight is None


class Output(msgspec.Struct, frozen=True, gc=False):
    """New tokens of one sequence. `finish_reason`: "stop", "length", "abort" or "rejected"; None: it goes on."""

    id: str
    sequence: int
    token_ids: list[int]
    finish_reason: str | None = None
    usage: RequestUsage | None = None


class Outputs(msgspec.Struct, frozen=True, eq=False, gc=False):
    """New tokens and ends of all sequences, after a batch ended. Iterating makes one Output a sequence.

    ids, sequences  object [m], int64 [m]: request id of each sequence, and which of the request's it is
    counts          int64 [m]: how many new tokens each has
    token_ids       int32 [counts.sum()]: these tokens, packed
    finish          int8 [m]: index into FINISH_REASONS; 0: the sequence goes on
    usage           by index into ids, of the requests that ended
    others          outputs of sequences that gave their row back meanwhile, and of requests that ended outside a batch
    """

    ids: NDArray[np.object_]
    sequences: NDArray[np.int64]
    token_ids: NDArray[np.int32]
    counts: NDArray[np.int64]
    finish: NDArray[np.int8]
    usage: dict[int, RequestUsage]
    others: list[Output]

    def __len__(self) -> int:
        return len(self.ids) + len(self.others)

    def __iter__(self) -> Iterator[Output]:
        tokens, start = self.token_ids.tolist(), 0
        columns = [column.tolist() for column in (self.ids, self.sequences, self.counts, self.finish)]
        for i, (request_id, sequence, count, finish) in enumerate(zip(*columns, strict=True)):
            yield Output(request_id, sequence, tokens[start : start + count], FINISH_REASONS[finish], self.usage.get(i))
            start += count
        yield from self.others


class SchedulerStats(Counted):
    """Totals since the scheduler was made, in tokens unless said otherwise.

    steps                    batches that ran
    computed_tokens          in updated batches, recomputed ones included
    recomputed_tokens        of computed_tokens: computed before, and lost to a preemption
    prompt_tokens            of requests admitted for the first time
    hit_tokens               of prompt_tokens: found in the prefix cache
    host_hit_tokens          of hit_tokens: copied back from the host
    shared_in_flight_tokens  of hit_tokens: another row of the same batch was still computing them
    output_tokens            sampled and delivered
    voided_tokens            of computed_tokens: of sequences that had ended, or whose earlier batch sampled no token
    drafted_tokens           drafts in updated batches; accepted_tokens of them were right, the others are rejected
    cancelled_tokens         in flight in cancelled batches
    swapped_out_blocks, swapped_in_blocks    blocks, or pages, copied to the host and back
    preemptions_recompute, preemptions_swap  how often requests lost blocks for lack of memory, by what became of them
    max_preemptions          most preemptions of one request
    admitted, finished, rejected, aborted    requests; admitted counts first admissions
    """

    steps: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    host_hit_tokens: int = 0
    shared_in_flight_tokens: int = 0
    output_tokens: int = 0
    voided_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    cancelled_tokens: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    preemptions_recompute: int = 0
    preemptions_swap: int = 0
    max_preemptions: int = 0
    admitted: int = 0
    finished: int = 0
    rejected: int = 0
    aborted: int = 0

    def count_batches(self, num: int, computed: int, outputs: int) -> None:
        self.steps += num
        self.computed_tokens += computed
        self.output_tokens += outputs

    def count_admission(self, prompt_tokens: int) -> None:
        self.admitted += 1
        self.prompt_tokens += prompt_tokens

    def count_preemption(self, kind: str, nth: int) -> None:
        """Count the `nth` preemption of a request. `kind`: "swap" or "recompute"."""
        self.count(f"preemptions_{kind}")
        self.max_preemptions = max(self.max_preemptions, nth)

    @property
    def preemptions(self) -> int:
        return self.preemptions_recompute + self.preemptions_swap
