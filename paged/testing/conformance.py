"""Checks that a subject keeps its protocol: every method is there, every answer has the promised shape.

    held_to("KVManager", subject)    the subject, with each answer checked on its way to the rig

Shapes and types alone are checked, so that an adapter's slip is reported with the method's name, not by a traceback
from inside the kit. Rigs check whether an answer is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from paged.errors import InvalidConfig
from paged.testing.protocol import flag_of


class BrokenPromise(TypeError):
    """A member of a protocol that a subject lacks, or that does not keep its promise, and the promise."""


class Promise(NamedTuple):
    """What a member promises, in words, and `holds(answer, subject)`: whether an answer keeps that. Members that a
    capability stands for are not required. `parts` are the promises of the answer's own members."""

    words: str
    holds: Callable[[Any, Any], bool]
    is_required: bool = True
    parts: dict[str, Promise] | None = None


def held_to(protocol: str, subject: Any) -> Any:
    """Wrap the subject so that each answer is checked. `protocol`: a key of PROTOCOLS.

    Raises BrokenPromise, now for members that are missing, later for answers; InvalidConfig for another protocol.
    """
    if protocol not in PROTOCOLS:
        raise InvalidConfig(f"protocol has to be one of {', '.join(PROTOCOLS)}; got {protocol!r}.")
    return _Held(subject, protocol, PROTOCOLS[protocol], type(subject).__name__)


class _Held:
    """A subject whose answers are checked."""

    def __init__(self, subject: Any, protocol: str, promises: dict[str, Promise], name: str) -> None:
        self._subject = subject
        self._protocol = protocol
        self._promises = promises
        self._name = name
        self._there: set[str] = set()
        # Members that have members, and what stands before each.
        self._parts: dict[str, tuple[Any, Any]] = {}
        for member, promise in promises.items():
            if promise.is_required and not _has(subject, member):
                raise BrokenPromise(self._missing(member, promise))

    def __getattr__(self, name: str) -> Any:
        promise = self._promises.get(name)
        if promise is not None and name not in self._there and not _has(self._subject, name):
            flag = flag_of(name)
            way_out = "" if flag is None else f" Capabilities({flag}=False) leaves it out."
            raise BrokenPromise(self._missing(name, promise) + way_out)
        value = getattr(self._subject, name)
        if promise is None:
            return value
        self._there.add(name)
        if promise.parts is not None:
            if name not in self._parts or self._parts[name][0] is not value:
                self._parts[name] = value, _Held(value, self._protocol, promise.parts, f"{self._name}.{name}")
            return self._parts[name][1]
        if not callable(value):
            self._look(name, promise, value)
            return value

        def call(*arguments: Any, **named: Any) -> Any:
            answer = value(*arguments, **named)
            self._look(name, promise, answer, arguments)
            return answer

        # From now on it is found without __getattr__.
        self.__dict__[name] = call
        return call

    def _look(self, name: str, promise: Promise, answer: Any, arguments: tuple[Any, ...] | None = None) -> None:
        try:
            holds = promise.holds(answer, self._subject)
        except (AttributeError, TypeError, ValueError, IndexError):
            holds = False
        if not holds:
            shown = repr(answer)
            shown = shown if len(shown) <= 100 else f"{shown[:100]}…"
            given = "" if arguments is None else f"({', '.join(map(repr, arguments))})"
            raise BrokenPromise(f"{self._name}.{name}{given} gave {shown}; {self._protocol} promises {promise.words}.")

    def _missing(self, name: str, promise: Promise) -> str:
        return f"{self._name} has no `{name}`; {self._protocol} asks for one that gives {promise.words}."


def _has(subject: Any, name: str) -> bool:
    # A property that raises is there: a read of it reports what it raises.
    return hasattr(type(subject), name) or name in getattr(subject, "__dict__", {}) or hasattr(subject, name)


def _is_count(answer: Any, subject: Any = None) -> bool:
    return isinstance(answer, (int, np.integer)) and not isinstance(answer, bool) and bool(answer >= 0)


