"""The server without its sockets: checks calls, admits them, sends them to the engine, answers and accounts them.

body ─> tokens and parameters ─> gate ─> engine ─> Answering ─> record
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from uuid import uuid4

from paged.base.extras import import_with_extra
from paged.errors import PagedError
from paged.model.checkpoint import is_shipped, named_or_shipped
from paged.model.tokenizer import load_tokenizer
from paged.sampling.params import SamplingParams
from paged.serving.answering import Answering, as_api_error
from paged.serving.answers import Form
from paged.serving.asking import Asking
from paged.serving.bodies import ChatRequest, CompletionRequest, StreamOptions
from paged.serving.engine_client import EngineClient, Inbox
from paged.serving.errors import TIMEOUT, ApiError, overloaded, unavailable, wrong
from paged.serving.gate import Gate, fingerprint_of, later
from paged.serving.kv_hints import KvAction, Origin, actions_of, scoped
from paged.serving.metrics import Metrics
from paged.serving.records import RequestRecord
from paged.serving.request_log import RequestLog
from paged.serving.settings import Settings
from paged.serving.viewers import Viewers
from paged.serving.wire import Add, Ready

SWEEP_S = 1.0
INLINE_CHARS = 8_000
"""Another thread tokenizes longer bodies."""
MOST_NAMED = 1000
"""Calls that can be found by their X-Request-Id."""
LAST_S = 1.0
"""Time for the errors of calls that a drain cut off."""


@dataclass(slots=True)
class Call:
    """One call.

    id        its X-Request-Id, for the client's logs and ours: several calls may have the same; else `own_id`
    own_id    made by the server; no other call has it
    client    its key, or the address that it comes from
    on_begun  called when the engine begins with one of its prompts
    routed    the router that chose this server, and the router's number of the call
    """

    id: str
    own_id: str
    path: str
    arrived: float
    client: str
    tenant: str | None
    body: bytes
    traceparent: str | None = None
    on_begun: Callable[[], None] | None = None
    routed: tuple[str, int] | None = None


class Front:
    """A server's calls. Belongs to one event loop."""

    def __init__(
        self,
        settings: Settings,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        new_id: Callable[[], str] = lambda: uuid4().hex,
    ) -> None:
        self.settings = settings
        self.clock, self.wall, self.new_id = clock, wall, new_id
        self.folder = Path(named_or_shipped(settings.engine.model.model))
        self.names = settings.names
        self.began = int(wall())
        self.asking = Asking(settings, load_tokenizer(self.folder), is_shipped(self.folder))
        self.traces = None
        if settings.traces_endpoint is not None:
            tracing = import_with_extra("paged.serving.tracing", "serving.tracing")
            self.traces = tracing.Traces(settings.traces_endpoint, model_name=self.names[0])
        self.gate = Gate(settings)
        self.metrics = Metrics(self.names[0])
        self.log = (
            None if settings.log == "off" else RequestLog(sys.stderr, with_prompts=settings.log_prompts, clock=wall)
        )
        on_said = None if self.log is None else self.log.pass_on
        # After all that may be refused: it makes a folder.
        self.engine = EngineClient(settings, self.names[0], clock, self.metrics, on_said)
        self.viewers = Viewers(self.engine)
        self.metrics.watch(
            open_streams=lambda: sum(answering.record.streams for answering in self._open),
            log_lines_lost=lambda: 0 if self.log is None else self.log.lost,
            spans_lost=lambda: 0 if self.traces is None else self.traces.lost,
        )
        self._open: set[Answering] = set()
        # By tenant and X-Request-Id, which the tenant chooses.
        self._named: OrderedDict[tuple[str | None, str], str] = OrderedDict()
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the engine, and the search for clients that read nothing."""
        self.engine.start()
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep())

    async def close(self) -> None:
        """End the engine, its requests and the streams, then the log and the traces."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        self.viewers.close()
        await self.engine.close()
        for each in (self.log, self.traces):
            if each is not None:
                await asyncio.to_thread(each.close)

    async def wait_until_ready(self) -> Ready:
        """Wait until the engine takes requests. Raises EngineAway if it cannot begin."""
        return await self.engine.wait_until_ready()

    async def drain(self, timeout_s: float) -> None:
        """Take no more calls, and wait up to `timeout_s` for the open ones to end; the others get an error."""
        self.engine.is_draining = True
        self.viewers.close()
        await while_any(lambda: self.num_open, self.clock, timeout_s)
        for answering in list(self._open):
            answering.inbox.fail(
                unavailable("the server ends, and this request was not finished in time.", None, "shutdown")
            )
        await while_any(lambda: self.num_open, self.clock, LAST_S)

    @property
    def num_open(self) -> int:
        """Calls that are being answered."""
        return len(self._open)

    def engine_id(self, name: str, tenant: str | None) -> str:
        """Return the engine's id of the request that a tenant calls `name`.

        The first of: its latest call with this X-Request-Id; a live request of this id; the call whose answer has this id. Of a call with
        several prompts it is the first.
        """
        return self._named.get((tenant, name), name if self.engine.is_alive(name) else f"{name}-0")

    def engine_ids(self, name: str) -> list[str]:
        """Return the engine's ids that `name` may stand for: itself, the call whose answer has this id, any tenant's latest call with this X-Request-Id."""
        named = (found for (_, own), found in reversed(self._named.items()) if own == name)
        return [name, f"{name}-0", *islice(named, 1)]

    def must_have_begun(self) -> None:
        """Raise EngineAway if the engine has not begun for the first time, or never will again."""
        if self.engine.state in ("starting", "dead"):
            self.engine.must_take()

    def must_know(self, model: str | None) -> str:
        """Return the model's name; None stands for the first. Raises ApiError for an unknown one."""
        if model is not None and model not in self.names:
            raise ApiError(
                404,
                f'no model "{model[:100]}" here; there is {", ".join(self.names)}.',
                code="model_not_found",
                param="model",
            )
        return model or self.names[0]

    async def completion(self, body: CompletionRequest, call: Call) -> Answering:
        """Answer a completion. Raises ApiError before anything has begun."""
        with self._accounting(call):
            longest, model = self.engine.must_take().max_model_len, self.must_know(body.model)
            size = len(call.body)
            params = await self._away(size, lambda: self.asking.completion_params(body))
            if body.echo and body.stream and body.logprobs is not None:
                raise wrong("echo with logprobs does not go with stream.", "echo")
            prompts = await self._away(size, lambda: self.asking.prompts(body, longest))
            opening = [self.asking.text(prompt) for prompt in prompts] if body.echo and body.stream else None
            form = Form(f"cmpl-{call.own_id}", int(self.wall()), model, is_chat=False, num_logprobs=body.logprobs)
            return self._answering(call, body, prompts, params, form, opening)

    async def chat(self, body: ChatRequest, call: Call) -> Answering:
        """Answer a conversation. Raises ApiError before anything has begun."""
        with self._accounting(call):
            ready, model = self.engine.must_take(), self.must_know(body.model)
            tools = body.tools if body.tool_choice != "none" else None
            size, most = len(call.body), ready.max_model_len
            prompt = await self._away(
                size, lambda: self.asking.chat(body.messages, tools, body.chat_template_kwargs, most)
            )
            room = _room(len(prompt), body.n or 1, ready)
            params = await self._away(size, lambda: self.asking.chat_params(body, room))
            num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
            form = Form(f"chatcmpl-{call.own_id}", int(self.wall()), model, is_chat=True, num_logprobs=num_logprobs)
            return self._answering(call, body, [prompt], params, form, None)

    @contextmanager
    def _accounting(self, call: Call) -> Iterator[None]:
        try:
            yield
        except PagedError as error:
            refused = as_api_error(error)
            self._refuse(call, refused)
            raise refused from None

    async def _away(self, size: int, what: Callable[[], Any]) -> Any:
        """Run a function, in another thread if the body is long."""
        return what() if size <= INLINE_CHARS else await asyncio.to_thread(what)

    def _answering(
        self,
        call: Call,
        body: CompletionRequest | ChatRequest,
        prompts: list[list[int]],
        params: SamplingParams,
        form: Form,
        opening: list[str] | None,
    ) -> Answering:
        settings, engine = self.settings, self.engine
        # Again: the engine may have died while another thread read the prompts.
        ready = self.engine.must_take()
        for prompt in prompts:
            _must_fit(prompt, params, ready)
        ids = [f"{form.id}-{place}" for place in range(len(prompts))]
        actions, session_id = self._hints_of(body, call.tenant, ids[0], prompts)
        streams = bool(body.stream)
        record = RequestRecord(
            call.id,
            call.path,
            call.arrived,
            call.tenant,
            streams,
            params.n,
            params.max_tokens,
            prompt_tokens=sum(map(len, prompts)),
            answers=len(prompts) * params.n,
        )
        if settings.log_prompts:
            record.prompt, record.answer = call.body.decode("utf-8", "replace"), ""
        now = self.clock()
        deadline_s = settings.request_timeout_s if body.deadline_s is None else float(body.deadline_s)
        self._enter(call, prompts, now, deadline_s)
        inbox = Inbox()
        own_name = (call.tenant, call.id)
        self._named[own_name] = ids[0]
        self._named.move_to_end(own_name)
        if len(self._named) > MOST_NAMED:
            self._named.popitem(last=False)
        waits = set(range(len(prompts)))

        def leave(place: int) -> None:
            if place in waits:
                waits.remove(place)
                self.gate.leave(call.tenant, 1, len(prompts[place]))

        def begin(place: int) -> None:
            if call.on_begun is not None:
                call.on_begun()
            leave(place)

        inbox.on_begun = begin
        loop = asyncio.get_running_loop()
        timers: list[asyncio.TimerHandle] = []

        def end(answering: Answering) -> None:
            for timer in timers:
                timer.cancel()
            self._open.discard(answering)
            engine.abort(ids)
            for place in list(waits):
                leave(place)
            record.begun = inbox.begun
            self.metrics.ended(record)
            self._write_down(record, call)

        answering = Answering(
            inbox=inbox,
            form=form,
            record=record,
            prompts=prompts,
            options=body.stream_options or StreamOptions(),
            opening_text=opening,
            form_param="response_format" if body.structured_outputs is None else "structured_outputs",
            clock=self.clock,
            on_end=end,
        )
        self._open.add(answering)
        salt = salt_of(call.tenant, body.cache_salt)
        adds = [
            Add(
                request_id,
                prompt,
                params,
                call.arrived,
                streams,
                call.tenant,
                body.priority or 0,
                salt,
                session_id,
                actions,
                call.routed,
            )
            for request_id, prompt in zip(ids, prompts, strict=True)
        ]
        engine.submit(adds, inbox)
        record.submitted = now
        if deadline_s is not None:
            late = ApiError(504, f"the request did not finish within {deadline_s:g} s.", kind=TIMEOUT, code="deadline")
            timers.append(loop.call_later(max(0.0, call.arrived + deadline_s - now), inbox.fail, late))
        if settings.max_queue_s is not None:
            timers.append(loop.call_later(settings.max_queue_s, self._waited_too_long, answering))
        return answering

    def _hints_of(
        self, body: CompletionRequest | ChatRequest, tenant: str | None, request_id: str, prompts: list[list[int]]
    ) -> tuple[list[KvAction] | None, str | None]:
        """Return the actions of a body's hints, and the engine's id of its session. Raises ApiError."""
        for name in ("session_id", "kv_hints"):
            if getattr(body, name) is not None and len(prompts) > 1:
                raise wrong(f"{name} goes with one prompt; there are {len(prompts):,}.", name)
        session_id = None if body.session_id is None else scoped(tenant, body.session_id)
        if body.kv_hints is None:
            return None, session_id
        origin = Origin(tenant, request_id, body.session_id, len(prompts[0]))
        return actions_of(body.kv_hints, origin), session_id

    def _enter(self, call: Call, prompts: list[list[int]], now: float, deadline_s: float | None) -> None:
        """Take a place in the queue for each prompt of a call. Raises ApiError (429)."""
        forecast = self.forecast(now)
        num, behind = len(prompts), self.gate.all.num
        if deadline_s is not None and behind < len(forecast) and forecast[behind] > deadline_s:
            raise overloaded(
                f"the request could begin in about {forecast[behind]:.1f} s, past its deadline of {deadline_s:g} s.",
                forecast[behind],
                "deadline",
            )
        self.gate.enter(call.tenant, fingerprint_of(call.client, call.body), num, sum(map(len, prompts)), now, forecast)

    def forecast(self, now: float) -> list[float]:
        """Return in how many seconds each waiting request begins, then requests behind them, by the engine's last figures."""
        figures = self.engine.figures
        if figures is None:
            return []
        return later(figures.forecast, self.engine.num_begun, now - figures.now)

    def _waited_too_long(self, answering: Answering) -> None:
        if answering.inbox.begun is None:
            limit = self.settings.max_queue_s
            forecast = self.forecast(self.clock())
            wait = forecast[0] if forecast else 1.0
            answering.inbox.fail(
                overloaded(f"the request waited for {limit:g} s, and did not begin.", max(1.0, wait), "queue_timeout")
            )

    async def _sweep(self) -> None:
        """End calls whose clients have read nothing for `stall_timeout_s`."""
        while True:
            await asyncio.sleep(SWEEP_S)
            late = self.clock() - self.settings.stall_timeout_s
            for answering in list(self._open):
                if answering.sending_since is not None and answering.sending_since < late:
                    assert answering.task is not None, "it writes"
                    answering.record.error = "client_stalled"
                    answering.task.cancel()

    def _refuse(self, call: Call, error: ApiError) -> None:
        """Account a call that was refused."""
        record = RequestRecord(
            call.id, call.path, call.arrived, call.tenant, status=error.status, error=error.code or error.kind
        )
        record.ended = self.clock()
        self.metrics.refused(record)
        self._write_down(record, call)

    def _write_down(self, record: RequestRecord, call: Call) -> None:
        if self.log is not None:
            self.log.write(record)
        if self.traces is not None:
            self.traces.span(record, call.traceparent, self.wall())


