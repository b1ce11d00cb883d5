"""The public calls about content: what the cache holds, what is to stay in it, and what has come and gone.

Each checks and then acts, as those of BlockManager do, which takes them from here. Knows prompts, namespaces and both tiers. Does not
know rows, but for the hashes of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paged.base.arguments import checked_level, logical_time, token_array
from paged.errors import InvalidConfig, InvalidTokens, UnknownContent

from . import inspection
from .content_key import root_prefix
from .events import Event, EventLog
from .free_list import Blocks
from .memory import Memory
from .runs import Segment, first_of


class Hit(NamedTuple):
    """What the prefix cache holds of a prompt: `num_tokens` in device blocks, int64 [n], and `host_tokens` after them that only
    the host has (0 without `host_caching`)."""

    num_tokens: int
    blocks: Blocks
    host_tokens: int = 0


class ContentCalls(Memory):
    """What a caller may ask of content, and ask for it."""

    def lookup(self, tokens: Any, namespace: Any = None) -> Hit:
        """The cached prefix of a prompt in full blocks, at most len(tokens) - 1 tokens. Changes nothing and counts nothing.

        Raises InvalidTokens or InvalidNamespace.
        """
        array = self._prompt(tokens)
        root = root_prefix(namespace)
        if self._index is None:
            return Hit(0, np.empty(0, np.int64))
        data, limit = array.tobytes(), (len(array) - 1) // self.block_size
        match = self._index.match(None, root, data, limit)
        on_host = 0
        if self._offload is not None and match.first_pending < 0:
            on_host = sum(part[2] for part in self._index.match_on_host(None, root, data, limit, match))
        size = self.block_size
        return Hit(match.num_blocks * size, self._index.blocks_of(match).copy(), on_host * size)

    def retain(self, tokens: Any, namespace: Any = None, *, priority: int = 1, until: float | None = None) -> int:
        """The cached prefix of these tokens is evicted after all content of lower priority; what is not retained has 0, the highest is 3.

        It holds for each block of the prefix until the logical time `until` (see `expire`; None: as long as the block stays known),
        on both tiers. Returns the tokens of the prefix.

        Raises InvalidTokens, InvalidNamespace, InvalidConfig (priority, until), or UnknownContent where nothing of it is cached.
        """
        level = checked_level(priority)
        segments = self._cached_prefix(tokens, namespace)
        self.retentions.retain(segments, level, until)
        return sum(count for _, _, count in segments) * self.block_size

    def expire(self, now: float) -> None:
        """Retentions that were to end by the logical time `now` have ended; an earlier time than before changes nothing.

        Raises InvalidConfig for what is no number, and for NaN.
        """
        self.retentions.expire(logical_time("now", now))

    def reset_cache(self) -> bool:
        """Forget all content. False, and nothing changed, while any block of either tier is used."""
        if self._device.num_used or self._host.num_used:
            return False
        if self._index is not None:
            self._index.clear()
        self.retentions.clear()
        if self._events is not None:
            self._events.clear()
        return True

    def block_hashes(self, row: int) -> list[bytes]:
        """Chained SHA-256 of the row's nodes, first to last: equal for equal content in every process. Raises UnknownRow."""
        row = self._tables.one(row, allow_swapped=True)
        return [] if self._index is None else inspection.hashes(self._index, row)

    def take_events(self) -> Sequence[Event]:
        """What either tier stored and removed since the last call, parents before children where they are stored. The first call
        begins with all that is there; before it, and without a prefix cache, nothing is written down. After it all that changes is
        remembered until the next call, so a reader has to go on asking. Hashes are computed when the events are read.

        A reader that applies all of it from empty has exactly the confirmed contents of both tiers.
        """
        log = self._event_log()
        return [] if log is None else log.take()

    def events_snapshot(self) -> Sequence[Event]:
        """What was told by `take_events` and still holds, for a reader that starts late: the events to come continue it."""
        log = self._event_log()
        return [] if log is None else log.snapshot()

    def cached_contents(self, tier: Literal["device", "host"] = "device") -> set[tuple[bytes, ...]]:
        """Every confirmed node in a tier as its path: encoded namespace, then the token bytes of each block. For tests.

        Raises InvalidConfig for another tier.
        """
        if tier not in ("device", "host"):
            raise InvalidConfig(f'tier has to be "device" or "host"; got "{tier}".')
        return set() if self._index is None else inspection.contents(self._index, self.block_size, tier)

    def _cached_prefix(self, tokens: Any, namespace: Any) -> list[Segment]:
        """The confirmed nodes of a prompt from its first block on, in either tier. Raises UnknownContent if there are none."""
        array, index = self._prompt(tokens), self._index
        root, data, limit = root_prefix(namespace), array.tobytes(), len(array) // self.block_size
        if index is None:
            raise UnknownContent(len(array))
        match = index.match(None, root, data, limit)
        if match.first_pending >= 0:
            segments = first_of(match.segments, match.first_pending)
        else:
            segments = [*match.segments, *index.match_on_host(None, root, data, limit, match)]
        if not segments:
            raise UnknownContent(len(array))
        return segments

    def _event_log(self) -> EventLog | None:
        if self._events is None and self._index is not None:
            self._events = EventLog(self._index, self._tables)
        return self._events

    def _prompt(self, tokens: Any) -> NDArray[np.int32]:
        array = token_array(tokens)
        if not len(array):
            raise InvalidTokens("a sequence needs at least one token.")
        return array
