"""What the kit asks of a KV-cache manager and of a scheduler, and which features it may take for granted.

A subject that has these methods can be tested as it is; one that names things differently needs an adapter with these names.
What it cannot do at all it says in its `Capabilities`, and the kit leaves those rules out. Knows interfaces, no implementation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Capabilities:
    """What a subject can do. The kit never calls what is False here."""

    prefix_cache: bool = True
    """Full blocks are shared by content, and content outlives its sequence."""
    sharing_in_flight: bool = True
    """A row may share blocks that an earlier row of the same batch is still computing."""
    fork: bool = True
    """A row can be forked, and a shared partial block is copied when written."""
    host_tier: bool = True
    """There is a second pool, and `swap_out` and `swap_in` move blocks there and back."""
    truncate: bool = True
    reserve: bool = True
    groups: bool = True
    """A request may own several sequences."""
    external_tokens: bool = True
    """`num_computed`, `Batch.loads` and `loaded`."""
    async_moves: bool = True
    cancel: bool = True
    """A scheduled batch can be taken back, and several may be outstanding."""


@runtime_checkable
class KVManager(Protocol):
    """Block accounting over integer rows. Semantics: the docstrings of `paged.BlockManager`."""

    num_blocks: int
    block_size: int
    num_host_blocks: int

    @property
    def num_free(self) -> int: ...
    @property
    def num_cached(self) -> int: ...
    @property
    def num_used(self) -> int: ...
    @property
    def host_free(self) -> int: ...
    @property
    def host_cached(self) -> int: ...
    @property
    def host_used(self) -> int: ...
    @property
    def ref_count(self) -> NDArray[np.integer]: ...
    @property
    def num_tokens(self) -> NDArray[np.integer]: ...
    @property
    def num_computed(self) -> NDArray[np.integer]: ...
    @property
    def num_scheduled(self) -> NDArray[np.integer]: ...

    def lookup(self, tokens: Sequence[int], namespace: Any = None) -> Any: ...
    def add(self, tokens: Sequence[int], *, namespace: Any = None) -> int: ...
    def append(self, row: int, tokens: Sequence[int]) -> None: ...
    def allocate(self, rows: Sequence[int], counts: Sequence[int]) -> Any: ...
    def confirm(self, rows: Sequence[int]) -> None: ...
    def cancel(self, rows: Sequence[int]) -> None: ...
    def free(self, rows: Sequence[int]) -> None: ...
    def table(self, row: int) -> NDArray[np.integer]: ...
    def cached_contents(self) -> set[tuple[bytes, ...]]: ...
    def reset_cache(self) -> bool: ...
    def check(self) -> list[str]: ...
    def snapshot(self) -> Any: ...


@runtime_checkable
class StepScheduler(Protocol):
    """Decides what one step runs. Semantics: the docstrings of `paged.Scheduler`."""

    manager: Any

    @property
    def has_unfinished(self) -> bool: ...
    def add(self, request: Any, now: float = 0.0) -> None: ...
    def schedule(self, now: float = 0.0) -> Any: ...
    def update(self, batch: Any, token_ids: Any, counts: Any = None, now: float = 0.0) -> Iterable[Any]: ...
    def abort(self, id: str) -> Any: ...
    def status(self, id: str) -> str: ...
    def counts(self) -> dict[str, int]: ...
    def waiting_ids(self) -> list[str]: ...
    def check(self) -> list[str]: ...


def capabilities_of(subject: object) -> Capabilities:
    """The subject's own `capabilities`, or everything; no host tier or prefix cache where its sizes and flags say so."""
    declared = getattr(subject, "capabilities", None)
    if isinstance(declared, Capabilities):
        return declared
    return Capabilities(
        prefix_cache=bool(getattr(subject, "prefix_caching", True)),
        host_tier=getattr(subject, "num_host_blocks", 0) > 0,
    )
