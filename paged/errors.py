"""Every typed error and warning of paged.

An error is raised before anything changes. Its message names the value, the limit and what would work; its numbers are attributes. Each
is a `PagedError`, but for `MissingExtra`, an ImportError, and errors that the server sends to a client.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any


class PagedError(Exception):
    """Base of everything that paged raises on purpose.

    A copy, and what pickle makes of it in another process, has the same text and attributes.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception's own would call the class with the finished text in place of what that was made from.
        reduced = super().__reduce__()
        assert isinstance(reduced, tuple), "an exception is no global"
        return _rebuilt, (type(self), reduced[1]), *reduced[2:]


def _rebuilt(kind: type[PagedError], arguments: tuple[object, ...]) -> PagedError:
    error = kind.__new__(kind, *arguments)
    if not error.args:
        # An OSError with an `__init__` of its own leaves them to it.
        error.args = arguments
    return error


class InvalidConfig(PagedError, ValueError):
    """A size, share or option outside its range."""


class InvalidTokens(PagedError, ValueError):
    """No tokens where some are needed, or values that are no token ids (int32, 0 or more)."""


class CannotCopy(PagedError, TypeError):
    """A copy or a pickle of an object that counts one KV memory: `kind`, its class's name."""

    def __init__(self, kind: str) -> None:
        super().__init__(
            f"a {kind} cannot be copied or pickled: its blocks are places in one KV memory, and a copy would hand out the"
            " same ones. Make another one of the same sizes, and give it the prompts again."
        )
        self.kind = kind


class PagedWarning(UserWarning):
    """What works, and is slower than it could be: said once a process, by the command line in a line."""


# Memory: block_manager


class OutOfBlocks(PagedError, ValueError):
    """More blocks wanted than the pool can give: `wanted` and `free` (blocks), `tier` ("device" or "host")."""

    def __init__(self, wanted: int, free: int, tier: str = "device") -> None:
        super().__init__(f"{wanted:,} blocks wanted, {free:,} free on the {tier}. Free some, or raise the pool's size.")
        self.wanted = wanted
        self.free = free
        self.tier = tier


class _RowError(PagedError, ValueError):
    sentence = ""

    def __init__(self, row: object, detail: str = "") -> None:
        super().__init__(f"row {row}: {self.sentence}{detail}")
        self.row = row


class UnknownRow(_RowError):
    """A row that no sequence holds; freeing a row twice is this, too."""

    sentence = "no sequence holds it (never opened, or freed already)."


class DuplicateRow(_RowError):
    """The same row twice in one call."""

    sentence = "listed twice in one call."


class RowInFlight(_RowError):
    """The row is in the batch that is being composed already; it can be in the next one as well."""

    sentence = "in this batch already; next_batch() begins another one."


class NothingInFlight(PagedError, ValueError):
    """No batch is out or being composed, so there is nothing to confirm or cancel."""

    def __init__(self) -> None:
        super().__init__("no row is in flight; there is nothing to confirm or cancel.")


class RowSwapped(_RowError):
    """Part of the row lies on the host; it has to come back first."""

    sentence = "part of it lies on the host; swap it in first."


class InvalidNamespace(PagedError, TypeError):
    """A namespace that is not built of None, bool, int, str, bytes and tuples of them."""


class InvalidHint(PagedError, ValueError):
    """A hint of an unknown action, without exactly one target, or with a field out of range."""


class UnknownSession(PagedError, LookupError):
    """No request named a session of this id, or it has ended."""

    def __init__(self, session_id: object) -> None:
        super().__init__(f"no session {session_id!r} is known; a request's session_id begins one.")
        self.session_id = session_id


