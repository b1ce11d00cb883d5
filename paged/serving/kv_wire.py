"""KV events as vLLM writes them down, so that indexers of routers that were made for vLLM read ours.

    payload = msgpack of [ts, [event, ...], data_parallel_rank], an event being a map whose `type` is the name of its class

Says of a namespace its adapter, and a digest in place of all else: 16 hex digits of the SHA-256 of the encoded
namespace, which tell namespaces apart and show no salt. (One that is easily guessed can be found by trying, here as
in the hashes of its blocks.) Knows the events of the memory layer and their form.
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
"""By tier of ours, what vLLM calls it."""
SEQ_BYTES = 8
"""Of a sequence number, big-endian, in a frame of its own."""
END_SEQ = (-1).to_bytes(SEQ_BYTES, "big", signed=True)
"""In place of a sequence number: a replay ends here."""

BlockHash = bytes | int
"""Of a block: the SHA-256 that the memory layer has, or its last 64 bits as an integer, as vLLM has it where nothing else is said."""
ExtraKeys = tuple[Any, ...] | None
"""What besides its tokens and its parent makes a block another one."""

_NO_NAMESPACE = root_prefix(None)


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks that `medium` holds from now on, each the child of the one before it, the first one of `parent_block_hash`.

    token_ids   block_size of each block
    extra_keys  one entry a block, None where there is nothing to say: the adapter's name, if the namespace has one, and behind it on the
                first block of a prompt the namespace's digest
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
    """Blocks that `medium` holds no more."""

    block_hashes: list[BlockHash]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """No medium holds anything."""


class RestartPointStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """A prompt can begin behind these blocks of a model whose layers are of several kinds: ours, sent where it is asked for."""

    block_hashes: list[BlockHash]


class RestartPointRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """No prompt can begin behind these blocks any more."""

    block_hashes: list[BlockHash]


WireEvent = BlockStored | BlockRemoved | AllBlocksCleared | RestartPointStored | RestartPointRemoved


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What happened in a step. `ts` is in seconds since the epoch."""

    ts: float
    events: list[WireEvent]
    data_parallel_rank: int | None = None

    @property
    def begins_anew(self) -> bool:
        """Whether what came before this batch does not matter: its first event clears everything."""
        return bool(self.events) and isinstance(self.events[0], AllBlocksCleared)


_decoder = msgspec.msgpack.Decoder(EventBatch)
_encoder = msgspec.msgpack.Encoder()


def encoded(batch: EventBatch) -> bytes:
    """The payload of a batch."""
    return _encoder.encode(batch)


def encoded_in_parts(ts: float, events: list[bytes], rank: int) -> bytes:
    """The payload of a batch whose events are encoded already, each by `encoded_event`."""
    return _encoder.encode([ts, [msgspec.Raw(event) for event in events], rank])


def encoded_event(event: WireEvent) -> bytes:
    """One event's part of a payload."""
    return _encoder.encode(event)


def decoded(payload: bytes) -> EventBatch:
    """The batch of a payload. Raises UnreadableBatch."""
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnreadableBatch(f"{len(payload):,} bytes are no batch of KV events: {error}.") from None


def int_hash(key: BlockHash) -> int:
    """A hash as vLLM publishes it: its last 64 bits, big-endian. One that is an integer stays as it is."""
    return key if isinstance(key, int) else int.from_bytes(key[-8:], "big")


def on_wire(event: Event, block_size: int, form: Callable[[bytes], BlockHash] = int_hash) -> WireEvent:
    """An event of the memory layer in the other form. `form` makes a hash what it is on the wire: `int_hash`, or `bytes`."""
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
    """The digest of an encoded namespace, None for that of everybody, and its adapter's name."""
    if namespace == _NO_NAMESPACE:
        return None, None
    digest = sha256(namespace).hexdigest()[:16]
    match namespace_of(namespace):
        case (_, str(adapter), _):  # (salt, adapter, extra_key), as the scheduler makes them
            return digest, adapter
    return digest, None
