"""One step of a model in two halves: launch a batch, and end a batch.

    launch: schedule → launched        settle: sampled        finish: update

One step ahead, a batch is launched before the last one has ended. The worker fills in the tokens that the last one
sampled; a row's result is dropped if its sequence has ended there. The worker samples, unless the engine has to see the
logits: then the step is settled before the next is launched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import OutOfMemoryError, Tensor

from paged.base.growing import rising_from
from paged.base.uninterrupted import Uninterrupted
from paged.decoding.drafter import Drafter, Tried
from paged.engine.executor import Executor, Launched, Ran
from paged.engine.results import EngineStats
from paged.engine.step_inputs import StepInputs
from paged.errors import BadLogits, CannotAdjust, EngineClosed, EngineFailed, PagedError, RanksFailed
from paged.sampling.rows import Asked, RowSampling, tell_prompts, tell_states
from paged.scheduler import Batch, Drafts, Outputs, Scheduler

OnLogits = Callable[[str, int, Tensor], None]
OnRan = Callable[[Batch, float], None]


class FailedBatch(NamedTuple):
    """A batch that was cancelled because of `error`, and the requests that it concerns."""

    request_ids: list[str]
    error: Exception


class _NotChosen(Exception):
    """Choosing tokens from logits failed with `error`."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class _Sampled(NamedTuple):
    """A batch's samples, packed; their number by row (None: one for each that samples); and the time of its logits."""

    tokens: NDArray[np.int32]
    counts: NDArray[np.int64] | None
    computed: float


class _Out:
    """A launched batch, and its step; `sampled` is None until its result is read."""

    def __init__(self, batch: Batch, launched: Launched, on_logits: OnLogits | None) -> None:
        self.batch, self.launched, self.on_logits = batch, launched, on_logits
        self.sampled: _Sampled | None = None


