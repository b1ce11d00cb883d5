"""The bytes by which content is found: equal keys are equal content, so no hash can collide.

    a node below another:  | id of the parent's run | offset in it | token ids of the block |
    a node without parent: | -1                     | namespace    | token ids of the block |

Run ids count up from 0 and are never reused, and all blocks have equally many token ids. The chained SHA-256 is for
indexes elsewhere.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any

from paged.errors import InvalidNamespace

_NODE = struct.Struct("<qq")
_ROOT = struct.pack("<q", -1)
_LENGTH = struct.Struct("<Q")
_CONSTANTS = {b"N": None, b"T": True, b"F": False}


def root_prefix(namespace: Any) -> bytes:
    """The start of a first block's key, for a namespace built of None, bool, int, str, bytes and tuples of them. Typed:
    1, "1", b"1" and True are four namespaces. Raises InvalidNamespace for another type, or for too deep nesting."""
    try:
        return _ROOT + _encoded(namespace)
    except RecursionError:
        raise InvalidNamespace("a namespace is nested too deep.") from None


def namespace_of(root: bytes) -> Any:
    """The namespace that `root` encodes."""
    value, _ = _decoded(root, len(_ROOT))
    return value


def node_prefix(run_id: int, offset: int) -> bytes:
    return _NODE.pack(run_id, offset)


def extend_chain(digests: list[bytes], before: bytes, data: bytes, block_bytes: int) -> None:
    """Append the chained SHA-256 of each block of `data`; `before` is that of the block or namespace before it."""
    for start in range(0, len(data), block_bytes):
        before = hashlib.sha256(before + data[start : start + block_bytes]).digest()
        digests.append(before)


def namespace_digest(root: bytes) -> bytes:
    return hashlib.sha256(root).digest()


def _encoded(value: Any) -> bytes:
    for tag, constant in _CONSTANTS.items():
        if value is constant:
            return tag
    if isinstance(value, int):
        body, tag = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True), b"i"
    elif isinstance(value, str):
        # surrogatepass: every str is a namespace of its own, lone surrogates included.
        body, tag = value.encode("utf-8", "surrogatepass"), b"s"
    elif isinstance(value, bytes):
        body, tag = value, b"b"
    elif isinstance(value, tuple):
        body, tag = b"".join(_encoded(part) for part in value), b"t"
    else:
        raise InvalidNamespace(
            f"a namespace is built of None, bool, int, str, bytes and tuples of them; got {type(value).__name__}: {value!r}."
        )
    return tag + _LENGTH.pack(len(body)) + body


def _decoded(data: bytes, start: int) -> tuple[Any, int]:
    """The value whose encoding begins at `start`, and where the next one begins."""
    tag, body = data[start : start + 1], start + 1
    if tag in _CONSTANTS:
        return _CONSTANTS[tag], body
    (length,) = _LENGTH.unpack_from(data, body)
    body += _LENGTH.size
    end = body + length
    if tag == b"t":
        parts: list[Any] = []
        while body < end:
            part, body = _decoded(data, body)
            parts.append(part)
        return tuple(parts), end
    raw = data[body:end]
    if tag == b"s":
        return raw.decode("utf-8", "surrogatepass"), end
    return (int.from_bytes(raw, "little", signed=True) if tag == b"i" else raw), end
