"""The pressure oracle with our own scheduler and worker, where more can be seen than from outside.

`PressureRun` runs requests under given conditions and keeps every logit row that was sampled from. Blocks are filled
with NaN when they become free, so that a read of foreign memory shows, and a shadow keeps who wrote which
slot. It is a `ServingEngine` itself, with what the shadow found in its `check()`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged.attention import KVPool
from paged.engine.step_inputs import StepInputs
from paged.model.capacity import pool_for
from paged.model.loading import LoadedModel
from paged.model.runner import runner_for
from paged.model.worker import Worker
from paged.sampling.params import SamplingParams
from paged.scheduler import Batch, Output, Request
from paged.testing.content import POISON
from paged.testing.engine_world import EngineWorld, request_of, scheduler_in
from paged.testing.pressure import Answers, Who, name, serve
from paged.testing.protocol import Capabilities
from paged.testing.shadow_kv import ShadowKV, Slots


class ShadowedPool(KVPool):
    """A KVPool with a ShadowKV. `violations` gets a sentence for each write to a wrong place."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.shadow = ShadowKV(self.num_blocks, self.block_size, self.num_host_blocks)
        self.violations: list[str] = []
        self._planned = np.full(self.num_blocks * self.block_size, POISON, np.int64)

    def plan(self, slots: Slots, contents: Slots) -> None:
        """Plan the next batch's writes: these contents, int64 [T], to these slots, int64 [T], and no others."""
        self._planned.fill(POISON)
        self._planned[slots] = contents

    def check_row(self, table: NDArray[np.integer], contents: Slots, who: str) -> None:
        """Check that the slots of a block table hold what is expected at each position, int64 [length]."""
        self.violations += self.shadow.mismatches(table, contents, who)

    def write_kv(
        self, layer: int, slot_mapping: Tensor, keys: Tensor, values: Tensor, *, is_whole: bool = False
    ) -> None:
        """Write to both. In the shadow a slot that the plan does not name gets POISON."""
        super().write_kv(layer, slot_mapping, keys, values, is_whole=is_whole)
        if layer == 0:
            self.written(slot_mapping)

    def written(self, slot_mapping: Tensor) -> None:
        """Write to the shadow what is planned for these slots."""
        slots = slot_mapping.cpu().numpy()
        self.violations += self.shadow.write(slots, self._planned[slots])

    def poison(self, blocks: Tensor) -> None:
        """Poison both."""
        super().poison(blocks)
        self.shadow.poison(blocks.tolist())

    def device_to_host(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy in both."""
        super().device_to_host(sources, destinations)
        self._copied("device_to_host", sources, destinations)

    def host_to_device(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy in both."""
        super().host_to_device(sources, destinations)
        self._copied("host_to_device", sources, destinations)

    def device_to_device(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy in both."""
        super().device_to_device(sources, destinations)
        self._copied("device_to_device", sources, destinations)

    def _copied(self, kind: str, sources: Tensor, destinations: Tensor) -> None:
        self.violations += self.shadow.copy(kind, torch.stack([sources, destinations], 1).numpy())


class PressureRun:
    """One run, greedy always. Its methods are what a planted fault replaces."""

    capabilities = Capabilities(seeds=False)

    def __init__(self, model: LoadedModel, world: EngineWorld, *, poison: bool = True) -> None:
        self.poison = poison
        longest = model.max_length if world.max_model_len is None else world.max_model_len
        self.scheduler = scheduler_in(world, max_model_len=longest, vocabulary=model.vocabulary_size)
        self.manager = self.scheduler.manager
        pool = pool_for(
            model,
            num_blocks=world.num_blocks,
            block_size=world.block_size,
            num_host_blocks=world.host_blocks,
            kv_dtype=world.kv_dtype,
            kind=ShadowedPool,
        )
        assert isinstance(pool, ShadowedPool), "that kind was asked for"
        self.pool = pool
        self.worker = Worker(runner_for(model, self.pool, backend=world.backend, batch_invariant=True))
        self.inputs = StepInputs(world.block_size)
        self.on_logits: Callable[[str, int, Tensor], None] | None = None
        self._prompt_lens: dict[str, int] = {}
        self._contents: dict[Who, list[int]] = {}

    def logits(self, batch: Batch) -> Tensor:
        """Copies, then the forward pass."""
        step = self.inputs.of(batch)
        self.worker.begin(step)
        return self.worker.logits(self.worker.ready(step))

    def run(self, requests: Sequence[Request], most_steps: int = 10_000) -> Answers:
        """Run all to the end, greedily, or as far as so many steps lead."""
        answers = Answers(violations=self.pool.violations)
        self._see = answers.see  # type: ignore[method-assign]
        for request in requests:
            for sequence in range(request.num_sequences):
                answers.expect((request.id, sequence))
            self.add(request)
        serve(self, answers, most_steps)
        stats = self.scheduler.stats()
        answers.recomputed, answers.swapped = stats.preemptions_recompute, stats.preemptions_swap
        answers.hit_tokens, answers.host_hit_tokens = stats.hit_tokens, stats.host_hit_tokens
        return answers

    def add(self, request: Request) -> None:
        """Take a request of any number of sequences."""
        self.scheduler.add(request)
        self._prompt_lens[request.id] = len(request.prompt)
        namespace = (request.salt, request.adapter, request.extra_key)
        for sequence in range(request.num_sequences):
            path = self.pool.shadow.contents.path(namespace, request.prompt)
            self._contents[request.id, sequence] = path.tolist()

    def add_request(self, prompt: Sequence[int], params: SamplingParams, *, id: str, **wishes: Any) -> str:
        """Take a request of one sequence, as `Engine.add_request` does; `wishes` as in `request_of`."""
        self.add(request_of(prompt, params, id, **wishes))
        return id

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is alive."""
        return self.scheduler.has_unfinished

    def abort(self, request_id: str) -> Output | None:
        """End a request in whatever state it is; its last output, None if it has ended. Raises UnknownRequest."""
        return self.scheduler.abort(request_id)

    def check(self) -> list[str]:
        """What the shadow has found so far, and what scheduler and memory find wrong in themselves."""
        return self.pool.violations + self.scheduler.check()

    def step(self) -> list[Output]:
        """One batch; what was delivered."""
        self._poison_free()
        batch = self.scheduler.schedule()
        expected = self._expected(batch)
        new = [
            contents[start:]
            for contents, start in zip(expected, batch.positions[batch.query_start_loc[:-1]], strict=True)
        ]
        self.pool.plan(batch.slot_mapping, np.concatenate([np.empty(0, np.int64), *new]))
        logits = self.logits(batch)
        for i, contents in enumerate(expected):
            who = (batch.ids[i], int(batch.sequences[i]))
            self.pool.check_row(batch.block_tables[batch.rows[i]], contents, name(who))
        tokens = logits.nan_to_num(nan=torch.inf).argmax(-1).to(torch.int32).numpy()
        sampled = (batch.ids[batch.samples].tolist(), batch.sequences[batch.samples].tolist())
        for request_id, sequence, row in zip(*sampled, logits, strict=True):
            who = (request_id, sequence)
            self._see(who, len(self._contents[who]) - self._prompt_lens[request_id], row)
        outputs = list(self.scheduler.update(batch, tokens))
        for output in outputs:
            self._add((output.id, output.sequence), output.token_ids)
        return outputs

    def _see(self, who: Who, place: int, row: Tensor) -> None:
        if self.on_logits is not None:
            self.on_logits(who[0], place, row)

    def _add(self, who: Who, token_ids: list[int]) -> None:
        contents = self._contents[who]
        for token in token_ids:
            contents.append(self.pool.shadow.contents.extend(contents[-1], token))

    def _expected(self, batch: Batch) -> list[NDArray[np.int64]]:
        """For each row, what the slots of its context hold after this step."""
        whose = zip(batch.ids.tolist(), batch.sequences.tolist(), batch.seq_lens.tolist(), strict=True)
        return [np.array(self._contents[request_id, sequence][:length]) for request_id, sequence, length in whose]

    def _poison_free(self) -> None:
        if self.poison:
            self.pool.poison(torch.from_numpy((self.manager.device.states == 0).nonzero()[0].astype(np.int64)))


def run_alone(model: LoadedModel, requests: Sequence[Request], backend: str, kv_dtype: str = "auto") -> Answers:
    """Each request by itself, its prompt in one step, in memory that it cannot fill."""
    together = Answers()
    for request in requests:
        longest = len(request.prompt) + request.max_tokens
        world = EngineWorld(
            num_blocks=request.num_sequences * -(-longest // 16) + 1,
            block_size=16,
            max_tokens_per_step=request.num_sequences * longest,
            max_sequences=request.num_sequences,
            prefix_caching=False,
            backend=backend,
            kv_dtype=kv_dtype,
        )
        together.add(PressureRun(model, world).run([request]))
    return together
