"""Sessions and hints from outside: the answer that each hint has to get, what is pinned, what a session's turns left.

For a scheduler that has `hint`, `session` and `sessions`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import msgspec

from paged.scheduler import Hint
from paged.testing import batch_oracles
from paged.testing.cache_view import content_namespace
from paged.testing.flight import Flight, Path
from paged.testing.life_oracles import ALIVE
from paged.testing.naive_layers import full_pages

if TYPE_CHECKING:
    from paged.testing.scheduler_rig import SchedulerRig

STATUSES = ("accepted", "clipped", "deferred", "rejected", "missing")


@dataclass
class Turn:
    """What a sequence knew when it ended: its namespace and its tokens."""

    namespace: object
    tokens: list[int]


@dataclass
class ExpectedSession:
    """Its live requests, what its next turn waits for, and what its finished turns knew."""

    live: set[str] = field(default_factory=set)
    waits_for: str | None = None
    priority: int = 1
    left: list[Turn] = field(default_factory=list)


@dataclass
class ExpectedPin:
    """Content that may not leave the device before a time, as far as known; how many blocks are pinned."""

    hint: Any
    paths: set[Path]
    num_blocks: int
    until: float


class NaiveHints:
    """The rules of hints, for a rig."""

    def __init__(self, rig: SchedulerRig) -> None:
        self._rig = rig
        self.sessions: dict[str, ExpectedSession] = {}
        self.pins: dict[tuple[object, ...], ExpectedPin] = {}
        # The pin of each live request that is to be pinned when it ends, and of each ended one that may be pinned.
        self.deferred: dict[str, Hint] = {}
        self.maybe_pinned: dict[str, Hint] = {}
        # What the next step brings to the device, as far as blocks are free: content that one tier has, in order.
        self._to_fetch: list[list[Path]] = []

    @property
    def may_hold(self) -> bool:
        """Whether content may be pinned."""
        return bool(self.pins or self.maybe_pinned)

    def begin(self, request: Any) -> None:
        """Note a request that was accepted."""
        self.deferred.pop(request.id, None)
        if request.session_id is not None:
            self.sessions.setdefault(request.session_id, ExpectedSession()).live.add(request.id)

    def look(self) -> list[str]:
        """Note which requests have ended, by the rig's states. Return what is wrong with pins and sessions."""
        rig, found = self._rig, list[str]()
        alive = {id for id in rig.books if rig.statuses[id] in ALIVE}
        for session in self.sessions.values():
            for id in session.live - alive:
                if id in rig.books and rig.statuses[id] == "finished":
                    book = rig.books[id]
                    session.left += [Turn(book.namespace, each.tokens) for each in book.sequences]
            session.live &= alive
        ended = [id for id in self.deferred if id not in alive]
        for id in ended:
            self._pin_at_end(id, self.deferred.pop(id), is_alone=len(ended) == 1)
        here = rig.contents() if self.pins or self.sessions else set()
        self._to_fetch = [self._cached(paths) for paths in self._to_fetch]
        found += self._num_pinned("the scheduler", getattr(rig.scheduler, "num_pinned", None), self.pins)
        for key, pin in self.pins.items():
            if rig.now < pin.until and (lost := pin.paths - here):
                lacks = f"{len(lost)} of its {len(pin.paths)} blocks have left the device"
                found.append(f"18: {key} is pinned, and {lacks}")
            found += self._found_again(pin) if rig.world.groups and rig.now < pin.until else []
        for id, session in self.sessions.items():
            found += self._session(id, session, here)
        return found

    def _pin_at_end(self, id: str, hint: Hint, *, is_alone: bool) -> None:
        """Note the pin of a request that has ended: for sure if it alone ended, simply, and the caps allow it."""
        rig, book = self._rig, self._rig.books.get(id)
        if book is None or rig.statuses[id] != "finished" or not rig.world.prefix_caching:
            return
        is_known = is_alone and len(book.sequences) == 1 and book.request.writes_cache and not self.maybe_pinned
        is_known &= not (rig.flights or rig.world.groups or book.was_steered or book.was_cut_short)
        num = (book.sequences[0].computed or 0) // rig.world.block_size
        paths = set(batch_oracles.paths(rig, book.namespace, book.sequences[0].tokens, num)) if is_known else set()
        if not (is_known and num and paths <= rig.contents()):
            self.maybe_pinned[id] = hint
        elif self._pin(hint, num) != ("rejected",):
            self.pins[self._key(hint)] = ExpectedPin(hint, paths, num, self._until(hint))

    def _until(self, hint: Hint) -> float:
        return math.inf if hint.lasts is None else self._rig.now + hint.lasts

    def _num_pinned(self, who: str, said: int | None, keys: Iterable[tuple[object, ...]]) -> list[str]:
        """Compare how many blocks are said to be pinned with these pins, while their time lasts."""
        pins, num = [self.pins[key] for key in keys], said or 0
        least = sum(pin.num_blocks for pin in pins)
        is_wrong = num < least or (num > least and not self.maybe_pinned)
        if said is None or self._rig.world.groups or not is_wrong or any(pin.until <= self._rig.now for pin in pins):
            return []
        return [f"18: {who} says that {num} blocks are pinned; {least} are"]

    def _cached(self, paths: list[Path]) -> list[Path]:
        here = self._rig.contents() | self._rig.contents("host")
        return list(takewhile(lambda path: path in here, paths))

    def scheduled(self, flight: Flight, *, could_copy: bool) -> list[str]:
        """End the pins whose time has come. Return what this step was to bring to the device and did not, though blocks
        are free. `could_copy`: no batch was out, and no copies waited."""
        rig = self._rig
        self.expire(rig.now)
        is_sure = could_copy and not rig.carries_moves and rig.manager.device.num_free
        late = {path for paths in self._to_fetch if is_sure for path in self._cached(paths)}
        late -= rig.contents() | flight.published.keys() if late else late
        self._to_fetch = self._to_fetch if rig.carries_moves else []
        return [f"18: {len(late)} blocks were to be prefetched, and are not, though blocks are free"] if late else []

    def _found_again(self, pin: ExpectedPin) -> list[str]:
        """With layers of several kinds, a prompt that begins with pinned content has to find at least that."""
        if pin.hint.tokens is None:
            return []
        least = pin.num_blocks * self._rig.world.block_size
        namespace = content_namespace(self.namespace(pin.hint))
        hit = self._rig.manager.lookup([*list(pin.hint.tokens)[:least], 0], namespace)
        return [] if hit.num_tokens >= least else [f"18: {least} tokens are pinned; a prompt finds {hit.num_tokens}"]

    def _session(self, id: str, session: ExpectedSession, here: set[Path]) -> list[str]:
        rig, view = self._rig, self._rig.scheduler.session(id)
        mine = [key for key in self.pins if key[:2] == ("session", id)]
        if found := self._num_pinned(f"session {id}", getattr(view, "pinned_blocks", None), mine):
            return found
        expected = (id, len(session.live), session.waits_for, session.priority)
        if (shown := (view.id, view.live, view.waits_for, view.priority)) != expected:
            return [f"18: session {shown}, expected {expected}"]
        most = max((len(turn.tokens) // rig.world.block_size for turn in session.left), default=0)
        if not view.device_blocks + view.host_blocks <= view.blocks <= max(most, view.blocks if session.live else 0):
            return [f"18: session {id} left {most} blocks at most: {view}"]
        if (view.expected_at is None) != bool(session.live or view.ended_at is None):
            its = f"{len(session.live)} turns, and its next one is expected at {view.expected_at}"
            return [f"18: session {id} has {its}"]
        is_asked = session.left and view.device_blocks and not rig.world.groups
        # Where one block is, those before it are, too (invariant 5).
        if is_asked and not any(self._paths(turn, view.device_blocks)[-1] in here for turn in reversed(session.left)):
            return [
                f"18: session {id} says that {view.device_blocks} of its blocks are on the device; they are not there"
            ]
        return []

    def _paths(self, turn: Turn, num_blocks: int) -> list[Path]:
        return batch_oracles.paths(self._rig, turn.namespace, turn.tokens, num_blocks)

    def expire(self, now: float) -> None:
        """End the pins whose time has come."""
        self.pins = {key: pin for key, pin in self.pins.items() if now < pin.until}

    def before(self, hint: Any) -> tuple[int, int, int]:
        """Count the full blocks that a hint names, those on the device, and those behind them on the host."""
        self.expire(self._rig.now)
        rig, size = self._rig, self._rig.world.block_size
        if hint.session is not None:
            if hint.session not in self.sessions:
                return 0, 0, 0
            view = rig.scheduler.session(hint.session)
            return view.blocks, view.device_blocks, view.host_blocks
        if hint.request is not None and hint.request not in rig.books:
            return 0, 0, 0
        # The outputs of a preempted request count.
        tokens = self._first_tokens(hint.request) if hint.tokens is None else hint.tokens
        paths = batch_oracles.paths(rig, self.namespace(hint), tokens, num := len(tokens) // size)
        here, there = rig.contents(), rig.contents("host")
        device = next((at for at, path in enumerate(paths) if path not in here), num)
        both = next((at for at, path in enumerate(paths[device:]) if path not in there), num - device)
        return num, device, both

    def _first_tokens(self, id: str) -> list[int]:
        sequences = self._rig.books[id].sequences
        first = next((number for number, sequence in enumerate(sequences) if sequence.reason is None), 0)
        return self._rig.known(id, first)[1]

    def namespace(self, hint: Any) -> object:
        """The namespace of what a hint names, as `ExpectedRequest` has it."""
        if hint.request is not None:
            return self._rig.books[hint.request].namespace
        return "request", hint.salt, hint.adapter, hint.extra_key

    def carried_out(self, hint: Any, outcome: Any, before: tuple[int, int, int]) -> list[str]:
        """Return what is wrong with a hint's outcome, or note it; `before`: what that method returned before."""
        allowed, num = self._allowed(hint, *before)
        size = self._rig.world.block_size
        if outcome.status not in allowed or not outcome.reason:
            return [f"18: {hint} was answered {outcome}; {before} blocks were there: has to be {' or '.join(allowed)}"]
        if outcome.status in ("accepted", "clipped") and num is not None and outcome.num_tokens not in num:
            return [f"18: {hint} was answered {outcome}; num_tokens has to be {' or '.join(map(str, num))}"]
        if outcome.num_tokens % size:
            return [f"18: {hint} was answered {outcome}: not whole blocks of {size}"]
        self._note(hint, outcome)
        return []

    def _allowed(self, hint: Any, whole: int, device: int, host: int) -> tuple[tuple[str, ...], list[int] | None]:
        """The statuses that an outcome may have, and its possible numbers of tokens, None for any."""
        rig, size = self._rig, self._rig.world.block_size
        groups, caches_on_host = rig.world.groups, rig.world.keeps_content_on_host
        if hint.session is not None and hint.session not in self.sessions:
            return ("missing",), None
        if hint.request is not None and hint.action != "prefetch":
            if hint.action == "unpin" and hint.request in self.deferred:
                return ("accepted",), None
            if hint.action == "unpin" and self._key(hint) not in self.pins:
                return ("missing", *(["accepted"] if hint.request in self.maybe_pinned else [])), None
            if hint.action != "unpin":
                return ("deferred" if rig.scheduler.status(hint.request) in ALIVE else "missing",), None
        if hint.action == "end":
            return ("clipped",) if self.sessions[hint.session].live else ("accepted",), None
        if hint.action == "prefetch" and hint.request is not None and rig.scheduler.status(hint.request) != "waiting":
            return ("accepted", "missing"), None
        if hint.action == "unpin":
            pin = self.pins.get(self._key(hint))
            return (("accepted",), [pin.num_blocks * size]) if pin is not None else (("missing",), None)
        if hint.action == "retain" and hint.session is not None:
            session = self.sessions[hint.session]
            if session.live or rig.scheduler.session(hint.session).ended_at is None:
                return ("deferred",), None
            return ("accepted", "clipped"), [(device + host) * size]
        if groups:
            return STATUSES, None
        # Content that is pending behind what is on the device hides what the host has.
        there = [device, device + host] if rig.flights else [device + host]
        if not any(there):
            return ("missing",), None
        status = tuple({"missing" if not num else "accepted" if num == whole else "clipped" for num in there})
        if hint.action == "retain":
            return status, [num * size for num in there]
        if hint.action == "demote":
            return ("accepted", "rejected", *(["missing"] if 0 in there else [])), None
        if hint.action == "pin":
            if not device:
                return ("missing",), None
            return self._pin(hint, device), [device * size]
        if not caches_on_host and max(there) > device:
            return ("rejected", *status), None
        return ("accepted", "clipped", "rejected", *(["missing"] if 0 in there else [])), None

    def _pin(self, hint: Any, num_blocks: int) -> tuple[str, ...]:
        world, key = self._rig.world, self._key(hint)
        others = [pin for other, pin in self.pins.items() if other != key]
        mine = [pin for pin in others if pin.hint.tenant == hint.tenant]
        most = math.inf if world.max_pinned_per_tenant is None else world.max_pinned_per_tenant
        fits = num_blocks + sum(pin.num_blocks for pin in others) <= world.max_pinned
        fits &= num_blocks + sum(pin.num_blocks for pin in mine) <= most
        if fits and self.maybe_pinned:
            return "accepted", "clipped", "rejected"
        return ("accepted", "clipped") if fits else ("rejected",)

    def _key(self, hint: Any) -> tuple[object, ...]:
        for kind in ("session", "request"):
            if (name := getattr(hint, kind)) is not None:
                return kind, name, hint.tenant
        return "tokens", repr(self.namespace(hint)), tuple(hint.tokens), hint.tenant

    def _note(self, hint: Any, outcome: Any) -> None:
        """Note what an outcome changed."""
        rig, is_done = self._rig, outcome.status in ("accepted", "clipped")
        session = self.sessions.get(hint.session)
        rig.events[f"{hint.action} {outcome.status}"] += 1
        if outcome.status == "deferred" and hint.request is not None and hint.action == "pin":
            self.deferred[hint.request] = hint
        if hint.action == "prefetch" and is_done and hint.session is None and not rig.world.groups:
            tokens = self._first_tokens(hint.request) if hint.tokens is None else hint.tokens
            whole = batch_oracles.paths(rig, self.namespace(hint), tokens, len(tokens) // rig.world.block_size)
            self._to_fetch.append(self._cached(whole))
        if hint.request is not None:
            if hint.action == "unpin" and outcome.status == "accepted":
                is_gone = self.deferred.pop(hint.request, None) or self.pins.pop(self._key(hint), None)
                if not is_gone and self.maybe_pinned[hint.request].tenant == hint.tenant:
                    del self.maybe_pinned[hint.request]
            return
        if session is not None and hint.action == "retain":
            session.waits_for, session.priority = hint.waits_for, hint.priority
        if session is not None and hint.action == "end":
            for key in [key for key in self.pins if key[:2] == ("session", hint.session)]:
                del self.pins[key]
            if outcome.status == "accepted":
                del self.sessions[hint.session]
        if hint.action == "unpin":
            self.pins.pop(self._key(hint), None)
        if hint.action == "pin" and is_done:
            num, paths, groups = outcome.num_tokens // rig.world.block_size, set[Path](), rig.world.groups
            # Content without full layers is not listed.
            is_listed = not groups or full_pages(groups)
            if is_listed and hint.tokens is not None:
                paths = set(batch_oracles.paths(rig, self.namespace(hint), hint.tokens, num))
            elif is_listed and session is not None and len(session.left) == 1:
                paths = set(self._paths(session.left[0], num))
            self.pins[self._key(hint)] = ExpectedPin(hint, paths, num, self._until(hint))

    def unpin_all(self) -> list[Any]:
        """Hints after which nothing is pinned."""
        hints = [pin.hint for pin in self.pins.values()] + list(self.maybe_pinned.values())
        return [msgspec.structs.replace(hint, action="unpin") for hint in hints]