def _is_ids(answer: Any, subject: Any = None) -> bool:
    """A one-dimensional array of integers."""
    return isinstance(answer, np.ndarray) and answer.ndim == 1 and (answer.dtype.kind in "iu" or not answer.size)


def _is_column(answer: Any, subject: Any) -> bool:
    """One integer a row, for every row that is live."""
    rows = subject.live
    return _is_ids(answer) and (not len(rows) or int(max(rows)) < len(answer))


def _is_by_block(answer: Any, subject: Any) -> bool:
    """One integer a block of the tier."""
    return _is_ids(answer) and len(answer) == subject.num_blocks


def _is_pairs(answer: Any) -> bool:
    pairs = np.asarray(answer)
    return not pairs.size or (pairs.ndim == 2 and pairs.shape[1] == 2 and pairs.dtype.kind in "iu")


def _is_moves(answer: Any, subject: Any = None) -> bool:
    kinds = (answer.device_to_host, answer.host_to_device, answer.device_to_device)
    return all(_is_pairs(kind) for kind in kinds) and len(answer) == sum(len(kind) for kind in kinds)


def _is_hit(answer: Any, subject: Any = None) -> bool:
    return _is_count(answer.num_tokens) and _is_ids(np.asarray(answer.blocks))


def _is_contents(answer: Any, subject: Any = None) -> bool:
    return isinstance(answer, (set, frozenset)) and all(isinstance(path, tuple) for path in answer)


def _are_strings(answer: Any, subject: Any = None) -> bool:
    return isinstance(answer, (list, tuple)) and all(isinstance(each, str) for each in answer)


def _is_batch(answer: Any, subject: Any = None) -> bool:
    num_rows, num_tokens = len(answer.rows), len(answer.token_ids)
    integers_per_row = answer.num_tokens, answer.seq_lens, answer.sequences
    per_row = (*integers_per_row, answer.samples, answer.ids)
    per_token = (answer.positions, answer.slot_mapping)
    changes = (answer.table_rows, answer.table_columns, answer.table_blocks)
    integers = answer.rows, answer.query_start_loc, *integers_per_row, answer.token_ids, *per_token, *changes
    return (
        all(map(_is_ids, integers))
        and all(len(each) == num_rows for each in per_row)
        and all(len(each) == num_tokens for each in per_token)
        and len({len(each) for each in changes}) == 1
        and len(answer.query_start_loc) == num_rows + 1
        and answer.samples.dtype == np.bool_
        and answer.block_tables.ndim == 2
        and (not len(answer.loads) or answer.loads.shape[1] == 3)
        and _is_moves(answer.moves)
        and isinstance(answer.is_empty, bool)
        and all(len(pair) == 2 for pair in answer.preempted)
        and _are_strings(answer.admitted)
    )


def _is_output(answer: Any) -> bool:
    reason = answer.finish_reason
    return (
        isinstance(answer.id, str)
        and _is_count(answer.sequence)
        and len(answer.token_ids) >= 0
        and (reason is None or isinstance(reason, str))
    )


def _are_outputs(answer: Any, subject: Any = None) -> bool:
    return isinstance(answer, Iterable) and all(_is_output(output) for output in answer)


def _is_counts(answer: Any, subject: Any = None) -> bool:
    return answer.keys() >= {*_STATES} and all(_is_count(number) for number in answer.values())


_STATES = ("submitted", "waiting", "loading", "running", "paused", "swapped", "finished", "rejected", "aborted")
_COUNT = "an int of at least 0"
_MOVES = "moves: device_to_host, host_to_device and device_to_device, int [n, 2] each, source and destination block; len() is all of them"

_NUM_BLOCKS = Promise(f"{_COUNT}, blocks", _is_count)
_NOTHING = Promise("nothing", lambda answer, _: answer is None)
_SENTENCES = Promise("a list of sentences, empty when all is well", _are_strings)


def _optional(words: str, holds: Callable[[Any, Any], bool] = lambda answer, _: True) -> Promise:
    return Promise(words, holds, is_required=False)


