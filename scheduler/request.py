"""What a user submits, and the state that the scheduler keeps of it."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from paged.base.arguments import UNLIMITED, Tokens, keep_at_error, tokens_below
from paged.base.fields import AtLeast0, AtLeast1, Level, Name, checked_fields
from paged.block_manager.content_key import root_prefix
from paged.errors import InvalidNamespace, InvalidRequest, InvalidTokens

TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
_NO_NAMESPACE = root_prefix(None)


class Status(StrEnum):
    """Exactly one of these at any time."""

    WAITING = "waiting"  # no row, no blocks
    LOADING = "loading"  # a row, its reservation whole, and tokens from elsewhere that it waits for
    RUNNING = "running"  # a row; gets tokens when memory and limits allow (a follower: 0 for now)
    PAUSED = "paused"  # gave back the tail of its blocks and kept the rest
    SWAPPED = "swapped"  # keeps no block on the device
    FINISHED = "finished"
    REJECTED = "rejected"
    ABORTED = "aborted"


_ENDED = {Status.FINISHED, Status.REJECTED, Status.ABORTED}
# The statuses that may follow each.
NEXT = {
    Status.WAITING: {Status.WAITING, Status.RUNNING, Status.LOADING, *_ENDED},
    Status.LOADING: {Status.RUNNING, Status.WAITING, *_ENDED},
    Status.RUNNING: {Status.PAUSED, Status.SWAPPED, Status.WAITING, *_ENDED},
    Status.PAUSED: {Status.PAUSED, Status.SWAPPED, Status.RUNNING, Status.WAITING, *_ENDED},
    Status.SWAPPED: {Status.RUNNING, Status.WAITING, *_ENDED},
}

# Codes in Outputs.finish; the index is the code.
FINISH_REASONS: tuple[str | None, ...] = (None, "stop", "length", "abort", "rejected")
NOT_FINISHED, STOP, LENGTH, ABORT, REJECTED = range(5)


class Retention(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How a finished sequence's content is kept: evicted after all of lower priority. `priority`: from 1 to 3; other
    content has 0. `lasts`: time from its end on, in the unit of `now`; None or infinity: no limit."""

    priority: Level = 1
    lasts: Annotated[float, Meta(gt=0)] | None = None

    def __post_init__(self) -> None:
        checked_fields(Retention, msgspec.structs.asdict(self))


