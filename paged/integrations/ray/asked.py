"""The messages between an ingress and a replica.

An answer is a stream of lists of ASGI messages. The first message has the type TAKEN and names the `replica` that answers.
BEGUN comes when the engine begins with the request; before it, nothing is lost if the replica dies. The last has the type
ENDED. The first and the last have the replica's current `report` (`Report`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from paged.engine.replica_index import NO_KEYS, Keys, prompt_keys
from paged.errors import InvalidNamespace, InvalidTokens
from paged.serving.front import Call

TAKEN, BEGUN, ENDED = "paged.taken", "paged.begun", "paged.ended"


class Prompt:
    """A prompt for a router: its token ids, int32, and the namespace of its content."""

    def __init__(self, tokens: np.ndarray, namespace: tuple[str | None, None, None] | None) -> None:
        self.tokens = tokens
        self._namespace = namespace
        self._keys: Keys | None = None

    def keys(self, block_size: int) -> Keys:
        """Return the keys of its full blocks, made once. A prompt that no replica accepts has none."""
        if self._keys is None:
            try:
                self._keys = prompt_keys(self.tokens, block_size, self._namespace)
            except (InvalidTokens, InvalidNamespace):
                self._keys = NO_KEYS
        return self._keys


@dataclass(slots=True)
class Asked:
    """A call on its way to a replica.

    waited  seconds from its arrival to its sending
    prompt  for the router, and not sent; None: there is nothing to compute
    routed  the router's name, and its number of the call
    """

    call: Call
    method: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    waited: float
    prompt: Prompt | None = None
    routed: tuple[str, int] | None = None

    def __reduce__(self) -> tuple[Callable[..., Asked], tuple[Any, ...]]:
        return Asked, (self.call, self.method, self.query, self.headers, self.waited, None, self.routed)