class UnknownContent(PagedError, LookupError):
    """Not even the first block of a prompt of `num_tokens` tokens is in the cache, so there is nothing to keep."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(
            f"no full block of these {num_tokens:,} tokens is in the cache of this namespace. Compute them first, or look them up."
        )
        self.num_tokens = num_tokens


class UnsupportedByLayers(InvalidConfig):
    """Something that memory for these kinds of layers cannot do."""

    def __init__(self, what: str, kinds: str) -> None:
        self.what, self.kinds = what, kinds
        super().__init__(f"{what} is not possible with {kinds}.")


class MemoryClaimed(PagedError, RuntimeError):
    """`call`, on memory that a scheduler has claimed, would change it behind the scheduler's back."""

    def __init__(self, call: str) -> None:
        super().__init__(
            f"{call}: a scheduler has this memory and alone changes its rows; call the scheduler (add, abort, finish, append, fork), or make"
            " another BlockManager."
        )
        self.call = call


# Decisions: scheduler


class InvalidRequest(PagedError, ValueError):
    """A request whose fields cannot be."""


class SchedulerInUse(PagedError, RuntimeError):
    """`call` cannot begin while `running` has not ended, in `thread` (a name); None: in this very thread."""

    def __init__(self, call: str, running: str, thread: str | None = None) -> None:
        where = "this thread, which made it" if thread is None else f"another thread, {thread}"
        super().__init__(
            f"{call}: {running} is running on the same scheduler in {where}. Hold a lock around calls of one scheduler; nothing has changed."
        )
        self.call = call
        self.running = running
        self.thread = thread


class DuplicateRequest(PagedError, ValueError):
    """The id of a request that is still alive: `id`."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f'request "{request_id}" is still alive; an id is free again when its request has ended.')
        self.id = request_id


class UnknownRequest(PagedError, KeyError):
    """An id that was never added, or ended long ago: `id`."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f'no request "{request_id}" is known: never added, or ended too long ago.')
        self.id = request_id

    def __str__(self) -> str:
        return str(self.args[0])


class RequestInFlight(PagedError, ValueError):
    """The request is in a batch that has not ended: `id`."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f'request "{request_id}" is in flight; end its batch first.')
        self.id = request_id


class NeverFits(PagedError, ValueError):
    """A prompt that can never run: `blocks_needed` and `num_blocks`, or `tokens_needed` and `max_model_len`."""

    def __init__(self, message: str, *, needed: int, limit: int, unit: str) -> None:
        super().__init__(message)
        self.blocks_needed = needed if unit == "blocks" else None
        self.num_blocks = limit if unit == "blocks" else None
        self.tokens_needed = needed if unit == "tokens" else None
        self.max_model_len = limit if unit == "tokens" else None


class WaitingFull(PagedError, RuntimeError):
    """The limit on waiting requests is reached: `limit`."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"{limit:,} requests are waiting, which is the limit (max_waiting). Try again when some have been admitted."
        )
        self.limit = limit


class UnknownPolicy(PagedError, ValueError):
    """A policy name that is not known: `name`, and `known`, the names that are."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        self.name = name
        self.known = tuple(known)
        near = get_close_matches(name, self.known, 1)
        hint = f' Did you mean "{near[0]}"?' if near else ""
        more = "" if "paged.study" in sys.modules else " Systems that are modelled for comparison: import paged.study."
        super().__init__(f'unknown policy "{name}"; known are {", ".join(self.known)}.{hint}{more}')


class UnknownReplica(PagedError, ValueError):
    """A replica that a router does not know: `name`, and `known`, the replicas that it knows."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        self.name = name
        self.known = tuple(known)
        super().__init__(f'unknown replica "{name}"; known are {", ".join(self.known) or "none"}.')


class WrongTokens(PagedError, ValueError):
    """Counts or tokens in `update` that do not fit the batch."""


class WrongDrafts(PagedError, ValueError):
    """Drafts for a request that does not run, or that are no token ids of the vocabulary."""


class TooManyOutstanding(PagedError, RuntimeError):
    """So many batches are out that no other may be scheduled: `num_outstanding`, `limit`."""

    def __init__(self, num_outstanding: int, limit: int) -> None:
        super().__init__(
            f"{num_outstanding} batches are out, which is the limit (max_outstanding {limit}). End the oldest one first."
        )
        self.num_outstanding = num_outstanding
        self.limit = limit


