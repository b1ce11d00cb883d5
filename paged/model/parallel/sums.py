"""Numbers that all ranks of a split model have parts of: added up, or joined.

A sum is taken in the order of the ranks, on each rank from the same parts, so that it is the same bits whichever rank sends first, and
whatever else is in the step. Called by one thread of each rank, and by all ranks in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from paged.model.parallel.split import Part

# Its classes of groups and stores are not in its types.
_dist: Any = torch.distributed
HOST = "127.0.0.1"
"""Ranks are on one machine."""


def store_of_first() -> Any:
    """The meeting point of ranks, on a free port; rank 0 owns it, and holds it as long as it has ranks."""
    return _dist.TCPStore(HOST, 0, None, True, wait_for_workers=False)


def store_at(port: int, limit_s: float) -> Any:
    """The same as another rank sees it."""
    return _dist.TCPStore(HOST, port, None, False, timeout=timedelta(seconds=limit_s))


class Sums:
    """What one rank sends to the others and has from them. Waits no longer than `limit_s` for any of them: raises what torch raises then, or when
    one is gone."""

    def __init__(self, store: Any, part: Part, device: torch.device, limit_s: float) -> None:
        self.part = part
        self._group = _group(store, part, device, limit_s)

    def added(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts, of their dtype, each addition in float32."""
        parts = self._all(part)
        total = parts[0].float()
        for each in parts[1:]:
            total = total + each.float()
        return total.to(part.dtype)

    def add_to(self, to: Tensor, part: Tensor) -> None:
        """Add it to `to`; both float32."""
        first, *others = self._all(part)
        for each in others:
            first += each
        to += first

    def joined(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        """[..., sum of sizes] of all ranks' [..., sizes of the rank], on each rank."""
        most = max(sizes)
        parts = self._all(torch.nn.functional.pad(part, (0, most - part.shape[-1])))
        return torch.cat([each[..., :size] for each, size in zip(parts, sizes, strict=True)], -1)

    def joined_at_first(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        """The same on rank 0; others have their own part back."""
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
    """Of its own, beside whatever else a program does with torch.distributed."""
    limit = timedelta(seconds=limit_s)
    if device.type == "cuda":
        # Never tried: no machine with two GPUs was there.
        torch.cuda.set_device(device)
        options = _dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        return _dist.ProcessGroupNCCL(store, part.rank, part.ranks, options)
    options = _dist.ProcessGroupGloo._Options()
    options._devices = [_dist.ProcessGroupGloo.create_device(hostname=HOST)]
    options._timeout = limit
    return _dist.ProcessGroupGloo(store, part.rank, part.ranks, options)
