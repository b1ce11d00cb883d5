"""The protocols of a KV-cache manager, a scheduler and a serving engine, and the features that each may have.

A subject that has these methods can be tested as it is; one with other names needs an adapter. What it cannot do, its
`Capabilities` say, and the kit leaves those rules out.
"""

from __future__ import annotations

from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any, Protocol, runtime_checkable

from numpy.typing import NDArray

from paged.errors import InvalidConfig


@dataclass(frozen=True)
class Capabilities:
    """What a subject can do. The kit never calls what is False here."""

    prefix_cache: bool = True
    """Full blocks are shared by content, and content outlives its sequence."""
    sharing_in_flight: bool = True
    """A row may share blocks that another one's batch, the same or one that is out, is still computing."""
    rows_in_flight: bool = True
    """A row in flight may be placed in the next batch, with tokens that it does not know yet, freed, truncated,
    swapped, forked and appended to."""
    fork: bool = True
    """A row can be forked, and a shared partial block is copied when written."""
    host_tier: bool = True
    """There is a second pool, and `swap_out` and `swap_in` move blocks there and back."""
    host_content: bool = True
    """Content that leaves the device can be kept in the second pool (`host_caching`), and a hit brings it back."""
    events: bool = True
    """`take_events` and `events_snapshot` tell what the cache stored and removed."""
    retention: bool = True
    """`retain` and `expire`."""
    private_rows: bool = True
    """Rows that do not read, or do not write, the prefix cache."""
    truncate: bool = True
    reserve: bool = True
    groups: bool = True
    """A request may own several sequences."""
    external_tokens: bool = True
    """`num_computed`, `Batch.loads` and `loaded`; `saves`, `saving_blocks` and `saved`."""
    append: bool = True
    """A scheduler's `append`. Without it, or without drafts, each row that samples gets one token."""
    cancel: bool = True
    """A scheduled batch can be taken back, and several may be outstanding."""
    drafts: bool = True
    """`schedule` takes drafts, a batch has `num_drafts`, and `update` takes the number of tokens of each row."""
    hints: bool = True
    """`hint`, `session` and `sessions`, and requests that have a `session_id`."""
    abort: bool = True
    """An engine's `abort`. Of these and the next ones only engines are asked."""
    priority: bool = True
    """`add_request` takes `priority`."""
    salts: bool = True
    """`add_request` takes `salt`: content is shared only among requests that agree in it."""
    seeds: bool = True
    """A temperature above 0 with a seed: the same seed draws the same tokens, whatever else runs."""
    logits: bool = True
    """`on_logits` is called with what each token was chosen from."""
    counts: bool = True
    """`manager` says how many blocks are free, cached and used."""
    check: bool = True
    """`check()` returns what is wrong inside, in sentences."""


_FLAGS = {
    "swap_out": "host_tier", "swap_in": "host_tier", "take_moves": "host_content", "expire": "retention",
    "retain": "retention", "take_events": "events", "events_snapshot": "events", "hint": "hints",
    "loaded": "external_tokens", "saved": "external_tokens",
}  # fmt: skip


def flag_of(method: str) -> str | None:
    """The field of `Capabilities` that leaves this method of a subject out; None: it is always called."""
    flag = _FLAGS.get(method, method)
    return flag if flag in Capabilities.__dataclass_fields__ else None


@runtime_checkable
class KVManager(Protocol):
    """Block accounting over integer rows: what every manager has. What a capability stands for comes on top. Semantics:
    the docstrings of `paged.BlockManager`; `conformance` says which type and shape each answer has.

    device, host    num_blocks, num_free, num_cached, num_used, in blocks; ref_counts, by block
    rows            live, the rows that sequences hold; num_tokens, num_computed, num_scheduled, by row; num_on_host(row)
    """

    num_blocks: int
    block_size: int
    num_host_blocks: int

    @property
    def device(self) -> Any: ...
    @property
    def host(self) -> Any: ...
    @property
    def rows(self) -> Any: ...

    def next_batch(self) -> int: ...
    def lookup(self, tokens: Any, namespace: Any = None, /) -> Any: ...
    def add(self, tokens: Any, /, *, namespace: Any = None) -> int: ...
    def append(self, row: int, tokens: Any, /) -> None: ...
    def allocate(self, rows: Any, counts: Any, /) -> Any: ...
    def confirm(self) -> int: ...
    def free(self, rows: Any, /) -> None: ...
    def table(self, row: int, /) -> NDArray[Any]: ...
    def slots(self, row: int, start: int, stop: int, /) -> NDArray[Any]: ...
    def cached_contents(self) -> set[tuple[bytes, ...]]: ...
    def reset_cache(self) -> bool: ...
    def check(self) -> list[str]: ...


