"""The answer to one call: the engine's outputs, written to the client whole or as they come.

    wait for the first outputs ─> status and headers ─> pieces ─> usage, [DONE]

Nothing is sent before the first outputs, so that an error until then has its own HTTP status. When the client goes, a
deadline passes or the queue takes too long, the call ends, and its requests with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.responses import JSONResponse, Response

from paged.engine.results import Completion, EngineOutput, Timings
from paged.errors import ClientGone, EngineAway, GrammarFailed, NoTokenAllowed, PagedError, RefusedByEngine
from paged.scheduler import RequestUsage
from paged.serving.answers import DONE, Form, Usage, event
from paged.serving.bodies import StreamOptions, field_of
from paged.serving.engine_client import Inbox
from paged.serving.errors import SERVER, ApiError, unavailable, wrong
from paged.serving.records import RequestRecord

Send = Callable[[dict[str, Any]], Any]
_BODY = "http.response.body"
# The engine's errors for a request that is too long.
_TOO_LONG = {"NeverFits"}


@dataclass(eq=False, kw_only=True)
class Answering(Response):
    """The response to one call. Calls `on_end` once, however it ends.

    opening_text   the prompts' texts, if a stream is to begin with them; else None
    form_param     the body's field that describes the form of the answers
    sending_since  when the write that waits for the client began; None: none waits
    task           writes
    """

    inbox: Inbox
    form: Form
    record: RequestRecord
    prompts: list[list[int]]
    options: StreamOptions
    opening_text: list[str] | None
    form_param: str
    clock: Callable[[], float]
    on_end: Callable[[Answering], None]
    usage: Usage = field(default_factory=Usage)
    num_out: int = 0
    lengths: dict[int, int] = field(default_factory=dict)
    sending_since: float | None = None
    task: asyncio.Task[Any] | None = None
    background = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Write the answer, or an error, and end the call."""
        self.task = asyncio.current_task()
        listener = asyncio.get_running_loop().create_task(self._listen(receive))
        record = self.record
        try:
            if record.streams:
                await self._stream(send)
            else:
                await self._whole(send)
        except (ClientGone, asyncio.CancelledError):
            record.status, record.error = 499, record.error or "client_gone"
            record.finish_reason = "abort"
        except PagedError as error:
            found = self._as_api_error(error)
            record.status, record.error = found.status, found.code or found.kind
            record.finish_reason = _reason_of(found)
            await error_response(found)(scope, receive, send)
        finally:
            listener.cancel()
            record.ended = self.clock()
            self.on_end(self)

    def _as_api_error(self, error: PagedError) -> ApiError:
        """Return the error as the client gets it, with the form's field as the body names it."""
        found = as_api_error(error)
        if found.param == "structured_outputs":
            found.param = self.form_param
        return found

    async def _listen(self, receive: Any) -> None:
        await until_gone(receive)
        self.inbox.fail(ClientGone("the client has gone."))

    async def _whole(self, send: Send) -> None:
        while await self.inbox.take():
            pass
        completions = [self.inbox.completions[place] for place in range(len(self.prompts))]
        record = self.record
        for place, completion in enumerate(completions):
            _must_be_answered(completion.error, completion.outputs[0].finish_reason)
            self._account(completion)
            if completion.prompt_logprobs is not None:
                completions[place] = msgspec.structs.replace(completion, prompt_token_ids=self.prompts[place])
        record.finish_reason = completions[0].outputs[0].finish_reason
        if record.answer is not None:
            record.answer = "".join(output.text for completion in completions for output in completion.outputs)
        body = self.form.whole(completions, self.usage, self.inbox.hint_outcomes)
        await self._start(send, {"content-type": "application/json", "content-length": str(len(body))})
        await self._write(send, body, more=False)

    async def _stream(self, send: Send) -> None:
        news = await self.inbox.take()
        for _, output in news:
            _must_be_answered(output.error, output.finish_reason)
        # The last one keeps a proxy from buffering pieces.
        headers = {"content-type": "text/event-stream", "cache-control": "no-cache", "x-accel-buffering": "no"}
        await self._start(send, headers)
        opening = self._openings()
        if opening:
            await self._write(send, opening)
        try:
            while news:
                pieces = self._pieces(news)
                if pieces:
                    await self._write(send, pieces)
                news = await self.inbox.take()
        except (ClientGone, asyncio.CancelledError):
            raise
        except PagedError as error:
            failure = self._as_api_error(error)
            self.record.error, self.record.finish_reason = failure.code or failure.kind, _reason_of(failure)
            await self._write(send, event(failure.body()) + DONE, more=False)
            return
        last = self.form.last_piece(self.usage if self.options.include_usage else None, self.inbox.hint_outcomes)
        await self._write(send, last + DONE, more=False)

    def _openings(self) -> bytes:
        """Return the beginning of each choice: the role of the message, or the echoed prompt."""
        num = len(self.prompts) * self.record.n
        if self.form.is_chat:
            return b"".join(self.form.opening(index) for index in range(num))
        if self.opening_text is None:
            return b""
        found = []
        for index in range(num):
            text = self.opening_text[index // self.record.n]
            piece = self.form.piece([EngineOutput("", [], text)], index)
            if piece is not None:
                found.append(piece)
        return b"".join(found)

    def _pieces(self, news: list[tuple[int, EngineOutput]]) -> bytes:
        """Return the new outputs as pieces, one a choice, and account them. Raises ApiError for one that has failed."""
        now, record, form = self.clock(), self.record, self.form
        if len(news) == 1:
            grouped = {news[0][0] * self.record.n + news[0][1].sequence: [news[0][1]]}
        else:
            grouped = {}
            for place, output in news:
                grouped.setdefault(place * self.record.n + output.sequence, []).append(output)
        found = []
        for index, outputs in grouped.items():
            num_tokens = 0
            for output in outputs:
                num_tokens += len(output.token_ids)
                _must_be_answered(output.error, output.finish_reason)
                if output.finish_reason is not None:
                    record.finish_reason = record.finish_reason or output.finish_reason
                if output.usage is not None:
                    self._take_usage(output.usage, output.timings)
            self.num_out += num_tokens
            self.lengths[index] = self.lengths.get(index, 0) + num_tokens
            usage = None
            if self.options.continuous_usage_stats:
                num_in = sum(map(len, self.prompts))
                usage = Usage(num_in, self.num_out, num_in + self.num_out)
            piece = form.piece(outputs, index, usage)
            if piece is not None:
                found.append(piece)
            if record.answer is not None:
                record.answer += "".join(output.text for output in outputs)
        if record.first is None and self.num_out:
            record.first = now
        record.last, record.output_tokens = now, self.num_out
        record.longest_answer = max(self.lengths.values())
        return b"".join(found)

    def _take_usage(self, used: RequestUsage, timings: Timings | None) -> None:
        record = self.record
        self.usage.add(used)
        record.cached_tokens += used.hit_tokens
        record.recomputed_tokens += used.recomputed_tokens
        record.swapped_blocks += used.swapped_blocks
        record.preemptions += used.preemptions
        if timings is not None and timings.longest_gap_s is not None:
            record.longest_pause_s = max(record.longest_pause_s, timings.longest_gap_s)

    def _account(self, completion: Completion) -> None:
        """Add a whole answer to the usage and the record."""
        record, timings = self.record, completion.timings
        if completion.usage is not None:
            self._take_usage(completion.usage, timings)
            record.output_tokens += completion.usage.output_tokens
        record.longest_answer = max(record.longest_answer, *(len(each.token_ids) for each in completion.outputs))
        if timings.ttft_s is not None:
            first = record.arrived + timings.ttft_s
            record.first = first if record.first is None else min(first, record.first)
            record.last = max(record.last or 0.0, record.arrived + timings.e2e_s)

    async def _start(self, send: Send, headers: dict[str, str]) -> None:
        self.record.status = 200
        raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})

    async def _write(self, send: Send, body: bytes, *, more: bool = True) -> None:
        self.sending_since = self.clock()
        await send({"type": _BODY, "body": body, "more_body": more})
        self.sending_since = None


