"""One block as a file: a header that says whose it is, and a checksum of all of it.

    | magic 8 | version 4 | header bytes 4 | payload bytes 8 | identity 32 | key 32 | SHA-256 32 |  payload  |

Little-endian. The checksum is of all that stands before it, and of the payload. A file is whole or it is not there: it
is written beside, and renamed.
"""

from __future__ import annotations

import os
import stat
import struct
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MAGIC = b"pagedkv\n"
VERSION = 1
_FIELDS = struct.Struct("<8sIIQ32s32s")
_CHECKSUM_BYTES = 32
HEADER_BYTES = _FIELDS.size + _CHECKSUM_BYTES
# O_NOFOLLOW: a link is no object of ours. O_NONBLOCK: a pipe in the place of one is no reason to wait.
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class Corrupt(Exception):
    """A file is there, and not what it has to be."""


class Header(NamedTuple):
    """The header of a file."""

    identity: bytes
    key: bytes
    payload_bytes: int


def write_object(path: Path, identity: bytes, key: bytes, payload: NDArray[np.uint8]) -> None:
    """Write a new file, which the disk has after `sync_object`. Raises OSError."""
    fields = _FIELDS.pack(MAGIC, VERSION, HEADER_BYTES, payload.nbytes, identity, key)
    digest = sha256(fields)
    digest.update(payload.data)
    parts = [memoryview(fields + digest.digest()), payload.data]
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        while parts:
            count = os.writev(number, parts)
            while parts and count >= len(parts[0]):
                count -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][count:]
    finally:
        os.close(number)


def sync_object(path: Path) -> None:
    """Wait until the disk has what was written to a file. Of several that were written before, the first one waits for
    most. Raises OSError."""
    number = os.open(path, _READ_FLAGS)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def read_object(path: Path, identity: bytes, key: bytes, into: NDArray[np.uint8]) -> None:
    """Fill `into`, uint8 [block bytes], with a file's payload. Raises Corrupt unless each byte is what was written
    under this identity and key, and OSError where it cannot be read; then `into` holds anything."""
    number = os.open(path, _READ_FLAGS)
    try:
        found = os.fstat(number)
        if not stat.S_ISREG(found.st_mode) or found.st_size != HEADER_BYTES + into.nbytes:
            raise Corrupt(f"{found.st_size} bytes")
        if found.st_uid != os.geteuid():
            raise Corrupt(f"of user {found.st_uid}")
        head = bytearray(HEADER_BYTES)
        _read_fully(number, head, into.data)
    finally:
        os.close(number)
    if bytes(head[: _FIELDS.size]) != _FIELDS.pack(MAGIC, VERSION, HEADER_BYTES, into.nbytes, identity, key):
        raise Corrupt("another header")
    digest = sha256(head[: _FIELDS.size])
    digest.update(into.data)
    if digest.digest() != head[_FIELDS.size :]:
        raise Corrupt("another checksum")


def read_header(path: Path) -> tuple[Header, os.stat_result]:
    """What a file says of itself, unchecked but for its form, and what the file system does. Raises Corrupt and
    OSError."""
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
    return Header(identity, key, payload_bytes), found


def _read_fully(number: int, *parts: bytearray | memoryview) -> None:
    left = [memoryview(part) for part in parts]
    while left:
        count = os.readv(number, left)
        if not count:
            raise Corrupt("it ends early")
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if left:
            left[0] = left[0][count:]
