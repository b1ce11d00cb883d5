"""One step of a model in two halves: a batch is put out, and a batch is ended.

    launch: schedule → begin → run → sample        finish: update

One step ahead, a batch is put out before the one before it is ended: what that one sampled is filled in where the model lies, and comes to
nothing where its sequence ends with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import OutOfMemoryError, Tensor

from paged.base.growing import rising_from
from paged.base.uninterrupted import Uninterrupted
from paged.decoding.drafter import Drafter, Tried
from paged.engine.results import EngineStats
from paged.engine.step_inputs import StepInputs
from paged.errors import BadLogits, CannotAdjust, EngineFailed, PagedError
from paged.model.runner import Read
from paged.model.step_input import StepInput
from paged.model.worker import ReadyStep, Worker
from paged.sampling.rows import Asked, RowSampling, prompt_places, state_places, tell_prompts, tell_states
from paged.scheduler import Batch, Drafts, Outputs, Scheduler

OnLogits = Callable[[str, int, Tensor], None]


class FailedBatch(NamedTuple):
    """A batch that was cancelled because of `error`, and the requests that this is about."""

    request_ids: list[str]
    error: Exception


class _NotChosen(Exception):
    """No tokens were chosen from logits, because of `error`."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class PutOut(NamedTuple):
    """A batch that is out, and the step that a worker runs of it."""

    batch: Batch
    step: StepInput


class _Launched(NamedTuple):
    """A batch that ran, what it sampled, packed, how many of each row (None: one of each that samples), and when its logits were there."""

    batch: Batch
    tokens: NDArray[np.int32]
    counts: NDArray[np.int64] | None
    computed: float


