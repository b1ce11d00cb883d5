"""Hints: what a caller knows of the next use of content. No hint stops progress: pins are bounded, and the blocks that
they may take count as taken from the start. Outcomes have the words of vLLM's RFC #57103."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Literal

import msgspec
import numpy as np

from paged.base.arguments import token_array
from paged.base.fields import Finite, Level, Name, checked_fields
from paged.base.words import counted
from paged.block_manager import Blocks, Memory, Node, Part, Retained, Run, num_nodes
from paged.errors import InvalidHint, InvalidNamespace, InvalidTokens

from .request import RequestState, Retention, request_root
from .sessions import REMEMBERED, Session, Sessions, WaitsFor


class Hint(msgspec.Struct, frozen=True, kw_only=True):
    """A caller's wish for cached content.

    action       "retain": evict it after content of lower priority. "pin": do not evict what the device has of it until
                 `lasts` is over or "unpin". "prefetch": copy what only lower tiers have to free blocks of the device.
                 "demote": evict it next. "end": a session has no more turns; unpin what it left, and evict it next
    session, request, tokens  one of these. A session's id: what its last turn left. A live request's id: what it leaves
                 when it finishes; with "prefetch", its prompt now. Or a prompt, int [n], with salt, adapter, extra_key
    priority     of "retain": 1 to 3
    lasts        of "retain" and "pin": seconds from now, or from the request's end. None: no limit; to retain what a
                 session left: until its next turn is no longer expected
    waits_for    what a session's next turn waits for, with "retain": "tool", "person" or None
    tenant       of "pin" and "unpin": whose cap the pin counts for
    """

    action: Literal["retain", "pin", "unpin", "prefetch", "demote", "end"]
    session: Name | None = None
    request: Name | None = None
    tokens: Any = None
    salt: Name | None = None
    adapter: Name | None = None
    extra_key: Any = None
    priority: Level = 1
    lasts: Finite | None = None
    waits_for: WaitsFor = None
    tenant: str | None = None

    @property
    def root(self) -> bytes:
        return request_root(self.salt, self.adapter, self.extra_key)

    @property
    def target(self) -> tuple[str, object]:
        if self.tokens is not None:
            return "tokens", self.root + self.tokens.tobytes()
        return ("session", self.session) if self.request is None else ("request", self.request)


class HintOutcome(msgspec.Struct, frozen=True):
    """What became of a hint. `status`: "accepted"; "clipped", only for `num_tokens` of its tokens; "deferred", until
    the request or turn ends; "rejected", over a cap or impossible; "missing", no such content. `reason`: a sentence."""

    status: str
    reason: str
    num_tokens: int = 0


class Pin(msgspec.Struct, frozen=True, eq=False):
    """A pin of a prompt's first `num_blocks` full blocks. `held`: (place, blocks), of `num_pages` pages in all."""

    target: tuple[str, object]
    tenant: str | None
    until: float  # time; infinity: no limit
    num_blocks: int
    num_pages: int
    held: list[tuple[int, Blocks]]


