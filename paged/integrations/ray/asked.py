"""The messages between an ingress and a replica.

An answer is a stream of lists of ASGI messages. The very first message is of the type TAKEN, with the `replica` that
answers; one of the type BEGUN comes when the engine begins with the request, and before it nothing is lost with a replica.
The first and the last have the replica's `report` (`Report`), as it is then.
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
    """What a router knows of a prompt: its token ids, int32, and the namespace in which its content is found."""

    def __init__(self, tokens: np.ndarray, namespace: tuple[str | None, None, None] | None) -> None:
        self.tokens = tokens
        self._namespace = namespace
        self._keys: Keys | None = None

    def keys(self, block_size: int) -> Keys:
        """Of its full blocks, made once. A prompt that no replica will take has none."""
        if self._keys is None:
            try:
                self._keys = prompt_keys(self.tokens, block_size, self._namespace)
            except (InvalidTokens, InvalidNamespace):
                self._keys = NO_KEYS
        return self._keys


@dataclass(slots=True)
class Asked:
    """A call on its way to a replica. `waited` is how many seconds before it is sent it came; `prompt` is for the router, and is not sent: None where nothing
    is to be computed. `routed` is the router's name, and its number of the call."""

    call: Call
    method: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    waited: float
    prompt: Prompt | None = None
    routed: tuple[str, int] | None = None

    def __reduce__(self) -> tuple[Callable[..., Asked], tuple[Any, ...]]:
        return Asked, (self.call, self.method, self.query, self.headers, self.waited, None, self.routed)
