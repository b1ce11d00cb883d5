"""The bytes under which content is found. Equal keys are equal content: there is no hash that could collide.

    a node below another:  | id of the parent's run | offset in it | token ids of the block |
    a node without parent: | -1                     | namespace    | token ids of the block |

Run ids count up from 0 and are never reused. All blocks have the same number of token ids. The chained SHA-256 is for
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
    """The start of a first block's key, for a namespace of None, bool, int, str, bytes and tuples of these. Typed:
    1, "1", b"1" and True are four namespaces. Raises InvalidNamespace for another type, or for too deep nesting."""
    try:
        return _ROOT + _encoded(namespace)
    except RecursionError:
        raise InvalidNamespace("a namespace is nested too deep.") from None


def namespace_of(root: bytes) -> Any:
    """The namespace that `root` encodes."""
    return _decoded(root[len(_ROOT) :])[0]


def node_prefix(run_id: int, offset: int) -> bytes:
    return _NODE.pack(run_id, offset)


def extend_chain(digests: list[bytes], before: bytes, data: bytes, block_bytes: int) -> None:
    """Append the chained SHA-256 of each block of `data`. `before`: that of the block or namespace before it."""
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
        # surrogatepass: every str is a namespace of its own, with lone surrogates, too.
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


def _decoded(data: bytes) -> tuple[Any, bytes]:
    """The value whose encoding comes first in `data`, and the rest of `data`."""
    tag, rest = data[:1], data[1:]
    if tag in _CONSTANTS:
        return _CONSTANTS[tag], rest
    end = _LENGTH.size + _LENGTH.unpack_from(rest)[0]
    body, rest = rest[_LENGTH.size : end], rest[end:]
    if tag == b"t":
        parts: list[Any] = []
        while body:
            part, body = _decoded(body)
            parts.append(part)
        return tuple(parts), rest
    if tag == b"s":
        return body.decode("utf-8", "surrogatepass"), rest
    return (int.from_bytes(body, "little", signed=True) if tag == b"i" else body), rest
