"""What a user submits, and the state that the scheduler keeps of it."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from paged.base.arguments import checked_level, is_integer, keep_at_error, token_array
from paged.block_manager.content_key import root_prefix
from paged.errors import InvalidConfig, InvalidNamespace, InvalidRequest, InvalidTokens

from .arguments import UNLIMITED, count_of, is_number, vocabulary_error
from .status import NEXT, Status

T = TypeVar("T")

_NO_NAMESPACE = root_prefix(None)
# min_tokens, priority, num_sequences and num_computed of most requests.
_USUAL = (0, 0, 1, 0)


class Retention(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How a finished sequence's content is kept: evicted after all of lower priority. `priority`: from 1 to 3; other
    content has 0. `lasts`: time from its end on, in the unit of `now`; None or infinity: no limit."""

    priority: int = 1
    lasts: float | None = None

    def __post_init__(self) -> None:
        checked_level(self.priority)
        lasts = self.lasts
        if lasts is not None and not (is_number(lasts) and lasts > 0):
            raise InvalidConfig(f"lasts has to be a time above 0, or None; got {lasts!r}.")


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
    expected_tokens  output tokens that it is thought to take, at most max_tokens: a hint for policies; None: not known
    keep_at          lengths of the prompt at which others may begin (the end of a system prompt, of tools): windows and
                     states are kept at the last block's end before each, at most MOST_KEPT_AT. Full layers always are
    salt, adapter, extra_key  content is shared only among requests that agree in all three; the key is any nesting of
                     None, bool, int, str, bytes and tuple
    reads_cache      off: everything is computed, though it may be cached (prompt log-probabilities)
    writes_cache     off: no other request finds what is computed for it
    retention        how its content is kept when it has finished; None: as any other
    tenant           whose share fair policies count it to; None is a tenant, too. Unlike `salt` it separates no content
    """

    id: str
    prompt: Any
    max_tokens: int = 16
    min_tokens: int = 0
    eos_token_id: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    priority: int = 0
    num_sequences: int = 1
    num_computed: int = 0
    expected_tokens: int | None = None
    keep_at: tuple[int, ...] = ()
    salt: str | None = None
    adapter: str | None = None
    extra_key: Any = None
    reads_cache: bool = True
    writes_cache: bool = True
    retention: Retention | None = None
    tenant: str | None = None

    @property
    def is_private(self) -> bool:
        """Whether it does not read, or does not write, the cache."""
        return not (self.reads_cache and self.writes_cache)


def with_own_integers(request: Request) -> Request:
    """Return the valid request with Python integers, counts at most UNLIMITED; itself where it has them."""
    stops, eos, hint = request.stop_token_ids, request.eos_token_id, request.expected_tokens
    counts = request.max_tokens, request.min_tokens, request.num_sequences, request.num_computed
    # Other counts are bounded by max_tokens or the pool.
    numbers = (*counts, request.priority, 0 if eos is None else eos, 0 if hint is None else hint, *stops)
    if request.max_tokens <= UNLIMITED and set(map(type, numbers)) == {int}:
        return request
    max_tokens, min_tokens, num_sequences, num_computed = map(count_of, counts)
    return msgspec.structs.replace(
        request,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        num_sequences=num_sequences,
        num_computed=num_computed,
        priority=int(request.priority),
        eos_token_id=None if eos is None else int(eos),
        expected_tokens=None if hint is None else count_of(hint),
        stop_token_ids=tuple(int(token) for token in stops),
    )


def validated_prompt(request: Request, vocabulary_size: int | None) -> NDArray[np.int32]:
    """Return the prompt, int32 [n], if all fields of the request are in range. Raises InvalidRequest."""
    if type(request.id) is not str or not request.id:
        raise InvalidRequest(f"id has to be a non-empty string; got {request.id!r}.")
    if not _is_at_least(1, request.max_tokens):
        raise _wrong(request, f"max_tokens has to be an integer of at least 1; got {request.max_tokens!r}.")
    least, priority, num_sequences, num_computed = counts = (
        request.min_tokens,
        request.priority,
        request.num_sequences,
        request.num_computed,
    )
    # Types first: arrays refuse to be compared.
    if not (
        type(least) is type(priority) is type(num_sequences) is type(num_computed) is int
        and counts == _USUAL
        and request.reads_cache is request.writes_cache is True
        and request.expected_tokens is None
        and request.retention is None
        and request.tenant is None
    ):
        _check_rare(request)
    if not isinstance(request.stop_token_ids, (tuple, list)):
        raise _wrong(request, f"stop_token_ids has to be a tuple of token ids; got {request.stop_token_ids!r}.")
    for token in request.stop_token_ids:
        if not (is_integer(token) and 0 <= token < 2**31):
            raise _wrong(request, f"stop_token_ids have to be token ids; got {token!r}.")
    eos = request.eos_token_id
    if eos is not None and not (is_integer(eos) and 0 <= eos < 2**31):
        raise _wrong(request, f"eos_token_id has to be a token id or None; got {eos!r}.")
    prompt = _prompt_array(request)
    if request.keep_at != () and (wrong := keep_at_error(request.keep_at, len(prompt))) is not None:
        raise _wrong(request, wrong)
    if vocabulary_size is not None and (wrong := vocabulary_error(prompt, vocabulary_size)) is not None:
        raise _wrong(request, wrong)
    return prompt


def _check_rare(request: Request) -> None:
    """Raise InvalidRequest unless the fields that most requests leave as they are, and their combinations, are right."""
    hint, most, num_sequences = request.expected_tokens, request.max_tokens, request.num_sequences
    is_hint = hint is None or (_is_at_least(1, hint) and hint <= most)
    for field, is_right, wanted in (
        ("expected_tokens", is_hint, f"from 1 to max_tokens ({most}), or None"),
        (
            "min_tokens",
            _is_at_least(0, request.min_tokens) and request.min_tokens <= most,
            f"from 0 to max_tokens ({most})",
        ),
        ("priority", is_integer(request.priority), "an integer"),
        ("num_sequences", _is_at_least(1, num_sequences), "an integer of at least 1"),
        ("num_computed", _is_at_least(0, request.num_computed), "an integer of at least 0"),
        ("reads_cache", isinstance(request.reads_cache, bool), "True or False"),
        ("writes_cache", isinstance(request.writes_cache, bool), "True or False"),
        ("retention", isinstance(request.retention, Retention | None), "a Retention or None"),
        ("tenant", request.tenant is None or type(request.tenant) is str, "a string or None"),
    ):
        if not is_right:
            raise _wrong(request, f"{field} has to be {wanted}; got {getattr(request, field)!r}.")
    if request.num_computed and num_sequences > 1:
        raise _wrong(request, f"num_computed goes with one sequence; got num_sequences {num_sequences}.")
    if request.is_private and num_sequences > 1:
        raise _wrong(
            request,
            f"{num_sequences} sequences share their prompt through the cache; reads_cache and writes_cache have to be on.",
        )


def _wrong(request: Request, what: str) -> InvalidRequest:
    return InvalidRequest(f'request "{request.id}": {what}')


def _is_at_least(least: int, value: Any) -> bool:
    return is_integer(value) and value >= least


def _prompt_array(request: Request) -> NDArray[np.int32]:
    try:
        tokens = token_array(request.prompt)
    except InvalidTokens as error:
        raise _wrong(request, str(error)) from None
    if not len(tokens):
        raise _wrong(request, "the prompt is empty; at least one token is needed.")
    # The array may be the caller's.
    return tokens.copy() if isinstance(request.prompt, np.ndarray) else tokens


def namespace_root(request: Request) -> bytes:
    """Return the encoded namespace of a request's content. Raises InvalidRequest for a type with no exact encoding."""
    if request.salt is None and request.adapter is None and request.extra_key is None:
        return _NO_NAMESPACE
    for field in ("salt", "adapter"):
        value = getattr(request, field)
        if value is not None and not isinstance(value, str):
            raise InvalidRequest(f'request "{request.id}": {field} has to be a string or None; got {value!r}.')
    try:
        return root_prefix((request.salt, request.adapter, request.extra_key))
    except InvalidNamespace as error:
        raise InvalidRequest(f'request "{request.id}": extra_key: {error}') from None


