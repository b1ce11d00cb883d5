"""The content of a KV slot: its token and the whole context before it, as one number.

A transformer's K and V at position i depend on every token up to i and on the weights that computed them. So the
stand-in for a slot's content is the whole prefix, interned: equal numbers mean equal namespace and equal tokens, with
no hash to collide.
"""

import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

POISON = -1
"""The content of a slot that may not be read: never written, given back, or half written."""


def typed(value: object) -> tuple[object, ...]:
    """A namespace as a hashable value, compared by type and spelling: 1, True, "1" and b"1" differ."""
    if isinstance(value, tuple):
        return ("tuple", *(typed(part) for part in value))
    return (type(value).__name__, repr(value))


class Contents:
    """Every prefix seen so far, numbered from 0 in the order of appearance: a trie kept in two plain containers."""

    def __init__(self) -> None:
        self._children: dict[tuple[object, object], int] = {}
        self._parent: list[int] = []
        self._token: list[int] = []
        self._checksum: list[int] = []
        self._root: list[object] = []

    def root(self, namespace: object) -> int:
        """The empty prefix of a namespace. Roots are never what a slot holds."""
        spelled = typed(namespace)
        return self._intern(("root", spelled), POISON, POISON, spelled)

    def extend(self, prefix: int, token: int) -> int:
        """The content of the slot that `token` gets after `prefix`."""
        return self._intern((prefix, int(token)), prefix, int(token), None)

    def path(self, namespace: object, tokens: Sequence[int]) -> NDArray[np.int64]:
        """What the slots of a whole sequence must hold, int64 [len(tokens)], position by position."""
        prefix, contents = self.root(namespace), np.empty(len(tokens), np.int64)
        for position, token in enumerate(tokens):
            prefix = contents[position] = self.extend(prefix, token)
        return contents

    def describe(self, content: int) -> str:
        """The content in words, for a failure's message."""
        if not 0 <= content < len(self._parent):
            return "poison" if content == POISON else f"unknown content {content}"
        tokens: list[int] = []
        while self._parent[content] != POISON:
            tokens.append(self._token[content])
            content = self._parent[content]
        return f"position {len(tokens) - 1} of {tokens[::-1]} in {self._root[content]}"

    def _intern(self, key: tuple[object, object], parent: int, token: int, root: object) -> int:
        number = self._children.get(key)
        if number is None:
            number = self._children[key] = len(self._parent)
            self._parent.append(parent)
            self._token.append(token)
            self._root.append(self._root[parent] if root is None else root)
            spelling = repr(root).encode() if parent == POISON else token.to_bytes(8, "little")
            self._checksum.append(zlib.crc32(spelling, 0 if parent == POISON else self._checksum[parent]))
        return number

    def next_token(self, held: Sequence[int], seed: int, vocabulary: int) -> int:
        """The stand-in model: the word that follows a context, a function of every slot that was read, `held`.

        `seed` tells the sequences of a group apart. One wrong slot changes the checksum, and with it, sooner or later, a word.
        """
        checksum = seed
        for content in held:
            word = self._checksum[content] if 0 <= content < len(self._checksum) else 0
            checksum = zlib.crc32(word.to_bytes(8, "little"), checksum)
        return checksum % vocabulary