class BatchError(PagedError, ValueError):
    """A batch that cannot be ended: `number`."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(f"batch {number} {message}")
        self.number = number


class BatchEnded(BatchError):
    """The batch has ended already."""

    def __init__(self, number: int) -> None:
        super().__init__(number, "has ended already.")


class BatchOutOfOrder(BatchError):
    """An older batch has to be updated, or a later one cancelled, first: `first` is its number."""

    def __init__(self, number: int, first: int, verb: str) -> None:
        super().__init__(
            number, f"cannot be {verb} before batch {first}: updates go oldest first, cancels latest first."
        )
        self.first = first


class ForeignBatch(BatchError):
    """Another scheduler made the batch."""

    def __init__(self, number: int) -> None:
        super().__init__(number, "was made by another scheduler.")


# Attention: each keeps what it was made from as its `args`


class AttentionError(PagedError):
    """The root of the errors of this package. Each keeps what it was made from as its `args`."""


class UnknownBackend(AttentionError):
    """No backend has this name."""

    def __init__(self, name: object, known: Iterable[str]) -> None:
        super().__init__(name, tuple(known))

    def __str__(self) -> str:
        name, known = self.args
        return f"unknown attention backend {name!r}; known ones are {', '.join(known)}."


class UnsupportedByBackend(AttentionError):
    """The backend cannot do what is asked."""

    def __init__(self, backend: str, what: str, instead: str) -> None:
        super().__init__(backend, what, instead)

    def __str__(self) -> str:
        backend, what, instead = self.args
        return f'backend "{backend}" cannot do {what}; {instead}'


class InvalidPool(AttentionError):
    """A pool of these sizes cannot be made, or a block is not in it."""


class InvalidStep(PagedError, ValueError):
    """Bytes that are no step, or a step that goes on from one that a worker has not run."""


class BuildFailed(AttentionError):
    """C code cannot be compiled or loaded here."""


# Models and their checkpoints


class ModelError(PagedError):
    """A checkpoint that cannot be run."""


class CheckpointNotFound(ModelError, FileNotFoundError):
    """There is no such folder, or no checkpoint in it."""


class BrokenCheckpoint(ModelError, ValueError):
    """Its files are truncated, missing or contradictory."""


class UnsupportedModel(ModelError, ValueError):
    """Its architecture, or an option asked for, cannot run on paged memory."""


class UnevenSplit(InvalidConfig):
    """A number of ranks, `degree`, that a model of `heads` and `kv_heads` cannot be split over; `degrees` would do."""

    def __init__(self, name: str, degree: int, heads: int, kv_heads: int, degrees: Iterable[int]) -> None:
        self.degrees = list(degrees)
        would = ", ".join(map(str, self.degrees))
        super().__init__(
            f"{name}: tensor_parallel_size={degree} does not split {heads} heads with {kv_heads} KV heads evenly; "
            + (f"1, {would} would." if would else "1 alone would.")
        )
        self.degree = degree
        self.heads = heads
        self.kv_heads = kv_heads


class BudgetTooSmall(PagedError, ValueError):
    """A byte budget that is too small; `wanted` and `given` are bytes."""

    def __init__(self, message: str, *, wanted: int, given: int) -> None:
        super().__init__(message)
        self.wanted = wanted
        self.given = given


class InvalidChat(PagedError, ValueError):
    """Messages of the wrong shape, or a model without a template for them."""


# How tokens are chosen and read


class InvalidSampling(PagedError, ValueError):
    """A sampling parameter outside its range, or two that contradict each other."""


class CannotAdjust(PagedError, RuntimeError):
    """Something that a request wants done to its logits cannot be: `row` of the batch, and `what` is wrong."""

    def __init__(self, row: int, what: str) -> None:
        super().__init__(row, what)
        self.row = row
        self.what = what


class ProcessorFailed(CannotAdjust):
    """A logits processor of the user's raised something, or returned what are no logits."""

    def __str__(self) -> str:
        return f"a logits processor failed: {self.what}"


class GrammarFailed(CannotAdjust):
    """A grammar could not say what may come next: it takes more time or memory than it may, for the most part."""

    def __str__(self) -> str:
        return f"the grammar cannot be followed: {self.what}"


