"""The messages between the server's two processes: msgspec structs as MessagePack.

    front ── Add, Abort, Ask ──> engine          engine ── Ready, Refused, Hinted, Stepped, Answered ──> front

Times are those of the machine's monotonic clock, which both read.
"""

from __future__ import annotations

import msgspec

from paged.attention.kv_dtypes import AUTO
from paged.block_manager import GroupStats, LayerGroup
from paged.engine.config import EngineConfig
from paged.engine.results import Completion, EngineOutput
from paged.engine.routing import ReplicaLoad
from paged.sampling.params import SamplingParams
from paged.scheduler import Hint
from paged.serving.kv_hints import KvAction, KvOutcome
from paged.serving.settings import KvEventsConfig


class Beginning(msgspec.Struct, frozen=True):
    """The start of the engine's process.

    name          the model's
    to_engine, from_engine
                  ZeroMQ endpoints, which the front has bound
    says_json     it writes lines of JSON on standard error
    policies_of   modules that registered policies in the front
    """

    engine: EngineConfig
    name: str
    to_engine: str
    from_engine: str
    kv_events: KvEventsConfig | None = None
    says_json: bool = False
    policies_of: list[str] = []


class Add(msgspec.Struct, frozen=True, tag="add"):
    """A request.

    arrival  when it came to the server
    streams  True: its outputs are sent as they come; False: its whole completion at the end
    actions  those of its KvHintsEnvelope; None: it has none
    routed   the router that chose this engine, and the router's number of the request; None: no router did
    """

    id: str
    prompt: list[int]
    params: SamplingParams
    arrival: float
    streams: bool
    tenant: str | None = None
    priority: int = 0
    salt: str | None = None
    session_id: str | None = None
    actions: list[KvAction] | None = None
    routed: tuple[str, int] | None = None


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Requests to abort, since they have no reader any more. Their last outputs still come."""

    ids: list[str]


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """A question, answered by an `Answered` of the same number. `what` is one of:

    snapshot  what the dashboard shows
    story     the life of request `id`
    session, sessions
              session `id`, or `limit` sessions whose ids begin with it
    hint      carry out `hint`
    prefix    why no more of the prompt of `hint` is cached
    check     every violated invariant
    index     the hashes of each tier's content
    """

    number: int
    what: str
    id: str = ""
    hint: Hint | None = None
    limit: int = 0


ToEngine = Add | Abort | Ask


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine takes requests.

    cache_tokens   tokens of the longest sequence that the device's memory holds
    max_model_len  tokens of one sequence, as model and pool allow
    groups         layer groups of a model whose layers are of several kinds; else empty
    rotary_limit   most tokens computed of a sequence whose prompt has no more than that; None: no such limit
    kv_endpoint, kv_replay_endpoint
                   where KV events are published and replayed; None: nowhere
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
    prefix_caching: bool
    groups: list[LayerGroup] = []
    rotary_limit: int | None = None
    kv_dtype: str = AUTO
    kv_endpoint: str | None = None
    kv_replay_endpoint: str | None = None

    @property
    def cache_dtype(self) -> str:
        """The dtype of stored K and V."""
        return self.dtype if self.kv_dtype == AUTO else self.kv_dtype

    def longest(self, length: int) -> int:
        """Return the most tokens of a sequence whose prompt has `length`."""
        if self.rotary_limit is None or length > self.rotary_limit:
            return self.max_model_len
        # The last token is sampled, and never computed.
        return min(self.max_model_len, self.rotary_limit + 1)


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine cannot begin; `error` says what to change."""

    error: str


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The engine refused a request: `kind` is the error's class, `error` its message."""

    id: str
    kind: str
    error: str


class Figures(msgspec.Struct, frozen=True):
    """Figures of now, and totals since the engine began: tokens and seconds, as their names say.

    requests  by state
    blocks    by state, those of the host with host_ before it, and those on the disk
    forecast  in how many seconds each waiting request is admitted, then further ones behind them, of the usual size
    groups    layer groups of a model whose layers are of several kinds; else empty
    load      what routers choose by, as far as the engine knows it
    disk_hit_tokens
              prompt tokens that came from the disk
    """

    now: float
    requests: dict[str, int]
    blocks: dict[str, int]
    totals: dict[str, int]
    failed_steps: int
    host_s: float
    model_s: float
    forecast: list[float]
    groups: tuple[GroupStats, ...] = ()
    load: ReplicaLoad = ReplicaLoad()
    disk_hit_tokens: int = 0
    sessions: int = 0


class Hinted(msgspec.Struct, frozen=True, tag="hinted"):
    """The outcomes of the actions that came with a request; sent before its last output."""

    id: str
    outcomes: list[KvOutcome]


class Stepped(msgspec.Struct, frozen=True, tag="stepped"):
    """A step has ended, or requests ended outside any.

    begun     requests that were admitted for the first time
    tokens    computed in it
    sent      when this was sent
    figures   None in most steps
    """

    outputs: list[EngineOutput]
    completions: list[Completion]
    begun: list[str]
    tokens: int
    seconds: float
    sent: float
    figures: Figures | None = None


class Answered(msgspec.Struct, frozen=True, tag="answered"):
    """The answer to a question, as JSON; None: there is no such request or session, or an error, with its class `kind` and its message `error`."""

    number: int
    answer: bytes | None
    kind: str = ""
    error: str = ""


FromEngine = Ready | Failed | Refused | Hinted | Stepped | Answered
