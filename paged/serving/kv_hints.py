"""Hints over HTTP: a `KvHintsEnvelope`, as vLLM and SGLang carry it, and our hints for each of its actions.

    {"protocol_version": "0.1", "message_id": "m1", "actions": [
        {"action_id": "a1", "action_type": "kv.retain", "action_version": "1.0", "payload": {…}}]}

Priorities of 1 to 33 are level 1, to 66 level 2, above that level 3. No action is ignored: the outcome of one that cannot be
carried out is "rejected".
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from pydantic import Discriminator, Field, StrictBool, StrictStr, Tag, ValidationError

from paged.scheduler import Hint, HintOutcome
from paged.serving.errors import wrong
from paged.serving.strict import Body, Number, Token, refused

MAX_ACTIONS, MAX_DIRECTIVES, MAX_DURATION_S = 64, 128, 30 * 24 * 3600
"""SGLang's limit on actions, and vLLM's on the others."""
MAX_HASHES = 65_536
LEVELS = 3

SessionId = Annotated[str, Field(strict=True, min_length=1, max_length=512, pattern=r"^[^\x00-\x1f\x7f]+$")]
Salt = Annotated[str, Field(strict=True, min_length=1, max_length=1024)]
Seconds = Annotated[Number, Field(gt=0, le=MAX_DURATION_S)]
Waits = Literal["tool", "person"] | None
Hash = Annotated[StrictStr, Field(pattern=r"^[0-9]{1,20}$")] | Annotated[int, Field(strict=True, ge=0, lt=2**64)]

_OTHERS = {
    "kv.fetch": "K and V are taken from no other engine.",
    "kv.share": "K and V are given to no other engine.",
}
# No session's id has it.
_SEPARATOR = "\x1f"


def scoped(tenant: str | None, session_id: str) -> str:
    """Return the engine's id of a tenant's session."""
    return f"{tenant or ''}{_SEPARATOR}{session_id}"


def shown(engine_id: str) -> tuple[str, str]:
    """Return the tenant, "" for none, and its id of a session from the engine's id."""
    tenant, _, session_id = engine_id.rpartition(_SEPARATOR)
    return tenant, session_id


def unscoped(reason: str, tenant: str | None) -> str:
    """Return a sentence of the engine's with its ids of a tenant's sessions replaced by the tenant's."""
    return reason.replace(scoped(tenant, ""), "")


class KvHintAction(Body):
    """One action of an envelope; its type says what its payload has."""

    action_id: Annotated[StrictStr, Field(min_length=1, max_length=512)]
    action_type: Annotated[StrictStr, Field(min_length=1, max_length=128)]
    action_version: Annotated[StrictStr, Field(min_length=1, max_length=32)]
    payload: dict[str, Any] = Field(default_factory=dict)


class KvHintsEnvelope(Body):
    """Hints that come with a request, or without one."""

    protocol_version: Annotated[StrictStr, Field(pattern=r"^[01]\.[0-9]+$", description="0.1 or 1.0.")]
    message_id: Annotated[StrictStr, Field(min_length=1, max_length=512)]
    actions: Annotated[list[KvHintAction], Field(default_factory=list, max_length=MAX_ACTIONS)]


class KvHint(Body):
    """A hint of our own, a `Hint` of `paged`: about a session, a live request or a prompt."""

    action: Literal["retain", "pin", "unpin", "prefetch", "demote", "end"]
    session_id: SessionId | None = None
    request_id: StrictStr | None = Field(None, description="Its X-Request-Id, or the id of its answer.")
    prompt: StrictStr | Annotated[list[Token], Field(min_length=1)] | None = None
    cache_salt: Salt | None = None
    priority: Annotated[int, Field(strict=True, ge=1, le=LEVELS)] = 1
    lasts: Seconds | None = None
    waits_for: Waits = None


def _kind_of(body: Any) -> str:
    return "KvHint" if "action" in (body if isinstance(body, dict) else ()) else "KvHintsEnvelope"


KvHintsBody = Annotated[
    Annotated[KvHint, Tag("KvHint")] | Annotated[KvHintsEnvelope, Tag("KvHintsEnvelope")], Discriminator(_kind_of)
]


