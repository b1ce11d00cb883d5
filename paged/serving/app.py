"""The paths of a server: who may call each, and the front's method behind it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import PlainTextResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from paged import __version__
from paged.errors import PagedError
from paged.serving import memory_calls
from paged.serving.answering import error_response
from paged.serving.answers import encode
from paged.serving.bodies import ChatRequest, CompletionRequest, DetokenizeRequest, ExplainRequest, TokenizeRequest
from paged.serving.dashboard import page
from paged.serving.errors import AUTHENTICATION, PERMISSION, SERVER, ApiError, wrong
from paged.serving.front import Call, Front
from paged.serving.kv_hints import KvHint, KvHintsBody
from paged.serving.memory_calls import MOST_LISTED
from paged.serving.settings import Settings, digest_of, is_one_of
from paged.serving.strict import must_be_text, refused

_PAGES = {"/": "index", "/dashboard": "page", "/docs": "docs"}
_OPEN = {"/health", "/ping", "/ready", "/version", "/load", "/metrics", "/openapi.json", *_PAGES}
_ADMIN = ("/requests/", "/dashboard/", "/debug/", "/explain")
_PAGE_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; base-uri 'none'"
# A body of more than so many times `max_body_bytes` is not read to its end.
_LINGERS = 8
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}\Z")
_HOST = re.compile(rb"[A-Za-z0-9\-._~%!$&'()*+,;=:\[\]]*\Z")


class _Error(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Failure(BaseModel):
    """The body of an error."""

    error: _Error


_ERRORS: dict[int | str, Any] = {
    status: {"description": what, "model": Failure}
    for status, what in {
        400: "A request that can never be answered",
        401: "No key, or a wrong one",
        404: "No such model",
        408: "The body came too slowly",
        413: "The body is too long",
        429: "Too many requests; Retry-After says when to try again",
        503: "No engine takes requests now",
        504: "Not finished by its deadline",
    }.items()
}


class Guard:
    """The checks before a path is looked up: one host, a key, and a body that is neither too long nor too slow. Gives each call its ids,
    and each answer X-Request-Id."""

    def __init__(self, app: Any, settings: Settings, clock: Callable[[], float], new_id: Callable[[], str]) -> None:
        self._app = app
        self._settings = settings
        self._clock, self._new_id = clock, new_id
        self._keys: list[tuple[bytes, str | None]] = [(digest_of(key), None) for key in settings.api_keys]
        self._keys += [(digest_of(key), tenant.name) for tenant in settings.tenants for key in tenant.keys]
        self._digests = [digest for digest, _ in self._keys]
        self._needs_key = settings.needs_key
        # Without admin keys the server's own keys show its requests; a tenant's never do.
        self._admins = [digest_of(key) for key in settings.admin_keys or settings.api_keys]
        header = settings.tenant_header
        self._tenant_header = None if header is None else header.lower().encode("latin-1")
        self._root = settings.root_path.rstrip("/")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Check one request, and pass it on with its `Call` in `scope["state"]["call"]`."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        arrived = self._clock()
        own_id = self._new_id()
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = given if _REQUEST_ID.match(given) else own_id

        async def named(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            _must_name_one_host(scope)
            path = scope["path"].removeprefix(self._root)
            tenant, key = self._who(path, scope["method"], headers)
            body = await self._body(headers, receive) if scope["method"] in ("POST", "PUT", "PATCH") else b""
            must_be_text(body)
        except ApiError as error:
            # The rest of the body is not read.
            await error_response(error, {"connection": "close"})(scope, receive, named)
            return
        # Without keys a client may send any, so the key alone names none.
        client = key if self._needs_key else f"{(scope['client'] or ('',))[0]} {key}"
        traceparent = headers.get(b"traceparent", b"").decode("latin-1") or None
        call = Call(request_id, own_id, path, arrived, client, tenant, body, traceparent)
        scope["state"]["call"] = call
        is_read = False

        async def read() -> dict[str, Any]:
            nonlocal is_read
            if is_read:
                return await receive()  # type: ignore[no-any-return]
            is_read = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, read, named)

    def _who(self, path: str, method: str, headers: dict[bytes, bytes]) -> tuple[str | None, str]:
        """Return the tenant and the key of the caller. Raises ApiError."""
        shown = headers.get(b"authorization", b"").decode("latin-1")
        key = shown[7:].strip() if shown[:7].lower() == "bearer " else ""
        if method == "OPTIONS" or path in _OPEN:
            return None, ""
        if path.startswith(_ADMIN):
            if (self._needs_key or self._admins) and is_one_of(key, self._admins) is None:
                status, kind = (401, AUTHENTICATION) if not key else (403, PERMISSION)
                raise ApiError(status, "an admin key is needed here.", kind=kind, code="invalid_api_key")
            return None, key
        tenant = None
        if self._needs_key:
            found = is_one_of(key, self._digests)
            if found is None:
                raise ApiError(401, "a valid API key is needed.", kind=AUTHENTICATION, code="invalid_api_key")
            tenant = self._keys[found][1]
        if tenant is None and self._tenant_header is not None:
            named = headers.get(self._tenant_header, b"").decode("latin-1")[:256]
            tenant = named or None
        return tenant, key

    async def _body(self, headers: dict[bytes, bytes], receive: Any) -> bytes:
        """Return the whole body. Raises ApiError for one that is too long or too slow."""
        settings = self._settings
        most = settings.max_body_bytes
        announced = headers.get(b"content-length", b"0")
        if announced.isdigit() and (len(announced) > 18 or int(announced) > _LINGERS * most):
            raise _too_long(most)
        parts, total = [], 0
        try:
            async with asyncio.timeout(settings.body_timeout_s):
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        raise ApiError(499, "the client has gone.", code="client_gone")
                    part = message.get("body", b"")
                    total += len(part)
                    if total <= most:
                        parts.append(part)
                    else:
                        # A client that still writes would not read the answer: read the rest, and drop it.
                        parts.clear()
                    if total > _LINGERS * most or (total > most and not message.get("more_body", False)):
                        raise _too_long(most)
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {settings.body_timeout_s:g} s.") from None


def _must_name_one_host(scope: Any) -> None:
    """Raise ApiError unless a request of HTTP/1.1 names one host, in one header, as RFC 9112 demands."""
    hosts = [value.strip() for name, value in scope["headers"] if name == b"host"]
    if len(hosts) > 1 or (not hosts and scope["http_version"] == "1.1"):
        raise wrong(f"a request has one header Host; this one has {len(hosts)}.")
    if hosts and _HOST.match(hosts[0]) is None:
        raise wrong("the header Host names no host.")


def _too_long(most: int) -> ApiError:
    return ApiError(413, f"the body is longer than {most:,} bytes.", code="body_too_long")


def build_app(front: Front) -> Any:
    """Return the ASGI application of a front. It starts and closes the front."""
    return guarded(paths_of(front), front.settings, front.clock, front.new_id)


def guarded(app: Any, settings: Settings, clock: Callable[[], float], new_id: Callable[[], str]) -> Any:
    """Return an ASGI application behind `Guard`, and behind CORS where origins are allowed."""
    found: Any = Guard(app, settings, clock, new_id)
    if settings.allowed_origins:
        found = CORSMiddleware(
            found,
            allow_origins=list(settings.allowed_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after", "retry-after-ms"],
        )
    return found


def paths_of(front: Front) -> FastAPI:
    """Return the paths of a front, for calls that `Guard` has checked. Their lifespan starts and closes the front."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await front.start()
        yield
        await front.close()

    # FastAPI's own pages load scripts from elsewhere.
    app = FastAPI(
        title="paged",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        root_path=front.settings.root_path,
    )
    _say_errors(app)
    _add_inference(app, front)
    _add_watching(app, front)
    return app