_TIER = {
    **dict.fromkeys(("num_blocks", "num_free", "num_cached", "num_used"), _NUM_BLOCKS),
    "ref_counts": Promise("int [num_blocks], references to each block", _is_by_block),
}
_DEVICE = {**_TIER, "states": _optional("int [num_blocks]: 0 free, 1 cached, 2 used", _is_by_block)}
_ROWS = {
    "live": Promise("int [n], the rows that sequences hold", _is_ids),
    "num_tokens": Promise("int [rows], tokens known of each row", _is_column),
    "num_computed": Promise("int [rows], tokens of each row that are computed", _is_column),
    "num_scheduled": Promise("int [rows], tokens of each row that are in flight", _is_column),
    "num_on_host": Promise(f"{_COUNT}, host blocks that the row holds", _is_count),
}
_MANAGER = {
    "num_blocks": _NUM_BLOCKS,
    "num_host_blocks": _NUM_BLOCKS,
    "block_size": Promise(f"{_COUNT}, tokens a block", _is_count),
    "device": Promise("a tier", lambda answer, _: True, parts=_DEVICE),
    "host": Promise("a tier", lambda answer, _: True, parts=_TIER),
    "rows": Promise("the rows' columns", lambda answer, _: True, parts=_ROWS),
    "next_batch": Promise("an int, the new batch's number", _is_count),
    "lookup": Promise("`num_tokens`, an int, and `blocks`, int [n], of the cached prefix", _is_hit),
    "add": Promise("an int, the row", _is_count),
    "append": _NOTHING,
    "allocate": Promise(_MOVES, _is_moves),
    "confirm": Promise("an int, the number of the batch that has ended", _is_count),
    "free": _NOTHING,
    "table": Promise("int [n], the row's device blocks in order", _is_ids),
    "slots": Promise("int [n], block * block_size + offset of each position", _is_ids),
    "cached_contents": Promise("a set of tuples of bytes: the namespace, then the tokens of each block", _is_contents),
    "reset_cache": Promise("a bool, whether anything was done", lambda answer, _: isinstance(answer, bool)),
    "check": _SENTENCES,
    "snapshot": _optional("a value that is equal exactly when nothing has changed"),
    "extend_hit": _optional(f"{_COUNT}, tokens won", _is_count),
    "cancel": _optional("anything"),
    "fork": _optional("an int, the new row", _is_count),
    "reserve": _NOTHING._replace(is_required=False),
    "truncate": _NOTHING._replace(is_required=False),
    "swap_out": _optional(_MOVES, _is_moves),
    "swap_in": _optional(_MOVES, _is_moves),
    "take_moves": _optional(_MOVES, _is_moves),
    "retain": _optional(f"{_COUNT}, tokens kept", _is_count),
    "expire": _optional("anything"),
    "take_events": _optional("the events since the last call"),
    "events_snapshot": _optional("events that add up to what is cached"),
}

_SCHEDULER = {
    "manager": Promise("the memory layer", lambda answer, _: answer is not None),
    "has_unfinished": Promise("a bool", lambda answer, _: isinstance(answer, (bool, np.bool_))),
    "add": _NOTHING,
    "schedule": Promise("a batch with the arrays of paged.Batch, in their shapes", _is_batch),
    "update": Promise("outputs: id, sequence, token_ids and finish_reason each", _are_outputs),
    "abort": Promise("the last output, or None", lambda answer, _: answer is None or _is_output(answer)),
    "status": Promise("a str, one state of a request", lambda answer, _: isinstance(answer, str)),
    "id_of": Promise(
        "a str, or None for a row that serves no request", lambda answer, _: answer is None or isinstance(answer, str)
    ),
    "counts": Promise(f"a dict of ints by {', '.join(_STATES)}", _is_counts),
    "waiting_ids": Promise("a list of str, in order", _are_strings),
    "check": _SENTENCES,
    "cancel": _NOTHING._replace(is_required=False),
    "append": _NOTHING._replace(is_required=False),
    "loaded": _NOTHING._replace(is_required=False),
    "saved": _NOTHING._replace(is_required=False),
}

PROTOCOLS: dict[str, dict[str, Promise]] = {"KVManager": _MANAGER, "StepScheduler": _SCHEDULER}
"""What each member of a protocol promises. What is not required has to be there only where `Capabilities` says so."""
