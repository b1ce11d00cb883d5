"""KV events in vLLM's wire form, so that routers made for vLLM can read ours.

    payload = msgpack of [ts, [event, ...], data_parallel_rank], an event being a map whose `type` is the name of its class

A namespace shows its adapter, and a digest in place of all else: 16 hex digits of the SHA-256 of the encoded
namespace, which tell namespaces apart and show no salt. (A salt that is easily guessed can be found by trying, here and
in the hashes of its blocks.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from hashlib import sha256
from typing import Any

import msgspec

from paged import Removed, RestartPoint, Stored
from paged.block_manager import Event
from paged.block_manager.content_key import namespace_of, root_prefix
from paged.errors import UnreadableBatch

MEDIA = {"device": "GPU", "host": "CPU"}
"""vLLM's name of each of our tiers."""
SEQ_BYTES = 8
"""Bytes of a sequence number, a big-endian frame."""
END_SEQ = (-1).to_bytes(SEQ_BYTES, "big", signed=True)
"""Ends a replay, in place of a sequence number."""

BlockHash = bytes | int
"""A block's hash: the memory layer's SHA-256, or its last 64 bits as an integer, which is vLLM's default."""
ExtraKeys = tuple[Any, ...] | None
"""What tells blocks apart besides tokens and parent."""

_NO_NAMESPACE = root_prefix(None)


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks that `medium` holds from now on, each the child of the one before it, the first one of `parent_block_hash`.

    token_ids   block_size of each block
    extra_keys  an entry a block, or None: the adapter's name, if the namespace has one; then, on the first block of a prompt, the
                namespace's digest
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[ExtraKeys] | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks that `medium` no longer holds."""

    block_hashes: list[BlockHash]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """No medium holds anything."""


class RestartPointStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks behind which a prompt can begin, of a model whose layers are of several kinds: our own event, sent if configured."""

    block_hashes: list[BlockHash]


class RestartPointRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks behind which no prompt can begin any more."""

    block_hashes: list[BlockHash]


WireEvent = BlockStored | BlockRemoved | AllBlocksCleared | RestartPointStored | RestartPointRemoved


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The events of a step. `ts`: Unix time."""

    ts: float
    events: list[WireEvent]
    data_parallel_rank: int | None = None

    @property
    def begins_anew(self) -> bool:
        """Whether its first event clears everything, so that what came before it does not matter."""
        return bool(self.events) and isinstance(self.events[0], AllBlocksCleared)


_decoder = msgspec.msgpack.Decoder(EventBatch)
encoded = msgspec.msgpack.Encoder().encode
"""Return the payload of a batch, or an event's part of one."""


def encoded_in_parts(ts: float, events: list[bytes], rank: int) -> bytes:
    """Return the payload of a batch whose events are `encoded` already."""
    return encoded([ts, [msgspec.Raw(event) for event in events], rank])


def decoded(payload: bytes) -> EventBatch:
    """Return the batch of a payload. Raises UnreadableBatch."""
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnreadableBatch(f"{len(payload):,} bytes are no batch of KV events: {error}.") from None


def int_hash(key: BlockHash) -> int:
    """Return a hash as vLLM publishes it: its last 64 bits, big-endian; an integer as it is."""
    return key if isinstance(key, int) else int.from_bytes(key[-8:], "big")


def on_wire(event: Event, block_size: int, form: Callable[[bytes], BlockHash] = int_hash) -> WireEvent:
    """Return an event of the memory layer in vLLM's form. `form` converts hashes: `int_hash`, or `bytes`."""
    if isinstance(event, Stored):
        digest, adapter = _labels(event.namespace)
        rest: ExtraKeys = (adapter,) if adapter is not None else None
        first = rest
        if digest is not None and event.parent is None:
            first = (*(rest or ()), digest)
        return BlockStored(
            block_hashes=list(map(form, event.hashes)),
            parent_block_hash=None if event.parent is None else form(event.parent),
            token_ids=event.tokens.tolist(),
            block_size=block_size,
            lora_id=None,
            medium=MEDIA[event.tier],
            lora_name=adapter,
            extra_keys=[first, *[rest] * (len(event.hashes) - 1)] if first or rest else None,
        )
    if isinstance(event, Removed):
        return BlockRemoved(block_hashes=list(map(form, event.hashes)), medium=MEDIA[event.tier])
    if isinstance(event, RestartPoint):
        return (RestartPointStored if event.is_stored else RestartPointRemoved)([form(event.hash)])
    return AllBlocksCleared()


@lru_cache(maxsize=1024)
def _labels(namespace: bytes) -> tuple[str | None, str | None]:
    """Return the digest of an encoded namespace, None for the common one, and its adapter's name or None."""
    if namespace == _NO_NAMESPACE:
        return None, None
    digest = sha256(namespace).hexdigest()[:16]
    match namespace_of(namespace):
        case (_, str(adapter), _):  # (salt, adapter, extra_key), as the scheduler makes them
            return digest, adapter
    return digest, None
