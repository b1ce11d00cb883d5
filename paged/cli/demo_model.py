"""The models of `paged demo`, if torch is installed: those that ship, in place of a simulation's stand-in, over prompts of real text.

The text is `pydoc`'s topics, which every Python has.
"""

from __future__ import annotations

import time
from pydoc_data import topics
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged.attention import LayeredPool
from paged.attention.kv_dtypes import AUTO
from paged.decoding.text import TextStream
from paged.engine.config import EngineConfig
from paged.engine.memory import memory_for
from paged.engine.step_inputs import StepInputs
from paged.model.capacity import pool_for
from paged.model.loading import LoadedModel
from paged.model.runner import runner_for
from paged.model.worker import Worker
from paged.scheduler import Batch, Scheduler
from paged.study.simulator import Scenario
from paged.study.traces import Trace
from paged.study.traces.content import content_ids

# Enough to choose from, and quick to cut into tokens.
MOST_CHARACTERS = 200_000
SHORTEST_PARAGRAPH = 80


class ModelAnswers:
    """Runs the batches of one scheduler, and answers greedily. `tokens` and `texts` by request id are what it has written, `found` how many
    tokens of its prompt were there when it came in."""

    def __init__(
        self, model: LoadedModel, scheduler: Scheduler, pool: LayeredPool | None = None, *, backend: str = "auto"
    ) -> None:
        """`pool`: None: one for layers that are all alike."""
        manager = scheduler.manager
        self._tokenizer = model.tokenizer
        self._eos = set(model.eos_token_ids)
        if pool is None:
            pool = pool_for(
                model,
                num_blocks=manager.num_blocks,
                block_size=manager.block_size,
                num_host_blocks=manager.num_host_blocks,
            )
        self._worker, self._inputs = Worker(runner_for(model, pool, backend=backend)), StepInputs(manager.block_size)
        self._streams: dict[str, TextStream] = {}
        self.tokens: dict[str, list[int]] = {}
        self.texts: dict[str, str] = {}
        self.found: dict[str, int] = {}
        self.seconds = 0.0

    def __call__(self, batch: Batch) -> NDArray[np.int32]:
        """int32 [rows that sample]: the likeliest next token of each."""
        began = time.perf_counter()
        step = self._inputs.of(batch)
        self._worker.begin(step)
        logits = self._worker.logits(self._worker.ready(step))
        tokens: NDArray[np.int32] = logits.argmax(-1).cpu().numpy().astype(np.int32)
        self.seconds += time.perf_counter() - began
        for request_id, first in zip(
            batch.ids.tolist(), batch.positions[batch.query_start_loc[:-1]].tolist(), strict=True
        ):
            self.found.setdefault(request_id, first)
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


def grouped(model: LoadedModel, scenario: Scenario) -> tuple[Scheduler, LayeredPool]:
    """A scheduler and a pool of as many pages as the scenario has blocks, for a model whose layers are of several kinds."""
    config = EngineConfig.of(
        num_blocks=scenario.blocks,
        block_size=scenario.block_size,
        prefix_caching=scenario.prefix_caching,
        max_tokens_per_step=scenario.budget(),
        max_sequences=scenario.max_sequences,
    )
    manager, (pool,) = memory_for(config, [model], None, AUTO)
    steps = config.scheduling
    costs = scenario.device.cost_model().costs(scenario.block_size)
    scheduler = Scheduler(
        manager, max_tokens_per_step=steps.max_tokens_per_step, max_sequences=steps.max_sequences, costs=costs
    )
    return scheduler, pool


class RealText:
    """Prompts for the requests of `trace`, each as long as the trace says. A segment's content id chooses a paragraph to begin at, so equal
    segments are equal text."""

    def __init__(self, trace: Trace, tokenizer: Any) -> None:
        self._trace = trace
        starts: list[int] = []
        stream: list[int] = []
        text = "\n\n".join(topics.topics[name].strip() for name in sorted(topics.topics))[:MOST_CHARACTERS]
        for paragraph in text.split("\n\n"):
            if len(paragraph) >= SHORTEST_PARAGRAPH and paragraph[0].isalpha():
                starts.append(len(stream))
            stream += tokenizer.encode(paragraph + "\n\n", add_special_tokens=False, verbose=False)
        self._stream = np.array(stream, np.int32)
        self._starts = np.array(starts, np.int64)

    def prompt(self, request: int) -> NDArray[np.int32]:
        """int32 [the trace's length]: the prompt of one request, the same at every call."""
        trace = self._trace
        segments = slice(trace.segment_starts[request], trace.segment_starts[request + 1])
        contents = content_ids(trace.segment_ids[segments], request)
        parts = []
        for content, length in zip(contents.tolist(), trace.segment_lengths[segments].tolist(), strict=True):
            start = int(self._starts[content * 2_654_435_761 % len(self._starts)])
            parts.append(np.take(self._stream, np.arange(start, start + length), mode="wrap"))
        return np.concatenate(parts)