class BadLogits(PagedError, ValueError):
    """Logits that no token can be chosen from: `row` of the batch, and its largest logit, `value`."""

    def __init__(self, row: int, value: float) -> None:
        what = (
            "all its logits are -inf" if value == -math.inf else f"a logit is {'NaN' if math.isnan(value) else 'inf'}"
        )
        super().__init__(f"row {row}: {what}; a token is chosen from finite logits, at least one of them, and -inf.")
        self.row = row
        self.value = value


class NoTokenAllowed(BadLogits):
    """The same of a row of -inf alone: what may follow and what may not, as its request says, leaves no token."""


class TextEnded(PagedError, ValueError):
    """Tokens for a stream that was finished."""


# The engine and the command line


class EngineFailed(PagedError, RuntimeError):
    """The copies of a step failed midway, so that what the pool holds is not known, or a step stopped while the
    scheduler's books were being written. The message says which."""


class RanksFailed(EngineFailed):
    """A rank of a split model ended, did not answer in time, or failed; the others were ended, and with them what they kept. The engine cannot go on."""


class RanksDiffer(RanksFailed):
    """Two ranks of a split model have other versions of a library, or read other weights."""


class EngineInUse(PagedError, RuntimeError):
    """`call` cannot begin while `running` has not ended, which `thread` (a name) is in; None: this very thread, so that
    `call` comes from a callback of `running`."""

    def __init__(self, call: str, running: str, thread: str | None = None) -> None:
        if thread is None:
            sentence = (
                f"{call} was called from a callback of {running}, on the same engine. "
                f"A callback may add, finish and abort requests; call {call} when {running} has returned."
            )
        else:
            sentence = (
                f"{call}: the engine is in use by another thread, {thread}, which is in {running}. "
                f"Hold a lock around calls of one engine, or give each thread an engine of its own; they may share a model."
            )
        super().__init__(sentence)
        self.call = call
        self.running = running
        self.thread = thread


class DeadlineExceeded(PagedError, TimeoutError):
    """A request did not end in its time; it has been aborted."""


class EngineClosed(PagedError, RuntimeError):
    """The engine was closed: it takes no requests any more, and those that were alive have been aborted."""


class MissingExtra(ImportError):
    """A library that an optional part of paged needs is not installed; the message says what installs it."""


class UnwritablePath(PagedError, OSError):
    """A file cannot be written there: `path`, and `problem`, why not."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path}: cannot be written, {problem}")
        self.path = path
        self.problem = problem


class UnusableStore(PagedError, OSError):
    """A folder that no blocks can be kept in: `folder`, and `problem`, why not and what would do."""

    def __init__(self, folder: Path, problem: str) -> None:
        super().__init__(f"{folder}: no disk cache, {problem}.")
        self.folder = folder
        self.problem = problem


class NoPrompt(PagedError, ValueError):
    """There is nothing to answer, or a file of prompts that cannot be read as text."""


# Traces


class TraceError(PagedError, ValueError):
    """A trace that cannot be read: malformed, empty, not sorted by arrival, or of no known format.

    `path` is the file, `line` counts from 1 (None: the file as a whole), `column` is a column's name, or a character's place in the
    line counted from 1 where the line does not even parse (None: the line as a whole).
    """

    def __init__(self, path: Path, line: int | None, column: str | int | None, problem: str) -> None:
        where = [str(path)]
        if line is not None:
            where.append(f"line {line}")
        if column is not None:
            where.append(f"column {column}")
        super().__init__(f"{', '.join(where)}: {problem}")
        self.path = str(path)
        self.line = line
        self.column = column
        self.problem = problem


class InvalidSpec(PagedError, ValueError):
    """A description of a synthetic trace that cannot be understood: `spec`, and `part`, the piece of it that is wrong."""

    def __init__(self, spec: str, part: str, problem: str) -> None:
        super().__init__(f'{spec}: in "{part}", {problem}' if part else f"{spec}: {problem}")
        self.spec = spec
        self.part = part
        self.problem = problem


# Models and devices by name


class _UnknownName(PagedError, ValueError):
    """`name`, `known` (the names that ship) and `nearest` (the known name of its family most like it, or None)."""

    kind = ""
    own = "a path that ends in .json names a file of your own"

    def __init__(self, name: str, known: Iterable[str], reason: str = "") -> None:
        self.name = name
        self.known = tuple(known)
        wanted = name.lower()
        longer = [known for known in self.known if wanted and known.startswith(wanted)]
        relatives = [known for known in self.known if _is_one_family(wanted, known)]
        self.nearest = next(iter(longer or get_close_matches(wanted, relatives, n=1)), None)
        hint = f" {reason}" if reason else f" Did you mean {self.nearest}?" if self.nearest else ""
        super().__init__(f'unknown {self.kind} "{name}".{hint} Known are {", ".join(self.known)}; {self.own}.')


def _is_one_family(name: str, other: str) -> bool:
    """Whether the words that two names begin with are alike, typing errors aside."""
    first, second = (re.split(r"[^a-z]", each, maxsplit=1)[0] for each in (name, other))
    return bool(get_close_matches(first, [second], cutoff=0.8))


class UnknownModel(_UnknownName):
    """A model's name that is not known."""

    kind = "model"
    own = "embedded and hybrid ship with weights; a path names a checkpoint folder, its config.json, or a .json file of your own"


