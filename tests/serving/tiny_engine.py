"""What the tests of KV events share: a tiny engine without a model, and its manager's contents as a router's index shows them."""

from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np

from paged import BlockManager, Request, Scheduler
from paged.serving.kv_index import KvIndex
from paged.serving.kv_wire import BlockHash, int_hash
from paged.testing.event_reader import hash_of


class TinyEngine:
    """A scheduler on a pool that evicts to the host, and a stand-in that samples a constant."""

    def __init__(self, num_blocks: int = 12, block_size: int = 4, host_blocks: int = 6, groups: Any = ()) -> None:
        options = {"groups": groups} if groups else {"host_blocks": host_blocks, "host_caching": host_blocks > 0}
        self.manager = BlockManager(num_blocks, block_size, **options)
        self.scheduler = Scheduler(self.manager, max_tokens_per_step=32, max_sequences=3)
        self._ids = count()

    def add(self, prompt: list[int], max_tokens: int = 1, **options: Any) -> None:
        self.scheduler.add(Request(id=str(next(self._ids)), prompt=prompt, max_tokens=max_tokens, **options))

    def step(self) -> None:
        batch = self.scheduler.schedule()
        if not batch.is_empty:
            self.scheduler.update(batch, np.full(int(batch.samples.sum()), 1))

    def finish(self) -> None:
        while self.scheduler.has_unfinished:
            self.step()

    def serve(self, *prompts: list[int], **options: Any) -> None:
        """Answer these one after the other, each with a token."""
        for prompt in prompts:
            self.add(prompt, **options)
            self.finish()

    def contents(self, form: Callable[[bytes], BlockHash] = int_hash) -> dict[str, set[BlockHash]]:
        """The hashes that the device and the host hold, by vLLM's names of these, as they are published."""
        tiers = {"GPU": "device", "CPU": "host"}
        return {
            name: {form(hash_of(path)) for path in self.manager.cached_contents(tier)} for name, tier in tiers.items()
        }


def shown(index: KvIndex) -> dict[str, set[Any]]:
    """What an index says that the two media hold."""
    return {medium: set(index.held(medium)) for medium in ("GPU", "CPU")}
