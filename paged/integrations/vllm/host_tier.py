"""Host blocks inside vLLM: a KV connector whose worker side makes the copies between the two tiers that our scheduler decided.

    vllm serve MODEL --scheduler-cls paged.integrations.vllm.Scheduler --kv-transfer-config '{"kv_connector": "HostTier",
        "kv_connector_module_path": "paged.integrations.vllm.host_tier", "kv_role": "kv_both",
        "kv_connector_extra_config": {"host_blocks": 4000}}'

vLLM calls a connector before it writes anything of a step. That is all that a tier needs: the copies are decided with the
step, and sent with it. The connector's scheduler side, which would look up content elsewhere, is never called, since our
scheduler has both tiers.
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
    """A step's copies of each kind, int32 [n, 2]: source block, destination block; device blocks have vLLM's ids."""

    device_to_host: NDArray[np.int32]
    host_to_device: NDArray[np.int32]


def host_moves_of(moves: Moves) -> HostMoves:
    """Return our moves between the tiers for vLLM, which reserves block 0."""
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
        # Layers that share their cache have views of the same tensor.
        for cache in {(cache.device, cache.data_ptr()): cache for cache in kv_caches.values()}.values():
            blocks = cache.unflatten(0, (self._num_blocks, -1))
            host = torch.empty((self._num_host_blocks, *blocks.shape[1:]), dtype=cache.dtype, pin_memory=cache.is_cuda)
            self._tiers.append((blocks, host))

    def handle_preemptions(self, kv_connector_metadata: HostMoves) -> None:
        """Make a step's copies, out before back. vLLM calls it first in a step."""
        out, back = kv_connector_metadata.device_to_host, kv_connector_metadata.host_to_device
        for device, host in self._tiers:
            for pairs, source, destination in ((out, device, host), (back, host, device)):
                if len(pairs):
                    sources, destinations = torch.from_numpy(pairs.astype(np.int64)).unbind(1)
                    # Blocks are gathered at the source, and then copied over.
                    read = source[sources.to(source.device)].to(destination.device)
                    destination[destinations.to(destination.device)] = read

    # The other calls of the worker's side.

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Do nothing: blocks have been copied by then."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: a block is saved when the device evicts it."""

    def wait_for_save(self) -> None:
        """Do nothing."""

    # The calls of vLLM's own scheduler, which is not used.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Return that nothing matches."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Do nothing."""

    def build_connector_meta(self, scheduler_output: Any) -> HostMoves:
        """Return no copies."""
        return host_moves_of(Moves())

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        """Return that its blocks may be freed."""
        return False, None