class UnknownDevice(_UnknownName):
    """A device's name that is not known."""

    kind = "device"


class UnknownLayers(InvalidConfig):
    """A kind of model, `model_type`, of which it is not known what its layers keep; `known` are those of which it is."""

    def __init__(self, model_type: str, known: Iterable[str]) -> None:
        self.model_type = model_type
        self.known = tuple(known)
        super().__init__(
            f"model_type: what layers of {model_type} keep is not known; known are {', '.join(sorted(self.known))}"
        )


class NoPagePlan(InvalidConfig):
    """Pages too small for a model's layers: `page_bytes`; `needed`, the bytes of the largest piece that has to lie within one page; and
    `block_size`."""

    def __init__(self, page_bytes: int, needed: int, block_size: int) -> None:
        super().__init__(
            f"page_bytes is {page_bytes:,}; one layer's part of a block of {block_size} tokens, or one piece of a state, has {needed:,} bytes "
            f"and has to lie within one page. Take at least {needed:,}."
        )
        self.page_bytes = page_bytes
        self.needed = needed
        self.block_size = block_size


class BadHardwareFile(PagedError, ValueError):
    """A file that does not describe what it should: `path`, `field` (None where the file as a whole is no JSON), `problem`."""

    def __init__(self, path: Path, field: str | None, problem: str) -> None:
        where = f"{path}, field {field}" if field else str(path)
        super().__init__(f"{where}: {problem}")
        self.path = path
        self.field = field
        self.problem = problem


class NotModelled(BadHardwareFile):
    """A configuration whose kind of model has no figures: it is not known, or its layers keep a state."""


class UnknownKernel(PagedError, ValueError):
    """A kernel of which nothing was measured: `wanted`, and `known`, of which something was."""

    def __init__(self, device: str, wanted: str, known: Iterable[str]) -> None:
        self.wanted = wanted
        self.known = tuple(known)
        super().__init__(f"of {device} there is no {wanted}; measured are {', '.join(self.known) or 'none'}")


# Simulations, measurements, saved programs


class UnevenRounds(PagedError, RuntimeError):
    """A step failed, or a round's steps were not those of the first one."""


class BadRun(PagedError, ValueError):
    """A file of a recorded run that cannot be read as one: `path`, `row` (counted from 1; None: the file), `problem`."""

    def __init__(self, path: Path, row: int | None, problem: str) -> None:
        self.path, self.row, self.problem = path, row, problem
        super().__init__(f"{path}{'' if row is None else f', row {row:,}'}: {problem}")


class SimulationStuck(PagedError, RuntimeError):
    """The scheduler has unfinished requests, none of them in flight, and twice scheduled nothing. A bug, never a slow trace."""