class _Directive(Body):
    start: Annotated[int, Field(strict=True, ge=0)] = 0
    end: Annotated[int, Field(strict=True, ge=1)] | None = None
    priority: Annotated[int, Field(strict=True, ge=0, le=100)]
    duration: Annotated[Number, Field(ge=0, le=MAX_DURATION_S)] | None = None
    covers_output: StrictBool = False


class _OfRanges(Body):
    scope: StrictStr | None = None
    directives: Annotated[list[_Directive], Field(max_length=MAX_DIRECTIVES)]
    waits_for: Waits = None


class _OfSession(Body):
    session_id: SessionId | None = None


class _Blocks(_OfSession):
    """Blocks as Dynamo names them."""

    execute_at: Literal["request_completion"] | None = None
    include_current_request: StrictBool = False
    block_hashes: Annotated[list[Hash], Field(default_factory=list, max_length=MAX_HASHES)]


class _Retain(_Blocks):
    priority: Annotated[int, Field(strict=True, ge=0)]
    ttl_seconds: Seconds | None = None
    waits_for: Waits = None


class _Demote(_OfSession):
    session_generation: Annotated[int, Field(strict=True, ge=0)] | None = None


class _Pin(_OfSession):
    ttl_seconds: Seconds | None = None


class Planned(msgspec.Struct, frozen=True):
    """A hint, and when it is carried out: `at_end` of the request that it came with, or at once. `prefix`: it is about the first so
    many tokens of that request's prompt; None: about what the hint names."""

    hint: Hint
    at_end: bool
    prefix: int | None = None


class KvAction(msgspec.Struct, frozen=True):
    """The engine's hints for an action, in order, those `at_end` last. `notes` are sentences for its outcome, and
    `is_clipped` if they say that a part is not done. `rejected`: why nothing is done; "": something is."""

    action_id: str
    hints: list[Planned] = []
    notes: list[str] = []
    is_clipped: bool = False
    rejected: str = ""

    def concluded(self, outcomes: list[HintOutcome], tenant: str | None) -> KvOutcome:
        """Return the outcome of the action from the outcomes of its hints, which are a tenant's."""
        if self.rejected:
            return KvOutcome(self.action_id, "rejected", self.rejected)
        done = [each for each in outcomes if each.status not in ("missing", "rejected")]
        kinds = {each.status for each in done}
        if outcomes and not done:
            status = outcomes[0].status
        elif self.is_clipped or len(done) < len(outcomes) or "clipped" in kinds:
            status = "clipped"
        else:
            status = "deferred" if "deferred" in kinds else "accepted"
        said = [unscoped(each.reason, tenant) for each in outcomes]
        reason = " ".join(dict.fromkeys([*self.notes, *(each[:1].upper() + each[1:] for each in said)]))
        return KvOutcome(self.action_id, status, reason, max((each.num_tokens for each in done), default=0))

    def undone(self, outcomes: list[HintOutcome], tenant: str | None) -> KvOutcome:
        """Return the outcome if the request did not finish, so that nothing was done at its end. `outcomes`: of the hints at its beginning."""
        left = HintOutcome("rejected", "the request was not finished.")
        begun = [left if each.status == "deferred" else each for each in outcomes]
        return self.concluded([*begun, *(left for each in self.hints if each.at_end)], tenant)


class KvOutcome(msgspec.Struct, frozen=True):
    """The outcome of an action. `status`: accepted, clipped, deferred, rejected or missing, as of `HintOutcome`."""

    action_id: str
    status: str
    reason: str
    num_tokens: int = 0


class Origin(NamedTuple):
    """The tenant of an envelope, and the request that it came with; `request_id` None: it came without one."""

    tenant: str | None
    request_id: str | None = None
    session_id: str | None = None
    prompt_len: int = 0


