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
    """The state of a request."""

    WAITING = "waiting"  # no row, no blocks
    LOADING = "loading"  # has a row, and blocks for tokens from elsewhere, which it waits for
    RUNNING = "running"  # has a row, and computes when memory and limits allow (a follower: nothing for now)
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


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """How long a finished sequence's content is kept: it is evicted after all content of lower `priority`, from 1 to 3;
    other content has 0. `lasts`: time from the sequence's end on, in the unit of `now`; None or infinity: no limit."""

    priority: Level = 1
    lasts: Annotated[float, Meta(gt=0)] | None = None

    def __post_init__(self) -> None:
        checked_fields(Retention, msgspec.structs.asdict(self))


class Request(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A prompt, and how to go on with it.

    id               of any length; unique among live requests
    prompt           token ids, a list of int or an int32 array [n], n ≥ 1
    max_tokens       most output tokens of each sequence
    min_tokens       output tokens before which EOS and stop ids have no effect
    eos_token_id     an id that ends a sequence, and is its last output; None: no id does
    stop_token_ids   more such ids
    priority         smaller is served sooner
    num_sequences    more than 1: a group of sequences of one prompt, admitted, preempted and swapped together
    num_computed     how many first tokens of the prompt have KV elsewhere; see Batch.loads
    saves            on: after its end its device blocks stay held, so that they can be copied, until `Scheduler.saved`
    expected_tokens  outputs that each sequence is thought to have, up to max_tokens, for policies; None: not known
    keep_at          up to MOST_KEPT_AT lengths of the prompt at which others may part from it (the end of a system
                     prompt): windows and states are kept at the last block end before each; full layers always are
    salt, adapter, extra_key  content is shared only among requests that agree in all three; the key is any nesting of
                     None, bool, int, str, bytes and tuple
    reads_cache      off: everything is computed, even if it is cached (for prompt log-probabilities)
    writes_cache     off: no other request finds what is computed for it
    retention        how long its content is kept after it finished; None: as other content
    tenant           whose share it counts to under fair policies; None is one, too. Tenants share content
    session_id       the session of which it is a turn: what it leaves is kept for the next one, see `Hint`; None: none
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
    """Check the request. Return a copy with Python integers, and counts up to UNLIMITED; its prompt, int32 [n]; and its
    encoded namespace. Raises InvalidRequest if a field is out of range."""
    fields = msgspec.structs.asdict(request)
    try:
        own = msgspec.convert(fields, Request)
    except (msgspec.ValidationError, UnicodeEncodeError):
        # A field is wrong, or a number of numpy.
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
    keeps = own.keep_at
    if (type(keeps) is not tuple or keeps) and (error := keep_at_error(keeps, len(prompt))) is not None:
        raise wrong(request.id, error)
    try:
        root = request_root(request.salt, request.adapter, request.extra_key)
    except InvalidNamespace as error:
        raise wrong(request.id, f"extra_key: {error}") from None
    # The array may be the caller's.
    return own, prompt.copy() if isinstance(request.prompt, np.ndarray) else prompt, root


def request_root(salt: str | None, adapter: str | None, extra_key: Any) -> bytes:
    """Return the encoded namespace of requests with this salt, adapter and extra_key. Raises InvalidNamespace."""
    if salt is None and adapter is None and extra_key is None:
        return _NO_NAMESPACE
    return root_prefix((salt, adapter, extra_key))


def wrong(request_id: str, what: str) -> InvalidRequest:
    return InvalidRequest(f'request "{request_id}": {what}')


class RequestUsage(msgspec.Struct, frozen=True, gc=False):
    """What a request and all its sequences took, delivered with its last output. hit_tokens: found in the prefix cache
    at its first admission. recomputed_tokens: computed again after preemptions. preemptions: how many there were."""

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
    """A live request. Lists are by sequence. No reference in it leads back to it, so the garbage collector skips it."""

    request: Request  # what the user submitted, with Python integers
    root: bytes
    # (priority, arrival, number): smaller is served sooner. Fair policies put its turn for its arrival at admission.
    order: tuple[int, float, int]
    stops: frozenset[int]  # ids that end a sequence, EOS among them
    prompt_len: int
    tokens: list[Tokens | None]  # its known tokens while it has no row; None: it has a row, or has ended
    rows: list[int]  # its row (-1: none)
    num_live: int  # sequences that have not ended
    # How many tokens from elsewhere it waits for, which batch `load_batch` lists; None: it asks when it is admitted.
    num_loading: int | None
    max_total: list[int]  # its full length in tokens
    high_water: list[int]  # how many tokens were ever computed: up to there, computing is recomputing
    appended: list[int]  # how many tokens the caller appended
    has_sampled: list[bool]  # its last known token has sampled: computed again, it does not sample
    is_plain: bool  # never admitted yet, of one sequence, reads and writes the cache: most are
    status: Status = Status.WAITING
    num_output: int = 0  # output tokens of the sequences that have ended
    preemptions: int = 0
    hit_tokens: int = 0
    recomputed_tokens: int = 0
    swapped_blocks: int = 0
    follows: str | None = None  # id of the request whose blocks it waits to share
    passed: int = 0  # how often a request behind it was admitted before it
    is_new: bool = True  # never admitted yet
    preempted_at: int | None = None  # the step in which it lost blocks; None: in no step since it last ran
    longest_pause: int = 0  # most steps for which it stood still after it lost blocks
    load_batch: int = 0
    charged: int = 0  # tokens charged to its tenant at its first admission
    hints: tuple[Any, ...] = ()  # hints that are carried out when it finishes

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
        """Take the next status. Only `Queues` and `State.end` call this."""
        assert status in NEXT[self.status], f'request "{self.id}" turns from {self.status} to {status}'
        self.status = status

    def set_sampled(self, sequence: int, has_sampled: bool) -> None:
        """Note whether the sequence's last known token has sampled. Only `RowColumns` calls this."""
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
        """Count tokens that the caller appended to the sequence. Its full length is `max_total` from now on."""
        self.appended[sequence] += num_more
        self.max_total[sequence] = max_total

    def reach(self, sequence: int, num_tokens: int) -> int:
        """Note that so many tokens of the sequence were computed. Return the most that ever were."""
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
        """Keep a hint for when the request finishes, instead of an earlier one of the same action."""
        self.forget_hint(hint.action)
        self.hints = (*self.hints, hint)

    def forget_hint(self, action: str) -> bool:
        """Drop the hint of this action that `defer` kept. Return whether there was one."""
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
        """Follow the request with this id, which computes blocks to share; None: follow none."""
        self.follows = leader

    def note_ended(self, num_output: int) -> None:
        """Note that one of its sequences has ended, with so many outputs."""
        self.num_output += num_output
        self.num_live -= 1

    def usage(self) -> RequestUsage:
        took = self.hit_tokens, self.recomputed_tokens, self.swapped_blocks, self.preemptions
        return RequestUsage(self.prompt_len, self.num_output, *took)


def state_of(
    request: Request, prompt: Tokens, root: bytes, order: tuple[int, float, int], max_total: int
) -> RequestState:
    """Return the state of a new request, whose sequences have at most `max_total` tokens each."""
    num, eos, loads = request.num_sequences, request.eos_token_id, request.num_computed
    stops = frozenset(request.stop_token_ids if eos is None else (*request.stop_token_ids, eos))
    is_plain = num == 1 and request.reads_cache and request.writes_cache
    known: list[Tokens | None] = [prompt] * num
    loading, rows, most = None if loads else 0, [-1] * num, [max_total] * num
    high, appended, sampled, length = [0] * num, [0] * num, [False] * num, len(prompt)
    return RequestState(
        request, root, order, stops, length, known, rows, num, loading, most, high, appended, sampled, is_plain
    )
