"""An index of the blocks in each medium of an engine, from its KV events. A router reads it before it chooses an engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any, NamedTuple

import msgspec
import numpy as np

from paged.base.arguments import token_array
from paged.block_manager.content_key import extend_chain, namespace_digest, root_prefix
from paged.errors import InconsistentEvent
from paged.serving.kv_wire import (
    MEDIA,
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    EventBatch,
    ExtraKeys,
    RestartPointRemoved,
    RestartPointStored,
    int_hash,
)

_LONGEST = 256
"""Blocks in one event of a summary."""


class IndexHit(NamedTuple):
    """The part of a prompt that an engine has, in tokens: on the device, and behind that on the host only."""

    num_tokens: int
    host_tokens: int


class _Block(msgspec.Struct, frozen=True, gc=False):
    """A block by its event. `tokens` are int32."""

    parent: BlockHash | None
    tokens: bytes
    extra_keys: ExtraKeys
    lora_name: str | None


class KvIndex:
    """The blocks in each medium after all applied batches.

    next_seq  the number of the next batch
    missing   numbers that have to come before a refused batch; else empty
    """

    def __init__(self) -> None:
        self.next_seq = 0
        self.missing = range(0)
        self._held: dict[str, set[BlockHash]] = {}
        self._blocks: dict[BlockHash, _Block] = {}
        self._block_size = 0
        # Blocks behind which a prompt can begin; None: behind any block.
        self._restarts: set[BlockHash] | None = None

    def apply(self, seq: int, batch: EventBatch) -> bool:
        """Apply a batch: the next one, or any that clears everything first. Skip one that was applied before.

        Return False, and change only `missing`, if batches before it are missing. Raises InconsistentEvent, and changes nothing.
        """
        if not batch.begins_anew:
            if seq > self.next_seq:
                self.missing = range(self.next_seq, seq)
                return False
            if seq < self.next_seq:
                return True
        tokens = [_tokens_of(seq, event) if isinstance(event, BlockStored) else b"" for event in batch.events]
        for event, data in zip(batch.events, tokens):
            if isinstance(event, BlockStored):
                self._store(event, data)
            elif isinstance(event, BlockRemoved):
                self._remove(event.medium or MEDIA["device"], event.block_hashes)
            elif isinstance(event, AllBlocksCleared):
                self._held, self._blocks, self._restarts = {}, {}, None
            elif isinstance(event, RestartPointStored | RestartPointRemoved):
                if self._restarts is None:
                    self._restarts = set()
                is_stored = isinstance(event, RestartPointStored)
                # In place: there may be as many as blocks, and an event for each.
                (self._restarts.update if is_stored else self._restarts.difference_update)(event.block_hashes)
        self.next_seq, self.missing = seq + 1, range(0)
        return True

    def held(self, medium: str) -> Set[BlockHash]:
        """Return the hashes of the blocks that a medium, "GPU" or "CPU", holds. Read-only."""
        return self._held.get(medium, set())

    def hits(self, tokens: Any, namespace: Any = None) -> IndexHit:
        """Return the full blocks that the engine has of a prompt, at most len(tokens) - 1 tokens, as `BlockManager.lookup` finds them there.

        `namespace` is (salt, adapter, extra_key) of a request with any of these, else None. Raises InvalidTokens or InvalidNamespace.
        """
        array, size = token_array(tokens), self._block_size
        root = root_prefix(namespace)
        if not size:
            return IndexHit(0, 0)
        chain: list[bytes] = []
        data = array.tobytes()[: max(0, len(array) - 1) // size * size * 4]
        extend_chain(chain, namespace_digest(root), data, size * 4)
        # A publisher has one form of hashes.
        is_int = isinstance(next(iter(self._blocks), None), int)
        on_device, behind = self.hit_blocks([int_hash(key) for key in chain] if is_int else chain)
        return IndexHit(on_device * size, behind * size)

    def hit_blocks(self, chain: Sequence[BlockHash]) -> tuple[int, int]:
        """Return how many blocks of a chain of hashes the device has from its beginning on, and how many the host has behind those. For layers
        of several kinds: as many as a prompt can begin behind, and 0."""
        on_device = _leading(chain, self.held(MEDIA["device"]))
        if self._restarts is not None:
            return next((num for num in range(on_device, 0, -1) if chain[num - 1] in self._restarts), 0), 0
        return on_device, _leading(chain[on_device:], self.held(MEDIA["host"]))

    def summary(self) -> Iterator[BlockStored | RestartPointStored]:
        """Yield events that make an empty index equal to this one: the device's first, parents before children."""
        for medium in sorted(self._held, key=lambda name: name != MEDIA["device"]):
            held = self._held[medium]
            yield from self._chains(medium, (key for key in self._parents_first() if key in held))
        if self._restarts is not None:
            yield RestartPointStored(list(self._restarts))

    def _store(self, event: BlockStored, data: bytes) -> None:
        size = self._block_size = event.block_size
        parent, extra = event.parent_block_hash, event.extra_keys
        held = self._held.setdefault(event.medium or MEDIA["device"], set())
        for i, key in enumerate(event.block_hashes):
            if key not in self._blocks:
                mine = data[i * size * 4 : (i + 1) * size * 4]
                self._blocks[key] = _Block(parent, mine, extra[i] if extra else None, event.lora_name)
            held.add(key)
            parent = key

    def _remove(self, medium: str, hashes: Iterable[BlockHash]) -> None:
        held = self._held.get(medium, set())
        others = [each for name, each in self._held.items() if name != medium]
        for key in hashes:
            held.discard(key)
            if not any(key in other for other in others):
                self._blocks.pop(key, None)

    def _parents_first(self) -> Iterator[BlockHash]:
        seen: set[BlockHash] = set()
        for key in self._blocks:
            path: list[BlockHash] = []
            above: BlockHash | None = key
            while above is not None and above not in seen and above in self._blocks:
                path.append(above)
                seen.add(above)
                above = self._blocks[above].parent
            yield from reversed(path)

    def _chains(self, medium: str, keys: Iterable[BlockHash]) -> Iterator[BlockStored]:
        """Yield an event for each chain of blocks, of at most _LONGEST."""
        chain: list[BlockHash] = []
        for key in keys:
            if chain and (self._blocks[key].parent != chain[-1] or len(chain) == _LONGEST):
                yield self._stored(medium, chain)
                chain = []
            chain.append(key)
        if chain:
            yield self._stored(medium, chain)

    def _stored(self, medium: str, chain: list[BlockHash]) -> BlockStored:
        blocks = [self._blocks[key] for key in chain]
        extra = [block.extra_keys for block in blocks]
        return BlockStored(
            block_hashes=list(chain),
            parent_block_hash=blocks[0].parent,
            token_ids=np.frombuffer(b"".join(block.tokens for block in blocks), np.int32).tolist(),
            block_size=self._block_size,
            lora_id=None,
            medium=medium,
            lora_name=blocks[0].lora_name,
            extra_keys=extra if any(extra) else None,
        )


def _tokens_of(seq: int, event: BlockStored) -> bytes:
    """Return the tokens of an event, as bytes of int32. Raises InconsistentEvent."""
    blocks, size = len(event.block_hashes), event.block_size
    if size < 1 or len(event.token_ids) != size * blocks:
        raise InconsistentEvent(f"batch {seq}: {blocks} blocks of {size} tokens, and {len(event.token_ids)} tokens.")
    if event.extra_keys is not None and len(event.extra_keys) != blocks:
        raise InconsistentEvent(f"batch {seq}: {blocks} blocks, and extra keys of {len(event.extra_keys)}.")
    try:
        return np.array(event.token_ids, np.int32).tobytes()
    except OverflowError:
        raise InconsistentEvent(f"batch {seq}: a token id is no int32: {max(event.token_ids, key=abs)}.") from None


def _leading(chain: Sequence[BlockHash], held: Set[BlockHash]) -> int:
    return next((i for i, key in enumerate(chain) if key not in held), len(chain))