def level_of(priority: int) -> int:
    """Return our level for a priority: 0 for 0, 1 to 3 for 1 to 100, and 3 above that."""
    return min(LEVELS, -(-LEVELS * priority // 100))


def actions_of(envelope: KvHintsEnvelope, origin: Origin, where: str = "kv_hints") -> list[KvAction]:
    """Return what the engine does for each action. Raises ApiError, which names the field, before anything is done."""
    found, ranges = [], list[tuple[str, _OfRanges]]()
    for place, action in enumerate(envelope.actions):
        field = f"{where + '.' if where else ''}actions.{place}"
        found.append(_action_of(action, origin, f"{field}.payload", ranges))
    _check_ranges(ranges)
    return found


def _action_of(action: KvHintAction, origin: Origin, field: str, ranges: list[tuple[str, _OfRanges]]) -> KvAction:
    kind, payload = action.action_type, action.payload
    if kind in _OTHERS:
        return _rejected(action, _OTHERS[kind])
    if kind not in _KINDS:
        return _rejected(action, f"there is no action {kind[:100]}; there are {', '.join(_KINDS)}.")
    if action.action_version.split(".")[0] not in ("0", "1"):
        return _rejected(action, f"version {action.action_version} of {kind} is not known; 1.0 is.")
    if kind == "kv.retain" and "directives" in payload:
        of_ranges = _checked(_OfRanges, payload, field)
        ranges.append((field, of_ranges))
        return _retained_ranges(action, of_ranges, origin)
    verb, of_kind = _KINDS[kind]
    its = _checked(of_kind, payload, field)
    if isinstance(its, _Demote) and its.session_generation is not None:
        return _rejected(action, "generations of a session are not counted; leave session_generation out.")
    notes, hashes = list[str](), isinstance(its, _Blocks) and its.block_hashes
    if hashes:
        notes.append("Blocks are not looked up by their hashes; its session, or its request, is.")
    is_own = its.session_id is None or its.session_id == origin.session_id
    if its.session_id is None and origin.request_id is None:
        return _rejected(action, "outside of a request session_id has to name its object.")
    if isinstance(its, _Blocks) and origin.request_id is None and (its.execute_at or its.include_current_request):
        return _rejected(action, "execute_at and include_current_request are of a request, and there is none.")
    if isinstance(its, _Blocks) and its.session_id is None and not its.include_current_request and hashes:
        return _rejected(action, f"{notes[0]} without include_current_request it names neither.")
    name = its.session_id if its.session_id is not None else origin.session_id
    session = None if name is None else scoped(origin.tenant, name)
    is_ours = is_own and origin.request_id is not None
    if session is None and kind == "kv.deref":
        return _rejected(action, "it is of a session, and the request names none.")
    more: dict[str, Any] = {}
    if isinstance(its, _Retain):
        if not (level := level_of(its.priority)):
            return KvAction(action.action_id, notes=[*notes, _RELEASES], is_clipped=True)
        notes.append(f"Priority {its.priority} is level {level} of {LEVELS}.")
        more = {"priority": level, "lasts": its.ttl_seconds}
        if session is not None:
            more["waits_for"] = its.waits_for
        elif its.waits_for is not None:
            notes.append(_NO_SESSION)
    elif isinstance(its, _Pin):
        more = {"lasts": its.ttl_seconds, "tenant": origin.tenant}
    elif verb == "unpin":
        more = {"tenant": origin.tenant}
    is_clipped = bool(hashes) or notes[-1:] == [_NO_SESSION]
    if session is not None and not (is_ours and verb == "prefetch"):
        # A request leaves its content when it has finished.
        planned = Planned(Hint(action=verb, session=session, **more), at_end=is_ours)
    elif verb in ("pin", "unpin"):
        # Its outcome is known at the end, too.
        planned = Planned(Hint(action=verb, **more), True, origin.prompt_len)
    else:
        # The scheduler itself keeps it until the request ends.
        planned = Planned(Hint(action=verb, request=origin.request_id, **more), at_end=False)
    return KvAction(action.action_id, [planned], notes, is_clipped)


# By type of action, our verb and the type of its payload.
_KINDS: dict[str, tuple[Any, type[_OfSession]]] = {
    "kv.retain": ("retain", _Retain),
    "kv.evict": ("demote", _Blocks),
    "kv.deref": ("end", _OfSession),
    "kv.demote": ("demote", _Demote),
    "kv.prefetch": ("prefetch", _OfSession),
    "kv.pin": ("pin", _Pin),
    "kv.unpin": ("unpin", _OfSession),
}
_RELEASES = "Priority 0, or a duration of 0, retains nothing; what was retained before stays so until that ends."
_NO_SESSION = "waits_for is of a session, and the request names none."


def _retained_ranges(action: KvHintAction, its: _OfRanges, origin: Origin) -> KvAction:
    """Return hints for ranges of a request's tokens. They become prefixes: a block is found with all before it, or not at all."""
    if origin.request_id is None:
        return _rejected(action, "directives are ranges of a request's tokens, and there is none.")
    notes, parts, hints, covered = list[str](), list[str](), list[Planned](), 0
    own = None if origin.session_id is None else scoped(origin.tenant, origin.session_id)
    waits_for = its.waits_for if own is not None else None
    if its.scope is not None:
        parts.append("Scope is not used: what is retained is its session's, or its request's.")
    if its.waits_for is not None and own is None:
        parts.append(_NO_SESSION)
    whole: Planned | None = None
    for each in sorted(its.directives, key=_start_of):
        start = origin.prompt_len if each.covers_output else each.start
        end = None if each.covers_output else each.end
        if not (level := level_of(each.priority)) or each.duration == 0:
            parts.append(_RELEASES)
            continue
        notes.append(f"Priority {each.priority} is level {level} of {LEVELS}.")
        if start > covered:
            parts.append(f"Tokens {covered:,} to {start:,} are kept with those behind them.")
        if end is not None and end > origin.prompt_len:
            parts.append(f"Of a range that ends at {end:,} the {origin.prompt_len:,} tokens of the prompt are kept.")
            end = origin.prompt_len
        covered = max(covered, origin.prompt_len if end is None else end)
        more: dict[str, Any] = {"priority": level, "lasts": None if each.duration is None else float(each.duration)}
        if end is not None:
            hints.append(Planned(Hint(action="retain", **more), True, end))
        elif whole is None and own is None:
            whole = Planned(Hint(action="retain", request=origin.request_id, **more), at_end=False)
        elif whole is None:
            whole = Planned(Hint(action="retain", session=own, waits_for=waits_for, **more), at_end=True)
    if whole is None and waits_for is not None:
        whole = Planned(Hint(action="retain", session=own, waits_for=waits_for), at_end=True)
    every = [*([whole] if whole is not None else []), *hints]
    return KvAction(action.action_id, every, list(dict.fromkeys([*notes, *parts])), bool(parts))


def _start_of(directive: _Directive) -> float:
    return math.inf if directive.covers_output else directive.start


def _check_ranges(ranges: list[tuple[str, _OfRanges]]) -> None:
    """Raise ApiError if directives of an envelope contradict each other, as vLLM does."""
    if sum(len(its.directives) for _, its in ranges) > MAX_DIRECTIVES:
        raise wrong(f"an envelope may have {MAX_DIRECTIVES} directives.", ranges[-1][0] + ".directives")
    for field, its in ranges:
        if its.scope != ranges[0][1].scope:
            raise wrong("actions of one envelope have one scope.", f"{field}.scope")
        for place, each in enumerate(its.directives):
            name = f"{field}.directives.{place}"
            if each.end is not None and each.end <= each.start:
                raise wrong(f"end has to be above start, {each.start}; got {each.end}.", f"{name}.end")
            if each.covers_output and (each.start or each.end is not None):
                raise wrong("covers_output does not go with start or end.", f"{name}.covers_output")
    ordered = sorted((each for _, its in ranges for each in its.directives), key=_start_of)
    for before, each in pairwise(ordered):
        if each.priority > before.priority:
            raise wrong(
                f"priorities must not rise along the tokens: {each.priority} at {each.start} comes after {before.priority}.",
                f"{ranges[-1][0]}.directives",
            )


def _checked(kind: type[Any], payload: dict[str, Any], field: str) -> Any:
    try:
        return kind.model_validate(payload)
    except ValidationError as error:
        raise refused(error.errors(), tuple(field.split("."))) from None


def _rejected(action: KvHintAction, why: str) -> KvAction:
    return KvAction(action.action_id, rejected=why)