class Request(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A prompt and what to make of it.

    id               of any length; unique among live requests
    prompt           token ids, a list of int or an int32 array [n], n ≥ 1
    max_tokens       output tokens at most, for each sequence
    min_tokens       output tokens before which EOS and stop ids do not count
    eos_token_id     ends a sequence, which keeps it; None: nothing does
    stop_token_ids   more ids that do
    priority         smaller is sooner
    num_sequences    a group: sequences of one prompt, admitted, preempted and swapped together
    num_computed     first tokens whose KV exists elsewhere; see Batch.loads
    saves            its device blocks stay held, and content as usual, from its end on, until `Scheduler.saved`
    expected_tokens  output tokens that it is thought to take, at most max_tokens: a hint for policies; None: not known
    keep_at          lengths of the prompt at which others may begin (the end of a system prompt, of tools): windows and
                     states are kept at the last block's end before each, at most MOST_KEPT_AT. Full layers always are
    salt, adapter, extra_key  content is shared only among requests that agree in all three; the key is any nesting of
                     None, bool, int, str, bytes and tuple
    reads_cache      off: everything is computed, though it may be cached (prompt log-probabilities)
    writes_cache     off: no other request finds what is computed for it
    retention        how its content is kept when it has finished; None: as any other
    tenant           whose share fair policies count it to; None is a tenant, too. Unlike `salt` it separates no content
    session_id       the session that it is a turn of: what it leaves is kept for the next turn, see `Hint`; None: of none
    """

    id: Name
    prompt: Any
    max_tokens: AtLeast1 = 16
    min_tokens: AtLeast0 = 0
    eos_token_id: TokenId | None = None
    stop_token_ids: tuple[TokenId, ...] = ()
    priority: int = 0
    num_sequences: AtLeast1 = 1
    num_computed: AtLeast0 = 0
    saves: bool = False
    expected_tokens: AtLeast1 | None = None
    keep_at: Any = ()
    salt: str | None = None
    adapter: str | None = None
    extra_key: Any = None
    reads_cache: bool = True
    writes_cache: bool = True
    retention: Retention | None = None
    tenant: str | None = None
    session_id: Name | None = None

    @property
    def is_private(self) -> bool:
        """Whether it does not read, or does not write, the cache."""
        return not (self.reads_cache and self.writes_cache)


def validated(request: Request, vocabulary_size: int | None) -> tuple[Request, Tokens, bytes]:
    """Return the request with Python integers, counts at most UNLIMITED, its prompt, int32 [n], and its encoded
    namespace. Raises InvalidRequest unless all fields are in range."""
    fields = msgspec.structs.asdict(request)
    try:
        own = msgspec.convert(fields, Request)
    except msgspec.ValidationError:
        # Numbers of numpy, or a wrong field.
        own = Request(**checked_fields(Request, fields, partial(wrong, request.id)))
    if own.max_tokens > UNLIMITED:
        own = Request(**checked_fields(Request, msgspec.structs.asdict(own)))
    most, num = own.max_tokens, own.num_sequences
    if own.min_tokens > most:
        raise wrong(request.id, f"min_tokens has to be from 0 to max_tokens ({most}); got {own.min_tokens}.")
    if own.expected_tokens is not None and own.expected_tokens > most:
        raise wrong(request.id, f"expected_tokens has to be from 1 to max_tokens ({most}); got {own.expected_tokens}.")
    if num > 1 and (own.num_computed or own.saves):
        field = "num_computed" if own.num_computed else "saves"
        raise wrong(request.id, f"{field} goes with one sequence; got num_sequences {num}.")
    if num > 1 and own.is_private:
        shared = f"{num} sequences share their prompt through the cache"
        raise wrong(request.id, f"{shared}; reads_cache and writes_cache have to be on.")
    try:
        prompt = tokens_below(request.prompt, vocabulary_size)
    except InvalidTokens as invalid:
        raise wrong(request.id, str(invalid)) from None
    if not len(prompt):
        raise wrong(request.id, "the prompt is empty; at least one token is needed.")
    if request.keep_at != () and (error := keep_at_error(request.keep_at, len(prompt))) is not None:
        raise wrong(request.id, error)
    try:
        root = request_root(request.salt, request.adapter, request.extra_key)
    except InvalidNamespace as error:
        raise wrong(request.id, f"extra_key: {error}") from None
    # The array may be the caller's.
    return own, prompt.copy() if isinstance(request.prompt, np.ndarray) else prompt, root


def request_root(salt: str | None, adapter: str | None, extra_key: Any) -> bytes:
    """Return the encoded namespace of requests with these. Raises InvalidNamespace."""
    if salt is None and adapter is None and extra_key is None:
        return _NO_NAMESPACE
    return root_prefix((salt, adapter, extra_key))


def wrong(request_id: str, what: str) -> InvalidRequest:
    return InvalidRequest(f'request "{request_id}": {what}')


class RequestUsage(msgspec.Struct, frozen=True, gc=False):
    """What a request took, delivered with its last output: tokens, blocks, times preempted. hit_tokens were found in
    the prefix cache at its first admission, recomputed_tokens computed again after preemptions."""

    prompt_tokens: int
    output_tokens: int
    hit_tokens: int
    recomputed_tokens: int
    swapped_blocks: int
    preemptions: int


class Counted(msgspec.Struct, gc=False):
    """Figures that only `count` changes."""

    def count(self, name: str, num: int = 1) -> None:
        setattr(self, name, getattr(self, name) + num)


class RequestState(Counted, eq=False, gc=False):
    """A live request. No reference in it leads back to it, so the garbage collector skips it. Lists: per sequence."""

    request: Request  # what the user submitted, with Python integers
    root: bytes
    # (priority, arrival, number): smaller is served sooner. Under fair policies its turn replaces the arrival in time.
    order: tuple[int, float, int]
    stops: tuple[int, ...]  # ids that end a sequence, EOS among them
    prompt_len: int
    tokens: list[Tokens | None]  # the known tokens while it has no row (None: it has one, or it has ended)
    rows: list[int]  # its row (-1: none)
    num_live: int  # sequences that have not ended
    # Tokens from elsewhere that it waits for, listed in batch `load_batch`; None: it asks for them when it is admitted.
    num_loading: int | None
    max_total: list[int]  # the tokens at which it has its full length
    high_water: list[int]  # tokens that were computed once: below it, computing is recomputing
    appended: list[int]  # tokens that the caller appended
    has_sampled: list[bool]  # all known tokens are computed and sampled: computed again, they do not sample
    is_plain: bool  # new, one sequence, in the cache as any: most are
    status: Status = Status.WAITING
    num_output: int = 0  # output tokens of the sequences that have ended
    preemptions: int = 0
    hit_tokens: int = 0
    recomputed_tokens: int = 0
    swapped_blocks: int = 0
    follows: str | None = None  # id of the request whose blocks it waits to share
    passed: int = 0  # how often a request behind it was admitted before it
    is_new: bool = True  # never admitted yet
    preempted_at: int | None = None  # the step in which blocks were taken from it since it last ran
    longest_pause: int = 0  # most steps that it stood still because blocks were taken from it
    load_batch: int = 0
    charged: int = 0  # tokens charged to its tenant at its first admission
    hints: tuple[Any, ...] = ()  # those that are carried out when it finishes

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def first_tokens(self) -> Tokens:
        """Known tokens of the first live sequence of a waiting request."""
        first = self.tokens[0]
        return next(tokens for tokens in self.tokens if tokens is not None) if first is None else first

    @property
    def live_rows(self) -> list[int]:
        return [row for row in self.rows if row >= 0]

    @property
    def live_sequences(self) -> list[int]:
        """The sequences that have an output to come."""
        return [sequence for sequence in range(len(self.rows)) if self.is_live(sequence)]

    def is_live(self, sequence: int) -> bool:
        return self.rows[sequence] >= 0 or self.tokens[sequence] is not None

    def become(self, status: Status) -> None:
        """Take the next status. Only `Queues`, and the end of the request, call this."""
        assert status in NEXT[self.status], f'request "{self.id}" turns from {self.status} to {status}'
        self.status = status

    def set_sampled(self, sequence: int, has_sampled: bool) -> None:
        """Note whether all known tokens of the sequence are computed and sampled. Only `RowColumns` call this."""
        self.has_sampled[sequence] = has_sampled

    def move(self, sequence: int, row: int, tokens: Tokens | None) -> None:
        """Give the sequence a row, or take its row (-1) and keep its known tokens (None: it has ended)."""
        self.rows[sequence], self.tokens[sequence] = row, tokens

    def extend(self, sequence: int, tokens: Tokens) -> None:
        """Append to the known tokens of a sequence that has no row."""
        known = self.tokens[sequence]
        assert known is not None, "a live sequence without a row keeps its tokens"
        self.tokens[sequence] = np.concatenate([known, tokens])

    def grow(self, sequence: int, num_more: int, max_total: int) -> None:
        """The caller appended tokens to the sequence, whose full length is `max_total` from now on."""
        self.appended[sequence] += num_more
        self.max_total[sequence] = max_total

    def reach(self, sequence: int, num_tokens: int) -> int:
        """Note that so many tokens of the sequence were computed. Returns the most that ever were."""
        self.high_water[sequence] = max(self.high_water[sequence], num_tokens)
        return self.high_water[sequence]

    def add_fork(self, sequence: int, row: int) -> int:
        """Add a fork of the sequence, which has this row. Return its number, which may be that of an ended fork."""
        self.num_live += 1
        # Numbers of ended forks are reused, or a search would need ever more of them.
        own, num = self.request.num_sequences, len(self.rows)
        number = next((number for number in range(own, num) if not self.is_live(number)), num)
        each: tuple[list[Any], ...] = (self.tokens, self.max_total, self.high_water, self.appended, self.has_sampled)
        for values in each:
            values[number : number + 1] = [values[sequence]]
        self.rows[number : number + 1] = [row]
        return number

    def admitted(self) -> None:
        self.is_plain = self.is_new = False

    def charge(self, num_tokens: int, turn: float) -> None:
        """Charge so many tokens to its tenant; from now on its turn stands for its arrival."""
        self.charged = num_tokens
        self.order = (self.order[0], turn, self.order[2])

    def defer(self, hint: Any) -> None:
        """Have a hint carried out when it finishes, and no other one of its action."""
        self.forget_hint(hint.action)
        self.hints = (*self.hints, hint)

    def forget_hint(self, action: str) -> bool:
        """Drop the hint of this action that was to be carried out. Return whether there was one."""
        before, self.hints = self.hints, tuple(hint for hint in self.hints if hint.action != action)
        return len(before) > len(self.hints)

    def await_load(self, num_tokens: int | None, batch: int = 0) -> None:
        """Wait for so many tokens from elsewhere, which this batch lists; None: ask for them at the next admission."""
        self.num_loading, self.load_batch = num_tokens, batch

    def note_preempted(self, step: int) -> None:
        self.preempted_at = step
        self.preemptions += 1

    def resume(self, step: int) -> None:
        if self.preempted_at is not None:
            self.longest_pause = max(self.longest_pause, step - self.preempted_at)
            self.preempted_at = None

    def follow(self, leader: str | None) -> None:
        """Wait for blocks that the request of this id computes; None: for none."""
        self.follows = leader

    def note_ended(self, num_output: int) -> None:
        """One of its sequences, of so many outputs, has ended."""
        self.num_output += num_output
        self.num_live -= 1

    def usage(self) -> RequestUsage:
        took = self.hit_tokens, self.recomputed_tokens, self.swapped_blocks, self.preemptions
        return RequestUsage(self.prompt_len, self.num_output, *took)


def state_of(
    request: Request, prompt: Tokens, root: bytes, order: tuple[int, float, int], max_total: int
) -> RequestState:
    """Return the state of a new request, whose sequences have at most `max_total` tokens each."""
    num, eos, stops, loads = request.num_sequences, request.eos_token_id, request.stop_token_ids, request.num_computed
    stops = tuple(stops) if eos is None else (*stops, eos)
    is_plain = num == 1 and request.reads_cache and request.writes_cache
    known: list[Tokens | None] = [prompt] * num
    loading, rows, most = None if loads else 0, [-1] * num, [max_total] * num
    high, appended, sampled, length = [0] * num, [0] * num, [False] * num, len(prompt)
    return RequestState(
        request, root, order, stops, length, known, rows, num, loading, most, high, appended, sampled, is_plain
    )
