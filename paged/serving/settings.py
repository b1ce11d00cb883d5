"""How a server is set up: one struct, from flags, from a TOML file, or from both.

    [[tenants]]
    name = "research"        keys = ["…"]        weight = 2.0        max_waiting = 20

Knows names, defaults and limits. Does not know what they are for.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from paged.errors import InvalidSettings
from paged.serving.kv_config import KvEventsConfig


class Tenant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who shares the server with others.

    keys         API keys, each in plain text, or as "sha256:" and 64 hexadecimal digits
    weight       tokens that it gets beside the others', while all want more than there is
    max_waiting, max_waiting_tokens
                 limits of its own, within the server's
    """

    name: str
    keys: tuple[str, ...] = ()
    weight: float = 1.0
    max_waiting: int | None = None
    max_waiting_tokens: int | None = None


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the engine process is started with: an Engine's arguments as plain values; `model` None is the one that ships."""

    model: str | None = None
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    block_size: int = 16
    host_blocks: int = 0
    policy: str = "paged-fair"
    max_tokens_per_step: int = 256
    max_sequences: int = 64
    max_chunk: int | None = None
    max_model_len: int | None = None
    prefix_caching: bool = True
    host_caching: bool = False
    backend: str = "auto"
    batch_invariant: bool = True
    dtype: str = "auto"
    device: str = "cpu"
    seed: int = 0
    steps_ahead: int = 0
    speculate: str | None = None
    num_drafts: int | None = None
    draft_model: str | None = None


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A server.

    engine               what runs
    host, port           where it listens; port 0: any that is free
    served_model_names   by which clients name the model (none: its folder's name, "paged" for the one that ships)
    api_keys             of clients that belong to no tenant; with none of these and no tenants' keys, everybody may ask
    admin_keys           for /requests and the dashboard; none: everybody who reaches the server may see them
    tenants              who shares it
    tenant_header        a header that names the tenant, where a gateway in front of it is trusted to set it
    max_waiting          requests that wait to begin; more are told when to come again
    max_waiting_tokens   prompt tokens of those (None: no limit)
    max_queue_s          a request that has not begun by then is told when to come again (None: it waits)
    request_timeout_s    the deadline of a request that names none (None: none)
    max_connections      open at a time
    max_body_bytes       of a request
    max_prompts, max_n   prompts of a request, answers to each
    max_logprobs         alternatives beside a token
    header_timeout_s, body_timeout_s, keep_alive_s
                         a client has so long to send a request's head, its body, and another request
    stall_timeout_s      a client that reads nothing for so long is gone
    shutdown_timeout_s   running requests are given so long when the server is to end
    max_restarts, restart_window_s
                         an engine that dies so often within that time stays away
    log                  "json": a line a request on standard error; "off"
    log_prompts          with prompts and answers
    tls_certificate, tls_key, tls_client_ca
                         PEM files; with the last, clients need a certificate that it signed
    root_path            what a proxy in front strips off the path
    allowed_origins      for browsers
    kv_events            vLLM's --kv-events-config
    traces_endpoint      an OpenTelemetry collector's, over HTTP
    """

    engine: EngineSettings = EngineSettings()
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()
    tenants: tuple[Tenant, ...] = ()
    tenant_header: str | None = None
    max_waiting: int = 256
    max_waiting_tokens: int | None = None
    max_queue_s: float | None = None
    request_timeout_s: float | None = None
    max_connections: int = 8192
    max_body_bytes: int = 8 * 2**20
    max_prompts: int = 128
    max_n: int = 32
    max_logprobs: int = 20
    header_timeout_s: float = 20.0
    body_timeout_s: float = 30.0
    keep_alive_s: float = 30.0
    stall_timeout_s: float = 120.0
    shutdown_timeout_s: float = 30.0
    max_restarts: int = 3
    restart_window_s: float = 600.0
    log: str = "json"
    log_prompts: bool = False
    tls_certificate: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    root_path: str = ""
    allowed_origins: tuple[str, ...] = ()
    kv_events: KvEventsConfig | None = None
    traces_endpoint: str | None = None

    def check(self) -> None:
        """Raise InvalidSettings for what makes no sense; what concerns the engine alone, the engine says."""
        for name in ("max_waiting", "max_connections", "max_body_bytes", "max_prompts", "max_n"):
            _check_count(name, getattr(self, name), 1)
        for name in ("max_logprobs", "max_restarts"):
            _check_count(name, getattr(self, name), 0)
        if self.max_waiting_tokens is not None:
            _check_count("max_waiting_tokens", self.max_waiting_tokens, 1)
        for name in ("header_timeout_s", "body_timeout_s", "keep_alive_s", "stall_timeout_s", "restart_window_s"):
            _check_time(name, getattr(self, name))
        if not (math.isfinite(self.shutdown_timeout_s) and self.shutdown_timeout_s >= 0):
            raise InvalidSettings(f"shutdown_timeout_s has to be seconds of at least 0; got {self.shutdown_timeout_s}.")
        for name in ("max_queue_s", "request_timeout_s"):
            if getattr(self, name) is not None:
                _check_time(name, getattr(self, name))
        if not self.host:
            raise InvalidSettings(
                "host is empty; it has to be an address of this machine, and 0.0.0.0 for all of them."
            )
        if not 0 <= self.port <= 65535:
            raise InvalidSettings(f"port has to be from 0 to 65535; got {self.port}.")
        if self.log not in ("json", "off"):
            raise InvalidSettings(f'log has to be "json" or "off"; got "{self.log}".')
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise InvalidSettings("tls_certificate and tls_key go together; one of them is missing.")
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise InvalidSettings("tls_client_ca goes with tls_certificate and tls_key.")
        _check_tenants(self.tenants)
        everyone = [*self.api_keys, *self.admin_keys, *(key for tenant in self.tenants for key in tenant.keys)]
        for key in everyone:
            if not key or not key.isascii() or key != key.strip():
                raise InvalidSettings("a key has to be ASCII text without spaces around it, and not empty.")

    @property
    def needs_key(self) -> bool:
        """Whether a client has to show a key."""
        return bool(self.api_keys or any(tenant.keys for tenant in self.tenants))


def _check_count(name: str, value: int, least: int) -> None:
    if value < least:
        raise InvalidSettings(f"{name} has to be an integer of at least {least}; got {value}.")


def _check_time(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise InvalidSettings(f"{name} has to be a finite number of seconds above 0; got {value}.")


def _check_tenants(tenants: tuple[Tenant, ...]) -> None:
    seen: set[str] = set()
    keys: set[bytes] = set()
    for tenant in tenants:
        if not tenant.name or tenant.name in seen:
            raise InvalidSettings(f'each tenant needs a name of its own; got "{tenant.name}".')
        seen.add(tenant.name)
        if not (math.isfinite(tenant.weight) and tenant.weight > 0):
            raise InvalidSettings(
                f'tenant "{tenant.name}": weight has to be a finite number above 0; got {tenant.weight}.'
            )
        for name in ("max_waiting", "max_waiting_tokens"):
            if (limit := getattr(tenant, name)) is not None:
                _check_count(f'tenant "{tenant.name}": {name}', limit, 1)
        for key in tenant.keys:
            if (digest := digest_of(key)) in keys:
                raise InvalidSettings(f'tenant "{tenant.name}": a key of it is another tenant\'s, too.')
            keys.add(digest)


def digest_of(key: str) -> bytes:
    """SHA-256 of a key, 32 bytes, which may be written as its digest. Raises InvalidSettings."""
    if not key.startswith("sha256:"):
        return hashlib.sha256(key.encode()).digest()
    try:
        found = bytes.fromhex(key.removeprefix("sha256:"))
    except ValueError:
        found = b""
    if len(found) != 32:
        raise InvalidSettings('a key that begins with "sha256:" goes on with 64 hexadecimal digits.')
    return found


def is_one_of(key: str, digests: list[bytes]) -> int | None:
    """Which of these the key is, None: none of them. All are compared, each in constant time."""
    mine, found = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest(), None
    for place, digest in enumerate(digests):
        if hmac.compare_digest(mine, digest):
            found = place
    return found


def read_settings(path: Path | None, said: dict[str, Any]) -> Settings:
    """The settings of a TOML file (None: the usual ones), and over them what was `said` by flags: fields of Settings, and under "engine" of
    EngineSettings. Raises InvalidSettings, naming the field, and OSError where the file cannot be read."""
    found: dict[str, Any] = {}
    if path is not None:
        try:
            found = tomllib.loads(path.read_bytes().decode())
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise InvalidSettings(f"{path}: {error}") from None
    for part in ("engine", "kv_events"):
        if not isinstance(found.get(part, {}), dict):
            raise InvalidSettings(f"{path}: {part} has to be a table.")
    merged = {**found, **said, "engine": {**found.get("engine", {}), **said.get("engine", {})}}
    try:
        settings = msgspec.convert(merged, Settings)
    except msgspec.ValidationError as error:
        raise InvalidSettings(f"{path or 'settings'}: {error}") from None
    settings.check()
    return settings
