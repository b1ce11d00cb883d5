"""One block as a file: a header with its identity and key, and a checksum of all of it.

    | magic 8 | version 4 | header bytes 4 | payload bytes 8 | identity 32 | key 32 | SHA-256 32 |  payload  |

Sizes in bytes, little-endian. The checksum is of all before it, and of the payload. A file is whole or not there: it
is written elsewhere, and renamed.
"""

from __future__ import annotations

import os
import stat
import struct
from hashlib import sha256
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

MAGIC = b"pagedkv\n"
VERSION = 1
_FIELDS = struct.Struct("<8sIIQ32s32s")
_CHECKSUM_BYTES = 32
HEADER_BYTES = _FIELDS.size + _CHECKSUM_BYTES
# O_NOFOLLOW: a link is no object of ours. O_NONBLOCK: opening a pipe would wait.
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class Corrupt(Exception):
    """A file is not the object that it has to be."""


def write_object(path: Path, identity: bytes, key: bytes, payload: NDArray[np.uint8]) -> None:
    """Write a new file; after `sync_object` it is on the disk. Raises OSError."""
    fields = _FIELDS.pack(MAGIC, VERSION, HEADER_BYTES, payload.nbytes, identity, key)
    digest = sha256(fields)
    digest.update(payload.data)
    parts = [memoryview(fields + digest.digest()), payload.data]
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        while parts:
            _skip(parts, os.writev(number, parts))
    finally:
        os.close(number)


def sync_object(path: Path) -> None:
    """Wait until a file is on the disk. Raises OSError. Of several files written before, the first call takes most of the
    time."""
    number = os.open(path, _READ_FLAGS)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def read_object(path: Path, identity: bytes, key: bytes, into: NDArray[np.uint8]) -> None:
    """Fill `into`, uint8 [block bytes], with a file's payload. Raises Corrupt unless each byte is as written under this
    identity and key, and OSError if it cannot be read; then the contents of `into` are undefined."""
    number = os.open(path, _READ_FLAGS)
    try:
        found = os.fstat(number)
        if not stat.S_ISREG(found.st_mode) or found.st_size != HEADER_BYTES + into.nbytes:
            raise Corrupt(f"{found.st_size} bytes")
        if found.st_uid != os.geteuid():
            raise Corrupt(f"of user {found.st_uid}")
        head = bytearray(HEADER_BYTES)
        left = [memoryview(head), into.data]
        while left:
            if not (count := os.readv(number, left)):
                raise Corrupt("it ends early")
            _skip(left, count)
    finally:
        os.close(number)
    if bytes(head[: _FIELDS.size]) != _FIELDS.pack(MAGIC, VERSION, HEADER_BYTES, into.nbytes, identity, key):
        raise Corrupt("another header")
    digest = sha256(head[: _FIELDS.size])
    digest.update(into.data)
    if digest.digest() != head[_FIELDS.size :]:
        raise Corrupt("another checksum")


def read_header(path: Path) -> tuple[bytes, bytes, os.stat_result]:
    """Return the identity and key in a file's header, of which only the form and sizes are checked, and the file's stat.
    Raises Corrupt and OSError."""
    number = os.open(path, _READ_FLAGS)
    try:
        found = os.fstat(number)
        head = os.read(number, HEADER_BYTES) if stat.S_ISREG(found.st_mode) else b""
    finally:
        os.close(number)
    if len(head) < HEADER_BYTES:
        raise Corrupt("no header")
    magic, version, header_bytes, payload_bytes, identity, key = _FIELDS.unpack_from(head)
    if (magic, version, header_bytes) != (MAGIC, VERSION, HEADER_BYTES):
        raise Corrupt("another header")
    if found.st_size != HEADER_BYTES + payload_bytes:
        raise Corrupt(f"{found.st_size} bytes")
    return identity, key, found


def _skip(parts: list[memoryview], count: int) -> None:
    """Remove the first `count` bytes."""
    while parts and count >= len(parts[0]):
        count -= len(parts.pop(0))
    if parts:
        parts[0] = parts[0][count:]
