"""Data movement as data: which page is copied where. The memory layer never touches a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Pairs = NDArray[np.int32]


NO_PAIRS: Pairs = np.empty((0, 2), np.int32)
NO_PAIRS.setflags(write=False)


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """Copies to make before the forward pass, int32 [n, 2] for each kind: (source page, destination page). Where blocks
    have one page, these are block ids. Run the kinds in the order of the fields: a later kind may write a page that
    `device_to_host` reads, and read a page that an earlier kind writes. Else no page is both source and destination.
    """

    device_to_host: Pairs = field(default_factory=lambda: NO_PAIRS)
    host_to_device: Pairs = field(default_factory=lambda: NO_PAIRS)
    device_to_device: Pairs = field(default_factory=lambda: NO_PAIRS)

    def __len__(self) -> int:
        return len(self.device_to_host) + len(self.host_to_device) + len(self.device_to_device)

    @property
    def is_empty(self) -> bool:
        return len(self) == 0


NO_MOVES = Moves()


def pairs_of(pairs: Sequence[tuple[int, int]]) -> Pairs:
    return np.array(pairs, np.int32).reshape(-1, 2) if pairs else NO_PAIRS


def joined(parts: Sequence[Moves]) -> Moves:
    parts = [part for part in parts if len(part)]
    if len(parts) < 2:
        return parts[0] if parts else NO_MOVES
    kinds = zip(*[(part.device_to_host, part.host_to_device, part.device_to_device) for part in parts], strict=True)
    return Moves(*map(np.concatenate, kinds))
