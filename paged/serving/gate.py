"""Admission of calls to the queue under overload: when it is full, a client gets a time to come again, and a place is kept for it.

    | waiting requests | places kept for clients that come again | free |        up to max_waiting

The time comes from the scheduler's forecast of free places. A client that comes again is recognised by its key and its
body, and goes before all that came later. Equal calls have a place each; the first one to come after a place is due
takes it. A client that comes before its place is due gets another time, and another place. A place lapses when its client does not come. Half
of the places are never kept, so that clients that stay away leave no engine idle.
"""

from __future__ import annotations

import hashlib
from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from paged.serving.errors import overloaded
from paged.serving.settings import Settings

EARLY_S = 0.01
"""A client may come so much too early: timers may be early."""
LAPSE_S = 10.0
"""A place is kept so long after its time, or as long as its client waited, if that is more."""
MOST_KEPT = 10_000
MOST_ALIKE = 512
"""Kept places beside the first of each call, over all calls: a client that sends one call every second looks like many clients."""
LEAST_WAIT_S = 0.5
SPARE = 1.15
"""So many requests have to begin for each place that is kept already: the spare ones make up for late steps."""
UNKNOWN_S, UNKNOWN_EACH_S = 1.0, 0.02
"""Without a forecast, before the first step has ended: until the first waiting request begins, and between two of them."""


@dataclass(slots=True, eq=False)
class KeptPlaces:
    """Places that are kept for one call, one a prompt: from the time `due`, which its client got, to `lapses`; -1: given up."""

    num: int
    due: float
    lapses: float


