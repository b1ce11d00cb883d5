"""A serving engine without tensors: our scheduler, KV memory of contexts, and a model that is a checksum of them.

Small and fast enough to be tried a thousand times, and to plant a fault in. Every word depends on every slot that was
read for it; `check()` reports a read of a slot that holds anything but its own context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paged.sampling.params import SamplingParams
from paged.scheduler import Output
from paged.testing.engine_world import EngineWorld, request_of, scheduler_in
from paged.testing.protocol import Capabilities
from paged.testing.shadow_kv import ShadowKV


class StandInEngine:
    """A `ServingEngine`; `build` of a rig, or of a machine, as it is."""

    capabilities = Capabilities(logits=False)

    def __init__(self, world: EngineWorld) -> None:
        self.world = world
        self.scheduler = scheduler_in(world, max_model_len=world.max_model_len, vocabulary=world.vocabulary)
        self.manager = self.scheduler.manager
        self.shadow = ShadowKV(world.num_blocks, world.block_size, world.host_blocks)
        self.violations: list[str] = []
        # By id, all tokens that a request knows, and what chance it has.
        self.known: dict[str, list[int]] = {}
        self.seeds: dict[str, int] = {}

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is alive."""
        return self.scheduler.has_unfinished

    def add_request(
        self, prompt: Sequence[int], params: SamplingParams | None = None, *, id: str, **wishes: Any
    ) -> str:
        """Take a request; `wishes` as in `request_of`. Raises DuplicateRequest, InvalidRequest or NeverFits."""
        params = params or SamplingParams()
        self.scheduler.add(request_of(prompt, params, id, **wishes))
        self.known[id] = list(prompt)
        self.seeds[id] = 0 if params.is_greedy else 1 + (params.seed or 0)
        return id

    def step(self) -> list[Output]:
        """One batch: its moves, its writes, its reads, a word a row."""
        batch = self.scheduler.schedule()
        if batch.is_empty:
            return []
        self.violations += self.shadow.move(batch.moves)
        tables = {row: batch.block_tables[row].astype(np.int64) for row in batch.rows.tolist()}
        found, attended = self.shadow.run(batch, tables, lambda id, _: (None, self.known[id]))
        self.violations += found
        words = []
        for index in batch.samples.nonzero()[0].tolist():
            # A row that read what is not its own gets a word as if it had read nothing.
            held = attended[index].tolist() if index in attended else []
            seed = self.seeds[batch.ids[index]]
            words.append(self.shadow.contents.next_token(held, seed, self.world.vocabulary))
        outputs = list(self.scheduler.update(batch, np.array(words, np.int32)))
        for output in outputs:
            self.known[output.id] += output.token_ids
        self.shadow.poison((self.manager.device.states == 0).nonzero()[0].tolist())
        return outputs

    def abort(self, request_id: str) -> Any:
        """End a request; its last output, None if it has ended. Raises UnknownRequest."""
        return self.scheduler.abort(request_id)

    def check(self) -> list[str]:
        """What the memory has seen, and what scheduler and manager find wrong in themselves."""
        return self.violations + self.scheduler.check()