class Steps:
    """The batches of one scheduler, run by one executor. After any error `take_back` cancels all that are outstanding.

    content_is_lost  copies have failed: it is not known what blocks hold
    on_ran(batch, seconds)
                     called when a batch has run and was sampled from, before it ends; None: nothing is called
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        sampling: RowSampling,
        clock: Callable[[], float],
        drafter: Drafter | None = None,
    ) -> None:
        self.content_is_lost = False
        self.on_ran: OnRan | None = None
        self._drafter = drafter
        self._scheduler = scheduler
        self._executor = executor
        self._inputs = StepInputs(scheduler.manager.block_size)
        self._sampling = sampling
        self._clock = clock
        # Batches that have not ended, oldest first.
        self._outstanding: list[_Out] = []
        self._torn_by: BaseException | None = None
        self._is_closed = False
        self._num_steps = self._num_failed = self._num_tokens = 0
        self._host_s = self._model_s = 0.0

    def must_be_whole(self) -> None:
        """Raise EngineFailed if the scheduler's books are half-written, and EngineClosed after `close`."""
        if self._is_closed:
            raise EngineClosed("the engine was closed; make a new one.")
        if self._torn_by is not None:
            raise EngineFailed(
                f"an earlier step stopped ({self._torn_by!r}) while the scheduler's books were being written. "
                f"Make a new engine; it can have the same model."
            ) from self._torn_by

    def forget_lost_content(self) -> None:
        """Empty the cache, once copies have failed and every request has ended."""
        was_forgotten = self._scheduler.manager.reset_cache()
        assert was_forgotten, "nothing holds a block"
        self.content_is_lost = False

    def launch(self, note_admitted: Callable[[Batch], None], on_logits: OnLogits | None) -> bool:
        """Launch a batch, if there is anything to run; return whether there was. `note_admitted` gets the batch before
        it runs. Does not wait, if steps run on a thread of their own."""
        began = self._clock()
        with Uninterrupted():
            try:
                batch = self._scheduler.schedule(began, self._drafts())
                if batch.is_empty:
                    return False
                # If this failed half-way, the worker would miss changes: note it as torn.
                oldest = self._outstanding[0].batch if self._outstanding else batch
                step = self._inputs.of(batch, oldest.number)
                note_admitted(batch)
                asked = self._sampling.of(batch.rows)
                draws = on_logits is None and batch.ticket.draft_counts is None and asked.only_draws
                self._outstanding.append(_Out(batch, self._executor.launch(step, asked, samples=draws), on_logits))
            except BaseException as error:
                self._note_torn(error)
                raise
        self._host_s += self._clock() - began
        return True

    def settle(self) -> FailedBatch | None:
        """Wait for batches whose executor does not sample, and sample from their logits: a callback, a reader or a
        change of logits needs them before the next batch is launched. Returns and raises as `finish`."""
        for out in self._outstanding:
            if not out.launched.samples and out.sampled is None:
                failed = self._sample(out)
                if failed is not None:
                    return failed
        return None

    def _sample(self, out: _Out) -> FailedBatch | None:
        """Read the samples of a batch, or sample from its logits. Return the batch if it had to be cancelled."""
        try:
            ran = self._executor.result(out.launched)
        except Exception as error:
            return self._failed(out, error)
        except BaseException:
            self.content_is_lost |= out.launched.lost_content
            raise
        self._model_s += ran.computed - ran.began
        self._host_s += ran.sampled - ran.computed
        if ran.tokens is not None:
            out.sampled = _Sampled(ran.tokens, None, ran.computed)
            self._note_ran(out, ran)
            return None
        began, asked, samples = self._clock(), out.launched.asked, out.batch.samples
        _tell(out, ran)
        try:
            sampled = asked if samples.all() else asked.of(samples)
            tokens, counts = self._chosen(out, ran, sampled)
        except _NotChosen as failure:
            return self._failed(out, failure.error)
        out.sampled = _Sampled(tokens, counts, ran.computed)
        # With drafts the next step waits until it is known how many are right: it needs no samples from here.
        values = np.zeros(len(samples), np.int32) if counts is not None else out.launched.by_row(tokens)
        self._executor.keep(out.launched, values)
        self._host_s += self._clock() - began
        self._note_ran(out, ran)
        return None

    def _note_ran(self, out: _Out, ran: Ran) -> None:
        """Call `on_ran`. Only now it is known that the logits are numbers, and so the K and V that the batch wrote."""
        if self.on_ran is not None:
            self.on_ran(out.batch, ran.computed - ran.began)

    def _chosen(
        self,
        out: _Out,
        ran: Ran,
        asked: Asked,
    ) -> tuple[NDArray[np.int32], NDArray[np.int64] | None]:
        """Return the tokens that rows go on with, packed, and their number by row (None: one for each that samples)."""
        batch, logits, on_logits = out.batch, ran.logits, out.on_logits
        assert logits is not None, "its executor does not sample"
        samples = batch.samples
        seen = logits.clone() if on_logits is not None and asked.adjusts else logits
        if batch.ticket.draft_counts is None:
            # Output tokens of each request before this step.
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
        drafts = ran.token_ids[rising_from(first, num_drafts)]
        self._sampling.note(asked.of(is_draft), places[is_draft], drafts)
        tokens = self._choose(logits, asked, places)
        # A token is kept if all drafts before it are what was chosen there: it is the same as without drafts.
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
        """Choose as RowSampling. Raises _NotChosen, to tell its errors from a callback's."""
        if not len(places):
            return np.empty(0, np.int32)
        try:
            return self._sampling.choose(logits, asked, places)
        except Exception as error:
            raise _NotChosen(error) from error

    @property
    def num_outstanding(self) -> int:
        """Batches that have not ended."""
        return len(self._outstanding)

    @property
    def latest(self) -> Batch:
        """The latest batch that has not ended."""
        return self._outstanding[-1].batch

    def finish(self, deliver: Callable[[Outputs], None]) -> Batch | FailedBatch | None:
        """Wait for the oldest batch, end it, and `deliver` the outputs of its requests. None: there is none.

        Returns a FailedBatch if it was cancelled: memory ran out (`is_out_of_memory`), or nothing can be chosen from
        logits. Raises EngineFailed if copies failed, and other errors as they are."""
        if not self._outstanding:
            return None
        out = self._outstanding[0]
        if out.sampled is None:
            failed = self._sample(out)
            if failed is not None:
                return failed
        began, sampled = self._clock(), out.sampled
        assert sampled is not None, "it was sampled"
        with Uninterrupted():
            try:
                outputs = self._scheduler.update(out.batch, sampled.tokens, sampled.counts, now=sampled.computed)
                del self._outstanding[0]
                deliver(outputs)
            except BaseException as error:
                self._note_torn(error)
                raise
            self._num_steps += 1
            self._num_tokens += len(sampled.tokens)
            self._host_s += self._clock() - began
        return out.batch

    def take_back(self) -> None:
        """Cancel all outstanding batches, as if they had never run; wait for a running step. Torn books stay."""
        with Uninterrupted():
            while self._outstanding and self._torn_by is None:
                out = self._outstanding.pop()
                try:
                    has_begun = self._executor.drop(out.launched)
                    # Its copies may have failed during the wait.
                    self.content_is_lost |= out.launched.lost_content
                    if not has_begun or out.launched.lost_content:
                        self._inputs.take_back(out.launched.step)
                    self._scheduler.cancel(out.batch, moved=has_begun)
                except BaseException as error:
                    self._note_torn(error)
                    raise

    def close(self) -> None:
        """Take back all launched batches, and close the executor; afterwards `must_be_whole` raises."""
        self._is_closed = True
        self.take_back()
        self._executor.close()

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

    def _drafts(self) -> Drafts | None:
        if self._drafter is None:
            return None
        manager, rows = self._scheduler.manager, self._scheduler.running_rows()
        return self._drafter.propose(manager.rows.tokens, manager.rows.num_tokens, rows) if len(rows) else None

    def _failed(self, out: _Out, error: Exception) -> FailedBatch:
        """Cancel the batch and all behind it, and return the requests that it concerns. Raises `error`, which the
        caller has caught, if it is of no known kind."""
        batch = out.batch
        if out.launched.lost_content:
            self.content_is_lost = True
            if isinstance(error, EngineFailed):
                raise error
            raise EngineFailed(
                f"step {out.launched.step.number}: the copies failed: {error}. What the pool holds is not known; "
                f'every request ends with "error", and the cache is forgotten.'
            ) from error
        if isinstance(error, BadLogits | CannotAdjust):
            # The row counts logits, and a row with drafts has several.
            owners = batch.ids[batch.samples].repeat(batch.num_drafts[batch.samples] + 1)
            request_ids = [owners[error.row]]
        elif is_out_of_memory(error):
            request_ids = list(dict.fromkeys(batch.ids.tolist()))
        else:
            # What other ranks kept is lost with them.
            self.content_is_lost |= isinstance(error, RanksFailed)
            raise error
        self._num_failed += 1
        self.take_back()
        return FailedBatch(request_ids, error)

    def _note_torn(self, error: BaseException) -> None:
        """Note that the scheduler's books may be half-written, except after a typed error, which changes nothing."""
        if not isinstance(error, PagedError):
            self._torn_by = error


def _tell(out: _Out, ran: Ran) -> None:
    """Give each reader of a batch what was read for it beside the tokens."""
    if ran.read is None:
        return
    batch, asked = out.batch, out.launched.asked
    owners = np.arange(len(batch.rows)).repeat(batch.num_tokens)
    if ran.of_prompts is not None:
        # These logits are of the token behind each one, which a later step may compute.
        tell_prompts(ran.read.others, asked.of(owners[ran.of_prompts]), batch.positions[ran.of_prompts] + 1)
    if ran.of_states is not None:
        tell_states(ran.read.states, asked.of(owners[ran.of_states]), batch.positions[ran.of_states])


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a forward pass failed for lack of memory, so that another try may succeed: torch.OutOfMemoryError of an
    accelerator, MemoryError of Python and numpy, and the RuntimeError of torch's CPU allocator, which has no class of
    its own."""
    if isinstance(error, (OutOfMemoryError, MemoryError)):
        return True
    return type(error) is RuntimeError and "DefaultCPUAllocator" in str(error)