async def while_any(num: Callable[[], int], clock: Callable[[], float], limit_s: float) -> None:
    """Wait until `num` is 0, at most `limit_s` seconds."""
    until = clock() + limit_s
    while num() and clock() < until:
        await asyncio.sleep(0.02)


def _room(prompt_len: int, num_sequences: int, ready: Ready) -> int:
    """Return the most tokens of each of `num_sequences` answers to a prompt: they run together, and share only the prompt's full blocks."""
    room = ready.longest(prompt_len) - prompt_len
    if num_sequences == 1:
        return room
    shared = prompt_len // ready.block_size if ready.prefix_caching else 0
    each = shared + max(0, ready.num_blocks - shared) // num_sequences
    # K and V of the last token are never written.
    return min(room, each * ready.block_size - prompt_len + 1)


def _must_fit(prompt: list[int], params: SamplingParams, ready: Ready) -> None:
    longest, num = ready.longest(len(prompt)), params.num_sequences
    if len(prompt) + params.max_tokens > longest:
        raise wrong(
            f"the prompt has {len(prompt):,} tokens, and its answer may have {params.max_tokens:,}; the most is {longest:,} in all.",
            "max_tokens" if len(prompt) < longest else "prompt",
            "context_length_exceeded",
        )
    name = "n" if params.best_of is None else "best_of"
    if num > ready.max_sequences:
        raise wrong(f"{num:,} answers run together; the server runs {ready.max_sequences:,} sequences at a time.", name)
    room = _room(len(prompt), num, ready)
    if params.max_tokens > room:
        raise wrong(
            f"{num:,} answers of up to {params.max_tokens:,} tokens run together, and do not fit into {ready.num_blocks:,} blocks of "
            f"{ready.block_size} tokens. They would with max_tokens {max(room, 0):,}, or a smaller {name}.",
            "max_tokens" if room > 0 else name,
            "context_length_exceeded",
        )
    highest = max(prompt)
    if highest >= ready.vocabulary_size:
        raise wrong(f"token id {highest:,} is outside the vocabulary of {ready.vocabulary_size:,}.", "prompt")


def salt_of(tenant: str | None, salt: str | None) -> str | None:
    """Return the engine's salt of a tenant's salt: two tenants never share one, whatever they choose."""
    if tenant is None and salt is None:
        return None
    name = "" if tenant is None else tenant
    return f"{len(name) if tenant is not None else '-'}:{name}{salt or ''}{'+' if salt is not None else ''}"