def _reason_of(error: ApiError) -> str:
    return error.code if error.code in ("deadline", "queue_timeout") else "error"


def _must_be_answered(error: str | None, finish_reason: str | None) -> None:
    """Raise ApiError if the engine ended a request without an answer."""
    if error is not None and error.startswith(NoTokenAllowed.__name__):
        raise wrong("no token is allowed: the request's own limits exclude every one.", code="no_token_allowed")
    if error is not None and error.startswith(GrammarFailed.__name__):
        raise wrong(error.removeprefix(f"{GrammarFailed.__name__}: "), "structured_outputs", "invalid_value")
    if error is not None:
        raise ApiError(500, f"the engine could not finish this request: {error}", kind=SERVER, code="engine_error")
    if finish_reason == "rejected":
        raise wrong("the request does not fit into the engine's memory.", code="context_length_exceeded")
    if finish_reason == "abort":
        raise ApiError(500, "the request was aborted.", kind=SERVER, code="aborted")


async def until_gone(receive: Any) -> None:
    """Wait until the client of a call has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def as_api_error(error: PagedError) -> ApiError:
    """Return the error as a client gets it."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RefusedByEngine):
        return wrong(str(error), field_of(str(error)), "context_length_exceeded" if error.kind in _TOO_LONG else None)
    if isinstance(error, EngineAway):
        return unavailable(str(error), error.back_in_s, error.code)
    return ApiError(500, str(error), kind=SERVER, code="internal_error")


def error_response(error: PagedError, headers: dict[str, str] | None = None) -> JSONResponse:
    """Return the response for an error, with these headers and the error's own."""
    found = as_api_error(error)
    return JSONResponse(found.body(), found.status, {**(headers or {}), **found.headers()})