def replaced(values: tuple[T, ...], place: int, value: T) -> tuple[T, ...]:
    """Return `values` with `value` at `place`."""
    return (*values[:place], value, *values[place + 1 :])


class RequestUsage(msgspec.Struct, frozen=True, gc=False):
    """What a request took, delivered with its last output: tokens, blocks, times preempted. hit_tokens were found in
    the prefix cache at its first admission, recomputed_tokens computed again after preemptions."""

    prompt_tokens: int
    output_tokens: int
    hit_tokens: int
    recomputed_tokens: int
    swapped_blocks: int
    preemptions: int


class RequestState(msgspec.Struct, eq=False, gc=False):
    """A live request. It holds no reference that leads back to it, so the garbage collector skips it.

    request      what the user submitted, with Python integers
    stops        ids that end a sequence, EOS among them
    order        (priority, arrival, number): smaller is served sooner and preempted later. Under fair policies its turn
                 replaces the arrival at its first admission
    charged      tokens charged to its tenant at that admission
    tokens       per sequence, the known tokens while it has no row (None: it has one, or it has ended)
    max_total    per sequence, the tokens at which it has its full length
    rows         per sequence, its row (-1: none)
    num_live     sequences that have not ended
    high_water   per sequence, tokens that were computed once: below it, computing is recomputing
    appended     per sequence, tokens that the caller appended
    has_sampled  per sequence, all known tokens are computed and sampled: computed again, they do not sample
    num_output   output tokens of the sequences that have ended
    is_new       never admitted yet
    is_plain     new, one sequence, nothing to load: most are
    follows      id of the request whose blocks it waits to share (None: none)
    is_preempted  blocks were taken from it, at step `preempted_at`, since it last ran: it counts as preempted
    longest_pause  most steps that it stood still because blocks were taken from it
    is_bounded   its worst case is reserved and it is no victim
    passed       how often a request behind it was admitted before it
    num_loading  tokens from elsewhere that it waits for, listed in batch `load_batch`
    """

    request: Request
    root: bytes
    order: tuple[int, float, int]
    stops: tuple[int, ...]
    prompt_len: int
    tokens: list[NDArray[np.int32] | None]
    rows: list[int]
    num_live: int
    may_load: bool
    is_plain: bool
    # Tuples, because they rarely change and all requests can share one: see `replaced`.
    max_total: tuple[int, ...]
    high_water: tuple[int, ...] = (0,)
    appended: tuple[int, ...] = (0,)
    has_sampled: tuple[bool, ...] = (False,)
    status: Status = Status.WAITING
    num_output: int = 0
    preemptions: int = 0
    hit_tokens: int = 0
    recomputed_tokens: int = 0
    swapped_blocks: int = 0
    follows: str | None = None
    is_bounded: bool = False
    passed: int = 0
    is_new: bool = True
    is_preempted: bool = False
    preempted_at: int = 0
    longest_pause: int = 0
    num_loading: int = 0
    load_batch: int = 0
    charged: int = 0

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def first_tokens(self) -> NDArray[np.int32]:
        """Known tokens of the first live sequence of a waiting request."""
        first = self.tokens[0]
        return next(tokens for tokens in self.tokens if tokens is not None) if first is None else first

    @property
    def live_rows(self) -> list[int]:
        rows = self.rows
        if len(rows) == 1:
            return rows[:] if rows[0] >= 0 else []
        return [row for row in rows if row >= 0]

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
        self.has_sampled = replaced(self.has_sampled, sequence, has_sampled)

    def move(self, sequence: int, row: int, tokens: NDArray[np.int32] | None) -> None:
        """Give the sequence a row, or take its row (-1) and keep its known tokens (None: it has ended)."""
        self.rows[sequence], self.tokens[sequence] = row, tokens

    def extend(self, sequence: int, tokens: NDArray[np.int32]) -> None:
        """Append to the known tokens of a sequence that has no row."""
        known = self.tokens[sequence]
        assert known is not None, "a live sequence without a row keeps its tokens"
        self.tokens[sequence] = np.concatenate([known, tokens])

    def grow(self, sequence: int, num_more: int, max_total: int) -> None:
        """The caller appended tokens to the sequence, whose full length is `max_total` from now on."""
        self.appended = replaced(self.appended, sequence, self.appended[sequence] + num_more)
        self.max_total = replaced(self.max_total, sequence, max_total)

    def reach(self, sequence: int, num_tokens: int) -> int:
        """Note that so many tokens of the sequence were computed. Returns the most that ever were."""
        most = max(self.high_water[sequence], num_tokens)
        self.high_water = replaced(self.high_water, sequence, most)
        return most

    def add_fork(self, sequence: int, row: int) -> int:
        """Add a fork of the sequence, which has this row. Return its number, which may be that of an ended fork."""
        self.num_live += 1
        # Numbers of ended forks are reused, or a search would need ever more of them.
        own, num = self.request.num_sequences, len(self.rows)
        number = next((number for number in range(own, num) if not self.is_live(number)), num)
        if number == num:
            self.rows.append(row)
            self.tokens.append(None)
        self.rows[number] = row
        self.max_total = replaced(self.max_total, number, self.max_total[sequence])
        self.high_water = replaced(self.high_water, number, self.high_water[sequence])
        self.appended = replaced(self.appended, number, self.appended[sequence])
        self.has_sampled = replaced(self.has_sampled, number, self.has_sampled[sequence])
        return number

    def admitted(self) -> None:
        self.is_plain = self.is_new = False

    def charge(self, num_tokens: int, turn: float) -> None:
        """Charge so many tokens to its tenant; from now on its turn stands for its arrival."""
        self.charged = num_tokens
        self.order = (self.order[0], turn, self.order[2])

    def set_bounded(self, is_bounded: bool) -> None:
        """Note whether its worst case is reserved. Only `Books` call this."""
        self.is_bounded = is_bounded

    def await_load(self, num_tokens: int) -> None:
        """Wait for so many tokens from elsewhere; 0: for none."""
        self.may_load, self.num_loading = False, num_tokens

    def listed_in(self, number: int) -> None:
        """Note the batch that lists the tokens that it asked for."""
        self.load_batch = number

    def load_again(self) -> None:
        """Ask for tokens from elsewhere when it is admitted again."""
        self.may_load, self.num_loading = True, 0

    def note_preempted(self, step: int) -> None:
        """Count it as preempted in this step."""
        self.is_preempted, self.preempted_at = True, step
        self.preemptions += 1

    def resume(self, step: int) -> None:
        """It runs again after blocks were taken from it."""
        self.is_preempted = False
        self.longest_pause = max(self.longest_pause, step - self.preempted_at)

    def follow(self, leader: str | None) -> None:
        """Wait for blocks that the request of this id computes; None: for none."""
        self.follows = leader

    def let_pass(self) -> None:
        """A request behind it was admitted before it."""
        self.passed += 1

    def note_ended(self, num_output: int) -> None:
        """One of its sequences, of so many outputs, has ended."""
        self.num_output += num_output
        self.num_live -= 1

    def count(self, *, hit_tokens: int = 0, recomputed_tokens: int = 0, swapped_blocks: int = 0) -> None:
        """Add to what it took."""
        self.hit_tokens += hit_tokens
        self.recomputed_tokens += recomputed_tokens
        self.swapped_blocks += swapped_blocks

    def usage(self) -> RequestUsage:
        return RequestUsage(
            self.prompt_len,
            self.num_output,
            self.hit_tokens,
            self.recomputed_tokens,
            self.swapped_blocks,
            self.preemptions,
        )


def state_of(
    request: Request, prompt: NDArray[np.int32], root: bytes, order: tuple[int, float, int], max_total: int
) -> RequestState:
    """Return the state of a new request, whose sequences have at most `max_total` tokens each."""
    num, eos, may_load = request.num_sequences, request.eos_token_id, request.num_computed > 0
    state = RequestState(
        request,
        root,
        order,
        (*request.stop_token_ids, eos) if eos is not None else tuple(request.stop_token_ids),
        len(prompt),
        [prompt] * num,
        [-1] * num,
        num,
        may_load,
        num == 1 and not may_load and not request.is_private,
        (max_total,) * num,
    )
    if num > 1:
        state.high_water = state.appended = (0,) * num
        state.has_sampled = (False,) * num
    return state
