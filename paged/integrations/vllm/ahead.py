"""Our scheduler for vLLM's asynchronous scheduling, which decides a step while the one before it runs.

    schedule 7 | schedule 8, which computes what 7 samples | update 7 | schedule 9 | update 8 | ...

The runner keeps sampled tokens on its device for the next step. For a row that is sent again it takes all tokens from the
scheduler, so such a row waits until they are known (`resumes_known` of our scheduler).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged.integrations.vllm.live import Live
from paged.integrations.vllm.plug_in import Scheduler
from paged.integrations.vllm.runner_view import RunnerView
from paged.scheduler import Batch


class RunnerViewAhead(RunnerView):
    """Counts tokens of outstanding steps among a row's outputs, and sends all tokens of a row that was not in the step before."""

    _before: Collection[str] = ()

    def output_of(self, batch: Batch, lives: dict[str, Live]) -> Any:
        output = super().output_of(batch, lives)
        before, self._before = self._before, output.num_scheduled_tokens.keys()
        if not self._uses_v2_runner:
            cached = output.scheduled_cached_reqs
            anew = [id for id in cached.req_ids if id not in before or id in cached.resumed_req_ids]
            cached.all_token_ids = {id: self._decisions.tokens_of(id).tolist() for id in anew}
        return output

    def nothing(self) -> Any:
        self._before = ()
        return super().nothing()

    def _num_outputs(self, batch: Batch) -> NDArray[np.int64]:
        return np.maximum(super()._num_outputs(batch), batch.seq_lens - self._tables.num_prompt(batch.rows))


class AsyncScheduler(Scheduler):
    """vLLM's `--async-scheduling --scheduler-cls paged.integrations.vllm.AsyncScheduler`: two batches out at a time.

    Otherwise like Scheduler. vLLM schedules asynchronously only on a GPU.
    """

    is_ahead = True
    _view_class = RunnerViewAhead

    def _output_of(self, batch: Batch, now: float) -> Any:
        output = super()._output_of(batch, now)
        if output.has_structured_output_requests:
            rests_on_a_sample = batch.samples & (batch.seq_lens > self.manager.rows.num_tokens[batch.rows])
            # A grammar has to see that token before it masks the next one, so vLLM samples this step after the update of the one before.
            output.pending_structured_output_tokens = any(
                self._live[id].request.use_structured_output for id in batch.ids[rests_on_a_sample].tolist()
            )
        return output
