"""Calls of clients about an engine's memory: hints outside of requests, sessions, and why no more of a prompt is in the cache.

A session belongs to its tenant; other tenants do not see it.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from paged.scheduler import Hint, HintOutcome, SessionView
from paged.serving.bodies import ExplainRequest
from paged.serving.errors import ApiError, wrong
from paged.serving.front import Front, salt_of
from paged.serving.kv_hints import (
    KvHint,
    KvHintsEnvelope,
    KvOutcome,
    Origin,
    actions_of,
    scoped,
    shown,
    unscoped,
)

MOST_LISTED = 200


async def hint(front: Front, body: KvHint, tenant: str | None) -> HintOutcome:
    """Carry out a hint of ours. Raises ApiError."""
    targets = [name for name in ("session_id", "request_id", "prompt") if getattr(body, name) is not None]
    if len(targets) != 1:
        names = " and ".join(targets) or "none"
        raise wrong(
            f"a hint names one of session_id, request_id and prompt; got {names}.", (targets or ["session_id"])[-1]
        )
    if body.cache_salt is not None and body.prompt is None:
        raise wrong("cache_salt goes with prompt.", "cache_salt")
    if body.waits_for is not None and (body.action != "retain" or body.session_id is None):
        raise wrong("waits_for goes with retain of a session_id.", "waits_for")
    if body.lasts is not None and body.action not in ("retain", "pin"):
        raise wrong(f"lasts goes with retain and pin; the action is {body.action}.", "lasts")
    if "priority" in body.model_fields_set and body.action != "retain":
        raise wrong(f"priority goes with retain; the action is {body.action}.", "priority")
    if body.action == "end" and body.session_id is None:
        raise wrong("end is of a session_id.", "session_id")
    request_id = None
    if body.request_id is not None:
        request_id = front.engine_id(body.request_id, tenant)
        if not front.engine.is_alive(request_id) or front.engine.tenant_of(request_id) != tenant:
            return HintOutcome("missing", f'no request "{body.request_id[:100]}" is alive.')
    asked = Hint(
        action=body.action,
        session=None if body.session_id is None else scoped(tenant, body.session_id),
        request=request_id,
        tokens=None if body.prompt is None else await _encoded(front, body.prompt),
        salt=None if body.prompt is None else salt_of(tenant, body.cache_salt),
        priority=body.priority,
        lasts=body.lasts,
        waits_for=body.waits_for,
        tenant=tenant if body.action in ("pin", "unpin") else None,
    )
    return await _carried_out(front, asked, tenant)


async def envelope(front: Front, body: KvHintsEnvelope, tenant: str | None) -> dict[str, Any]:
    """Carry out the actions of an envelope that came without a request. Raises ApiError."""
    outcomes = list[KvOutcome]()
    for action in actions_of(body, Origin(tenant), ""):
        of_hints = [await _carried_out(front, each.hint, tenant) for each in action.hints]
        outcomes.append(action.concluded(of_hints, tenant))
    return {"message_id": body.message_id, "kv_hint_outcomes": outcomes}


async def sessions(front: Front, tenant: str | None, limit: int) -> dict[str, Any]:
    """Return a tenant's sessions, the latest ended turns first. Raises EngineAway."""
    views = await _asked(front, list[SessionView], "sessions", scoped(tenant, ""), limit=limit)
    return {"sessions": [_shown(front, each) for each in views or ()]}


async def session(front: Front, tenant: str | None, session_id: str) -> dict[str, Any]:
    """Return one session. Raises ApiError (404) and EngineAway."""
    found = await _asked(front, SessionView, "session", scoped(tenant, session_id))
    if found is None:
        raise _unknown(session_id)
    return _shown(front, found)


async def end(front: Front, tenant: str | None, session_id: str) -> HintOutcome:
    """End a session: no further turn of it comes. Raises ApiError (404) and EngineAway."""
    outcome = await _carried_out(front, Hint(action="end", session=scoped(tenant, session_id)), tenant)
    if outcome.status == "missing":
        raise _unknown(session_id)
    return outcome


async def explain(front: Front, body: ExplainRequest) -> bytes:
    """Return what of a prompt is cached, and why no more is, as JSON. Raises ApiError."""
    tokens = await asyncio.to_thread(front.asking.one_text, body, _most(front))
    _within(front, tokens, "prompt" if body.messages is None else "messages")
    asked = Hint(action="prefetch", tokens=tokens, salt=salt_of(body.tenant, body.cache_salt))
    return await front.engine.ask("prefix", hint=asked) or b""


def _most(front: Front) -> int:
    """Most tokens of a prompt. Raises EngineAway."""
    return front.engine.must_take().max_model_len


async def _encoded(front: Front, prompt: str | list[int]) -> list[int]:
    """Return the token ids of a prompt. Raises ApiError, also for one that is too long."""
    if not isinstance(prompt, str):
        return _within(front, prompt)
    return _within(front, await asyncio.to_thread(front.asking.encoded, prompt, _most(front)))


def _within(front: Front, tokens: list[int], param: str = "prompt") -> list[int]:
    if len(tokens) > _most(front):
        reason = f"the prompt has {len(tokens):,} tokens; the most is {_most(front):,}."
        raise wrong(reason, param, "context_length_exceeded")
    return tokens


def _shown(front: Front, view: SessionView) -> dict[str, Any]:
    """Return a session by its tenant's name for it, with Unix times."""
    found: dict[str, Any] = msgspec.to_builtins(view)
    for name in ("ended_at", "expected_at", "retained_until"):
        if found[name] is not None:
            found[name] = round(front.wall() + found[name] - front.clock(), 3)
    return found | {"id": shown(view.id)[1]}


async def _carried_out(front: Front, hint: Hint, tenant: str | None) -> HintOutcome:
    found = await _asked(front, HintOutcome, "hint", hint=hint)
    assert found is not None, "a hint has an outcome"
    return msgspec.structs.replace(found, reason=unscoped(found.reason, tenant))


async def _asked(front: Front, kind: Any, what: str, name: str = "", **more: Any) -> Any:
    """Return the engine's answer to an `Ask`, decoded as a `kind`; None for none."""
    answer = await front.engine.ask(what, name, **more)
    return None if answer is None else msgspec.json.decode(answer, type=kind)


def _unknown(session_id: str) -> ApiError:
    return ApiError(404, f'no session "{session_id[:100]}" is known.', code="session_not_found", param="session_id")
