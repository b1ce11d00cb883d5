"""One step of a model in two halves: a batch is put out, and a batch is ended.

    launch: schedule → move → run → sample        finish: update

One step ahead, a batch is put out before the one before it is ended: what that one sampled is filled in, and comes to nothing where
its sequence ends with it.

Knows batches, the runner, and how each row is sampled. Does not know text, or who a request is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from torch import OutOfMemoryError, Tensor

from paged.block_manager import PagedError
from paged.live_request import RowSampling
from paged.model.runner import Runner
from paged.results import EngineStats
from paged.sampling.sampler import BadLogits, sample
from paged.scheduler import Batch, Outputs, Scheduler
from paged.uninterrupted import Uninterrupted

OnLogits = Callable[[str, int, Tensor], None]


class EngineFailed(PagedError, RuntimeError):
    """The copies of a step failed midway, so that what the pool holds is not known, or a step stopped while the
    scheduler's books were being written. The message says which."""


class FailedBatch(NamedTuple):
    """A batch that was cancelled because of `error`, and the requests that this is about."""

    request_ids: list[str]
    error: Exception


class _Launched(NamedTuple):
    """A batch that ran, what it sampled, int32 [rows that sample], and when its logits were there."""

    batch: Batch
    tokens: NDArray[np.int32]
    computed: float


