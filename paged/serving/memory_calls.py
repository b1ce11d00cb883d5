"""Calls of clients about an engine's memory: hints outside of requests, sessions, and why no more of a prompt is in the cache.

A session belongs to its tenant; other tenants do not see it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from paged.scheduler import Hint, HintOutcome, SessionView
from paged.serving.asking import Asking
from paged.serving.bodies import ExplainRequest
from paged.serving.engine_client import EngineClient
from paged.serving.errors import ApiError, wrong
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


class MemoryCalls:
    """Answers calls about an engine's memory, in what JSON can be made of.

    salt_of  the engine's salt of a tenant and the tenant's own salt
    unix     Unix time of a time of the engine's clock
    """

    def __init__(
        self,
        engine: EngineClient,
        asking: Asking,
        salt_of: Callable[[str | None, str | None], str | None],
        unix: Callable[[float], float],
    ) -> None:
        self._engine, self._asking, self._salt_of, self._unix = engine, asking, salt_of, unix

    async def hint(self, body: KvHint, tenant: str | None, request_id: str | None) -> HintOutcome:
        """Carry out a hint of ours; `request_id` is the engine's id of the request that it names. Raises ApiError."""
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
        alive = request_id is not None and self._engine.is_alive(request_id)
        if request_id is not None and (not alive or self._engine.tenant_of(request_id) != tenant):
            return HintOutcome("missing", f'no request "{(body.request_id or "")[:100]}" is alive.')
        hint = Hint(
            action=body.action,
            session=None if body.session_id is None else scoped(tenant, body.session_id),
            request=request_id,
            tokens=None if body.prompt is None else await self._encoded(body.prompt),
            salt=None if body.prompt is None else self._salt_of(tenant, body.cache_salt),
            priority=body.priority,
            lasts=body.lasts,
            waits_for=body.waits_for,
            tenant=tenant if body.action in ("pin", "unpin") else None,
        )
        return await self._carried_out(hint, tenant)

    async def envelope(self, envelope: KvHintsEnvelope, tenant: str | None) -> dict[str, Any]:
        """Carry out the actions of an envelope that came without a request. Raises ApiError."""
        outcomes = list[KvOutcome]()
        for action in actions_of(envelope, Origin(tenant), ""):
            of_hints = [await self._carried_out(each.hint, tenant) for each in action.hints]
            outcomes.append(action.concluded(of_hints, tenant))
        return {"message_id": envelope.message_id, "kv_hint_outcomes": outcomes}

    async def sessions(self, tenant: str | None, limit: int) -> dict[str, Any]:
        """Return a tenant's sessions, the latest ended turns first. Raises EngineAway."""
        views = await self._asked(list[SessionView], "sessions", scoped(tenant, ""), limit=limit)
        return {"sessions": [self._shown(each) for each in views or ()]}

    async def session(self, tenant: str | None, session_id: str) -> dict[str, Any]:
        """Return one session. Raises ApiError (404) and EngineAway."""
        found = await self._asked(SessionView, "session", scoped(tenant, session_id))
        if found is None:
            raise _unknown(session_id)
        return self._shown(found)

    async def end(self, tenant: str | None, session_id: str) -> HintOutcome:
        """End a session: no further turn of it comes. Raises ApiError (404) and EngineAway."""
        outcome = await self._carried_out(Hint(action="end", session=scoped(tenant, session_id)), tenant)
        if outcome.status == "missing":
            raise _unknown(session_id)
        return outcome

    async def explain(self, body: ExplainRequest) -> bytes:
        """Return what of a prompt is cached, and why no more is, as JSON. Raises ApiError."""
        tokens = await asyncio.to_thread(self._asking.one_text, body, self._most)
        self._within(tokens, "prompt" if body.messages is None else "messages")
        hint = Hint(action="prefetch", tokens=tokens, salt=self._salt_of(body.tenant, body.cache_salt))
        return await self._engine.ask("prefix", hint=hint) or b""

    @property
    def _most(self) -> int:
        """Most tokens of a prompt. Raises EngineAway."""
        return self._engine.must_take().max_model_len

    async def _encoded(self, prompt: str | list[int]) -> list[int]:
        """Return the token ids of a prompt. Raises ApiError, also for one that is too long."""
        if not isinstance(prompt, str):
            return self._within(prompt)
        return self._within(await asyncio.to_thread(self._asking.encoded, prompt, self._most))

    def _within(self, tokens: list[int], param: str = "prompt") -> list[int]:
        if len(tokens) > self._most:
            reason = f"the prompt has {len(tokens):,} tokens; the most is {self._most:,}."
            raise wrong(reason, param, "context_length_exceeded")
        return tokens

    def _shown(self, view: SessionView) -> dict[str, Any]:
        """Return a session by its tenant's name for it, with Unix times."""
        found: dict[str, Any] = msgspec.to_builtins(view)
        for name in ("ended_at", "expected_at", "retained_until"):
            if found[name] is not None:
                found[name] = round(self._unix(found[name]), 3)
        return found | {"id": shown(view.id)[1]}

    async def _carried_out(self, hint: Hint, tenant: str | None) -> HintOutcome:
        found = await self._asked(HintOutcome, "hint", hint=hint)
        assert found is not None, "a hint has an outcome"
        return msgspec.structs.replace(found, reason=unscoped(found.reason, tenant))

    async def _asked(self, kind: Any, what: str, name: str = "", **more: Any) -> Any:
        """Return the engine's answer to an `Ask`, decoded as a `kind`; None for none."""
        answer = await self._engine.ask(what, name, **more)
        return None if answer is None else msgspec.json.decode(answer, type=kind)


def _unknown(session_id: str) -> ApiError:
    return ApiError(404, f'no session "{session_id[:100]}" is known.', code="session_not_found", param="session_id")
