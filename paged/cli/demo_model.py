"""The models of `paged demo`: those that ship answer the simulation's requests, whose prompts are text of `pydoc`'s topics."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from pydoc_data import topics
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paged.attention import LayeredPool
from paged.attention.kv_dtypes import AUTO
from paged.decoding.text import TextStream
from paged.engine.config import EngineConfig
from paged.engine.memory import memory_for
from paged.engine.step_inputs import StepInputs
from paged.model.loading import LoadedModel, load_model
from paged.model.runner import runner_for
from paged.model.worker import Worker
from paged.scheduler import Batch, Scheduler
from paged.study.simulator import Scenario, Simulation
from paged.study.traces import Trace
from paged.study.traces.content import content_ids

# Enough paragraphs, and quick to tokenize.
MOST_CHARACTERS = 200_000
SHORTEST_PARAGRAPH = 80


class ModelAnswers:
    """Runs the batches of one scheduler, and answers greedily. By request id: `tokens` and `texts` that it has written, and `found`, the
    tokens of the prompt that were cached when the request was admitted."""

    def __init__(self, model: LoadedModel, block_size: int, pool: LayeredPool) -> None:
        self._tokenizer = model.tokenizer
        self._eos = set(model.eos_token_ids)
        self._worker, self._inputs = Worker(runner_for(model, pool)), StepInputs(block_size)
        self._streams: dict[str, TextStream] = {}
        self.tokens: dict[str, list[int]] = {}
        self.texts: dict[str, str] = {}
        self.found: dict[str, int] = {}
        self.seconds = 0.0

    def __call__(self, batch: Batch) -> NDArray[np.int32]:
        """Run a batch. Return the likeliest next token of each row that samples, int32 [rows that sample]."""
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
            # The trace says how long it is, so it goes on with another text.
            self.texts[request_id] += self._streams[request_id].finish() + " ¶ "
            self._streams[request_id] = TextStream(self._tokenizer, [])
            return
        self.texts[request_id] += self._streams[request_id].push([token])


class ModelRun(NamedTuple):
    """A simulation, and a model's answers in it."""

    simulation: Simulation
    answers: ModelAnswers


def alike(checkpoint: Path, scenarios: Sequence[Scenario], *, unchecked: Sequence[Scenario] = ()) -> list[ModelRun]:
    """Return a run of the same requests by one model for each scenario. Invariants are checked in all but `unchecked`."""
    model = load_model(checkpoint)
    trace = scenarios[0].load.build()
    prompt_of, cost_model = real_text(trace, model.tokenizer), scenarios[0].device.cost_model()
    runs = []
    for scenario in scenarios:
        config = EngineConfig.of(
            num_blocks=scenario.blocks,
            block_size=scenario.block_size,
            host_blocks=scenario.host_blocks,
            prefix_caching=scenario.prefix_caching,
        )
        manager, (pool,) = memory_for(config, [model], None, AUTO)
        scheduler = Scheduler(
            manager,
            max_tokens_per_step=scenario.budget(),
            max_sequences=scenario.max_sequences,
            costs=cost_model.costs(scenario.block_size),
        )
        answers, check = ModelAnswers(model, scenario.block_size, pool), scenario not in unchecked
        simulation = Simulation(trace, scheduler, cost_model, check=check, prompt_of=prompt_of, answer=answers)
        runs.append(ModelRun(simulation, answers))
    return runs


def real_text(trace: Trace, tokenizer: Any) -> Callable[[int], NDArray[np.int32]]:
    """Return a function from a request of `trace` to its prompt, int32 [the trace's length], the same in every call. A segment's content id
    chooses the paragraph where it begins, so equal segments have equal text."""
    starts: list[int] = []
    stream: list[int] = []
    text = "\n\n".join(topics.topics[name].strip() for name in sorted(topics.topics))[:MOST_CHARACTERS]
    for paragraph in text.split("\n\n"):
        if len(paragraph) >= SHORTEST_PARAGRAPH and paragraph[0].isalpha():
            starts.append(len(stream))
        stream += tokenizer.encode(paragraph + "\n\n", add_special_tokens=False, verbose=False)
    tokens = np.array(stream, np.int32)

    def prompt(request: int) -> NDArray[np.int32]:
        segments = slice(trace.segment_starts[request], trace.segment_starts[request + 1])
        contents = content_ids(trace.segment_ids[segments], request)
        parts = []
        for content, length in zip(contents.tolist(), trace.segment_lengths[segments].tolist(), strict=True):
            start = starts[content * 2_654_435_761 % len(starts)]
            parts.append(np.take(tokens, np.arange(start, start + length), mode="wrap"))
        return np.concatenate(parts)

    return prompt