class Steps:
    """The batches of one scheduler, run by one runner. Whatever is raised, `take_back` then leaves none outstanding.

    content_is_lost  copies have failed: no block is known to hold what the manager thinks
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, sampling: RowSampling, clock: Callable[[], float]) -> None:
        self.content_is_lost = False
        self._scheduler = scheduler
        self._runner = runner
        self._sampling = sampling
        self._clock = clock
        # Batches that have not ended, oldest first; those that ran are the first ones of them.
        self._outstanding: list[Batch] = []
        self._launched: deque[_Launched] = deque()
        # What each of them sampled, int32 [rows], by its number.
        self._values: dict[int, NDArray[np.int32]] = {}
        self._torn_by: BaseException | None = None
        self._num_steps = self._num_failed = self._num_tokens = 0
        self._host_s = self._model_s = 0.0

    def must_be_whole(self) -> None:
        """Raise EngineFailed if the scheduler's books were left half-written, or content is lost."""
        if self._torn_by is not None:
            raise EngineFailed(
                f"an earlier step stopped ({self._torn_by!r}) while the scheduler's books were being written. "
                f"Make a new engine; it can have the same model."
            ) from self._torn_by
        self.forget_lost_content()
        if self.content_is_lost:
            raise EngineFailed(
                "copies failed in an earlier step, so that no content of the cache can be trusted, and pinned content "
                "cannot be forgotten. Give back the pins."
            )

    def forget_lost_content(self) -> None:
        """Empty the cache once copies have failed, as soon as nothing holds a block."""
        self.content_is_lost = self.content_is_lost and not self._scheduler.manager.reset_cache()

    def launch(self, note_admitted: Callable[[Batch], None], on_logits: OnLogits | None) -> FailedBatch | None:
        """The first half. `note_admitted` is called with the batch before it runs.

        Returns the batch if it was cancelled, for want of memory (`is_out_of_memory`) or because nothing can be chosen
        from the logits of a request. Raises EngineFailed when copies fail, and all else as it is."""
        began = self._clock()
        batch = self._put_out(began, note_admitted)
        if batch is None:
            return None
        self._host_s += self._clock() - began
        return self._run(batch, on_logits)

    def _run(self, batch: Batch, on_logits: OnLogits | None) -> FailedBatch | None:
        """The forward pass of a batch that is out and whose copies are made, and what is sampled from it; as `launch`."""
        began = self._clock()
        try:
            logits = self._runner.logits(self._filled_in(batch))
        except Exception as error:
            return self._failed(batch, error)
        computed = self._clock()
        rows = batch.rows[batch.samples]
        # Output tokens of each before this step.
        places = batch.seq_lens[batch.samples] - self._sampling.prompt_len[rows]
        if on_logits is not None:
            for request_id, place, row in zip(batch.ids[batch.samples].tolist(), places.tolist(), logits, strict=True):
                on_logits(request_id, place, row)
        try:
            tokens = self._sampled(rows, places, logits)
        except Exception as error:
            return self._failed(batch, error)
        self._launched.append(_Launched(batch, tokens, computed))
        values = self._values[batch.number] = np.zeros(len(batch.rows), np.int32)
        values[batch.samples] = tokens
        self._model_s += computed - began
        self._host_s += self._clock() - computed
        return None

    @property
    def num_launched(self) -> int:
        """Batches that ran and have not ended."""
        return len(self._launched)

    def _filled_in(self, batch: Batch) -> Batch:
        """The batch with the tokens that batches before it sampled."""
        is_unknown = batch.source_batches >= 0
        if not is_unknown.any():
            return batch
        token_ids = batch.token_ids.copy()
        for number, values in self._values.items():
            of_it = batch.source_batches == number
            token_ids[of_it] = values[batch.source_places[of_it]]
        return msgspec.structs.replace(batch, token_ids=token_ids)

    def finish(self, deliver: Callable[[Outputs], None]) -> Batch | None:
        """The second half: end the oldest batch that ran, and `deliver` what became of its requests. None: no batch
        ran."""
        if not self._launched:
            return None
        began = self._clock()
        batch, tokens, computed = self._launched[0]
        with Uninterrupted():
            try:
                outputs = self._scheduler.update(batch, tokens, now=computed)
                del self._launched[0], self._outstanding[0], self._values[batch.number]
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
            self._values.clear()
            while self._outstanding and self._torn_by is None:
                try:
                    self._scheduler.cancel(self._outstanding.pop(), moved=True)
                except BaseException as error:
                    self._note_torn(error)
                    raise

    def stats(self) -> EngineStats:
        """Totals so far."""
        return EngineStats(
            steps=self._num_steps,
            failed_steps=self._num_failed,
            output_tokens=self._num_tokens,
            host_s=self._host_s,
            model_s=self._model_s,
        )

    def _put_out(self, now: float, note_admitted: Callable[[Batch], None]) -> Batch | None:
        """Schedule a batch and make its copies, both or neither; None: there is nothing to run."""
        with Uninterrupted():
            try:
                batch = self._scheduler.schedule(now)
            except BaseException as error:
                self._note_torn(error)
                raise
            if batch.is_empty:
                return None
            self._outstanding.append(batch)
            note_admitted(batch)
            self._move(batch)
        return batch

    def _move(self, batch: Batch) -> None:
        try:
            self._runner.move(batch)
        except Exception as error:
            self.content_is_lost = True
            raise EngineFailed(
                f"step {batch.number}: the copies failed: {error}. What the pool holds is not known; "
                f'every request ends with "error", and the cache is forgotten.'
            ) from error
        except BaseException:
            self.content_is_lost = True
            raise

    def _sampled(self, rows: NDArray[np.int64], places: NDArray[np.int64], logits: Tensor) -> NDArray[np.int32]:
        """int32 [rows]: the next token of each, of which so many output tokens were chosen before."""
        if not len(rows):
            return np.empty(0, np.int32)
        columns = self._sampling
        return sample(
            logits,
            temperature=columns.temperature[rows],
            top_k=columns.top_k[rows],
            top_p=columns.top_p[rows],
            seeds=columns.seed[rows],
            places=places,
        )

    def _failed(self, batch: Batch, error: Exception) -> FailedBatch:
        """Cancel the batch and say whom that concerns; called where `error` was caught. Raises it unless it is one that
        is known."""
        if isinstance(error, BadLogits):
            request_ids = [batch.ids[batch.samples][error.row]]
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
