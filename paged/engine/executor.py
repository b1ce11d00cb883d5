"""Executors, which run steps for an engine: it launches a step, and reads the step's result later.

    caller  launch 2 | result 1, update 1 | launch 3 |   result 2, update 2 | launch 4 |
    thread  1 runs   |       2 runs                  |          3 runs                 |

A step begins when those before it have run, so its copies come behind what they write. Samples stay where steps run,
and feed the next step. A result is given out only once the next step computes: until then both need Python's lock.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import NamedTuple, Protocol
from weakref import ref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged.base.uninterrupted import Uninterrupted
from paged.decoding.drafter import Drafter
from paged.model.runner import Read
from paged.model.step_input import StepInput
from paged.model.worker import ReadyStep, Worker
from paged.sampling.rows import Asked, drawn, prompt_places, state_places


class Ran(NamedTuple):
    """The result of a step of T tokens, of which k sample a token; times of the clock.

    token_ids  int32 [T], with the drafts that were filled in
    tokens     int32 [k], the samples, if the step samples; else None, and the reader samples from `logits`, float32
               [k, vocabulary]. One of the two is None
    read       what else was read of the tokens `of_prompts` and `of_states`, bool [T]; None: nothing
    began, computed, sampled
               when its copies began, when its logits were there, and when its samples were
    """

    token_ids: NDArray[np.int32]
    logits: Tensor | None
    tokens: NDArray[np.int32] | None
    read: Read | None
    of_prompts: NDArray[np.bool_] | None
    of_states: NDArray[np.bool_] | None
    began: float
    computed: float
    sampled: float


class Launched:
    """A launched step, and how each of its rows is sampled.

    samples       the step samples its tokens itself; otherwise the reader of its result does
    num_threads   torch's threads in the step: as many as the caller has
    has_begun     its tables were taken in and its copies made, or some of them
    lost_content  the copies failed: what the pool holds is not known
    computes      set once a processor or a GPU has all that it needs, or if nothing more comes
    next_computes  the `computes` of the next step; None: there is none
    """

    def __init__(self, step: StepInput, asked: Asked, *, samples: bool) -> None:
        self.step, self.asked, self.samples = step, asked, samples
        self.num_threads = torch.get_num_threads()
        self.has_begun = self.lost_content = False
        self.ran: Ran | None = None
        self.future: Future[None] | None = None
        self.computes = Event()
        self.next_computes: Event | None = None

    def run(self, worker: Worker, drafter: Drafter | None, clock: Callable[[], float]) -> None:
        """Begin the step and run it; `ran` has the result."""
        began, asked = clock(), self.asked
        with Uninterrupted():
            self.has_begun = True
            try:
                worker.begin(self.step)
                if drafter is not None:
                    drafter.copy(self.step.moves)
            except BaseException:
                self.lost_content = True
                raise
        ready = worker.ready(self.step)
        if drafter is not None:
            ready = drafter.filled(ready, asked)
        of_prompts = prompt_places(asked, self.step.num_tokens, ready.tokens.positions)
        of_states = state_places(asked, self.step.num_tokens)
        device = worker.runner.model.device
        if device.type == "cpu":
            self.computes.set()
        logits, read = _computed(worker, ready, asked, of_prompts, of_states)
        if device.type == "cuda":
            # The kernels were only launched. What comes next needs their results, and times have to be true.
            self.computes.set()
            torch.cuda.current_stream(device).synchronize()
        computed = sampled = clock()
        tokens = None
        if self.samples:
            tokens = self._drawn(logits)
            worker.keep(self.step, self.by_row(tokens))
            sampled = clock()
        kept = None if self.samples else logits
        self.ran = Ran(ready.token_ids, kept, tokens, read, of_prompts, of_states, began, computed, sampled)

    def by_row(self, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the samples, int32 [k], one for each row that samples, as int32 [rows]."""
        samples = self.step.samples
        if len(tokens) == len(samples):
            return tokens
        values = np.zeros(len(samples), np.int32)
        values[samples] = tokens
        return values

    def _drawn(self, logits: Tensor) -> NDArray[np.int32]:
        step = self.step
        if not len(logits):
            return np.empty(0, np.int32)
        asked = self.asked if step.samples.all() else self.asked.of(step.samples)
        return drawn(logits, asked, step.seq_lens[step.samples] - asked.prompt_len)


