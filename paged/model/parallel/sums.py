"""Sums and joins over the ranks of a split model.

Each rank adds the same parts in the order of the ranks. So a sum has the same bits on each rank, whichever rank sends first, and whatever else is
in the step. One thread of each rank calls these, and all ranks call them in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from paged.model.parallel.split import Part

# torch's type hints lack its classes of groups and stores.
_dist: Any = torch.distributed
HOST = "127.0.0.1"
"""Ranks are on one machine."""


def store_of_first() -> Any:
    """Make the store by which ranks find each other, on a free port. Rank 0 keeps it as long as it has ranks."""
    return _dist.TCPStore(HOST, 0, None, True, wait_for_workers=False)


def store_at(port: int, limit_s: float) -> Any:
    """Connect to rank 0's store."""
    return _dist.TCPStore(HOST, port, None, False, timeout=timedelta(seconds=limit_s))


class Sums:
    """One rank's exchanges with the others. Raises torch's error if one is gone, or takes longer than `limit_s`."""

    def __init__(self, store: Any, part: Part, device: torch.device, limit_s: float) -> None:
        self.part = part
        self._group = _group(store, part, device, limit_s)

    def added(self, part: Tensor) -> Tensor:
        """Return the sum of all ranks' parts, in their dtype; each addition is in float32."""
        parts = self._all(part)
        total = parts[0].float()
        for each in parts[1:]:
            total = total + each.float()
        return total.to(part.dtype)

    def add_to(self, to: Tensor, part: Tensor) -> None:
        """Add the sum of all ranks' parts to `to`; both float32."""
        first, *others = self._all(part)
        for each in others:
            first += each
        to += first

    def joined(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return all ranks' parts, [..., size of the rank] each, joined on each rank: [..., sum of sizes]."""
        most = max(sizes)
        parts = self._all(torch.nn.functional.pad(part, (0, most - part.shape[-1])))
        return torch.cat([each[..., :size] for each, size in zip(parts, sizes, strict=True)], -1)

    def joined_at_first(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return the joined parts on rank 0; other ranks get their own part back. A part without rows is not sent."""
        if not part.numel():
            return part.new_empty(*part.shape[:-1], sum(sizes))
        whole = torch.nn.functional.pad(part, (0, max(sizes) - part.shape[-1])).contiguous()
        if self.part.rank:
            self._group.gather([], whole, 0).wait()
            return part
        parts = [torch.empty_like(whole) for _ in sizes]
        self._group.gather(parts, whole, 0).wait()
        return torch.cat([each[..., :size] for each, size in zip(parts, sizes, strict=True)], -1)

    def _all(self, part: Tensor) -> list[Tensor]:
        own = part.contiguous()
        parts = [torch.empty_like(own) for _ in range(self.part.ranks)]
        self._group.allgather([parts], [own]).wait()
        return parts


def _group(store: Any, part: Part, device: torch.device, limit_s: float) -> Any:
    """Make a process group that is independent of any other use of torch.distributed in the program."""
    limit = timedelta(seconds=limit_s)
    if device.type == "cuda":
        # Never tried on a machine with two GPUs.
        torch.cuda.set_device(device)
        options = _dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        return _dist.ProcessGroupNCCL(store, part.rank, part.ranks, options)
    options = _dist.ProcessGroupGloo._Options()
    options._devices = [_dist.ProcessGroupGloo.create_device(hostname=HOST)]
    options._timeout = limit
    return _dist.ProcessGroupGloo(store, part.rank, part.ranks, options)