class RecordingFailed(PagedError, RuntimeError):
    """The engine did not do what a recording can tell: a step failed, or none ran although requests were alive."""


class UnknownEngine(PagedError, ValueError):
    """An engine's name that is not known: `name`, and `known`."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        self.name = name
        self.known = tuple(known)
        super().__init__(
            f'unknown engine "{name}". Known are {", ".join(self.known)}; a path that ends in .json names a file of your own.'
        )


class BenchmarkFailed(PagedError, RuntimeError):
    """The engine did not give every request the tokens that it was to get."""


class InvalidProgram(PagedError, ValueError):
    """A file that is no saved program, or one that this version cannot run; a subject that cannot be built from its name;
    or a call of the test kit's rigs about what is not there."""


# Plug-ins for other engines


class UnsupportedEngine(PagedError, ImportError):
    """The engine that is installed lacks a name, or a field, that the plug-in uses, or none is installed."""


class RefusedByPaged(PagedError, ValueError):
    """A configuration of an engine, or an option of ours, that a plug-in does not carry; the message says why and what to do."""


class UnsupportedTransformers(UnsupportedEngine):
    """No transformers, or one whose continuous batching is not what the plug-in knows."""


class Unfinished(PagedError, RuntimeError):
    """A request that ended before its length, because a cache of this size could hold no more of it."""


class UnsupportedVllm(UnsupportedEngine):
    """No vLLM, or one whose scheduler interface is not what the plug-in knows."""


class UnsupportedRay(UnsupportedEngine):
    """No Ray, or one that is too old, or has no Ray Serve."""


class WrongAnswer(PagedError, ValueError):
    """A runner's output that does not belong to what was scheduled. Nothing has changed."""


# The server, its engine process and its events


class ServerFailed(PagedError, RuntimeError):
    """The server cannot begin: the port is taken, or its engine did not come up."""


class ClientGone(PagedError, ConnectionError):
    """The answer has no reader any more."""


class EngineAway(PagedError, RuntimeError):
    """There is no engine at the moment; `back_in_s` is when one is expected, None: none will come. `code` goes to the client."""

    def __init__(self, message: str, back_in_s: float | None, code: str = "engine_unavailable") -> None:
        super().__init__(message)
        self.back_in_s = back_in_s
        self.code = code


class EngineDied(EngineAway):
    """The engine process ended while it had this request."""

    def __init__(self, message: str, back_in_s: float | None) -> None:
        super().__init__(message, back_in_s, "engine_died")


class RefusedByEngine(PagedError, ValueError):
    """The engine did not take a request; `kind` is the class of its error."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


class NoFeed(PagedError, ConnectionError):
    """No pictures come from `url`: nothing listens there, or the key is wrong, or it is another kind of server."""

    def __init__(self, url: str, why: str) -> None:
        super().__init__(f"{url}: {why}")
        self.url = url


class UnreadableBatch(PagedError, ValueError):
    """A payload that is no batch of KV events."""


class UnusableEndpoint(PagedError, OSError):
    """An address that cannot be bound or connected to: `endpoint`."""

    def __init__(self, endpoint: str, problem: str) -> None:
        super().__init__(
            f"{endpoint}: {problem}. An address to bind is tcp://*:5557 or ipc:///tmp/events, one to connect to tcp://router:5557."
        )
        self.endpoint = endpoint


class PublisherFailed(PagedError, RuntimeError):
    """The publisher's thread has ended on its own; what it raised is the cause."""


class EventsLost(PagedError, RuntimeError):
    """A publisher cannot tell what was missed: its replay has batch `seq`, which rests on one that is not there. Ours never does."""

    def __init__(self, seq: int, wanted: int) -> None:
        super().__init__(
            f"batches from {wanted} on are wanted; the publisher's replay has {seq} without the one before it, and does not clear first."
        )
        self.seq = seq
        self.wanted = wanted


class InconsistentEvent(PagedError, ValueError):
    """An event that contradicts itself, such as one with fewer tokens than its blocks hold."""
