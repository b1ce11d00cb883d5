"""A pool with a shadow, which knows which token of which sequence each slot holds: both get every write and copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged.attention import KVPool
from paged.testing.content import POISON
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
