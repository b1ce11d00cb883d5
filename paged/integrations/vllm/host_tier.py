"""Host blocks inside vLLM: a KV connector whose worker side copies blocks between the two tiers, as our scheduler decided.

    vllm serve MODEL --scheduler-cls paged.integrations.vllm.Scheduler --kv-transfer-config '{"kv_connector": "HostTier",
        "kv_connector_module_path": "paged.integrations.vllm.host_tier", "kv_role": "kv_both",
        "kv_connector_extra_config": {"host_blocks": 4000}}'

vLLM calls a connector before it writes anything of a step, and that is all that a tier needs here: which blocks
travel is decided with the step, and sent with it. Its scheduler side, which would look for content elsewhere, is
never asked: our scheduler knows both tiers. Decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA

from paged.block_manager import Moves
from paged.integrations.vllm.options import host_blocks_of


@dataclass
class HostMoves(KVConnectorMetadata):  # type: ignore[misc]
    """A step's copies, int32 [n, 2] a kind: source block, destination block; device blocks as vLLM numbers them."""

    device_to_host: NDArray[np.int32]
    host_to_device: NDArray[np.int32]


def told_moves(moves: Moves) -> HostMoves:
    """Our moves between the tiers, for vLLM, whose block 0 belongs to no row."""
    out, back = moves.device_to_host, moves.host_to_device
    return HostMoves(out + np.array([1, 0], np.int32), back + np.array([0, 1], np.int32))


class HostTier(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """The worker's side: host memory for `host_blocks` blocks of each layer, and the copies of each step."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._num_blocks: int = kv_cache_config.num_blocks
        self._num_host_blocks = host_blocks_of(vllm_config.kv_transfer_config)
        # Of each layer [blocks, ...], on the device and on the host.
        self._tiers: list[tuple[Tensor, Tensor]] = []

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Take the layers' tensors, whose first dimension counts blocks or equal parts of them."""
        # Layers that share their cache come as views of the same place.
        for cache in {(cache.device, cache.data_ptr()): cache for cache in kv_caches.values()}.values():
            blocks = cache.unflatten(0, (self._num_blocks, -1))
            host = torch.empty((self._num_host_blocks, *blocks.shape[1:]), dtype=cache.dtype, pin_memory=cache.is_cuda)
            self._tiers.append((blocks, host))

    def handle_preemptions(self, kv_connector_metadata: HostMoves) -> None:
        """Called first in a step: make its copies, out before back."""
        out, back = kv_connector_metadata.device_to_host, kv_connector_metadata.host_to_device
        for device, host in self._tiers:
            for pairs, source, destination in ((out, device, host), (back, host, device)):
                if len(pairs):
                    sources, destinations = torch.from_numpy(pairs.astype(np.int64)).unbind(1)
                    # Sources are indexed where they are, and what was read travels.
                    read = source[sources.to(source.device)].to(destination.device)
                    destination[destinations.to(destination.device)] = read

    # What else a connector may do.

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: blocks have been copied by then."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: a block is saved when it has to leave."""

    def wait_for_save(self) -> None:
        """Nothing to wait for."""

    # What vLLM's own scheduler would ask: this tier has nothing for it.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """None."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing."""

    def build_connector_meta(self, scheduler_output: Any) -> HostMoves:
        """No copies."""
        return told_moves(Moves())

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        """Its blocks may go."""
        return False, None