class Steps:
    """The batches of one scheduler, run by one worker. Whatever is raised, `take_back` then leaves none outstanding.

    content_is_lost  copies have failed: no block is known to hold what the manager thinks
    """

    def __init__(
        self,
        scheduler: Scheduler,
        worker: Worker,
        sampling: RowSampling,
        clock: Callable[[], float],
        drafter: Drafter | None = None,
    ) -> None:
        self.content_is_lost = False
        self._drafter = drafter
        self._scheduler = scheduler
        self._worker = worker
        self._inputs = StepInputs(scheduler.manager.block_size)
        self._sampling = sampling
        self._clock = clock
        # Batches that have not ended, oldest first; those that ran are the first ones of them.
        self._outstanding: list[Batch] = []
        self._launched: deque[_Launched] = deque()
        self._torn_by: BaseException | None = None
        self._num_steps = self._num_failed = self._num_tokens = 0
        self._host_s = self._model_s = 0.0

    def must_be_whole(self) -> None:
        """Raise EngineFailed if the scheduler's books were left half-written."""
        if self._torn_by is not None:
            raise EngineFailed(
                f"an earlier step stopped ({self._torn_by!r}) while the scheduler's books were being written. "
                f"Make a new engine; it can have the same model."
            ) from self._torn_by

    def forget_lost_content(self) -> None:
        """Empty the cache once copies have failed, and every request has ended."""
        was_forgotten = self._scheduler.manager.reset_cache()
        assert was_forgotten, "nothing holds a block"
        self.content_is_lost = False

    def launch(self, note_admitted: Callable[[Batch], None], on_logits: OnLogits | None) -> FailedBatch | None:
        """The first half. `note_admitted` is called with the batch before it runs.

        Returns the batch if it was cancelled, for want of memory (`is_out_of_memory`) or because nothing can be chosen
        from the logits of a request. Raises EngineFailed when copies fail, and all else as it is."""
        began = self._clock()
        put = self._put_out(began, note_admitted)
        if put is None:
            return None
        self._host_s += self._clock() - began
        return self._run(put, self._sampling.of(put.batch.rows), on_logits)

    def _run(self, put: PutOut, asked: Asked, on_logits: OnLogits | None) -> FailedBatch | None:
        """The forward pass of a batch that is out and whose step has begun, and what is sampled from it; as `launch`. `asked` says how
        each of its rows is sampled."""
        began, batch = self._clock(), put.batch
        of_prompts = prompt_places(asked, batch.num_tokens, batch.positions)
        of_states = state_places(asked, batch.num_tokens)
        try:
            step = self._worker.ready(put.step)
            if self._drafter is not None:
                step = self._drafter.filled(step, asked)
            logits, read = self._computed(step, asked, of_prompts, of_states)
        except Exception as error:
            return self._failed(batch, error)
        computed = self._clock()
        if read is not None:
            owners = np.arange(len(batch.rows)).repeat(batch.num_tokens)
            if of_prompts is not None:
                # The token behind each of them, which a later step may compute.
                tell_prompts(read.others, asked.of(owners[of_prompts]), batch.positions[of_prompts] + 1)
            if of_states is not None:
                tell_states(read.states, asked.of(owners[of_states]), batch.positions[of_states])
        try:
            sampled = asked if batch.samples.all() else asked.of(batch.samples)
            tokens, counts = self._chosen(batch, step.token_ids, sampled, logits, on_logits)
        except _NotChosen as failure:
            return self._failed(batch, failure.error)
        self._launched.append(_Launched(batch, tokens, counts, computed))
        values = np.zeros(len(batch.rows), np.int32)
        if counts is None:
            # Behind drafts nothing is computed before it is known how many are right.
            values[batch.samples] = tokens
        self._worker.keep(put.step, values)
        self._model_s += computed - began
        self._host_s += self._clock() - computed
        return None

    def _computed(
        self,
        step: ReadyStep,
        asked: Asked,
        of_prompts: NDArray[np.bool_] | None,
        of_states: NDArray[np.bool_] | None,
    ) -> tuple[Tensor, Read | None]:
        """Logits that are sampled from, and what else is read, if anything is."""
        more = () if self._worker.runner.model.rotary_limit is None else (asked.prompt_len,)
        if of_prompts is None and of_states is None:
            return self._worker.logits(step, *more), None
        none = np.zeros(len(step.token_ids), np.bool_)
        read = self._worker.read(
            step, none if of_prompts is None else of_prompts, none if of_states is None else of_states, *more
        )
        return read.logits, read

    def _chosen(
        self,
        batch: Batch,
        token_ids: NDArray[np.int32],
        asked: Asked,
        logits: Tensor,
        on_logits: OnLogits | None,
    ) -> tuple[NDArray[np.int32], NDArray[np.int64] | None]:
        """What each row that samples goes on with, packed, and how many tokens of each row of the batch; None: one of each that samples."""
        samples = batch.samples
        seen = logits.clone() if on_logits is not None and asked.adjusts else logits
        if batch.ticket.draft_counts is None:
            # Output tokens of each before this step.
            places = batch.seq_lens[samples] - asked.prompt_len
            if on_logits is not None:
                for request_id, place, row in zip(batch.ids[samples].tolist(), places.tolist(), seen, strict=True):
                    on_logits(request_id, place, row)
            tokens = self._choose(logits, asked, places)
            if not asked.any_waits:
                return tokens, None
            counts = np.zeros(len(batch.rows), np.int64)
            counts[samples] = ~asked.waits
            return tokens[~asked.waits], counts
        ids, num_drafts = batch.ids[samples], batch.num_drafts[samples]
        places = batch.seq_lens[samples] - num_drafts - asked.prompt_len
        each = num_drafts + 1
        owners, nth = np.arange(len(ids)).repeat(each), rising_from(np.zeros(len(ids), np.int64), each)
        asked, places = asked.of(owners), places[owners] + nth
        is_draft = nth < num_drafts[owners]
        first = batch.query_start_loc[1:][samples] - num_drafts
        drafts = token_ids[rising_from(first, num_drafts)]
        self._sampling.note(asked.of(is_draft), places[is_draft], drafts)
        tokens = self._choose(logits, asked, places)
        # A token is one if all drafts before it are what was chosen there: then it is what would have been chosen without them.
        is_wrong = np.zeros(len(tokens), np.int64)
        is_wrong[is_draft] = tokens[is_draft] != drafts
        wrong_before = is_wrong.cumsum() - is_wrong
        starts = each.cumsum() - each
        is_kept = (wrong_before == wrong_before[starts].repeat(each)) & ~asked.waits
        if on_logits is not None:
            kept = is_kept.nonzero()[0]
            for request_id, place, row in zip(
                ids[owners[kept]].tolist(), places[kept].tolist(), seen[kept], strict=True
            ):
                on_logits(request_id, place, row)
        counts = np.zeros(len(batch.rows), np.int64)
        counts[samples] = np.add.reduceat(is_kept, starts, dtype=np.int64)
        if self._drafter is not None:
            has_any = num_drafts > 0
            rows, right = batch.rows[samples][has_any], counts[samples][has_any] - 1
            self._drafter.learn(Tried(rows, num_drafts[has_any], right, tokens[has_any[owners]]))
        return tokens[is_kept], counts

    def _choose(self, logits: Tensor, asked: Asked, places: NDArray[np.int64]) -> NDArray[np.int32]:
        """As RowSampling; raises _NotChosen, so that it is told from what a callback raises."""
        if not len(places):
            return np.empty(0, np.int32)
        try:
            return self._sampling.choose(logits, asked, places)
        except Exception as error:
            raise _NotChosen(error) from error

    @property
    def num_launched(self) -> int:
        """Batches that ran and have not ended."""
        return len(self._launched)

    @property
    def latest(self) -> Batch:
        """Of those, the one that ran last."""
        return self._launched[-1].batch

    def finish(self, deliver: Callable[[Outputs], None]) -> Batch | None:
        """The second half: end the oldest batch that ran, and `deliver` what became of its requests. None: no batch
        ran."""
        if not self._launched:
            return None
        began = self._clock()
        batch, tokens, counts, computed = self._launched[0]
        with Uninterrupted():
            try:
                outputs = self._scheduler.update(batch, tokens, counts, now=computed)
                del self._launched[0], self._outstanding[0]
                deliver(outputs)
            except BaseException as error:
                self._note_torn(error)
                raise
            self._num_steps += 1
            self._num_tokens += len(tokens)
            self._host_s += self._clock() - began
        return batch

    def take_back(self) -> None:
        """Cancel every batch that has not ended, as if it had never run; with torn books, leave them as they are."""
        with Uninterrupted():
            self._launched.clear()
            while self._outstanding and self._torn_by is None:
                try:
                    self._scheduler.cancel(self._outstanding.pop(), moved=True)
                except BaseException as error:
                    self._note_torn(error)
                    raise

    def stats(self) -> EngineStats:
        """Totals so far."""
        decided = self._scheduler.stats()
        return EngineStats(
            steps=self._num_steps,
            failed_steps=self._num_failed,
            output_tokens=self._num_tokens,
            drafted_tokens=decided.drafted_tokens,
            accepted_tokens=decided.accepted_tokens,
            host_s=self._host_s,
            model_s=self._model_s,
        )

    def _put_out(self, now: float, note_admitted: Callable[[Batch], None]) -> PutOut | None:
        """Schedule a batch and begin its step, both or neither; None: there is nothing to run."""
        with Uninterrupted():
            try:
                batch = self._scheduler.schedule(now, self._drafts())
                if batch.is_empty:
                    return None
                self._outstanding.append(batch)
                # If this fails half-way, the worker would miss changes.
                put = PutOut(batch, self._inputs.of(batch, self._outstanding[0].number))
            except BaseException as error:
                self._note_torn(error)
                raise
            self._begin(put)
            note_admitted(batch)
        return put

    def _drafts(self) -> Drafts | None:
        if self._drafter is None:
            return None
        manager, rows = self._scheduler.manager, self._scheduler.running_rows()
        return self._drafter.propose(manager.rows.tokens, manager.rows.num_tokens, rows) if len(rows) else None

    def _begin(self, put: PutOut) -> None:
        try:
            self._worker.begin(put.step)
            if self._drafter is not None:
                self._drafter.copy(put.step.moves)
        except Exception as error:
            self._lose_content(put)
            raise EngineFailed(
                f"step {put.step.number}: the copies failed: {error}. What the pool holds is not known; "
                f'every request ends with "error", and the cache is forgotten.'
            ) from error
        except BaseException:
            self._lose_content(put)
            raise

    def _lose_content(self, put: PutOut) -> None:
        self.content_is_lost = True
        self._inputs.take_back(put.step)

    def _failed(self, batch: Batch, error: Exception) -> FailedBatch:
        """Cancel the batch and say whom that concerns; called where `error` was caught. Raises it unless it is one that
        is known."""
        if isinstance(error, BadLogits | CannotAdjust):
            # Of its logits, of which a row with drafts has several.
            owners = batch.ids[batch.samples].repeat(batch.num_drafts[batch.samples] + 1)
            request_ids = [owners[error.row]]
        elif is_out_of_memory(error):
            request_ids = list(dict.fromkeys(batch.ids.tolist()))
        else:
            raise error
        self._num_failed += 1
        self.take_back()
        return FailedBatch(request_ids, error)

    def _note_torn(self, error: BaseException) -> None:
        """The scheduler's books may be half-written, unless the error is a typed one, which has changed nothing."""
        if not isinstance(error, PagedError):
            self._torn_by = error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a forward pass failed for want of memory, which another try may find: torch.OutOfMemoryError of an
    accelerator, MemoryError of Python and numpy, and the RuntimeError of torch's allocator on a CPU, which has no class
    of its own."""
    if isinstance(error, (OutOfMemoryError, MemoryError)):
        return True
    return type(error) is RuntimeError and "DefaultCPUAllocator" in str(error)
