"""The copies that a step makes before its forward pass, executed on a pool."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged.errors import InvalidPool


class MoveLists(Protocol):
    """The copies of a step, int32 [n, 2] for each kind: source block, destination block."""

    @property
    def device_to_host(self) -> NDArray[np.int32]: ...
    @property
    def host_to_device(self) -> NDArray[np.int32]: ...
    @property
    def device_to_device(self) -> NDArray[np.int32]: ...


class Tiers(Protocol):
    """A pool whose blocks can be copied: a KVPool or another. Sources and destinations are block ids, int64 [n]."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def num_host_blocks(self) -> int: ...
    def device_to_host(self, sources: Tensor, destinations: Tensor, /) -> None: ...
    def host_to_device(self, sources: Tensor, destinations: Tensor, /) -> None: ...
    def device_to_device(self, sources: Tensor, destinations: Tensor, /) -> None: ...


def run_moves(pool: Tiers, moves: MoveLists) -> None:
    """Copy device to host, host to device, device to device, in this order: a later kind may write a block that an
    earlier kind has read. Raises InvalidPool, before it copies anything, for a block that is not in the pool."""
    kinds = (
        (moves.device_to_host, pool.num_blocks, pool.num_host_blocks, pool.device_to_host),
        (moves.host_to_device, pool.num_host_blocks, pool.num_blocks, pool.host_to_device),
        (moves.device_to_device, pool.num_blocks, pool.num_blocks, pool.device_to_device),
    )
    for pairs, num_sources, num_destinations, _ in kinds:
        _check(pairs, num_sources, num_destinations)
    for pairs, _, _, copy in kinds:
        if len(pairs):
            copy(_ids(pairs[:, 0]), _ids(pairs[:, 1]))


def _check(pairs: NDArray[np.int32], num_sources: int, num_destinations: int) -> None:
    for ids, limit in ((pairs[:, 0], num_sources), (pairs[:, 1], num_destinations)):
        if len(ids) and not (ids.min() >= 0 and ids.max() < limit):
            raise InvalidPool(
                f"a move names block {ids.max() if ids.max() >= limit else ids.min()}; there are {limit}."
            )


def _ids(blocks: NDArray[Any]) -> Tensor:
    return torch.from_numpy(blocks.astype(np.int64))