@runtime_checkable
class StepScheduler(Protocol):
    """Decides what one step runs. Semantics: the docstrings of `paged.Scheduler`.

    `manager` has the members of `KVManager`, and its device has `states`, too: int [num_blocks], 0 free, 1 cached, 2
    used. With a prefix cache `type(manager)(1, 1)` makes one of a block of one token, which shows how it spells
    namespaces in `cached_contents`.
    """

    @property
    def manager(self) -> Any: ...
    @property
    def has_unfinished(self) -> bool: ...

    def add(self, request: Any, now: float = 0.0) -> None: ...
    def schedule(self, now: float = 0.0) -> Any: ...
    def update(self, batch: Any, token_ids: Any, counts: Any = None, now: float = 0.0) -> Any: ...
    def abort(self, request_id: str, /) -> Any: ...
    def status(self, request_id: str, /) -> str: ...
    def id_of(self, row: int, /) -> str | None: ...
    def counts(self) -> dict[str, int]: ...
    def waiting_ids(self) -> list[str]: ...
    def check(self) -> list[str]: ...


@runtime_checkable
class ServingEngine(Protocol):
    """Takes requests and answers them step by step: what the kit calls of an engine, which it sees from outside only.

    An output has `id`, `token_ids` (new ones, in order) and `finish_reason`: None while the request goes on, "stop"
    when its last token is one of its stop ids, "length" at `max_tokens` or when neither pool nor model holds more. It
    may have `usage`, with `hit_tokens` and `preemptions`; these are counted, not judged.

    What an engine may offer besides, and says in its `Capabilities`:

        on_logits   None, or called as on_logits(id, place, row) for each token that is chosen: `place` is how many
                    tokens of the request were chosen before, `row` the logits [vocabulary], as numpy can read them
        manager     has `device`, with num_free, num_cached and num_used, in blocks, and `host` if there is a second pool
        check()     what is wrong inside, as sentences
    """

    @property
    def has_unfinished(self) -> bool: ...

    def add_request(self, prompt: Any, params: Any = None, *, id: Any = None) -> Any:
        """Take a prompt of token ids. `params` are `paged.SamplingParams`, or None. `priority=` (smaller is sooner) and
        `salt=` are given only where the request has them. Raises, changing nothing, for the id of a live request, and
        for what the pool can never hold."""
        ...

    def step(self) -> Any:
        """Compute something, if there is anything to compute. Return the new outputs."""
        ...

    def abort(self, request_id: str, /) -> Any:
        """End a request in any state: nothing of it is delivered after that. Return its last output or None; None if it
        has ended. May raise for an id that was never added."""
        ...


def capabilities_of(subject: object) -> Capabilities:
    """The subject's own `capabilities`; without them everything but a host tier or prefix cache that its sizes and
    flags deny, and of what an engine may offer only what is there. Raises InvalidConfig for `capabilities` of another
    type."""
    declared = getattr(subject, "capabilities", None)
    if isinstance(declared, Capabilities):
        return declared
    if declared is not None:
        raise InvalidConfig(f"capabilities of {type(subject).__name__} have to be Capabilities; got {declared!r}.")
    if isinstance(subject, ServingEngine):
        logits, counts, check = (hasattr(subject, name) for name in ("on_logits", "manager", "check"))
        takes = signature(subject.add_request).parameters
        takes_all = any(each.kind is Parameter.VAR_KEYWORD for each in takes.values())
        return Capabilities(
            logits=logits,
            counts=counts,
            check=check,
            retention=takes_all or "retention" in takes,
            private_rows=takes_all or {"reads_cache", "writes_cache"} <= takes.keys(),
        )
    return Capabilities(
        prefix_cache=bool(getattr(subject, "prefix_caching", True)),
        host_tier=getattr(subject, "num_host_blocks", 0) > 0,
    )