class Hints:
    """Carries out hints, and holds pinned blocks."""

    def __init__(
        self, manager: Memory, max_pinned: int, max_per_tenant: int | None, clock: Callable[[], float]
    ) -> None:
        self._manager, self._content, self._size = manager, manager.content.ways, manager.block_size
        self._max_pinned, self._max_per_tenant = max_pinned, max_per_tenant
        self.sessions = Sessions(manager, clock)
        self.pins: list[Pin] = []
        self._retained: OrderedDict[tuple[str, object], Retained] = OrderedDict()
        # Ways that the next step copies to the device as far as there is room, and whether a row ended there.
        self.to_fetch: list[tuple[list[Node], bool]] = []

    def carry_out(self, hint: Hint, request: RequestState | None) -> HintOutcome:
        """Carry out a checked hint. `request`: the live request that it names, if any."""
        if hint.action == "unpin":
            if request is not None and request.forget_hint("pin"):
                return HintOutcome("accepted", f'"{request.id}" will not be pinned when it finishes.')
            return self._unpin(hint.target, hint.tenant)
        if hint.session is not None:
            session = self.sessions.by_id.get(hint.session)
            if session is None:
                return HintOutcome("missing", f'no session "{hint.session}" is known.')
            return self._of_session(hint, session)
        if request is not None and hint.action != "prefetch":
            request.defer(hint)
            return HintOutcome("deferred", f'it is carried out when "{request.id}" finishes, as far as possible.')
        if request is not None and request.live_rows:
            return HintOutcome("accepted", f'"{request.id}" has been admitted, and holds it.')
        tokens, root = (hint.tokens, hint.root) if request is None else (request.first_tokens, request.root)
        way = self._content.way_to(self._content.confirmed(tokens, root))
        return self._of_content(hint, way, len(tokens) // self._size, was_left=False)

    def finish(self, request: RequestState, way: list[Node]) -> None:
        """Carry out the hints that were deferred until the request finished. `way`: what it left."""
        for hint in request.hints:
            self._of_content(hint, way, 0)

    def _of_session(self, hint: Hint, session: Session) -> HintOutcome:
        """Carry out a hint for what the session's last turn left."""
        num = num_nodes(self._content.spans_of(session.way))
        if hint.action == "retain":
            retention = Retention(priority=hint.priority, lasts=hint.lasts)
            if not self.sessions.expect(session, hint.waits_for, retention):
                return HintOutcome("deferred", "it takes effect when the turn that lives ends.")
            return self._done(num, session.num_blocks, "retained")
        if hint.action == "demote" and num:
            return self._demoted(self.sessions.let_go(session))
        if hint.action != "end":
            return self._of_content(hint, session.way, session.num_blocks)
        self._unpin(hint.target)
        num = self.sessions.let_go(session)
        if session.live:
            reason = f"{counted(session.live, 'turn')} of it live; what the last one left will be evicted next."
            return HintOutcome("clipped", reason, num * self._size)
        self.sessions.forget(session)
        return HintOutcome("accepted", f"{counted(num, 'block')} will be evicted next.", num * self._size)

    def _of_content(self, hint: Hint, way: list[Node], wanted: int, *, was_left: bool = True) -> HintOutcome:
        """Carry out a hint for a way. `wanted`: all full blocks that it names. `was_left`: a row ended there."""
        if not (num := num_nodes(self._content.spans_of(way))):
            return HintOutcome("missing", "no full block of it is in the cache.")
        if hint.action == "retain":
            self._retain(hint, way, was_left=was_left)
            return self._done(num, wanted, "retained")
        if hint.action == "demote":
            return self._demoted(self._content.demote(way)[1])
        if hint.action == "pin":
            return self._pin(hint, *self._content.within(way, -1, was_left=was_left), wanted)
        num, parts = self._content.within(way, self._manager.num_blocks, was_left=was_left)
        if is_lacking := self._content.lacks(parts):
            if not self._manager.host_caching:
                return HintOutcome("rejected", "the host keeps no content (host_caching).")
            if not self._room():
                return HintOutcome("rejected", "no block of the device is free; others are not evicted for it.")
            num, _ = self._content.within(way, self._room(), was_left=was_left)
        if not num:
            return HintOutcome("missing", "no prompt can begin with the cached part that there is room for.")
        if is_lacking and (way, was_left) not in self.to_fetch:
            self.to_fetch.append((way, was_left))
        return self._done(num, wanted, "on the device, or will be after the next step")

    def _retain(self, hint: Hint, way: list[Node], *, was_left: bool) -> None:
        """Retain a way as the hint says, and no longer as an earlier hint of the same target said."""
        before = self._retained.pop(hint.target, None)
        until = self._until(hint)
        ends = until if until < math.inf else None
        if (retained := self._content.retain_way(way, hint.priority, ends, was_left=was_left)) is not None:
            self._retained[hint.target] = retained
        if before is not None:
            self._content.retentions.end(before)
        if len(self._retained) > REMEMBERED:
            self._retained.popitem(last=False)

    def _demoted(self, num: int) -> HintOutcome:
        if not num:
            return HintOutcome("rejected", "other content continues it, or requests hold it.")
        return HintOutcome("accepted", f"{counted(num, 'block')} will be evicted next.", num * self._size)

    def _done(self, num: int, wanted: int, what: str) -> HintOutcome:
        status, of_all = ("clipped", f" of {wanted:,}") if num < wanted else ("accepted", "")
        return HintOutcome(status, f"{num:,}{of_all} blocks are {what}.", num * self._size)

    def _pin(self, hint: Hint, num: int, parts: list[Part], wanted: int) -> HintOutcome:
        if not num:
            return HintOutcome("missing", "no prompt can begin with what the device has of it; prefetch it first.")
        others = [pin for pin in self.pins if (pin.target, pin.tenant) != (hint.target, hint.tenant)]
        of_tenant = [pin for pin in others if pin.tenant == hint.tenant]
        caps = ("max_pinned", self._max_pinned, others), ("max_pinned_per_tenant", self._max_per_tenant, of_tenant)
        pages = self._content.pages_of(parts)
        for name, most, pins in caps:
            have = sum(pin.num_pages for pin in pins)
            if most is not None and have + pages > most:
                return HintOutcome(
                    "rejected", f"{pages:,} blocks beside {have:,} pinned ones exceed {name} ({most:,})."
                )
        pin = Pin(hint.target, hint.tenant, self._until(hint), num, pages, self._content.pin(parts))
        self._unpin(hint.target, hint.tenant)
        self.pins.append(pin)
        return self._done(num, wanted, "pinned")

    def _unpin(self, target: tuple[str, object], *tenants: str | None) -> HintOutcome:
        """End the pins of a target: those of one tenant, or, without one, of all."""
        gone = [pin for pin in self.pins if pin.target == target and (not tenants or pin.tenant in tenants)]
        self.pins = [pin for pin in self.pins if pin not in gone]
        for pin in gone:
            self._content.unpin(pin.held)
        num = sum(pin.num_blocks for pin in gone)
        if not gone:
            return HintOutcome("missing", "it is not pinned.")
        return HintOutcome("accepted", f"{counted(num, 'block')} no longer pinned.", num * self._size)

    def _room(self) -> int:
        # Nothing is promised when it is asked for.
        return self._manager.device.num_free

    def fetch(self) -> None:
        """Plan the copies of all prefetches, as far as content is still on the host alone and blocks are free."""
        for way, was_left in self.to_fetch:
            _, parts = self._content.within(way, self._room(), was_left=was_left)
            if self._content.lacks(parts):
                self._content.fetch(parts)
        self.to_fetch = []

    def bring(self, hint: Hint, first: int, write: Callable[[int, Blocks], None]) -> int:
        """Carry out `Scheduler.bring` for a checked hint, while nothing else writes to free blocks."""
        manager, num = self._manager, min(len(hint.tokens) // self._size - first, self._room())
        if num <= 0 or not manager.prefix_caching:
            return 0
        # No block before these is copied from the host for it.
        manager.growth.copies.allow_content(False)
        row = manager.add_counted(hint.tokens[: (first + num) * self._size], hint.root, count=False)
        try:
            have = manager.rows.num_blocks.item(row)
            if have < first:
                return 0
            manager.growth.promise_one(row, have, first + num)
            manager.growth.draw_promised()
            write(have - first, manager.rows.table(row)[have:].astype(np.int64))
            manager.set_computed(row, (first + num) * self._size)
        finally:
            manager.release(row)
        return num

    def expire(self, now: float) -> None:
        for pin in [pin for pin in self.pins if pin.until <= now]:
            self._unpin(pin.target, pin.tenant)

    def num_pinned(self, session_id: str | None = None) -> int:
        """Return the blocks (pages, of layers of several kinds) that hints have pinned; of one session, if named."""
        return sum(pin.num_pages for pin in self.pins if session_id is None or pin.target == ("session", session_id))

    def num_yet_to_pin(self) -> int:
        """Return how many blocks pins may still take from requests: `max_pinned`, less what pins alone hold now."""
        return self._max_pinned - self._content.pages_held_alone(self.held())

    def _until(self, hint: Hint) -> float:
        return math.inf if hint.lasts is None else self.sessions.now() + hint.lasts

    def violations(self, sessions: list[str]) -> list[str]:
        """Return what is wrong. `sessions`: the session id of each live request that has one."""
        num = self.num_pinned()
        found = [f"8: {num} blocks are pinned; {self._max_pinned} may be."] if num > self._max_pinned else []
        return found + self.sessions.violations(sessions)

    def held(self) -> list[tuple[int, Blocks]]:
        """Return (place, blocks) of all pins; a block that is pinned twice comes twice."""
        return [held for pin in self.pins for held in pin.held]


class Quotas:
    """Which tenant's content the blocks of the device hold: that of the first one whose finished request left it there.
    Of a tenant with more than `most` blocks, the least recently used ones are evicted next."""

    def __init__(self, manager: Memory, most: int) -> None:
        self._content, self._pool = manager.content.ways, manager.blocks
        self._size, self._most = manager.block_size, most
        # By block, its tenant's number; 0: it is of none, or is evicted next anyway.
        self._owner = np.zeros(0, np.int64)
        # By tenant, its number, and by last run the ways that its requests left, oldest first.
        self._tenants: dict[str | None, tuple[int, dict[Run, list[Node]]]] = {}

    def note(self, tenant: str | None, way: list[Node], hit_tokens: int) -> None:
        """Count the way that a finished request left for its tenant. It had found `hit_tokens` of it in the cache."""
        owner, mine = self._tenants.setdefault(tenant, (len(self._tenants) + 1, {}))
        blocks, num_hits = self._content.device_blocks(way), hit_tokens // self._size
        if more := self._pool.num_pages - len(self._owner):
            # A pool whose blocks cost no page grows.
            self._owner = np.append(self._owner, np.zeros(more, np.int64))
        found, new = blocks[:num_hits], blocks[num_hits:]
        self._owner[found[self._owner[found] == 0]] = self._owner[new] = owner
        for run, _ in way:
            mine.pop(run, None)
        mine[way[0][0]] = way
        if len(mine) > self._most + 1:
            # There cannot be content of all these ways.
            del mine[next(iter(mine))]
        over = int(np.count_nonzero((self._owner == owner) & self._pool.has_content(slice(None)))) - self._most
        for run, oldest in list(mine.items()) if over > 0 else ():
            gone, _ = self._content.demote(oldest, over)
            self._owner[gone] = 0
            over -= len(gone)
            if not (self._owner[self._content.device_blocks(oldest)] == owner).any():
                del mine[run]
            if over <= 0:
                break


def checked_hint(hint: Any) -> Hint:
    """Return the hint with its tokens as int32 [n]. Raises InvalidHint."""
    if not isinstance(hint, Hint):
        raise InvalidHint(f"a Hint is needed; got {hint!r}.")
    own = Hint(**checked_fields(Hint, msgspec.structs.asdict(hint), InvalidHint))
    try:
        tokens = None if own.tokens is None else token_array(own.tokens).copy()
        _ = own.root
    except (InvalidNamespace, InvalidTokens) as error:
        raise InvalidHint(str(error)) from None
    targets = [name for name in ("session", "request", "tokens") if getattr(own, name) is not None]
    if len(targets) != 1:
        raise InvalidHint(f"a hint is of one session, request or tokens; got {' and '.join(targets) or 'none'}.")
    if tokens is not None and not len(tokens):
        raise InvalidHint("tokens are empty; at least one is needed.")
    if own.action == "end" and own.session is None:
        raise InvalidHint(f"end is of a session; got {targets[0]}.")
    return msgspec.structs.replace(own, tokens=tokens)
