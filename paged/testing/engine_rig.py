"""A serving engine and its clients, call by call, with an oracle for every answer.

Each public method is one thing that a client does to an engine: add a request, let it step, abort. It runs at once,
and what came back is held against the answer that the request gets alone in ample memory. What is wrong is raised as
a `Violation` with the program that led there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import msgspec
from numpy.typing import NDArray

from paged.errors import InvalidProgram
from paged.testing.engine_world import Builder, EngineRequest, EngineWorld, build_engine, submit
from paged.testing.pressure import answers_of, array_of
from paged.testing.protocol import Capabilities, capabilities_of
from paged.testing.rig import Rig
from paged.testing.violation import Program, Violation, sentence_of


@dataclass(frozen=True)
class Stream:
    """The tokens that a request gets alone, and the logits [vocabulary] of each; None if they are not known."""

    tokens: list[int]
    logits: list[NDArray[Any]] | None = None


_MOST_STREAMS = 4096
Reference = Callable[[EngineRequest], Stream]
"""Exactly `max_tokens` tokens of a request that has no stop ids."""


class Alone:
    """The engine itself as the reference: a new one for each request, with room for that one alone.

    A stream is kept, and computed again only where more of it is needed.
    """

    def __init__(self, build: Builder, world: EngineWorld) -> None:
        self._build = build
        self._world = world
        self._known: dict[object, Stream] = {}

    def __call__(self, request: EngineRequest) -> Stream:
        """Raises Violation if the engine gives fewer than `max_tokens` tokens even so."""
        chance = (request.temperature, request.id if request.seed is None else request.seed)
        key = (tuple(request.prompt), chance if request.temperature > 0 else None)
        known = self._known.get(key)
        if known is None or len(known.tokens) < request.max_tokens:
            if len(self._known) >= _MOST_STREAMS:
                self._known.clear()
            known = self._known[key] = self._computed(request)
        return known

    def _computed(self, request: EngineRequest) -> Stream:
        world = self._world.ample(len(request.prompt) + request.max_tokens)
        program = Program("EngineRig", world, (("add", (request,)), ("drain", ())))
        engine = self._build(world)
        most_steps = 60 + 12 * (len(request.prompt) + request.max_tokens)
        try:
            answers = answers_of(engine, [request], most_steps)
        except Exception as error:
            raise Violation([f"alone in ample memory, {request.id} {sentence_of(error)}"], program) from error
        tokens = answers.tokens[request.id, 0]
        if len(tokens) != request.max_tokens:
            got = f"gets {len(tokens)} tokens instead of {request.max_tokens}: {tokens}"
            raise Violation([f"alone in ample memory, {request.id} {got}"], program)
        return Stream(tokens, answers.logits[request.id, 0] if capabilities_of(engine).logits else None)


@lru_cache(maxsize=64)
def alone(build: Builder, world: EngineWorld) -> Alone:
    """The reference of a builder, one for all rigs that ask for it."""
    return Alone(build, world)


@dataclass
class Book:
    """A request: what it has to receive, and what it has received."""

    request: EngineRequest
    tokens: list[int]
    reason: str
    logits: list[NDArray[Any]] | None = None
    outputs: list[int] = field(default_factory=list)
    fits: bool = True


class EngineRig(Rig):
    """Drives one engine in one `EngineWorld`; every method checks before it returns."""

    kind = "EngineRig"

    def __init__(
        self,
        world: EngineWorld,
        build: Builder = build_engine,
        *,
        reference: Reference | None = None,
        capabilities: Capabilities | None = None,
    ) -> None:
        """`reference` gives what a request gets alone; None: the engine itself does. `capabilities`: None: those of
        the engine."""
        super().__init__(world)
        options = {"reference": reference, "capabilities": capabilities}
        self.options = {name: given for name, given in options.items() if given is not None}
        self.engine: Any = build(world)
        self.able = capabilities_of(self.engine) if capabilities is None else capabilities
        self.reference = alone(build, world.ample(1)) if reference is None else reference
        self.live: dict[str, Book] = {}
        self.past: set[str] = set()
        self.num_added = 0
        self.num_received = 0
        self._wrong_logits: list[str] = []
        if self.able.logits:
            self.engine.on_logits = self._see
        self._num_blocks = self._all_blocks()

    @property
    def has_work(self) -> bool:
        """Whether anything is left to do."""
        return bool(self.live or self.engine.has_unfinished)

    def add(self, request: EngineRequest) -> None:
        """Submit a request. One whose id lives has to be refused by an exception; one that can never be served by that,
        or by an end without a token; and no other may be. Raises InvalidProgram for what is no EngineRequest."""
        if not isinstance(request, EngineRequest):
            raise InvalidProgram(f"{request!r} is no EngineRequest.")
        self.calls.append(("add", (request,)))
        self.num_added += 1
        book, is_taken = self._book(request), request.id in self.live
        try:
            submit(self.engine, request, self.able)
        except Exception as error:
            may_refuse = is_taken or not book.fits
            self._expect(may_refuse, f"{request.id} {sentence_of(error)}, and an empty pool holds it")
            self.events["duplicate refused" if is_taken else "refused"] += 1
        else:
            self._expect(not is_taken, f"{request.id} lives, and was taken once more")
            self.live[request.id] = book
            self.past.discard(request.id)
        self._check()

    def step(self, times: int = 1) -> None:
        """Let the engine compute, and take what it brings, so many times."""
        for _ in range(times):
            verb, (steps,) = self.calls[-1] if self.calls and self.calls[-1][0] == "step" else ("step", (0,))
            self.calls[len(self.calls) - (steps > 0) :] = [(verb, (steps + 1,))]
            self._fail_on([sentence for output in self.engine.step() for sentence in self._receive(output)])
            self._check()

    def abort(self, id: str) -> None:
        """The client is gone and receives nothing any more. An abort after the end changes nothing; an unknown id may
        be refused."""
        self.calls.append(("abort", (id,)))
        output = None
        try:
            output = self.engine.abort(id)
        except Exception as error:
            self._expect(id not in self.live and id not in self.past, f"abort of {id} {sentence_of(error)}")
        book = self.live.pop(id, None)
        if book is not None:
            self.past.add(id)
            self.events["abort"] += 1
            self.events["abort halfway"] += bool(book.outputs)
            if output is not None:
                book.outputs += [int(token) for token in output.token_ids]
                is_right = book.outputs == book.tokens[: len(book.outputs)]
                is_right &= (output.id, output.finish_reason) == (id, "abort")
                self._expect(is_right, f"abort of live {id} returned {output}; alone it is {book.tokens}")
        else:
            self._expect(output is None, f"abort of {id}, which does not live, returned {output}")
        self._check()

    def drain(self) -> None:
        """No more requests: each token has to come within a bounded number of steps, and in the end every block."""
        num_idle = 0
        while self.has_work:
            # All tokens that are known may have to be computed once more before a new one comes.
            known = sum(len(book.request.prompt) + len(book.outputs) for book in self.live.values())
            is_slow = num_idle > 20 + 2 * known
            left = sorted(self.live) or "something"
            self._expect(not is_slow, f"nothing came of {num_idle} steps, and {left} has not ended")
            before = self.num_received
            self.step()
            num_idle = 0 if self.num_received > before else num_idle + 1

    def _book(self, request: EngineRequest) -> Book:
        """What the request has to receive, by the reference and by the rules of stopping."""
        num_outputs = self.world.num_outputs(request)
        if num_outputs < 1:
            return Book(request, [], "rejected", fits=False)
        unstopped = msgspec.structs.replace(request, max_tokens=num_outputs, stop_token_ids=(), priority=0, salt=None)
        stream = self.reference(unstopped)
        for count, token in enumerate(stream.tokens[:num_outputs], 1):
            if token in request.stop_token_ids:
                return Book(request, stream.tokens[:count], "stop", stream.logits)
        return Book(request, stream.tokens[:num_outputs], "length", stream.logits)

    def _receive(self, output: Any) -> list[str]:
        """Hold an output against the book of its request."""
        self.num_received += 1
        id, tokens = output.id, [int(token) for token in output.token_ids]
        book = self.live.get(id)
        if book is None:
            return [f"{id} received {tokens} ({output.finish_reason}), and it does not live"]
        book.outputs += tokens
        found = []
        if book.outputs != book.tokens[: len(book.outputs)]:
            found.append(f"{id} received {book.outputs}; alone it is {book.tokens}")
        if output.finish_reason is None:
            return found
        del self.live[id]
        self.past.add(id)
        if not book.fits:
            is_refusal = output.finish_reason not in ("stop", "length")
            self.events["refused"] += 1
            return found if is_refusal else [*found, f"{id} can never be served, and ended by {output.finish_reason}"]
        if not found and (len(book.outputs), output.finish_reason) != (len(book.tokens), book.reason):
            error = getattr(output, "error", None)
            why = output.finish_reason if error is None else f"{output.finish_reason}: {error}"
            found.append(
                f"{id} ended with {book.outputs} by {why}; alone with {book.tokens} by {book.reason}"
                f" (max_tokens {book.request.max_tokens}, {self.world.longest} tokens fit)"
            )
        self._count(output, book)
        return found

    def _count(self, output: Any, book: Book) -> None:
        usage = getattr(output, "usage", None)
        self.events["hit"] += getattr(usage, "hit_tokens", 0) > 0
        self.events["preempted"] += getattr(usage, "preemptions", 0) > 0
        self.events["swapped"] += getattr(usage, "swapped_blocks", 0) > 0
        self.events[f"ended by {book.reason}"] += 1
        self.events["cut by the pool"] += len(book.tokens) < book.request.max_tokens and book.reason == "length"

    def _see(self, id: str, place: int, row: Any) -> None:
        """The engine chooses output `place` of a request from these logits."""
        book = self.live.get(id)
        if book is None or book.logits is None or place >= len(book.tokens):
            return
        ours, theirs = array_of(row), book.logits[place]
        if ours.tobytes() != theirs.tobytes():
            shown = f"are {ours.tolist()}; alone {theirs.tolist()}"
            self._wrong_logits.append(f"{id}: the logits of its output {place} {shown}")

    def _check(self) -> None:
        found, self._wrong_logits = self._wrong_logits, []
        is_busy = bool(self.engine.has_unfinished)
        found += [f"check(): {violation}" for violation in (self.engine.check() if self.able.check else ())]
        if self.live and not is_busy:
            found.append(f"{sorted(self.live)} live, and the engine has nothing unfinished")
        num_blocks = self._all_blocks()
        if num_blocks != self._num_blocks:
            found.append(f"free, cached and used blocks were {self._num_blocks} and are {num_blocks}")
        if self.able.counts and not self.live and not is_busy:
            manager = self.engine.manager
            used = (int(manager.device.num_used), int(manager.host.num_used) if hasattr(manager, "host") else 0)
            if any(used):
                found.append(f"nothing lives, and {used[0]} device and {used[1]} host blocks are used")
        self._fail_on(found)

    def _all_blocks(self) -> int:
        if not self.able.counts:
            return 0
        device = self.engine.manager.device
        return int(device.num_free + device.num_cached + device.num_used)
