"""The messages between the server's two processes: msgspec structs as MessagePack.

    front ── Add, Abort, Ask ──> engine          engine ── Ready, Refused, Hinted, Stepped, Answered ──> front

Times are those of the machine's monotonic clock, which both read.
"""

from __future__ import annotations

from typing import Any

import msgspec

from paged.attention.kv_dtypes import AUTO
from paged.block_manager import GroupStats, LayerGroup
from paged.engine.config import EngineConfig
from paged.engine.results import Completion, EngineOutput
from paged.engine.routing import ReplicaLoad
from paged.sampling.params import SamplingParams
from paged.sampling.structured import StructuredOutputsParams
from paged.scheduler import Hint
from paged.serving.kv_config import KvEventsConfig
from paged.serving.kv_hints import KvAction, KvOutcome


class Beginning(msgspec.Struct, frozen=True):
    """The start of the engine's process: ZeroMQ endpoints, which the front has bound; `name` is the model's. `says_json`: what it
    says on standard error are lines of JSON. `policies_of` are the modules that registered policies in the front."""

    engine: EngineConfig
    name: str
    to_engine: str
    from_engine: str
    kv_events: KvEventsConfig | None = None
    says_json: bool = False
    policies_of: list[str] = []


class Add(msgspec.Struct, frozen=True, tag="add"):
    """A request. `params` are the fields of SamplingParams that are not the usual ones; `arrival` is when it came to the server.

    streams  its outputs are sent as they come; else its whole completion at the end
    actions  those of its KvHintsEnvelope; None: it has none
    routed   the router that chose this engine, and its number of the request; None: none did
    """

    id: str
    prompt: list[int]
    params: dict[str, Any]
    arrival: float
    streams: bool
    tenant: str | None = None
    priority: int = 0
    salt: str | None = None
    session_id: str | None = None
    actions: list[KvAction] | None = None
    routed: tuple[str, int] | None = None


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Requests to abort, for they have no reader any more; their last outputs still come."""

    ids: list[str]


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """A question, answered by an Answered of the same number: "snapshot" is what the dashboard shows, "story" the life of request `id`, "check" every
    violated invariant, "index" the hashes of the content that each tier has, "session" and "sessions" what is known of session `id`, or of
    `limit` whose ids begin with it, "prefix" why no more of the prompt of `hint` is cached; "hint" carries `hint` out."""

    number: int
    what: str
    id: str = ""
    hint: Hint | None = None
    limit: int = 0


ToEngine = Add | Abort | Ask


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine takes requests.

    cache_tokens   tokens that the device's memory holds: of a model whose layers are of several kinds, in one sequence
    max_model_len  tokens of one sequence, as model and pool allow
    groups         of a model whose layers are of several kinds; else empty
    rotary_limit   tokens that are computed of a sequence whose prompt has no more; None: as many as of any
    kv_endpoint, kv_replay_endpoint
                   where KV events are published and repeated; None: nowhere
    """

    block_size: int
    num_blocks: int
    host_blocks: int
    block_bytes: int
    cache_tokens: int
    max_model_len: int
    max_sequences: int
    max_tokens_per_step: int
    vocabulary_size: int
    policy: str
    dtype: str
    device: str
    backend: str
    prefix_caching: bool
    groups: list[LayerGroup] = []
    rotary_limit: int | None = None
    kv_dtype: str = AUTO
    kv_endpoint: str | None = None
    kv_replay_endpoint: str | None = None

    @property
    def cache_dtype(self) -> str:
        """What K and V are stored in."""
        return self.dtype if self.kv_dtype == AUTO else self.kv_dtype

    def longest(self, length: int) -> int:
        """Tokens of a sequence whose prompt has so many."""
        if self.rotary_limit is None or length > self.rotary_limit:
            return self.max_model_len
        # The last token is not computed.
        return min(self.max_model_len, self.rotary_limit + 1)


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine cannot begin; `error` says what to change."""

    error: str


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """A request was not taken: the class of the error and what it says."""

    id: str
    kind: str
    error: str


class Figures(msgspec.Struct, frozen=True):
    """Figures of now, and totals since the engine began. Requests, blocks, tokens and seconds, as their names say.

    forecast  in how many seconds each waiting request is let in, and after them as many more of the usual size
    groups    of a model whose layers are of several kinds; else empty
    load      what routers go by, as far as the engine knows it
    disk_hit_tokens, disk_blocks
              prompt tokens that came from the disk, and blocks that it has
    """

    now: float
    running: int
    waiting: int
    paused: int
    swapped: int
    loading: int
    free_blocks: int
    cached_blocks: int
    used_blocks: int
    shared_blocks: int
    reserved_blocks: int
    host_free: int
    host_cached: int
    host_used: int
    totals: dict[str, int]
    steps: int
    failed_steps: int
    host_s: float
    model_s: float
    forecast: list[float]
    groups: tuple[GroupStats, ...] = ()
    load: ReplicaLoad = ReplicaLoad()
    disk_hit_tokens: int = 0
    disk_blocks: int = 0
    sessions: int = 0
    pinned_blocks: int = 0


class Hinted(msgspec.Struct, frozen=True, tag="hinted"):
    """What became of the actions that came with a request, before its last output."""

    id: str
    outcomes: list[KvOutcome]


class Stepped(msgspec.Struct, frozen=True, tag="stepped"):
    """A step has ended, or requests ended outside any.

    begun     requests that were let in for the first time
    tokens    computed in it
    sent      when it was sent
    figures   now and then
    """

    outputs: list[EngineOutput]
    completions: list[Completion]
    begun: list[str]
    tokens: int
    seconds: float
    sent: float
    figures: Figures | None = None


class Answered(msgspec.Struct, frozen=True, tag="answered"):
    """The answer to a question, as JSON; None: there is no such request. `kind` and `error` are the class of an error and what it says."""

    number: int
    answer: bytes | None
    kind: str = ""
    error: str = ""


FromEngine = Ready | Failed | Refused | Hinted | Stepped | Answered

_USUAL = SamplingParams()


def sent(params: SamplingParams) -> dict[str, Any]:
    """Sampling parameters as plain values, without what is as usual."""
    named = {name: getattr(params, name) for name in params.__struct_fields__}
    return {name: msgspec.to_builtins(value) for name, value in named.items() if value != getattr(_USUAL, name)}


def received(fields: dict[str, Any]) -> SamplingParams:
    """The same again. Raises InvalidSampling."""
    form = fields.get("structured_outputs")
    if form is not None:
        fields = {**fields, "structured_outputs": StructuredOutputsParams(**form)}
    if (bias := fields.get("logit_bias")) is not None:
        fields = {**fields, "logit_bias": {int(token): value for token, value in bias.items()}}
    return SamplingParams(**fields)
