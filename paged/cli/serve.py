"""`paged serve`: a model behind OpenAI's interface, until a signal ends it.

An option is a setting of the same name; one that is not given is as the file of --config has it, or as usual. Knows options, vLLM's names for
them, and what is said when the server begins. Does not know what a server does.
"""

import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from typer import Option

from paged.base.extras import import_with_extra
from paged.cli import signals
from paged.cli.commands import Command
from paged.cli.show import figures, is_terminal, printed, say
from paged.errors import InvalidSettings, PagedError
from paged.hardware.budget import as_bytes
from paged.integrations.vllm_flags import translated
from paged.serving.request_log import to_stderr
from paged.serving.settings import EngineSettings, Settings, read_settings

if TYPE_CHECKING:
    from paged.serving.front import Front

ENDED_AT_ONCE, CANNOT_BEGIN = 1, 2
_KEYS = "PAGED_API_KEY"
_UNITS = {"k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_LISTEN, _WHO, _LIMITS, _TIMES, _SAYS = "Where it listens", "Who may ask", "How much", "How long", "What it says"
_MODEL, _MEMORY = "The model", "Memory and steps"


class ServeCommand(Command):
    """A command that takes vLLM's flags, too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Its options, of which none is vLLM's alone any more."""
        return super().parse_args(ctx, translated(args))


def size(text: str) -> int:
    """A count as vLLM writes it: 4096, 16k (16,000), 4G (4 · 2³⁰). Raises BadParameter."""
    found = re.fullmatch(r"(\d+)([kKmMgGtT]?)", text.strip())
    if found is None:
        raise typer.BadParameter(
            f'a whole number is needed, or one with k, K, m, M, g, G, t or T behind it; got "{text}"'
        )
    return int(found[1]) * _UNITS.get(found[2], 1)


def json_object(text: str) -> dict[str, Any]:
    """A JSON object. Raises BadParameter."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise typer.BadParameter(f"a JSON object is needed: {error}") from None


def _usual(name: str) -> str:
    """What a setting is where nobody names it, as the help shows it."""
    settings: Any = Settings() if name in Settings.__struct_fields__ else EngineSettings()
    value = getattr(settings, name)
    if value is None or value == ():
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) and name != "port" else f"{value}"


# fmt: off
Model = Annotated[str | None, typer.Argument(metavar="MODEL", help="A checkpoint folder in the Hugging Face layout.", show_default="the small one that ships")]
Config = Annotated[Path | None, Option("--config", metavar="FILE", help="TOML with settings by name, and with tenants; options win over it.", show_default="none")]

Host = Annotated[str | None, Option(help="An address of this machine; 0.0.0.0: all of them.", show_default=_usual("host"), rich_help_panel=_LISTEN)]
Port = Annotated[int | None, Option(help="0: any that is free, which is printed.", show_default=_usual("port"), rich_help_panel=_LISTEN)]
TlsCertificate = Annotated[str | None, Option("--tls-certificate", "--ssl-certfile", metavar="FILE", help="PEM; with --tls-key it serves HTTPS.", show_default="none", rich_help_panel=_LISTEN)]
TlsKey = Annotated[str | None, Option("--tls-key", "--ssl-keyfile", metavar="FILE", help="The certificate's key, PEM.", show_default="none", rich_help_panel=_LISTEN)]
TlsClientCa = Annotated[str | None, Option("--tls-client-ca", "--ssl-ca-certs", metavar="FILE", help="PEM; clients need a certificate that it signed.", show_default="none", rich_help_panel=_LISTEN)]
RootPath = Annotated[str | None, Option("--root-path", help="What a proxy in front strips off the path.", show_default="none", rich_help_panel=_LISTEN)]
AllowedOrigins = Annotated[list[str] | None, Option("--allowed-origin", help="A web page's origin that may call it from a browser; may be given several times.", show_default="none", rich_help_panel=_LISTEN)]

ServedNames = Annotated[list[str] | None, Option("--served-model-name", help="What clients call the model; may be given several times.", show_default='MODEL, or "paged"', rich_help_panel=_WHO)]
ApiKeys = Annotated[list[str] | None, Option("--api-key", envvar=_KEYS, help='A key that clients have to show, in plain text or as "sha256:" and its digest; may be given several times.', show_default="everybody may ask", rich_help_panel=_WHO)]
AdminKeys = Annotated[list[str] | None, Option("--admin-key", help="A key for /requests and the dashboard; may be given several times.", show_default="everybody may look", rich_help_panel=_WHO)]
TenantHeader = Annotated[str | None, Option(help="A header that names the tenant, where a gateway sets it.", show_default="none", rich_help_panel=_WHO)]

MaxWaiting = Annotated[int | None, Option(help="Requests that wait to begin; more are told when to come again.", show_default=_usual("max_waiting"), rich_help_panel=_LIMITS)]
MaxWaitingTokens = Annotated[int | None, Option(help="Prompt tokens of those.", show_default="no limit", parser=size, metavar="N", rich_help_panel=_LIMITS)]
MaxConnections = Annotated[int | None, Option(help="Open at a time.", show_default=_usual("max_connections"), rich_help_panel=_LIMITS)]
MaxBodyBytes = Annotated[int | None, Option(help="Of a request.", show_default=_usual("max_body_bytes"), parser=size, metavar="N", rich_help_panel=_LIMITS)]
MaxPrompts = Annotated[int | None, Option(help="Prompts of a request.", show_default=_usual("max_prompts"), rich_help_panel=_LIMITS)]
MaxN = Annotated[int | None, Option(help="Answers to a prompt.", show_default=_usual("max_n"), rich_help_panel=_LIMITS)]
MaxLogprobs = Annotated[int | None, Option(help="Alternatives beside a token.", show_default=_usual("max_logprobs"), rich_help_panel=_LIMITS)]

MaxQueueS = Annotated[float | None, Option(metavar="S", help="A request that has not begun by then is told when to come again.", show_default="it waits", rich_help_panel=_TIMES)]
RequestTimeoutS = Annotated[float | None, Option(metavar="S", help="The deadline of a request that names none.", show_default="none", rich_help_panel=_TIMES)]
HeaderTimeoutS = Annotated[float | None, Option(metavar="S", help="For a request's head to come.", show_default=_usual("header_timeout_s"), rich_help_panel=_TIMES)]
BodyTimeoutS = Annotated[float | None, Option(metavar="S", help="For its body to come.", show_default=_usual("body_timeout_s"), rich_help_panel=_TIMES)]
KeepAliveS = Annotated[float | None, Option(metavar="S", help="For another request on a connection.", show_default=_usual("keep_alive_s"), rich_help_panel=_TIMES)]
StallTimeoutS = Annotated[float | None, Option(metavar="S", help="A client that reads nothing for so long is gone.", show_default=_usual("stall_timeout_s"), rich_help_panel=_TIMES)]
ShutdownTimeoutS = Annotated[float | None, Option("--shutdown-timeout-s", "--shutdown-timeout", metavar="S", help="Running requests have so long when the server is to end.", show_default=_usual("shutdown_timeout_s"), rich_help_panel=_TIMES)]
MaxRestarts = Annotated[int | None, Option(help="An engine that dies more often than that stays away.", show_default=_usual("max_restarts"), rich_help_panel=_TIMES)]
RestartWindowS = Annotated[float | None, Option(metavar="S", help="Within so long.", show_default=_usual("restart_window_s"), rich_help_panel=_TIMES)]

Log = Annotated[str | None, Option(help="json: a line a request on standard error; off.", show_default=_usual("log"), rich_help_panel=_SAYS)]
LogPrompts = Annotated[bool | None, Option("--log-prompts/--no-log-prompts", help="With prompts and answers.", show_default=_usual("log_prompts"), rich_help_panel=_SAYS)]
KvEvents = Annotated[Any, Option("--kv-events-config", metavar="JSON", parser=json_object, help="Where to tell which blocks are stored and removed, as vLLM has it.", show_default="nowhere", rich_help_panel=_SAYS)]
TracesEndpoint = Annotated[str | None, Option("--traces-endpoint", "--otlp-traces-endpoint", metavar="URL", help="An OpenTelemetry collector, over HTTP.", show_default="none", rich_help_panel=_SAYS)]

Backend = Annotated[str | None, Option(help="How attention is computed; `paged doctor` lists what works here.", show_default=_usual("backend"), rich_help_panel=_MODEL)]
BatchInvariant = Annotated[bool | None, Option("--batch-invariant/--fast", help="An answer depends on nothing but its request; fast: words may differ with what else is running.", show_default=_usual("batch_invariant"), rich_help_panel=_MODEL)]
Dtype = Annotated[str | None, Option(help="auto, float32, bfloat16 or float16.", show_default=_usual("dtype"), rich_help_panel=_MODEL)]
Device = Annotated[str | None, Option(help="cpu, or cuda.", show_default=_usual("device"), rich_help_panel=_MODEL)]
Seed = Annotated[int | None, Option(help="Of requests that name none.", show_default=_usual("seed"), rich_help_panel=_MODEL)]
MaxModelLen = Annotated[int | None, Option(help="Tokens of a request, its prompt and its answer.", parser=size, metavar="N", show_default="what model and memory allow", rich_help_panel=_MODEL)]
Speculate = Annotated[str | None, Option(help="Draft tokens: lookup, lookahead or draft; answers are the same.", show_default="no drafts", rich_help_panel=_MODEL)]
NumDrafts = Annotated[int | None, Option(help="Drafts of a sequence and step at most.", show_default="6, for lookahead 12", rich_help_panel=_MODEL)]
DraftModel = Annotated[str | None, Option(help="A smaller checkpoint of the same tokens, for --speculate draft.", show_default="the one that ships", rich_help_panel=_MODEL)]

NumBlocks = Annotated[int | None, Option("--blocks", "--num-gpu-blocks-override", help="Device blocks.", show_default="what --kv-cache-bytes hold", rich_help_panel=_MEMORY)]
KvCacheBytes = Annotated[int | None, Option("--kv-cache-bytes", "--kv-cache-memory-bytes", parser=size, metavar="N", help="Device memory of K and V: 4G is 4 GiB.", show_default="256 MiB", rich_help_panel=_MEMORY)]
BlockSize = Annotated[int | None, Option(help="Tokens a block.", show_default=_usual("block_size"), rich_help_panel=_MEMORY)]
HostBlocks = Annotated[int | None, Option(help="Host blocks to swap to.", show_default=_usual("host_blocks"), rich_help_panel=_MEMORY)]
PrefixCaching = Annotated[bool | None, Option("--prefix-caching/--no-prefix-caching", "--enable-prefix-caching/--no-enable-prefix-caching", help="Share equal full blocks.", show_default=_usual("prefix_caching"), rich_help_panel=_MEMORY)]
HostCaching = Annotated[bool | None, Option("--host-caching/--no-host-caching", help="Keep in host blocks what leaves the device.", show_default=_usual("host_caching"), rich_help_panel=_MEMORY)]
Policy = Annotated[str | None, Option(help="Who decides; `paged policies` lists them.", show_default=_usual("policy"), rich_help_panel=_MEMORY)]
MaxTokensPerStep = Annotated[int | None, Option("--max-tokens-per-step", "--max-num-batched-tokens", parser=size, metavar="N", help="Token budget of a step.", show_default=_usual("max_tokens_per_step"), rich_help_panel=_MEMORY)]
MaxSequences = Annotated[int | None, Option("--max-sequences", "--max-num-seqs", help="Sequences in a step.", show_default=_usual("max_sequences"), rich_help_panel=_MEMORY)]
MaxChunk = Annotated[int | None, Option(help="Prompt tokens of one sequence in a step.", show_default="what the step has room for", rich_help_panel=_MEMORY)]
StepsAhead = Annotated[int | None, Option(help="0, or 1: a step is put out before the one before it is ended.", show_default=_usual("steps_ahead"), rich_help_panel=_MEMORY)]
# fmt: on


def serve(
    context: typer.Context,
    model: Model = None,
    config: Config = None,
    host: Host = None,
    port: Port = None,
    tls_certificate: TlsCertificate = None,
    tls_key: TlsKey = None,
    tls_client_ca: TlsClientCa = None,
    root_path: RootPath = None,
    allowed_origins: AllowedOrigins = None,
    served_model_names: ServedNames = None,
    api_keys: ApiKeys = None,
    admin_keys: AdminKeys = None,
    tenant_header: TenantHeader = None,
    max_waiting: MaxWaiting = None,
    max_waiting_tokens: MaxWaitingTokens = None,
    max_connections: MaxConnections = None,
    max_body_bytes: MaxBodyBytes = None,
    max_prompts: MaxPrompts = None,
    max_n: MaxN = None,
    max_logprobs: MaxLogprobs = None,
    max_queue_s: MaxQueueS = None,
    request_timeout_s: RequestTimeoutS = None,
    header_timeout_s: HeaderTimeoutS = None,
    body_timeout_s: BodyTimeoutS = None,
    keep_alive_s: KeepAliveS = None,
    stall_timeout_s: StallTimeoutS = None,
    shutdown_timeout_s: ShutdownTimeoutS = None,
    max_restarts: MaxRestarts = None,
    restart_window_s: RestartWindowS = None,
    log: Log = None,
    log_prompts: LogPrompts = None,
    kv_events: KvEvents = None,
    traces_endpoint: TracesEndpoint = None,
    backend: Backend = None,
    batch_invariant: BatchInvariant = None,
    dtype: Dtype = None,
    device: Device = None,
    seed: Seed = None,
    max_model_len: MaxModelLen = None,
    speculate: Speculate = None,
    num_drafts: NumDrafts = None,
    draft_model: DraftModel = None,
    num_blocks: NumBlocks = None,
    kv_cache_bytes: KvCacheBytes = None,
    block_size: BlockSize = None,
    host_blocks: HostBlocks = None,
    prefix_caching: PrefixCaching = None,
    host_caching: HostCaching = None,
    policy: Policy = None,
    max_tokens_per_step: MaxTokensPerStep = None,
    max_sequences: MaxSequences = None,
    max_chunk: MaxChunk = None,
    steps_ahead: StepsAhead = None,
) -> None:
    """Answer OpenAI's clients over HTTP, with a model that runs in a process of its own.

    SIGTERM (status 0) or Ctrl-C (130) lets running requests end first, a second one does not (1, 130). vLLM's flags are taken where they mean the same
    (docs/serving.md).

    Example: `paged serve --port 8000`
    """
    if os.environ.get(_KEYS) == "":
        raise InvalidSettings(f"{_KEYS} is empty, and everybody could ask; unset it, or let it have a key.")
    settings = read_settings(config, _said(context.params))
    # Whoever collects a log reads a line as JSON; at a terminal a person reads it.
    says_json = settings.log == "json" and not sys.stderr.isatty()
    with signals.at_once():
        _leave_torch_out()
        server = import_with_extra("paged.serving.server", "serve")
    loading = f"loading {settings.engine.model or 'the model that ships'}"
    to_stderr("info", loading) if says_json else say(loading)
    try:
        with _handled_by_the_server():
            has_drained = server.serve(settings, on_ready=_announce)
    except PagedError as error:
        if not says_json:
            raise
        to_stderr("error", str(error))
        raise typer.Exit(CANNOT_BEGIN) from None
    if not has_drained:
        raise typer.Exit(ENDED_AT_ONCE)


def _leave_torch_out() -> None:
    """Load transformers as if there were no torch: this process makes tokens and speaks HTTP, the engine's runs the model. Saves 2 s and 300 MB."""
    if "torch" in sys.modules or find_spec("transformers") is None:
        return
    sys.modules["torch"] = None  # type: ignore[assignment]
    advice = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    before = os.environ.setdefault(advice, "")
    os.environ[advice] = "1"
    try:
        import_module("transformers")
    finally:
        os.environ[advice] = before


def _said(params: dict[str, Any]) -> dict[str, Any]:
    """What was said on the command line, as `read_settings` takes it."""
    said = {name: value for name, value in params.items() if name != "config" and value not in (None, [], ())}
    of_engine = {name: said.pop(name) for name in EngineSettings.__struct_fields__ if name in said}
    return {**said, "engine": of_engine}


@contextmanager
def _handled_by_the_server() -> Iterator[None]:
    """Within the block signals are the server's, which lets requests end; a terminal that is closed asks for the same as SIGTERM."""
    before = signal.getsignal(signal.SIGHUP)
    with signals.unhurried():
        if before is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
        try:
            yield
        finally:
            signal.signal(signal.SIGHUP, before)


def _announce(front: "Front", port: int) -> None:
    """Say that requests are taken, where, and of how much there is room."""
    settings, ready = front.settings, front.engine.ready
    assert ready is not None, "it is called when the engine is ready"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    url = f"{'http' if settings.tls_certificate is None else 'https'}://{host}:{port}"
    names = ", ".join(front.names)
    memory = f"{ready.num_blocks:,} blocks of {ready.block_size} tokens"
    if is_terminal():
        pairs = [
            ("interface", f"{url}/v1"),
            ("model", names),
            ("memory", f"{memory}, {as_bytes(ready.num_blocks * ready.block_bytes)}, {ready.dtype} on {ready.device}"),
            ("a request", f"up to {ready.max_model_len:,} tokens"),
            ("a step", f"up to {ready.max_sequences:,} sequences and {ready.max_tokens_per_step:,} tokens"),
            ("waiting", f"up to {settings.max_waiting:,} requests"),
            ("keys", "needed" if settings.needs_key else "none: everybody who reaches it may ask"),
            ("dashboard", f"{url}/dashboard"),
        ]
        figures(f"ready at {url}", pairs)
    else:
        printed(f"ready at {url}, model {names}, {memory}, up to {ready.max_model_len:,} tokens a request")
    sys.stdout.flush()
