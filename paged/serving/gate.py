"""Admission of clients under overload: some wait in the queue, the others get a time to come again.

    | waiting requests | places kept for clients that come again | free |        up to max_waiting

A client that is not admitted gets a time to come again, from the scheduler's forecast of free places. From then on a
place is kept for it. When it comes again, recognised by its key and its request, it goes before all that came later.
Clients that are alike in both have a place each, and the one that comes when a place is due takes it. One that comes
before any is due has no place yet, and gets a time of its own. A kept place lapses when its client does not come. Half of
the places are never kept, so that clients that do not come again leave no engine idle.
"""

from __future__ import annotations

import hashlib
from bisect import insort
from collections import deque
from collections.abc import Sequence
from operator import attrgetter

from paged.serving.errors import overloaded
from paged.serving.settings import Settings

EARLY_S = 0.01
"""A client may come this much before its time: it counts from the moment when it reads the answer, and a timer may be a little early."""
LAPSE_S = 10.0
"""Seconds after its time for which a client's place is kept; more for a client that had to wait long."""
MOST_KEPT = 10_000
MOST_ALIKE = 512
"""Places beside the first for clients that look alike, in all: one that asks every second, whatever the answer, looks like many."""
LEAST_WAIT_S = 0.5
SPARE = 1.15
"""Places pass before a promised one for each place that is promised already: were all promised, each delay would turn a client away."""
UNKNOWN_S, UNKNOWN_EACH_S = 1.0, 0.02
"""While nothing is known, before the first step has ended: until a first place is free, and for each place behind it."""


class Kept:
    """Places that are kept for a client, one a prompt: `due` is the time in its answer, `lapses` when it is kept no more."""

    __slots__ = ("due", "lapses", "num")

    def __init__(self, num: int, due: float, lapses: float) -> None:
        self.num = num
        self.due = due
        self.lapses = lapses