class Executor(Protocol):
    """Runs the steps of one scheduler in the order of their launch. After an error the caller drops all launched steps,
    the latest first."""

    def launch(self, step: StepInput, asked: Asked, *, samples: bool) -> Launched:
        """Launch a step, without waiting. It raises no error of the step itself. `asked` says how each row is sampled.
        With `samples` the step samples; its rows' logits must be neither read nor changed."""

    def result(self, launched: Launched) -> Ran:
        """Wait for a step and return its result, after all earlier results. Raises the errors of the step."""

    def keep(self, launched: Launched, tokens: NDArray[np.int32]) -> None:
        """Keep the tokens sampled from a step's logits, int32 [rows], for later steps."""

    def drop(self, launched: Launched) -> bool:
        """Cancel the latest step; if it runs, wait for its end. Return whether it had begun."""

    def close(self) -> None:
        """Stop. The caller has dropped all steps, and launches no more."""


class LocalExecutor:
    """Runs steps of a worker in this process: when a result is read, or, `threaded`, early on a thread of the model."""

    def __init__(
        self, worker: Worker, clock: Callable[[], float], drafter: Drafter | None = None, *, threaded: bool = False
    ) -> None:
        self._worker, self._clock, self._drafter = worker, clock, drafter
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="paged-model") if threaded else None
        # Set where steps run: after a failed step none begins.
        self._has_failed = False
        # A weak reference: an ended step may have large logits.
        self._latest: Callable[[], Launched | None] = lambda: None

    def launch(self, step: StepInput, asked: Asked, *, samples: bool) -> Launched:
        """As Executor."""
        launched = Launched(step, asked, samples=samples)
        if self._thread is not None:
            launched.future = self._thread.submit(self._run_behind, launched)
            latest, self._latest = self._latest(), ref(launched)
            if latest is not None:
                latest.next_computes = launched.computes
        return launched

    def result(self, launched: Launched) -> Ran:
        """As Executor."""
        if launched.future is not None:
            launched.future.result()
            if launched.next_computes is not None:
                launched.next_computes.wait()
        elif launched.ran is None:
            launched.run(self._worker, self._drafter, self._clock)
        assert launched.ran is not None, "those before it were read, and had not failed"
        return launched.ran

    def keep(self, launched: Launched, tokens: NDArray[np.int32]) -> None:
        """As Executor."""
        if self._thread is None:
            self._worker.keep(launched.step, tokens)
        else:
            self._thread.submit(self._worker.keep, launched.step, tokens).result()

    def drop(self, launched: Launched) -> bool:
        """As Executor."""
        if launched.future is not None and not launched.future.cancel():
            launched.future.exception()
        launched.computes.set()
        self._has_failed = False
        return launched.has_begun

    def close(self) -> None:
        """As Executor."""
        if self._thread is not None:
            self._thread.shutdown()

    def _run_behind(self, launched: Launched) -> None:
        """Run a step on the model's thread, unless an earlier one failed."""
        try:
            if self._has_failed:
                return
            if torch.get_num_threads() != launched.num_threads:
                torch.set_num_threads(launched.num_threads)
            launched.run(self._worker, self._drafter, self._clock)
        except BaseException:
            self._has_failed = True
            raise
        finally:
            launched.computes.set()


def _computed(
    worker: Worker,
    step: ReadyStep,
    asked: Asked,
    of_prompts: NDArray[np.bool_] | None,
    of_states: NDArray[np.bool_] | None,
) -> tuple[Tensor, Read | None]:
    """Return the logits to sample from, and the other values that were asked for, if any."""
    more = () if worker.runner.model.rotary_limit is None else (asked.prompt_len,)
    if of_prompts is None and of_states is None:
        return worker.logits(step, *more), None
    none = np.zeros(len(step.token_ids), np.bool_)
    read = worker.read(
        step, none if of_prompts is None else of_prompts, none if of_states is None else of_states, *more
    )
    return read.logits, read
