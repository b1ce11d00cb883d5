"""The configuration of a server: one struct, from flags, from a TOML file, or from both.

[[tenants]]
name = "research"        keys = ["…"]        weight = 2.0        max_waiting = 20
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from paged.engine.config import Config, EngineConfig, Field, engine_table, environment, read_toml
from paged.errors import InvalidConfig


class KvEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The configuration of KV events, by the names of vLLM's `--kv-events-config`.

    publisher       "zmq", or "null" for none; by default as enable_kv_cache_events says
    endpoint        of new batches; bound if it has `*` or `::` or is ipc, else connected to
    replay_endpoint where readers request batches again; None: nowhere
    buffer_steps    batches kept for replays
    hwm             messages that wait for a slow reader before it loses some; 0: no limit
    max_queue_size  steps that may wait for the publisher's thread
    use_int_block_hashes
                    True: hashes are integers of 64 bits; False: all 32 bytes. vLLM reads this from an environment variable
    restart_points  also send where prompts can begin in a model whose layers are of several kinds: our own events, which readers made for
                    vLLM may refuse
    """

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] = 10_000
    hwm: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 100_000
    max_queue_size: Annotated[int, msgspec.Meta(ge=1)] = 100_000
    topic: str = ""
    use_int_block_hashes: bool = True
    restart_points: bool = False

    @classmethod
    def of(cls, given: Any) -> KvEventsConfig:
        """Return the configuration of a JSON object, as text or as an object. Raises InvalidConfig."""
        try:
            if isinstance(given, str):
                given = msgspec.json.decode(given)
            return msgspec.convert(given, cls)
        except (msgspec.DecodeError, RecursionError, UnicodeEncodeError) as error:
            known = ", ".join(cls.__struct_fields__)
            raise InvalidConfig(
                f"KV events are described by a JSON object with any of {known}; got {given!r}: {error}."
            ) from None


