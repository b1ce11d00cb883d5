"""The messages between rank 0 and another rank, over a pair of sockets.

Begin → Hello     Join → Read     Go → Loaded     Make → Made     then Begun and Run, without answers; Failed at any time
"""

from __future__ import annotations

import platform
import socket
import struct
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from paged import __version__


class Begin(msgspec.Struct, frozen=True, tag=True):
    """The rank of the process, of `ranks`. `limit_s`: seconds that it waits for others."""

    rank: int
    ranks: int
    limit_s: float


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The rank's versions, which have to be those of rank 0."""

    versions: dict[str, str]


class Join(msgspec.Struct, frozen=True, tag=True):
    """The port of the ranks' store, and the model, as for `load_model`."""

    port: int
    folder: str
    dtype: str
    device: str


class Read(msgspec.Struct, frozen=True, tag=True):
    """The weights are read; `digest` is that of `load_part`."""

    digest: str


class Go(msgspec.Struct, frozen=True, tag=True):
    """All ranks have read the same weights."""


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The part is loaded. `free`: free bytes of the device then; None if not known."""

    free: int | None


class Make(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Make a pool of these sizes, and a runner on it. `is_planned`: the pool has pages, by a plan of the layers; else blocks of all layers."""

    num_blocks: int
    host_blocks: int
    block_size: int
    is_planned: bool
    kv_cache_dtype: str
    kv_cache_dtype_skip_layers: tuple[str, ...]
    backend: str
    batch_invariant: bool


class Made(msgspec.Struct, frozen=True, tag=True):
    """The rank takes steps."""


class Begun(msgspec.Struct, frozen=True, tag=True):
    """A step that begins, as `StepInput.encoded` makes it."""

    step: bytes


class Run(msgspec.Struct, frozen=True, tag=True):
    """Run the forward pass of a step that has begun: its token ids, int32; `others` and `stateful` as for `Worker.read`, bool, None: none; and `lengths` of its
    rows, int64, as for `Worker.logits`."""

    number: int
    token_ids: bytes
    others: bytes | None = None
    stateful: bytes | None = None
    lengths: bytes | None = None


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The rank ends, for this reason."""

    why: str


ToRank = Begin | Join | Go | Make | Begun | Run
FromRank = Hello | Read | Loaded | Made | Failed
_TO_RANK, _FROM_RANK = msgspec.msgpack.Decoder(ToRank), msgspec.msgpack.Decoder(FromRank)
_ENCODER = msgspec.msgpack.Encoder()
_LENGTH = struct.Struct("<Q")


class Channel:
    """One end of a connection. `is_rank`: the end of the other rank, not that of rank 0."""

    def __init__(self, end: socket.socket, *, is_rank: bool) -> None:
        self.end = end
        self._decoder: Any = _TO_RANK if is_rank else _FROM_RANK

    def send(self, message: ToRank | FromRank, limit_s: float | None = None) -> None:
        """Send a message. Raises TimeoutError if the other end does not take it within `limit_s`, and OSError if it is gone."""
        data = _ENCODER.encode(message)
        self.end.settimeout(limit_s)
        self.end.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self, limit_s: float | None = None) -> Any:
        """Wait for the next message. Raises EOFError if the other end is gone, and TimeoutError if nothing comes for `limit_s` seconds; None: no limit."""
        self.end.settimeout(limit_s)
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        return self._decoder.decode(self._exactly(length))

    def _exactly(self, length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            try:
                more = self.end.recv(length - len(data))
            except ConnectionError:
                more = b""
            if not more:
                raise EOFError("the other end is gone")
            data += more
        return bytes(data)


def versions() -> dict[str, str]:
    """Return the versions that have to be the same on each rank."""
    import torch
    import transformers

    return {
        "paged": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
    }


def sent(values: NDArray[Any] | None) -> bytes | None:
    """Return the bytes of an array; None if no element is true."""
    return None if values is None or not values.any() else np.ascontiguousarray(values).tobytes()