def _call(request: Request) -> Call:
    found: Call = request.state.call
    return found


def _json(content: Any) -> Response:
    """Return a response with this content, which may be JSON already."""
    body = content if isinstance(content, bytes) else encode(content)
    return Response(body, media_type="application/json")


def _say_errors(app: FastAPI) -> None:
    """Give every error OpenAI's form."""

    @app.exception_handler(PagedError)
    async def _own(request: Request, error: PagedError) -> Response:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> Response:
        # Each place begins with "body" or "query".
        return error_response(refused([{**each, "loc": each["loc"][1:]} for each in error.errors()]))

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        path, headers = request.url.path[:200], error.headers or {}
        said = {
            "Not Found": f"{path} is no address of this server; GET / lists them.",
            "Method Not Allowed": f"{path} does not take {request.method}; it takes {headers.get('Allow')}.",
        }
        found = ApiError(error.status_code, said.get(error.detail, str(error.detail)))
        return error_response(found, dict(headers))

    @app.exception_handler(Exception)
    async def _bug(request: Request, error: Exception) -> Response:
        found = ApiError(500, "an internal error; the server's log has it.", kind=SERVER, code="internal_error")
        return error_response(found)


def _add_inference(app: FastAPI, front: Front) -> None:
    streams: dict[int | str, Any] = {
        200: {
            "description": "The answer, or a stream of its pieces",
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
        }
    }

    @app.post("/v1/completions", responses=_ERRORS | streams)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue text, or token ids."""
        return await front.completion(body, _call(request))

    @app.post("/v1/chat/completions", responses=_ERRORS | streams)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Continue a conversation."""
        return await front.chat(body, _call(request))

    @app.get("/v1/models", responses={status: _ERRORS[status] for status in (401, 503)})
    async def models() -> Response:
        """List the served model under each of its names."""
        front.must_have_begun()
        ready = front.engine.ready
        data = [
            {
                "id": name,
                "object": "model",
                "created": front.began,
                "owned_by": "paged",
                "root": str(front.folder) if front.settings.engine.model.model else name,
                "parent": None,
                "max_model_len": None if ready is None else ready.max_model_len,
            }
            for name in front.names
        ]
        return _json({"object": "list", "data": data})

    @app.get("/v1/models/{name:path}", responses={status: _ERRORS[status] for status in (401, 404, 503)})
    async def model(name: str) -> Response:
        """Describe the served model by one of its names."""
        front.must_have_begun()
        front.must_know(name)
        found = {"id": name, "object": "model", "created": front.began, "owned_by": "paged"}
        return _json(found)

    @app.post("/tokenize", responses=_ERRORS)
    async def tokenize(body: TokenizeRequest) -> Response:
        """Return the token ids of text, or of messages."""
        front.must_know(body.model)
        found = await asyncio.to_thread(front.asking.one_text, body)
        ready = front.engine.ready
        answer: dict[str, Any] = {
            "count": len(found),
            "max_model_len": None if ready is None else ready.max_model_len,
            "tokens": found,
        }
        if body.return_token_strs:
            answer["token_strs"] = front.asking.token_texts(found)
        return _json(answer)

    @app.post("/v1/kv_hints", responses=_ERRORS)
    async def kv_hints(body: KvHintsBody, request: Request) -> Response:
        """Carry out hints on cached content: a KvHintsEnvelope, or one hint of ours."""
        front.engine.must_take()
        tenant = _call(request).tenant
        if isinstance(body, KvHint):
            return _json(await memory_calls.hint(front, body, tenant))
        return _json(await memory_calls.envelope(front, body, tenant))

    @app.get("/sessions", responses={status: _ERRORS[status] for status in (400, 401, 503)})
    async def sessions(request: Request, limit: Annotated[int, Query(ge=1, le=MOST_LISTED)] = 100) -> Response:
        """List the caller's sessions, the latest ended turns first: what is kept for each, where, and until when."""
        return _json(await memory_calls.sessions(front, _call(request).tenant, limit))

    @app.get("/sessions/{name:path}", responses={status: _ERRORS[status] for status in (401, 404, 503)})
    async def session(name: str, request: Request) -> Response:
        """Return one session."""
        return _json(await memory_calls.session(front, _call(request).tenant, name))

    @app.delete("/sessions/{name:path}", responses={status: _ERRORS[status] for status in (401, 404, 503)})
    async def end_session(name: str, request: Request) -> Response:
        """End a session: no further turn of it comes, and what is kept for it is evicted next."""
        return _json(await memory_calls.end(front, _call(request).tenant, name))

    @app.post("/detokenize", responses=_ERRORS)
    async def detokenize(body: DetokenizeRequest) -> Response:
        """Return the text of token ids."""
        front.must_know(body.model)
        text = await asyncio.to_thread(front.asking.text, body.tokens)
        return _json({"prompt": text})