class Tenant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of several clients that share a server.

    keys         API keys, each in plain text, or as "sha256:" and 64 hexadecimal digits
    weight       its share of tokens relative to the others' weights, while all have requests that wait
    max_waiting, max_waiting_tokens
                 its own limits, within the server's; None: no limit
    """

    name: str
    keys: tuple[str, ...] = ()
    weight: float = 1.0
    max_waiting: int | None = None
    max_waiting_tokens: int | None = None


SERVED = EngineConfig.of(policy="paged-fair", max_sequences=64, remember_evicted=1000)
"""The default engine of a server."""

SHIPPED_NAME = "paged"
_HEADER = re.compile(r"[-!#$%&'*+.^_`|~0-9A-Za-z]+")

_LISTEN, _WHO, _LIMITS, _TIMES, _SAYS = "Address", "Keys and tenants", "Limits", "Timeouts", "Logs and events"


def _tenants(value: Any) -> tuple[Tenant, ...]:
    try:
        tenants = msgspec.convert(value, tuple[Tenant, ...])
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise InvalidConfig(f"tenants: {error}") from None
    seen: set[str] = set()
    keys: set[bytes] = set()
    for tenant in tenants:
        if not tenant.name or tenant.name in seen:
            raise InvalidConfig(f'each tenant needs its own name; got "{tenant.name}".')
        seen.add(tenant.name)
        if not (math.isfinite(tenant.weight) and tenant.weight > 0):
            raise InvalidConfig(
                f'tenant "{tenant.name}": weight has to be a finite number above 0; got {tenant.weight}.'
            )
        for name in ("max_waiting", "max_waiting_tokens"):
            if (limit := getattr(tenant, name)) is not None and limit < 1:
                raise InvalidConfig(f'tenant "{tenant.name}": {name} has to be an integer of at least 1; got {limit}.')
        for key in tenant.keys:
            if (digest := digest_of(key)) in keys:
                raise InvalidConfig(f'tenant "{tenant.name}": one of its keys is another tenant\'s, too.')
            keys.add(digest)
    return tenants


def _kv_events(value: Any) -> KvEventsConfig:
    return value if isinstance(value, KvEventsConfig) else KvEventsConfig.of(value)


# fmt: off
class Settings(Config, frozen=True, kw_only=True):
    """A server: its engine, and the settings of its front. A key is plain text, or "sha256:" and its digest."""

    of_what: ClassVar[str] = "a server"

    engine: EngineConfig = SERVED
    tenants: Annotated[tuple[Tenant, ...], Field(help="The clients that share it.", flag="", rule=_tenants)] = ()

    host: Annotated[str, Field(help="An address of this machine; 0.0.0.0: all of them.", panel=_LISTEN, vllm=("host",))] = "127.0.0.1"
    port: Annotated[int, Field(help="0: any free port, which is printed.", least=0, most=65535, panel=_LISTEN, vllm=("port",))] = 8000
    tls_certificate: Annotated[str | None, Field(help="PEM; with --tls-key it serves HTTPS.", metavar="FILE", vllm=("ssl_certfile",), panel=_LISTEN)] = None
    tls_key: Annotated[str | None, Field(help="The certificate's key, PEM.", metavar="FILE", vllm=("ssl_keyfile",), panel=_LISTEN)] = None
    tls_client_ca: Annotated[str | None, Field(help="PEM; clients need a certificate that it signed.", metavar="FILE", vllm=("ssl_ca_certs",), panel=_LISTEN)] = None
    root_path: Annotated[str, Field(help="The beginning of the path that a proxy in front strips off.", panel=_LISTEN, vllm=("root_path",))] = ""
    allowed_origins: Annotated[tuple[str, ...], Field(help="A web page's origin that may call it from a browser; may be given several times.", flag="--allowed-origin", panel=_LISTEN)] = ()

    served_model_names: Annotated[tuple[str, ...], Field(help="What clients call the model; may be given several times.", usually='MODEL, or "paged"', flag="--served-model-name", panel=_WHO, vllm=("served_model_name",))] = ()
    api_keys: Annotated[tuple[str, ...], Field(help='A key that clients have to show, in plain text or as "sha256:" and its digest; may be given several times.', usually="no key is needed", flag="--api-key", variable="PAGED_API_KEY", panel=_WHO, vllm=("api_key",))] = ()
    admin_keys: Annotated[tuple[str, ...], Field(help="A key for /requests and the dashboard; may be given several times.", usually="the api_keys", flag="--admin-key", panel=_WHO)] = ()
    tenant_header: Annotated[str | None, Field(help="A header that names the tenant, where a gateway sets it.", panel=_WHO)] = None

    max_waiting: Annotated[int, Field(help="Requests that wait to begin; further ones get 429 with a time to retry after.", least=1, panel=_LIMITS)] = 256
    max_waiting_tokens: Annotated[int | None, Field(help="Prompt tokens of waiting requests.", usually="no limit", least=1, panel=_LIMITS)] = None
    max_connections: Annotated[int, Field(help="Connections that are open at a time.", least=1, panel=_LIMITS)] = 8192
    max_body_bytes: Annotated[int, Field(help="Bytes of a request's body.", least=1, panel=_LIMITS)] = 8 * 2**20
    max_prompts: Annotated[int, Field(help="Prompts of a completion.", least=1, panel=_LIMITS)] = 128
    max_n: Annotated[int, Field(help="Answers to a prompt (n, best_of).", least=1, panel=_LIMITS)] = 32
    max_logprobs: Annotated[int, Field(help="Alternatives beside a token.", least=0, panel=_LIMITS, vllm=("max_logprobs",))] = 20

    max_queue_s: Annotated[float | None, Field(help="A request that has not begun by then gets 429 with a time to retry after.", usually="it waits", above=0, panel=_TIMES)] = None
    request_timeout_s: Annotated[float | None, Field(help="The deadline of a request that names none.", above=0, panel=_TIMES)] = None
    header_timeout_s: Annotated[float, Field(help="Time for a request's head, which has at most 64 KiB.", above=0, panel=_TIMES)] = 20.0
    body_timeout_s: Annotated[float, Field(help="Time for its body, from the first byte to the last.", above=0, panel=_TIMES)] = 30.0
    keep_alive_s: Annotated[float, Field(help="A connection without a request is closed after this time.", above=0, panel=_TIMES)] = 30.0
    stall_timeout_s: Annotated[float, Field(help="A client that reads nothing for this long is taken for gone.", above=0, panel=_TIMES)] = 120.0
    shutdown_timeout_s: Annotated[float, Field(help="Time for running requests when the server ends.", least=0, vllm=("shutdown_timeout",), panel=_TIMES)] = 30.0
    max_restarts: Annotated[int, Field(help="Restarts of a dead engine within --restart-window-s. After more, the server stays without one.", least=0, panel=_TIMES)] = 3
    restart_window_s: Annotated[float, Field(help="The time in which --max-restarts counts.", above=0, panel=_TIMES)] = 600.0

    log: Annotated[str, Field(help="json: a line a request on standard error; off.", choices=("json", "off"), panel=_SAYS)] = "json"
    log_prompts: Annotated[bool, Field(help="Log prompts and answers, too.", panel=_SAYS)] = False
    kv_events: Annotated[KvEventsConfig | None, Field(help="Publication of stored and removed blocks, as in vLLM.", usually="nowhere", flag="--kv-events-config", metavar="JSON", rule=_kv_events, what="a JSON object or a table", panel=_SAYS, vllm=("kv_events_config",))] = None
    traces_endpoint: Annotated[str | None, Field(help="An OpenTelemetry collector, over HTTP.", metavar="URL", vllm=("otlp_traces_endpoint",), panel=_SAYS)] = None
    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.host:
            raise InvalidConfig("host is empty; it has to be an address of this machine, and 0.0.0.0 for all of them.")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise InvalidConfig("tls_certificate and tls_key go together; one of them is missing.")
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise InvalidConfig("tls_client_ca goes with tls_certificate and tls_key.")
        if self.tenants and self.engine.scheduling.tenant_weights:
            raise InvalidConfig("tenant_weights and the tenants' own weights both say how tokens are shared; leave tenant_weights out.")
        everyone = [*self.api_keys, *self.admin_keys, *(key for tenant in self.tenants for key in tenant.keys)]
        for key in everyone:
            if not key or not key.isascii() or key != key.strip():
                raise InvalidConfig("a key has to be ASCII text without spaces around it, and not empty.")
            digest_of(key)
        if self.tenant_header is not None and _HEADER.fullmatch(self.tenant_header) is None:
            raise InvalidConfig(f'tenant_header has to be the name of a header; got "{self.tenant_header}".')

    # fmt: on
    @property
    def names(self) -> tuple[str, ...]:
        """The names of the model for clients."""
        return self.served_model_names or (self.engine.model.model or SHIPPED_NAME,)

    @property
    def needs_key(self) -> bool:
        """Whether a client has to show a key."""
        return bool(self.api_keys or any(tenant.keys for tenant in self.tenants))


def digest_of(key: str) -> bytes:
    """Return the SHA-256 of a key, 32 bytes; the key may be written as "sha256:" and that. Raises InvalidConfig."""
    if not key.startswith("sha256:"):
        return hashlib.sha256(key.encode()).digest()
    try:
        found = bytes.fromhex(key.removeprefix("sha256:"))
    except ValueError:
        found = b""
    if len(found) != 32:
        raise InvalidConfig('a key that begins with "sha256:" goes on with 64 hexadecimal digits.')
    return found


def is_one_of(key: str, digests: list[bytes]) -> int | None:
    """Return the index of the key's digest among these, or None. Compares all of them, each in constant time."""
    mine, found = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest(), None
    for place, digest in enumerate(digests):
        if hmac.compare_digest(mine, digest):
            found = place
    return found


def read_settings(path: Path | None, server: Mapping[str, Any], engine: Mapping[str, Any]) -> Settings:
    """Read settings: the defaults, over them the file `path` (TOML; None: no file), over its [engine] the environment, over all
    `server` and `engine`. Raises InvalidConfig, which names the setting, and OSError for a file that cannot be read."""
    found = {} if path is None else read_toml(path)
    table = engine_table(path, found)
    found.pop("engine", None)
    runs = SERVED.layered((f"{path}", table), ("", environment()), ("", engine))
    return Settings(engine=runs).layered((f"{path}", found), ("", server))