@dataclass(slots=True, eq=False)
class Waiting:
    """The waiting requests of one tenant, or of all: their number, their prompt tokens, and the places kept beside them."""

    max_waiting: int | None
    max_tokens: int | None
    num: int = 0
    tokens: int = 0
    num_kept: int = 0

    def has_room(self, num: int, tokens: int, *, is_kept: bool) -> bool:
        """Whether so many more requests of so many prompt tokens may wait. An empty queue takes any call, whatever its size."""
        limit = self.max_waiting
        if limit is not None:
            if is_kept:
                # Though the forecast was a little too early.
                limit += max(1, limit // 4)
            elif self.num >= limit // 2:
                limit -= min(self.num_kept, limit)
            if self.num + num > max(limit, num if not self.num else 0):
                return False
        return self.max_tokens is None or not self.num or self.tokens + tokens <= self.max_tokens

    def num_over(self, num: int) -> int:
        """Return how many requests have to begin before so many more have room."""
        if self.max_waiting is None:
            return 1 if self.max_tokens is None else max(1, self.num // 2)
        return max(1, self.num + round(SPARE * self.num_kept) + num - self.max_waiting)


class Gate:
    """The waiting requests, and the places that are kept."""

    def __init__(self, settings: Settings) -> None:
        self._max_queue_s = settings.max_queue_s
        self.all = Waiting(settings.max_waiting, settings.max_waiting_tokens)
        self._tenants: dict[str | None, Waiting] = {
            tenant.name: Waiting(tenant.max_waiting, tenant.max_waiting_tokens) for tenant in settings.tenants
        }
        # By tenant and fingerprint; the earliest due first.
        self._kept: dict[tuple[str | None, bytes], list[KeptPlaces]] = {}
        # All of them in the order in which they were kept: the first ones lapse first, or nearly.
        self._all_kept: deque[tuple[tuple[str | None, bytes], KeptPlaces]] = deque()
        # Of them, those beside the first of each call.
        self._num_alike = 0

    def enter(
        self, tenant: str | None, fingerprint: bytes, num: int, tokens: int, now: float, forecast: Sequence[float]
    ) -> None:
        """Add `num` requests of `tokens` prompt tokens to the queue. `forecast`: in how many seconds each waiting request begins, then
        further ones behind them.

        Raises ApiError (429), with the time after which there is room, if they may not wait; keeps places for them from then on.
        """
        self._lapse(now)
        own, key = self._waiting_of(tenant), (tenant, fingerprint)
        kept = self._kept.get(key)
        is_kept = kept is not None and now >= kept[0].due - EARLY_S
        has_room = all(each.has_room(num, tokens, is_kept=is_kept) for each in {self.all, own})
        if kept is not None and is_kept:
            # The call takes its place, or gets another time.
            self._give_up(key, kept[0])
        if has_room and (is_kept or not self._is_too_long(num, forecast)):
            self._count(tenant, num, tokens)
            return
        wait = self._wait(own, num, forecast)
        self._keep(key, KeptPlaces(num, now + wait, now + wait + max(LAPSE_S, wait)))
        full = f"{self.all.num} requests wait" if own is self.all else f"{own.num} requests of yours wait"
        raise overloaded(f"{full}; there is room in about {wait:.1f} s.", wait)

    def leave(self, tenant: str | None, num: int, tokens: int) -> None:
        """Remove requests from the queue: they have begun, or ended."""
        self._count(tenant, -num, -tokens)

    def _wait(self, own: Waiting, num: int, forecast: Sequence[float]) -> float:
        """Return the seconds until so many more have room, behind all kept places, and would not wait longer than `max_queue_s`."""
        wait = begins(max(self.all.num_over(num), own.num_over(num)) - 1, forecast)
        if self._max_queue_s is not None:
            # With a quarter of `max_queue_s` to spare.
            wait = max(wait, begins(self.all.num + self.all.num_kept + num - 1, forecast) - 0.75 * self._max_queue_s)
        return max(LEAST_WAIT_S, wait)

    def _is_too_long(self, num: int, forecast: Sequence[float]) -> bool:
        """Whether the last of so many new ones would wait longer than `max_queue_s`; False without a forecast."""
        most = self._max_queue_s
        return most is not None and len(forecast) > 0 and begins(self.all.num + num - 1, forecast) > most

    def _waiting_of(self, tenant: str | None) -> Waiting:
        """The requests of a tenant whose settings name it; those of all for any other, which has no limits of its own."""
        return self._tenants.get(tenant, self.all)

    def _count(self, tenant: str | None, num: int, tokens: int) -> None:
        for each in {self.all, self._waiting_of(tenant)}:
            each.num += num
            each.tokens += tokens
            assert each.num >= 0, "a request leaves once"

    def _keep(self, key: tuple[str | None, bytes], kept: KeptPlaces) -> None:
        """Keep a place, unless too many are kept."""
        is_alike = key in self._kept
        if len(self._all_kept) >= MOST_KEPT or (is_alike and self._num_alike >= MOST_ALIKE):
            return
        self._num_alike += is_alike
        insort(self._kept.setdefault(key, []), kept, key=attrgetter("due"))
        self._all_kept.append((key, kept))
        for each in {self.all, self._waiting_of(key[0])}:
            each.num_kept += kept.num

    def _give_up(self, key: tuple[str | None, bytes], kept: KeptPlaces) -> None:
        """Give up a kept place."""
        of_call = self._kept[key]
        of_call.remove(kept)
        if of_call:
            self._num_alike -= 1
        else:
            del self._kept[key]
        kept.lapses = -1.0
        for each in {self.all, self._waiting_of(key[0])}:
            each.num_kept -= kept.num

    def _lapse(self, now: float) -> None:
        while self._all_kept and self._all_kept[0][1].lapses <= now:
            key, kept = self._all_kept.popleft()
            if kept.lapses >= 0:
                self._give_up(key, kept)


def begins(place: int, forecast: Sequence[float]) -> float:
    """Return in how many seconds the waiting request at this place begins; behind the forecast's end as fast as in its second half."""
    if not forecast:
        return UNKNOWN_S + UNKNOWN_EACH_S * place
    if place < len(forecast):
        return forecast[place]
    half = len(forecast) // 2
    each = (forecast[-1] - forecast[half]) / max(1, len(forecast) - 1 - half)
    return forecast[-1] + max(each, 0.0) * (place + 1 - len(forecast))


def later(forecast: Sequence[float], num_begun: int, age: float) -> list[float]:
    """Return the forecast `age` seconds later, when `num_begun` of its requests have begun: as long as before, from the request that
    is first now."""
    left = list(forecast[num_begun:])
    left += [begins(place, forecast) for place in range(max(num_begun, len(forecast)), num_begun + len(forecast))]
    return [max(0.0, each - age) for each in left]


def fingerprint_of(client: str, body: bytes) -> bytes:
    """Return the digest, 16 bytes, by which a client that comes again is recognised: of its body, and its key or address."""
    return hashlib.blake2b(
        body, key=hashlib.sha256(client.encode("utf-8", "surrogateescape")).digest(), digest_size=16
    ).digest()
