"""A model in the place of a simulation's stand-in: it runs each batch and answers greedily.

Knows a loaded model, a pool and the arrays of a batch. Does not know the trace, the clock or who watches.
"""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from paged.decoding.text import TextStream
from paged.model.capacity import pool_for
from paged.model.loading import LoadedModel
from paged.model.runner import runner_for
from paged.scheduler import Batch, Scheduler


class ModelAnswers:
    """Runs the batches of one scheduler. `tokens` and `texts` by request id are what it has written."""

    def __init__(self, model: LoadedModel, scheduler: Scheduler, *, backend: str = "auto") -> None:
        manager = scheduler.manager
        self._tokenizer = model.tokenizer
        self._eos = set(model.eos_token_ids)
        self._runner = runner_for(
            model,
            pool_for(
                model,
                num_blocks=manager.num_blocks,
                block_size=manager.block_size,
                num_host_blocks=manager.num_host_blocks,
            ),
            backend=backend,
        )
        self._streams: dict[str, TextStream] = {}
        self.tokens: dict[str, list[int]] = {}
        self.texts: dict[str, str] = {}
        self.seconds = 0.0

    def __call__(self, batch: Batch) -> NDArray[np.int32]:
        """int32 [rows that sample]: the likeliest next token of each."""
        began = time.perf_counter()
        self._runner.move(batch)
        logits = self._runner.logits(batch)
        tokens: NDArray[np.int32] = logits.argmax(-1).cpu().numpy().astype(np.int32)
        self.seconds += time.perf_counter() - began
        for request_id, token in zip(batch.ids[batch.samples].tolist(), tokens.tolist(), strict=True):
            self._write(request_id, token)
        return tokens

    def _write(self, request_id: str, token: int) -> None:
        if request_id not in self._streams:
            self._streams[request_id] = TextStream(self._tokenizer, [])
            self.tokens[request_id], self.texts[request_id] = [], ""
        self.tokens[request_id].append(token)
        if token in self._eos:
            # Lengths are the trace's, so it goes on; what comes after is another text.
            self.texts[request_id] += self._streams[request_id].finish() + " ¶ "
            self._streams[request_id] = TextStream(self._tokenizer, [])
            return
        self.texts[request_id] += self._streams[request_id].push([token])
