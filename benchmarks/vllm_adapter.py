"""Our manager and scheduler behind the methods of a harness that drives vLLM's scheduler, so that one loop times both.

The harness (`vllm_sched.py`) holds the workloads, the clock and the timed regions; it calls `make_request`, `add`,
`schedule`, `update` and `lookup` under the clock and everything else outside it. So whatever belongs to a step must
happen inside those five: the methods under "not timed" only read what a step returned, or build the arrays that a
model's sampler would hand over.
"""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING

import numpy as np

import paged

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCK_SIZE = 16
TOKEN_BUDGET = 8192
MAX_MODEL_LEN = 8192


class Engine:
    """`paged.BlockManager` and `paged.Scheduler` with the harness' method names.

    The clock of the scheduler is an argument, so the adapter counts steps and passes that: no policy here may gain
    from knowing the real time.
    """

    name = "paged"
    # `vllm` on-demand blocks and recompute the latest, for steps whose rows all have to run.
    policy = os.environ.get("PAGED_POLICY", "paged")
    # Batches outstanding at once: one, as vLLM's default without asynchronous scheduling.
    depth = 1

    def __init__(
        self,
        *,
        num_blocks: int,
        max_seqs: int,
        caching: bool,
        block_size: int = BLOCK_SIZE,
        budget: int = TOKEN_BUDGET,
        max_len: int = MAX_MODEL_LEN,
    ) -> None:
        self.manager = paged.BlockManager(num_blocks, block_size, prefix_caching=caching)
        self.scheduler = paged.Scheduler(
            self.manager,
            policy=self.policy,
            max_tokens_per_step=budget,
            max_sequences=max_seqs,
            max_model_len=max_len,
        )
        self.step = 0.0
        self.info = {
            "engine": self.name,
            "version": paged.__version__,
            "policy": self.policy,
            "caching": caching,
            "python": platform.python_version(),
            "numpy": np.__version__,
        }

    # Timed by the harness.

    def make_request(self, rid: str, prompt: list[int], max_tokens: int) -> paged.Request:
        """A request of `prompt`, a plain list of token ids as a tokenizer returns it."""
        return paged.Request(id=rid, prompt=prompt, max_tokens=max_tokens)

    def add(self, request: paged.Request) -> None:
        """Queue the request; the prompt becomes an array here, under the clock."""
        self.scheduler.add(request, now=self.step)

    def schedule(self) -> paged.Batch:
        """The next batch, complete: tables, slots, positions, token ids and moves are already arrays."""
        self.step += 1.0
        return self.scheduler.schedule(now=self.step)

    def update(self, batch: paged.Batch, sampled: tuple[NDArray[np.int32], NDArray[np.int64]]) -> paged.Outputs:
        """End the batch with the sampled tokens; returns what became of each of its requests."""
        tokens, counts = sampled
        return self.scheduler.update(batch, tokens, counts, now=self.step)

    def lookup(self, request: paged.Request) -> int:
        """Tokens of the request's prompt that the prefix cache would serve; the list of ids is turned into keys here."""
        return self.manager.lookup(request.prompt).num_tokens

    # Not timed: these only read.

    def fabricate(self, batch: paged.Batch, token: int = 7) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """What a sampler returns for the batch: one token for each row that samples, none for the others."""
        counts = batch.samples.astype(np.int64)
        return np.full(int(counts.sum()), token, np.int32), counts

    def scheduled(self, batch: paged.Batch) -> tuple[int, int, int]:
        """(tokens, rows, preemptions) of one step."""
        return batch.num_scheduled_tokens, len(batch.rows), len(batch.preempted)

    def outputs(self, outputs: paged.Outputs) -> tuple[int, int, int, int]:
        """(output tokens, finished requests, their prompt tokens, of them prefix hits) of one update.

        vLLM reports a prompt when its first token is sampled, we with the request's last output; the sums over a
        whole run are the same.
        """
        usages = [*outputs.usage.values(), *(output.usage for output in outputs.others if output.usage is not None)]
        return (
            int(outputs.counts.sum()) + sum(len(output.token_ids) for output in outputs.others),
            len(usages),
            sum(usage.prompt_tokens for usage in usages),
            sum(usage.hit_tokens for usage in usages),
        )

    def counts(self) -> tuple[int, int]:
        """(requests that own a row, requests that wait for one)."""
        counts = self.scheduler.counts()
        return sum(counts[state] for state in ("loading", "running", "paused", "swapped")), counts["waiting"]

    def usage(self) -> tuple[float, float]:
        """(share of the blocks held by live requests, computed tokens per slot of those; above 1 means shared)."""
        used_slots = self.manager.device.num_used * self.manager.block_size
        computed = int(self.manager.rows.num_computed[self.manager.rows.live].sum())
        return self.manager.device.usage, computed / used_slots if used_slots else 0.0