def _add_watching(app: FastAPI, front: Front) -> None:
    @app.get("/health", responses={503: _ERRORS[503]})
    async def health() -> Response:
        """Return 200 while the server lives; 503 until its engine has begun for the first time, and once the engine is gone for good."""
        front.must_have_begun()
        return _json({"status": "ok"})

    app.add_api_route("/ping", health, methods=["GET"], responses={503: _ERRORS[503]})

    @app.get("/ready", responses={503: _ERRORS[503]})
    async def ready() -> Response:
        """Return 200 while the server takes requests; 503 while an engine starts, and once the server is to end."""
        front.engine.must_take()
        return _json({"status": "ready"})

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        """Return all metrics for Prometheus."""
        found, kind = front.metrics.render(request.headers.get("accept", ""))
        return Response(found, media_type=kind)

    @app.get("/version")
    async def version() -> dict[str, str]:
        """Return the server's version."""
        return {"version": __version__}

    @app.get("/load")
    async def load() -> dict[str, int]:
        """Return the number of calls that are being answered."""
        return {"server_load": front.num_open}

    def show(name: str) -> Response:
        headers = {
            "cache-control": "no-cache",
            "content-security-policy": _PAGE_POLICY,
            "x-content-type-options": "nosniff",
        }
        return Response(page(name), media_type="text/html; charset=utf-8", headers=headers)

    for path, name in _PAGES.items():
        app.add_api_route(path, partial(show, name), methods=["GET"], include_in_schema=False)

    @app.get("/dashboard/feed", include_in_schema=False)
    async def feed() -> Response:
        """Send the dashboard's snapshots as server-sent events."""
        front.engine.must_take()
        return front.viewers.feed()

    @app.get("/requests/{name:path}", responses={status: _ERRORS[status] for status in (401, 404, 503)})
    async def story(name: str) -> Response:
        """Return a request's life, and why it waits, by the engine's id, the id of its answer, or its X-Request-Id."""
        for found in front.engine_ids(name):
            answer = await front.engine.ask("story", found)
            if answer is not None:
                return _json(answer)
        raise ApiError(404, f'no request "{name[:100]}" is known.', code="request_not_found", param="name")

    @app.post("/explain", responses=_ERRORS)
    async def explain(body: ExplainRequest) -> Response:
        """Return what of a prompt is in the cache, and why no more is."""
        front.engine.must_take()
        front.must_know(body.model)
        found = await memory_calls.explain(front, body)
        return _json(found)

    @app.get("/debug/{what}", include_in_schema=False)
    async def debug(what: Literal["check", "index"]) -> Response:
        """Return every violated invariant, or the hashes of each tier's content. For tests."""
        return _json(await front.engine.ask(what))
