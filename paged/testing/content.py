"""The content of a KV slot: its token and the whole context before it, as one number.

A transformer's K and V at position i depend on every token up to i and on the weights that computed them. So the
stand-in for a slot's content is the whole prefix, interned: equal numbers mean equal namespace and equal tokens, with
no hash to collide.
"""

import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

POISON = -1
"""The content of a slot that may not be read: never written, given back, or half written."""


def typed(value: object) -> tuple[object, ...]:
    """A namespace as a hashable value, compared by type and spelling: 1, True, "1" and b"1" differ."""
    if isinstance(value, tuple):
        return ("tuple", *(typed(part) for part in value))
    return (type(value).__name__, repr(value))


class _Prefix(NamedTuple):
    """A prefix: the one before it and its last token (POISON for a root), a checksum of all, its namespace."""

    parent: int
    token: int
    checksum: int
    namespace: object


class Contents:
    """Every prefix seen so far, numbered from 0 in the order of appearance."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[object, object], int] = {}
        self._prefixes: list[_Prefix] = []

    def root(self, namespace: object) -> int:
        """The empty prefix of a namespace. Roots are never what a slot holds."""
        key = "root", typed(namespace)
        if key not in self._numbers:
            self._add(key, _Prefix(POISON, POISON, zlib.crc32(repr(key[1]).encode()), key[1]))
        return self._numbers[key]

    def extend(self, prefix: int, token: int) -> int:
        """The content of the slot that `token` gets after `prefix`."""
        key = prefix, int(token)
        if key not in self._numbers:
            before = self._prefixes[prefix]
            checksum = zlib.crc32(key[1].to_bytes(8, "little"), before.checksum)
            self._add(key, _Prefix(prefix, key[1], checksum, before.namespace))
        return self._numbers[key]

    def _add(self, key: tuple[object, object], prefix: _Prefix) -> None:
        self._numbers[key] = len(self._prefixes)
        self._prefixes.append(prefix)

    def path(self, namespace: object, tokens: Sequence[int]) -> NDArray[np.int64]:
        """What the slots of a whole sequence must hold, int64 [len(tokens)], position by position."""
        prefix, contents = self.root(namespace), np.empty(len(tokens), np.int64)
        for position, token in enumerate(tokens):
            prefix = contents[position] = self.extend(prefix, token)
        return contents

    def describe(self, content: int) -> str:
        """The content in words, for a failure's message."""
        if not 0 <= content < len(self._prefixes):
            return "poison" if content == POISON else f"unknown content {content}"
        tokens: list[int] = []
        prefix = self._prefixes[content]
        while prefix.parent != POISON:
            tokens.insert(0, prefix.token)
            prefix = self._prefixes[prefix.parent]
        return f"position {len(tokens) - 1} of {tokens} in {prefix.namespace}"

    def next_token(self, held: Sequence[int], seed: int, vocabulary: int) -> int:
        """The stand-in model: the word that follows a context, a function of every slot that was read, `held`.

        `seed` tells the sequences of a group apart. One wrong slot changes the checksum, and with it, sooner or later,
        a word.
        """
        checksum = seed
        for content in held:
            word = self._prefixes[content].checksum if 0 <= content < len(self._prefixes) else 0
            checksum = zlib.crc32(word.to_bytes(8, "little"), checksum)
        return checksum % vocabulary