class Crowd:
    """The waiting requests of one tenant, or of all: how many, how many tokens, and what is kept."""

    def __init__(self, max_waiting: int | None, max_tokens: int | None) -> None:
        self.max_waiting = max_waiting
        self.max_tokens = max_tokens
        self.num = 0
        self.tokens = 0
        self.num_kept = 0

    def has_room(self, num: int, tokens: int, *, is_kept: bool) -> bool:
        """Whether so many more requests of so many tokens may wait. One alone always may wait for tokens that are too many."""
        limit = self.max_waiting
        if limit is not None:
            if is_kept:
                # A promise is kept, though the forecast was a little too hopeful.
                limit += max(1, limit // 4)
            elif self.num >= limit // 2:
                limit -= min(self.num_kept, limit)
            if self.num + num > max(limit, num if not self.num else 0):
                return False
        return self.max_tokens is None or not self.num or self.tokens + tokens <= self.max_tokens

    def num_over(self, num: int) -> int:
        """Requests that have to begin before so many more have room."""
        if self.max_waiting is None:
            return max(1, self.num // 2)
        return max(1, self.num + round(SPARE * self.num_kept) + num - self.max_waiting)


class Gate:
    """Counts waiting requests, admits new ones, and keeps places."""

    def __init__(self, settings: Settings) -> None:
        self._max_queue_s = settings.max_queue_s
        self.all = Crowd(settings.max_waiting, settings.max_waiting_tokens)
        self._tenants: dict[str | None, Crowd] = {
            tenant.name: Crowd(tenant.max_waiting, tenant.max_waiting_tokens) for tenant in settings.tenants
        }
        # Of each, the earliest first.
        self._kept: dict[tuple[str | None, bytes], list[Kept]] = {}
        # In the order in which they were promised, over all clients: those at the front lapse first, or nearly.
        self._promised: deque[tuple[tuple[str | None, bytes], Kept]] = deque()
        # Places beside the first of each.
        self._num_alike = 0

    def enter(
        self, tenant: str | None, fingerprint: bytes, num: int, tokens: int, now: float, forecast: Sequence[float]
    ) -> None:
        """Let so many requests of so many prompt tokens in, which wait from now on. `forecast`: in how many seconds each waiting request
        begins, and those that would come behind them.

        Raises ApiError (429) with the time after which there is room, and keeps it.
        """
        self._lapse(now)
        crowd, key = self._crowd(tenant), (tenant, fingerprint)
        mine = self._kept.get(key)
        is_kept = mine is not None and now >= mine[0].due - EARLY_S
        has_room = all(each.has_room(num, tokens, is_kept=is_kept) for each in {self.all, crowd})
        if mine is not None and is_kept:
            # The client takes it, or gets another time.
            self._give_up(key, mine[0])
        if has_room and (is_kept or not self._is_too_long(num, forecast)):
            self._count(tenant, num, tokens)
            return
        wait = self._wait(crowd, num, forecast)
        self._keep(key, Kept(num, now + wait, now + wait + max(LAPSE_S, wait)))
        full = f"{self.all.num} requests wait" if crowd is self.all else f"{crowd.num} requests of yours wait"
        raise overloaded(f"{full}; there is room in about {wait:.1f} s.", wait)

    def leave(self, tenant: str | None, num: int, tokens: int) -> None:
        """Note that admitted requests wait no more: they have begun, or ended."""
        self._count(tenant, -num, -tokens)

    @property
    def num_kept(self) -> int:
        """Places that are kept."""
        return self.all.num_kept

    def _wait(self, crowd: Crowd, num: int, forecast: Sequence[float]) -> float:
        """Seconds until places for so many more, behind all that are kept, are free, and near enough to the head of the queue."""
        over = max(self.all.num_over(num), crowd.num_over(num) if crowd is not self.all else 0)
        wait = begins(over - 1, forecast)
        if self._max_queue_s is not None:
            # The queue is to be shorter by then than what is waited at most, with something to spare.
            wait = max(wait, begins(self.all.num + self.num_kept + num - 1, forecast) - 0.75 * self._max_queue_s)
        return max(LEAST_WAIT_S, wait)

    def _is_too_long(self, num: int, forecast: Sequence[float]) -> bool:
        """Whether the last of so many new ones would wait longer than `max_queue_s`; what is not known is not too long."""
        most = self._max_queue_s
        return most is not None and len(forecast) > 0 and begins(self.all.num + num - 1, forecast) > most

    def _crowd(self, tenant: str | None) -> Crowd:
        """The requests of a tenant whose settings name it; those of all for any other, which has no limits of its own."""
        return self._tenants.get(tenant, self.all)

    def _count(self, tenant: str | None, num: int, tokens: int) -> None:
        for each in {self.all, self._crowd(tenant)}:
            each.num += num
            each.tokens += tokens
            assert each.num >= 0, "who leaves was let in"

    def _keep(self, key: tuple[str | None, bytes], kept: Kept) -> None:
        """Keep a place, unless too many are kept."""
        is_alike = key in self._kept
        if len(self._promised) >= MOST_KEPT or (is_alike and self._num_alike >= MOST_ALIKE):
            return
        self._num_alike += is_alike
        insort(self._kept.setdefault(key, []), kept, key=attrgetter("due"))
        self._promised.append((key, kept))
        for each in {self.all, self._crowd(key[0])}:
            each.num_kept += kept.num

    def _give_up(self, key: tuple[str | None, bytes], kept: Kept) -> None:
        """Give up a kept place."""
        mine = self._kept[key]
        mine.remove(kept)
        if mine:
            self._num_alike -= 1
        else:
            del self._kept[key]
        kept.lapses = -1.0
        for each in {self.all, self._crowd(key[0])}:
            each.num_kept -= kept.num

    def _lapse(self, now: float) -> None:
        promised = self._promised
        while promised and (promised[0][1].lapses < 0 or promised[0][1].lapses <= now):
            key, kept = promised.popleft()
            if kept.lapses >= 0:
                self._give_up(key, kept)


def begins(place: int, forecast: Sequence[float]) -> float:
    """In how many seconds the waiting request at this place begins; beyond what is foreseen as fast as the last of those that are."""
    if not forecast:
        return UNKNOWN_S + UNKNOWN_EACH_S * place
    if place < len(forecast):
        return forecast[place]
    half = len(forecast) // 2
    each = (forecast[-1] - forecast[half]) / max(1, len(forecast) - 1 - half)
    return forecast[-1] + max(each, 0.0) * (place + 1 - len(forecast))


def later(forecast: Sequence[float], num_begun: int, age: float) -> list[float]:
    """The same forecast so many seconds later, when so many of its requests have begun: it is as long as it was, and its first place is that of
    who waits at the head now."""
    left = list(forecast[num_begun:])
    left += [begins(place, forecast) for place in range(max(num_begun, len(forecast)), num_begun + len(forecast))]
    return [max(0.0, each - age) for each in left]


def fingerprint_of(client: str, body: bytes) -> bytes:
    """Return the digest that recognises a client that comes again: its request, and its key or address."""
    return hashlib.blake2b(
        body, key=hashlib.sha256(client.encode("utf-8", "surrogateescape")).digest(), digest_size=16
    ).digest()
