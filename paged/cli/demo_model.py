"""The models of `paged demo`, if torch is installed: those that ship, in place of a simulation's stand-in, over prompts of real text.

The text is `pydoc`'s topics, which every Python has.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
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

# Enough to choose from, and quick to cut into tokens.
MOST_CHARACTERS = 200_000
SHORTEST_PARAGRAPH = 80


class ModelAnswers:
    """Runs the batches of one scheduler, and answers greedily. `tokens` and `texts` by request id are what it has written, `found` how many
    tokens of its prompt were there when it came in."""

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


class ModelRun(NamedTuple):
    """A simulation, and what a model answers in it."""

    simulation: Simulation
    answers: ModelAnswers


def alike(checkpoint: Path, scenarios: Sequence[Scenario], *, unchecked: Sequence[Scenario] = ()) -> list[ModelRun]:
    """The same requests in several scenarios, answered by one model; invariants are checked in all but `unchecked`. Blocks of a model whose layers
    are of several kinds are pages."""
    model = load_model(checkpoint)
    trace = scenarios[0].load.build()
    prompt_of, cost_model = RealText(trace, model.tokenizer).prompt, scenarios[0].device.cost_model()
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
