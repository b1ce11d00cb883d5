"""Hints: what a caller knows of content that is to come, or is not: retain, pin, unpin, prefetch, demote, end. Each is of
a prefix, a session, or a live request, for which it is carried out when that ends. The words of the outcomes are those of
vLLM's RFC #57103. No hint stops progress: pins are bounded, and what they may take counts as taken from the start."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from paged.base.arguments import checked_level, is_integer, is_real, token_array
from paged.base.words import counted
from paged.block_manager import Memory
from paged.block_manager.runs import Blocks, Node, Run, Span, first_of
from paged.errors import InvalidConfig, InvalidHint, InvalidNamespace, InvalidTokens

from .request import RequestState, Retention, request_root
from .sessions import Session, Sessions

ACTIONS = ("retain", "pin", "unpin", "prefetch", "demote", "end")
WAITS = ("tool", "person", None)


class Hint(msgspec.Struct, frozen=True, kw_only=True):
    """A wish for content.

    action      "retain": evict it after content of lower priority; of a session, note what its next turn waits for, too.
                "pin": never evict what the device has of it, until `lasts` or "unpin". "prefetch": bring what only the host
                has to blocks of the device that are free. "demote": let it go next. "end": of a session, no turn comes
    session, request, tokens  one of these: a session's id; a live request's id: its content when it finishes, for
                "prefetch" its prompt now; or a prompt, int [n], with the salt, adapter and extra_key of its requests
    priority    "retain": 1 to 3
    lasts       "retain", "pin": seconds from now on, or from the request's end; None: no limit, of a session's retention
                what its gaps say
    waits_for   "retain" of a session: "tool", "person" or None
    tenant      whose cap a pin counts for
    """

    action: str
    session: str | None = None
    request: str | None = None
    tokens: Any = None
    salt: str | None = None
    adapter: str | None = None
    extra_key: Any = None
    priority: int = 1
    lasts: float | None = None
    waits_for: str | None = None
    tenant: str | None = None


class HintOutcome(msgspec.Struct, frozen=True):
    """What became of a hint. `status`: "accepted"; "clipped" (a part of what it names, `num_tokens`, was there or fits);
    "deferred" (when the request finishes); "rejected" (over a cap, or not possible); "missing" (nothing is known of it)."""

    status: str
    reason: str
    num_tokens: int = 0


class Pin(msgspec.Struct, eq=False, gc=False):
    key: object
    tenant: str | None
    until: float
    blocks: Blocks


class Hints:
    """Carries hints out. `sessions`; and pins, in the order in which they were made."""

    def __init__(self, manager: Memory, max_pinned: int, max_per_tenant: int | None) -> None:
        self._manager, self._content, self._size = manager, manager.content, manager.block_size
        self._max_pinned, self._max_per_tenant = max_pinned, max_per_tenant
        self.sessions = Sessions(manager)
        self.pins: list[Pin] = []
        # The first time at which a pin ends.
        self.next_end = math.inf
        # Ways that the next step brings to the device, as far as there is room.
        self._to_fetch: list[list[Node]] = []

    def carry_out(self, hint: Hint, request: RequestState | None, now: float) -> HintOutcome:
        """Carry out a validated hint; `request`: the live one that it is of."""
        self.sessions.reach(now)
        if request is not None and hint.action != "prefetch":
            return self._defer(hint, request)
        session = None if hint.session is None else self.sessions.by_id.get(hint.session)
        if hint.session is not None and session is None:
            return HintOutcome("missing", f'no session "{hint.session}" is known.')
        if session is not None and hint.action in ("retain", "end"):
            return self._of_session(hint, session)
        way: list[Node] = []
        if session is not None:
            way, wanted = session.way, session.num_blocks * self._size
            key, spans = session.id.encode(), self._content.spans_of(way)
        else:
            if request is not None:
                tokens, root = request.first_tokens, request.root
            else:
                tokens, root = hint.tokens, request_root(hint.salt, hint.adapter, hint.extra_key)
            spans, key, wanted = self._content.confirmed(tokens, root), root + tokens.tobytes(), len(tokens)
            wanted -= wanted % self._size
            if spans:
                way = self._content.way_to(spans)
        return self._of_content(hint, spans, way, (key,), wanted)

    def _of_content(self, hint: Hint, spans: list[Span], way: list[Node], key: object, wanted: int) -> HintOutcome:
        if hint.action == "unpin":
            return self._unpin(key)
        if not spans:
            return HintOutcome("missing", "no full block of it is in the cache.")
        if hint.action == "retain":
            until = self._until(hint.lasts)
            self._content.retain_node(way[0], int(hint.priority), until if until < math.inf else None)
            return self._done(spans, wanted, "retained")
        if hint.action == "demote":
            num = self._content.demote(way)
            if not num:
                return HintOutcome("rejected", "other content goes on behind it, or requests hold it.")
            return HintOutcome("accepted", f"{counted(num, 'block')} go next.", num * self._size)
        if self._manager.sides is not None:
            return HintOutcome("rejected", f"content of layers of several kinds cannot be the object of {hint.action}.")
        return self._pin(hint, spans, key, wanted) if hint.action == "pin" else self._prefetch(way, spans, wanted)

    def _of_session(self, hint: Hint, session: Session) -> HintOutcome:
        if hint.action == "end":
            self._unpin((session.id.encode(),))
            num = self.sessions.let_go(session)
            if session.live:
                return HintOutcome(
                    "clipped", f"{counted(session.live, 'turn')} of it live; only what was left goes.", num
                )
            self.sessions.forget(session)
            return HintOutcome("accepted", f"{counted(num, 'block')} go next.", num * self._size)
        session.waits_for = hint.waits_for
        session.retention = Retention(priority=int(hint.priority), lasts=hint.lasts)
        if session.live or session.ended_at is None:
            return HintOutcome("deferred", "it counts from the end of the turn that lives.")
        self.sessions.retain(session)
        return self._done(self._content.spans_of(session.way), session.num_blocks * self._size, "retained")

    def _done(self, spans: list[Span], wanted: int, what: str) -> HintOutcome:
        num = sum(stop - first for _, first, stop in spans) * self._size
        if num < wanted:
            return HintOutcome("clipped", f"{num:,} of {wanted:,} tokens are in the cache, and {what}.", num)
        return HintOutcome("accepted", f"{num:,} tokens are {what}.", num)

    def _defer(self, hint: Hint, request: RequestState) -> HintOutcome:
        if hint.action in ("unpin", "end"):
            return HintOutcome("rejected", f"{hint.action} is not of a request that lives.")
        request.hints = (*request.hints, hint)
        return HintOutcome("deferred", f'it is carried out when "{request.id}" finishes.')

    def finish(self, hints: Sequence[Hint], way: list[Node]) -> None:
        """Carry out what was deferred until a request finished, which left this way."""
        for hint in hints:
            spans = self._content.spans_of(way)
            self._of_content(hint, spans, way, (hint.request,), 0)

    def _pin(self, hint: Hint, spans: list[Span], key: object, wanted: int) -> HintOutcome:
        here, _ = self._content.split(spans)
        num = sum(stop - first for _, first, stop in here)
        if not num:
            return HintOutcome("missing", "no full block of it is on the device; prefetch it first.")
        others = [pin for pin in self.pins if pin.key != key]
        held = sum(len(pin.blocks) for pin in others)
        mine = sum(len(pin.blocks) for pin in others if pin.tenant == hint.tenant)
        for name, limit, have in (
            ("max_pinned", self._max_pinned, held),
            ("max_pinned_per_tenant", self._max_per_tenant, mine),
        ):
            if limit is not None and have + num > limit:
                reason = f"{counted(num, 'block')} beside {have:,} pinned ones exceed {name} ({limit:,})."
                return HintOutcome("rejected", reason)
        pin = Pin(key, hint.tenant, self._until(hint.lasts), self._content.pin(here))
        self._unpin(key)
        self.pins.append(pin)
        self.next_end = min(self.next_end, pin.until)
        return self._done(here, wanted, "pinned")

    def _unpin(self, key: object) -> HintOutcome:
        gone = [pin for pin in self.pins if pin.key == key]
        self.pins = [pin for pin in self.pins if pin.key != key]
        for pin in gone:
            self._content.unpin(pin.blocks)
        if not gone:
            return HintOutcome("missing", "it is not pinned.")
        num = sum(len(pin.blocks) for pin in gone)
        return HintOutcome("accepted", f"{counted(num, 'block')} are pinned no longer.", num * self._size)

    def _prefetch(self, way: list[Node], spans: list[Span], wanted: int) -> HintOutcome:
        here, there = self._content.split(spans)
        if not there:
            return self._done(here, wanted, "on the device")
        if not self._manager.host_caching:
            return HintOutcome("rejected", "the host keeps no content (host_caching).")
        if (room := self._room()) <= 0:
            return HintOutcome("rejected", "no block of the device is free; others are not evicted for it.")
        self._to_fetch.append(way)
        return self._done(here + first_of(there, room), wanted, "on the device after the next step")

    def _room(self) -> int:
        return self._manager.device.num_free - self._manager.growth.num_promised

    def fetch(self) -> None:
        """Plan the copies of what was to be prefetched, as far as it is still on the host alone and there is room."""
        for way in self._to_fetch:
            _, there = self._content.split(self._content.spans_of(way))
            if there and (room := self._room()) > 0:
                self._content.fetch(first_of(there, room))
        self._to_fetch = []

    @property
    def has_to_fetch(self) -> bool:
        return bool(self._to_fetch)

    def expire(self, now: float) -> None:
        """End the pins until this time."""
        for pin in [pin for pin in self.pins if pin.until <= now]:
            self._unpin(pin.key)
        self.next_end = min((pin.until for pin in self.pins), default=math.inf)

    @property
    def num_pinned(self) -> int:
        return sum(len(pin.blocks) for pin in self.pins)

    def pinned_of(self, session_id: str) -> int:
        return sum(len(pin.blocks) for pin in self.pins if pin.key == (session_id.encode(),))

    def _until(self, lasts: float | None) -> float:
        return math.inf if lasts is None else self.sessions.now + lasts

    def violations(self, sessions: Sequence[str]) -> list[str]:
        num = self.num_pinned
        found = [f"8: {num} blocks are pinned; {self._max_pinned} may be."] if num > self._max_pinned else []
        refs = self._manager.blocks.refs()
        for pin in self.pins:
            if not refs[pin.blocks].all():
                found.append(f"2: blocks of pin {pin.key!r} are not held.")
        return found + self.sessions.violations(sessions)


class Quotas:
    """How much content each tenant's requests left. What is over `most` blocks goes next, a tenant's oldest first."""

    def __init__(self, manager: Memory, most: int) -> None:
        self._content, self._size, self._most = manager.content, manager.block_size, most
        # By tenant and last run: the way that a request left, and the blocks of it that its tenant computed.
        self._left: dict[str | None, dict[Run, tuple[list[Node], int]]] = {}

    def note(self, tenant: str | None, way: list[Node], hit_tokens: int) -> None:
        """Note what a request that found so many tokens has left."""
        mine, num = self._left.setdefault(tenant, {}), sum(at + 1 for _, at in way) - hit_tokens // self._size
        for run in [run for run, _ in way if run in mine]:
            num += mine.pop(run)[1]
        mine[way[0][0]] = way, num
        over = sum(blocks for _, blocks in mine.values()) - self._most
        while over > 0:
            run, (oldest, num) = next(iter(mine.items()))
            self._content.demote(oldest, over)
            if num > over:
                mine[run] = oldest, num - over
                break
            del mine[run]
            over -= num


def checked_hint(hint: Any) -> Hint:
    """Return the hint with its tokens as int32 [n]. Raises InvalidHint."""
    if not isinstance(hint, Hint):
        raise InvalidHint(f"a Hint is needed; got {hint!r}.")
    if hint.action not in ACTIONS:
        raise InvalidHint(f"action has to be one of {', '.join(ACTIONS)}; got {hint.action!r}.")
    targets = [name for name in ("session", "request", "tokens") if getattr(hint, name) is not None]
    if len(targets) != 1:
        raise InvalidHint(f"a hint is of one session, request or tokens; got {' and '.join(targets) or 'none'}.")
    for name in ("session", "request", "tenant", "salt", "adapter"):
        value = getattr(hint, name)
        if value is not None and (not isinstance(value, str) or not value):
            raise InvalidHint(f"{name} has to be a non-empty string or None; got {value!r}.")
    if hint.action == "end" and hint.session is None:
        raise InvalidHint("end is of a session.")
    if hint.waits_for not in WAITS:
        raise InvalidHint(f'waits_for has to be "tool", "person" or None; got {hint.waits_for!r}.')
    if hint.lasts is not None and not (is_real(hint.lasts) and 0 < hint.lasts < math.inf):
        raise InvalidHint(f"lasts has to be a finite time above 0, or None; got {hint.lasts!r}.")
    try:
        checked_level(hint.priority)
        if hint.tokens is None:
            return hint
        tokens = token_array(hint.tokens)
        request_root(hint.salt, hint.adapter, hint.extra_key)
    except (InvalidConfig, InvalidNamespace, InvalidTokens) as error:
        raise InvalidHint(str(error)) from None
    if not len(tokens):
        raise InvalidHint("tokens are empty; at least one is needed.")
    return msgspec.structs.replace(hint, tokens=np.array(tokens))


def checked_cap(name: str, value: Any, most: int) -> Any:
    """Return a number of blocks from 0 to `most`, or None. Raises InvalidConfig."""
    if value is not None and (not is_integer(value) or not 0 <= value <= most):
        raise InvalidConfig(f"{name} has to be from 0 to {most:,} blocks; got {value!r}.")
    return None if value is None else int(value)
