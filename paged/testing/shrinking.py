"""Running a program again, on any rig, and making one that fails short: a smaller pool, fewer calls, smaller arguments.

A call that makes no sense any more, because one before it is gone, is left out or cut to what is there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import msgspec

from paged.block_manager import LayerGroup
from paged.errors import InvalidProgram
from paged.testing.engine_rig import EngineRig
from paged.testing.engine_world import EngineWorld
from paged.testing.manager_rig import ManagerRig, ManagerWorld
from paged.testing.rig import NotThere
from paged.testing.scheduler_rig import SchedulerRig
from paged.testing.violation import Call, Program, Violation
from paged.testing.world import World

Build = Callable[[Any], Any]
Failing = Callable[[Any, list[Call]], list[Call] | None]
AnyWorld = World | ManagerWorld | EngineWorld


def replay(
    world: AnyWorld, calls: Sequence[Call], build: Build | None = None, *, drain: bool = False, **options: Any
) -> Any:
    """Run a program from the start on the rig that its world belongs to, with `drain` to the end of all that it began;
    return the rig. `build` makes the subject, ours if None; `options`: what else the rig is given.

    Raises Violation, also for what the subject raises out of turn, and InvalidProgram for a call that no rig can make.
    """
    rig = _rig_in(world, build, options)
    for call in [*calls, ("drain", ())] if drain else calls:
        _make(rig, call, [])
    return rig


def shrink(
    world: AnyWorld, calls: Sequence[Call], build: Build | None = None, *, programs: int | None = None, **options: Any
) -> Program:
    """A shorter program that still breaks a rule, with fewer calls, smaller pools and smaller arguments.

    `programs`: run at most so many, and return the best so far. All else as of `replay`.
    """
    left = itertools.count() if programs is None else iter(range(programs))
    failing = partial(_failing, partial(_rig_in, build=build, options=options), left)
    kept: tuple[Any, list[Call]] = world, list(calls)
    # One that breaks no rule stays as it is.
    before = kept if failing(*kept) is None else None
    while kept != before:
        before = kept
        # Fewer calls first: each of the other tries runs all of them.
        kept = kept[0], _with_fewer_calls(*kept, failing)
        kept = _in_a_smaller_world(*kept, failing)
        kept = kept[0], _with_smaller_arguments(*kept, failing)
    return Program(_kind(world).__name__, kept[0], tuple(kept[1]), options)


def _rig_in(world: AnyWorld, build: Build | None, options: dict[str, Any]) -> Any:
    return _kind(world)(world, *([] if build is None else [build]), **options)


def _kind(world: AnyWorld) -> Any:
    for of, rig in KINDS:
        if isinstance(world, of):
            return rig
    raise InvalidProgram(f"{world!r} is no world; {', '.join(of.__name__ for of, _ in KINDS)} are.")


def _make(rig: Any, call: Call, made: list[Call]) -> None:
    """Make a call, cut to what is there now, and add it to `made`; leave it out if it makes no sense any more."""
    verb, arguments = call
    cut = _OF_A_MANAGER[verb](rig, *arguments) if isinstance(rig, ManagerRig) and verb in _OF_A_MANAGER else arguments
    if cut is None:
        return
    made.append((verb, cut))
    try:
        getattr(rig, verb)(*cut)
    except NotThere:
        made.pop()


def _failing(rig_in: Build, left: Iterator[int], world: Any, calls: Sequence[Call]) -> list[Call] | None:
    """The calls as they were made, if the program breaks a rule before it is drained; None if not, or if none is left."""
    if next(left, None) is None:
        return None
    try:
        rig = rig_in(world)
    except ValueError:
        # Sizes that go together only as they were.
        return None
    made: list[Call] = []
    try:
        for call in calls:
            _make(rig, call, made)
        _make(rig, ("drain", ()), [])
    except Violation:
        return made
    return None


def _in_a_smaller_world(world: Any, calls: list[Call], failing: Failing) -> tuple[Any, list[Call]]:
    while True:
        tries = (
            (smaller, failing(smaller, program))
            for smaller in _smaller_worlds(world)
            for program in _programs_for(smaller, world, calls)
        )
        better = next(((smaller, made) for smaller, made in tries if made is not None), None)
        if better is None:
            return world, calls
        world, calls = better


def _smaller_worlds(world: Any) -> Iterator[Any]:
    """Worlds with less memory or fewer limits, in which every request of this one is valid."""
    for name, least in (("num_blocks", 1), ("block_size", 1), ("host_blocks", 0)):
        value = getattr(world, name)
        for fewer in dict.fromkeys([value // 2, value - 1]):
            if least <= fewer < value:
                yield replace(world, **{name: fewer})
    groups: tuple[LayerGroup, ...] = getattr(world, "groups", ())
    yield from (replace(world, groups=fewer) for fewer in _simpler(groups))
    for each in fields(world):
        usual = _ROOMY.get(each.name, each.default)
        # Without `max_model_len` a sequence of windows or states has no end.
        is_needed = each.name in _STAYS or (each.name == "max_model_len" and bool(groups))
        if not is_needed and getattr(world, each.name) != usual:
            yield replace(world, **{each.name: usual})


def _simpler(groups: tuple[LayerGroup, ...]) -> Iterator[tuple[LayerGroup, ...]]:
    """Fewer layer groups, with shorter windows and fewer pages."""
    for number, group in enumerate(groups):
        before, after = groups[:number], groups[number + 1 :]
        if before or after:
            yield before + after
        less = [replace(group, reach=group.reach - 1)] if group.reach > 1 else []
        less += [replace(group, pages=group.pages - 1)] if group.pages > 1 else []
        kinds = {(other.kind, other.reach) for other in before + after if other.kind != "state"}
        yield from ((*before, smaller, *after) for smaller in less if (smaller.kind, smaller.reach) not in kinds)


def _programs_for(smaller: Any, world: Any, calls: list[Call]) -> Iterator[list[Call]]:
    """The program as it is, and with prompts that fill as much of the smaller pool as they filled of this one."""
    yield calls
    room, less = world.num_blocks * world.block_size, smaller.num_blocks * smaller.block_size
    if less < room:
        lengths: list[Callable[[list[int]], int]] = [
            lambda tokens: len(tokens) * less // room,
            lambda tokens: -(-len(tokens) * less // room),
            lambda tokens: len(tokens) - (room - less),
        ]
        for length in lengths:
            shorter = [_with_shorter_prompts(verb, arguments, length) for verb, arguments in calls]
            if shorter != calls:
                yield shorter


def _with_shorter_prompts(verb: str, arguments: tuple[Any, ...], length: Callable[[list[int]], int]) -> Call:
    def cut(argument: Any) -> Any:
        if hasattr(argument, "prompt"):
            return _with_tokens(argument, "prompt", cut(argument.prompt))
        return argument[: max(1, length(argument))] if isinstance(argument, list) else argument

    # Of calls that name rows, in lists of their own, only `append` says tokens.
    return verb, tuple(map(cut, arguments)) if verb in ("add", "append", "visit", "retain") else arguments


# A budget that holds everything saves steps.
_ROOMY = {"max_tokens_per_step": 32, "max_sequences": 8}
# What calls may need as it is; sizes are made smaller, and not set to the usual ones.
_STAYS = (
    *("num_blocks", "block_size", "host_blocks", "groups", "prefix_caching"),
    *("policy", "vocabulary", "max_outstanding", "backend", "kv_dtype"),
)


def _with_fewer_calls(world: Any, calls: list[Call], failing: Failing) -> list[Call]:
    kept, size = calls, max(1, len(calls) // 2)
    while size:
        start = 0
        while start < len(kept):
            tries = (failing(world, program) for program in _without(kept, start, size))
            shorter = next((made for made in tries if made is not None), None)
            if shorter is not None:
                kept = shorter
            else:
                # A step is three calls, anywhere.
                start += size if size > 3 else 1
        size //= 2
    return kept


def _without(calls: list[Call], start: int, size: int) -> Iterator[list[Call]]:
    """The program without these calls; where they open a row, also with the rows above it one number lower."""
    before, gone, after = calls[:start], calls[start : start + size], calls[start + size :]
    yield before + after
    if [verb for verb, _ in gone] in (["add"], ["fork"]):
        rows = {row for verb, arguments in after for row in _rows_of(verb, arguments)}
        for row in range(max(rows, default=0)):
            yield before + [(verb, _lowered(verb, arguments, row)) for verb, arguments in after]


def _rows_of(verb: str, arguments: tuple[Any, ...]) -> list[int]:
    """The rows that a call on a manager names."""
    if verb == "misuse":
        return _rows_of(arguments[0], arguments[1:])
    if verb not in _OF_A_MANAGER or not arguments:
        return []
    rows = arguments[0]
    return [row for row in (rows if isinstance(rows, list) else [rows]) if isinstance(row, int)]


def _lowered(verb: str, arguments: tuple[Any, ...], above: int) -> tuple[Any, ...]:
    """The arguments with rows above this one called by one number less."""
    if verb == "misuse":
        return (arguments[0], *_lowered(arguments[0], arguments[1:], above))
    if not _rows_of(verb, arguments):
        return arguments
    rows = arguments[0]
    lowered = [row - (row > above) for row in rows] if isinstance(rows, list) else rows - (rows > above)
    return (lowered, *arguments[1:])


def _with_smaller_arguments(world: Any, calls: list[Call], failing: Failing) -> list[Call]:
    kept, place = calls, 0
    while place < len(kept):
        for smaller in _smaller_calls(*kept[place]):
            made = failing(world, [*kept[:place], smaller, *kept[place + 1 :]])
            if made is not None and made != kept:
                kept = made
                break
        else:
            place += 1
    return kept


def _smaller_calls(verb: str, arguments: tuple[Any, ...]) -> Iterator[Call]:
    if verb == "misuse":
        return
    if verb == "add" and arguments[1:] not in ((), (None,)):
        yield verb, (arguments[0], None)
    for place, argument in enumerate(arguments):
        for value in _smaller(argument):
            yield verb, (*arguments[:place], value, *arguments[place + 1 :])


def _smaller(value: Any) -> Iterator[Any]:
    """What may stand instead of an argument, each closer to nothing than it is."""
    if isinstance(value, msgspec.Struct):
        yield from _smaller_structs(value)
    elif isinstance(value, bool):
        yield from [False] if value else []
    elif isinstance(value, int):
        yield from dict.fromkeys([value // 2, value - 1]) if value > 0 else []
    elif isinstance(value, tuple):
        yield from [()] if value else []
    elif isinstance(value, list):
        for length in dict.fromkeys([len(value) // 2, len(value) - 1]):
            if 0 < length < len(value):
                yield value[:length]
                yield value[-length:]
        for place, each in enumerate(value):
            if isinstance(each, int) and each > 0:
                for less in dict.fromkeys([each // 2, each - 1]):
                    yield [*value[:place], less, *value[place + 1 :]]


def _smaller_structs(value: msgspec.Struct) -> Iterator[msgspec.Struct]:
    """Requests and hints of which one field is as usual, or that have fewer tokens."""
    for each in msgspec.structs.fields(value):
        is_needed = each.required or each.name in _STAY_WITH_OTHERS
        if not is_needed and getattr(value, each.name) != each.default:
            yield msgspec.structs.replace(value, **{each.name: each.default})
    for name in ("prompt", "tokens"):
        for tokens in _smaller(getattr(value, name, None)):
            yield _with_tokens(value, name, tokens)
    most = getattr(value, "max_tokens", 0)
    for fewer in dict.fromkeys([1, most // 2, most - 1]):
        if 1 <= fewer < most:
            bounded = {name: getattr(value, name, None) for name in ("min_tokens", "expected_tokens")}
            cut = {name: min(fewer, count) for name, count in bounded.items() if count is not None}
            yield msgspec.structs.replace(value, max_tokens=fewer, **cut)


def _with_tokens(value: Any, name: str, tokens: list[int]) -> Any:
    """The request or hint with other tokens, and without places to keep that lie behind them."""
    kept = {"keep_at": tuple(at for at in value.keep_at if at <= len(tokens))} if hasattr(value, "keep_at") else {}
    return msgspec.structs.replace(value, **{name: tokens}, **kept)


# The targets of a hint, of which it has one, and what bounds other fields.
_STAY_WITH_OTHERS = ("session", "request", "tokens", "max_tokens")


def _still(rows: Sequence[int], there: Sequence[int]) -> list[int]:
    return [row for row in dict.fromkeys(rows) if row in there]


def _allocated(
    rig: ManagerRig, rows: list[int], counts: list[int], coming: list[list[int]] | None = None
) -> tuple[Any, ...] | None:
    wanted: list[tuple[int, int, list[int]]] = []
    for row in _still(rows, rig.placeable_rows):
        place = rows.index(row)
        count = min(counts[place], rig.left(row)) if place < len(counts) else 0
        # Behind known tokens that are not launched there can be none that are unknown.
        later = coming[place] if coming and place < len(coming) and count == rig.left(row) else []
        if count + len(later):
            wanted.append((row, count, later))
    if not wanted:
        return None
    arguments = tuple(list(column) for column in zip(*wanted, strict=True))
    return arguments if any(arguments[2]) else arguments[:2]


def _reserved(rig: ManagerRig, rows: list[int], num_blocks: list[int]) -> tuple[Any, ...] | None:
    places = [rows.index(row) for row in _still(rows, rig.device_rows) if rows.index(row) < len(num_blocks)]
    return ([rows[place] for place in places], [num_blocks[place] for place in places]) if places else None


def _swapped_out(rig: ManagerRig, rows: list[int], keep: int = 0) -> tuple[Any, ...] | None:
    there = _still(rows, rig.free_rows)
    return (there, min(keep, *(rig.blocks_to_keep(row) for row in there))) if there else None


def _lasting(ticks: int | None) -> int | None:
    return None if ticks is None else max(1, ticks)


def _misused(rig: ManagerRig, verb: str, *arguments: Any) -> tuple[Any, ...] | None:
    """A misuse as the state machine tries it: some calls are always refused, some while the row is in this batch."""
    if verb in ("confirm", "cancel"):
        is_refused = not rig.naive.batches
    elif verb == "allocate":
        rows, (wanted, *_) = arguments
        is_refused = any(row not in rig.placeable_rows or not 1 <= wanted <= rig.left(row) for row in rows)
    else:
        in_flight = verb in _REFUSED_IN_FLIGHT and arguments[0] in rig.rows and arguments[0] not in rig.free_rows
        is_refused = in_flight or isinstance(arguments[0], list) or (verb, *arguments[1:]) == ("truncate", 99)
    return (verb, *arguments) if is_refused else None


# By a manager that leaves rows alone that are in flight.
_REFUSED_IN_FLIGHT = ("free", "fork", "swap_out", "truncate", "append")
# Calls on a manager that need something to be there: what is left of their arguments, None if nothing is.
_OF_A_MANAGER: dict[str, Callable[..., tuple[Any, ...] | None]] = {
    "append": lambda rig, row, tokens: (row, tokens) if row in rig.free_rows else None,
    "allocate": _allocated,
    "extend_hit": lambda rig, row: (row,) if row in rig.device_rows else None,
    "reserve": _reserved,
    "truncate": lambda rig, row, num_blocks: (
        (row, min(num_blocks, len(rig.naive.rows[row].table))) if row in rig.free_rows else None
    ),
    "free": lambda rig, rows: (there,) if (there := _still(rows, rig.free_rows)) else None,
    "fork": lambda rig, row: (row,) if row in rig.device_rows else None,
    "swap_out": _swapped_out,
    "swap_in": lambda rig, rows: (there,) if (there := _still(rows, rig.swapped_rows)) else None,
    "visit": lambda rig, tokens, others: (
        (tokens, others[: rig.naive.device.available * rig.world.block_size] or [0]) if tokens else None
    ),
    "misuse": _misused,
    "retain": lambda rig, tokens, namespace=None, priority=1, lasts=None: (
        (tokens, namespace, max(1, priority), _lasting(lasts))
    ),
}
KINDS: tuple[tuple[Any, Any], ...] = ((ManagerWorld, ManagerRig), (World, SchedulerRig), (EngineWorld, EngineRig))
"""The worlds and the rigs that run in them."""
