"""The messages of steps to vLLM's model runner: everything of a new request, and the changes of one that it has."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from paged.integrations.vllm.groups import Groups, RunnerTables
from paged.integrations.vllm.live import Live
from paged.scheduler import Batch, Scheduler as Decisions

T = TypeVar("T")
Tables = tuple[list[int], ...]
"""Block ids by vLLM group."""


class RunnerView:
    """Keeps the runner's state of each row.

    groups          what the model's layers keep
    num_drafts      the most drafts of a request in a step
    most_tokens     of a sequence
    uses_v2_runner  a runner that replaces a table only by that of a new request
    """

    def __init__(
        self, decisions: Decisions, groups: Groups, num_drafts: int, most_tokens: int, *, uses_v2_runner: bool
    ) -> None:
        self._decisions = decisions
        self._groups = RunnerTables(decisions.manager, groups, most_tokens)
        self._tables = self._groups.tables
        self._num_drafts = num_drafts
        self._uses_v2_runner = uses_v2_runner

    def open(self, live: Live) -> None:
        """Note that the request was admitted, so the runner has nothing of its rows."""
        for row in self._decisions.rows_of(live.id):
            self._tables.open(row, live.request.num_prompt_tokens)

    def output_of(self, batch: Batch, lives: dict[str, Live]) -> Any:
        """Return the step as a SchedulerOutput, without ended requests and grammars, which the caller fills in."""
        ids, starts = batch.ids.tolist(), (batch.seq_lens - batch.num_tokens).tolist()
        self._tables.note(batch)
        copies = self._groups.copies_of(batch)
        blocks: list[Tables | None] = [None] * len(ids)
        new, resumed = self._changed(batch, ids, lives, blocks)
        # The runner drops a request that it has, and then takes it as new.
        resent = {ids[place] for place, _ in new if lives[ids[place]].is_sent}
        output = SchedulerOutput(
            scheduled_new_reqs=[self._new_request(lives[ids[place]], tables, starts[place]) for place, tables in new],
            scheduled_cached_reqs=self._known(batch, ids, starts, blocks, resumed, {place for place, _ in new}),
            num_scheduled_tokens=dict(zip(ids, batch.num_tokens.tolist())),
            total_num_scheduled_tokens=batch.num_scheduled_tokens,
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            finished_req_ids=set(),
            free_encoder_mm_hashes=[],
            num_spec_tokens_to_schedule=self._num_drafts,
        )
        if self._uses_v2_runner:
            output.preempted_req_ids = resent
        if self._num_drafts and batch.num_drafts.any():
            output.scheduled_spec_decode_tokens = _drafts_in(batch, ids)
        output.kv_cache_block_copies = copies or None
        output.new_block_ids_to_zero = self._groups.new_in(batch)
        return output

    def resend(self, batch: Batch) -> None:
        """Note that the step was taken back, so the whole tables of its rows are sent again."""
        self._tables.mark_wrong(batch.rows.astype(np.int64))

    def nothing(self) -> Any:
        """Return a step in which nothing was decided."""
        return SchedulerOutput.make_empty()

    def _changed(
        self, batch: Batch, ids: list[str], lives: dict[str, Live], blocks: list[Tables | None]
    ) -> tuple[list[tuple[int, Tables]], set[str]]:
        """Sort the rows whose tables differ from the runner's. Return place and tables of rows to send as new, and the ids of others whose table is
        replaced; fill in the `blocks` of these others."""
        new, resumed = [], set()
        for place, tables, is_whole in self._groups.changes(batch):
            if not lives[ids[place]].is_sent or (is_whole and self._uses_v2_runner):
                new.append((place, tables))
                continue
            blocks[place] = tables
            if is_whole:
                resumed.add(ids[place])
        return new, resumed

    def _known(
        self,
        batch: Batch,
        ids: list[str],
        starts: list[int],
        blocks: list[Tables | None],
        resumed: set[str],
        new: set[int],
    ) -> Any:
        """Return the changes of requests that the runner has: all but those at places `new`."""
        num_outputs = self._num_outputs(batch).tolist()
        if new:
            ids, starts, num_outputs = _without(new, ids), _without(new, starts), _without(new, num_outputs)
            blocks = _without(new, blocks)
        return CachedRequestData(
            req_ids=ids,
            resumed_req_ids=resumed,
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=blocks,
            num_computed_tokens=starts,
            num_output_tokens=num_outputs,
        )

    def _num_outputs(self, batch: Batch) -> NDArray[np.int64]:
        """Return the outputs that the runner has of each row, int64 [n]; after a withdrawal it drops those beyond them."""
        return self._decisions.manager.rows.num_tokens[batch.rows] - self._tables.num_prompt(batch.rows)

    def _new_request(self, live: Live, tables: Tables, start: int) -> Any:
        request = live.request
        live.is_sent = True
        return NewRequestData(
            req_id=live.id,
            prompt_token_ids=request.prompt_token_ids,
            mm_features=[],
            sampling_params=request.sampling_params,
            pooling_params=None,
            block_ids=tables,
            num_computed_tokens=start,
            lora_request=request.lora_request,
            prefill_token_ids=self._decisions.tokens_of(live.id).tolist() if self._uses_v2_runner else None,
        )


def _without(places: set[int], column: list[T]) -> list[T]:
    """Return the column without these places, at least one."""
    # New requests compute chunks, which come after all decodes.
    first = min(places)
    return column[:first] + [column[place] for place in range(first, len(column)) if place not in places]


def _drafts_in(batch: Batch, ids: list[str]) -> dict[str, list[int]]:
    """Return the placed drafts by request: the last tokens of its share."""
    stops, counts, drafts = batch.query_start_loc[1:], batch.num_drafts, batch.token_ids
    return {
        ids[place]: drafts[stops[place] - counts[place] : stops[place]].tolist()
        for place in counts.nonzero()[0].tolist()
    }
