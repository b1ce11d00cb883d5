"""What the state machines draw: tiny worlds and few different tokens, so that sharing and eviction are common.

docs/testing.md lists the strategies for tests of your own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from hypothesis import strategies as st
from hypothesis.stateful import precondition

from paged.block_manager import LayerGroup
from paged.testing.engine_world import GREEDY, EngineRequest, EngineWorld
from paged.testing.manager_rig import ManagerWorld
from paged.testing.naive_layers import pages_for
from paged.testing.protocol import Capabilities
from paged.testing.reserving import DRAWN, DRAWN_FOR_ENGINES, PREALLOCATES, RESERVES
from paged.testing.world import World

SESSIONS = ("s0", "s1", "s2")
NAMESPACES = (None,) * 9 + ("a", ("a",), 1, True)
"""Mostly one; the others differ from each other by type alone."""


@st.composite
def prompts(draw: st.DrawFn, vocabulary: int = 2, longest: int = 14) -> list[int]:
    """Prompts that share prefixes: a stretch of one of a few fixed patterns, then a few free tokens."""
    pattern, length = draw(st.sampled_from([[0], [0, 1], [0, 0, 1], [1]])), draw(st.integers(1, longest))
    tail = draw(st.lists(st.integers(0, vocabulary - 1), max_size=3))
    return ((pattern * length)[:length] + tail)[:longest]


def tails(vocabulary: int = 2, longest: int = 5) -> st.SearchStrategy[list[int]]:
    """A few tokens more."""
    return st.lists(st.integers(0, vocabulary - 1), min_size=1, max_size=longest)


picks = st.integers(0, 11)
"""Which of several: taken modulo how many there are."""


@dataclass(frozen=True)
class Wish:
    """A request before it is cut to a world: lengths are shares of the pool."""

    prompt: list[int]
    share: float = 1.0
    output: float = 0.5
    min_tokens: int = 0
    eos: int | None = None
    stop: tuple[int, ...] = ()
    priority: int = 0
    num_sequences: int = 1
    num_computed: int = 0
    saves: bool = False
    salt: str | None = None
    reads_cache: bool = True
    writes_cache: bool = True
    keeps: tuple[int, float | None] | None = None
    """Priority of what it leaves in the cache, and for how long."""
    temperature: float = GREEDY
    seed: int = 0
    adapter: str | None = None
    extra_key: object = None
    session: str | None = None
    tenant: str | None = None
    expected: float | None = None
    """Share of max_tokens that its `expected_tokens` are."""

    def request(self, id: str, world: World, able: Capabilities) -> Any:
        """Make the request of a scheduler's world, without what the subject is not able to do."""
        from paged import Request, Retention

        max_tokens = max(1, int(world.longest * self.output))
        num_sequences = min(self.num_sequences, world.max_sequences) if able.groups else 1
        keeps = self.keeps if able.retention else None
        return Request(
            id=id,
            prompt=self._prompt(world.longest),
            max_tokens=max_tokens,
            min_tokens=min(self.min_tokens, max_tokens),
            eos_token_id=self.eos,
            stop_token_ids=self.stop,
            priority=self.priority,
            num_sequences=num_sequences,
            num_computed=self.num_computed if able.external_tokens and num_sequences == 1 else 0,
            saves=self.saves and able.external_tokens and num_sequences == 1 and world.may_save,
            salt=self.salt,
            reads_cache=self.reads_cache or num_sequences > 1 or not able.private_rows,
            writes_cache=self.writes_cache or num_sequences > 1 or not able.private_rows,
            retention=None if keeps is None else Retention(priority=keeps[0], lasts=keeps[1]),
            adapter=self.adapter,
            extra_key=self.extra_key,
            session_id=self.session if able.hints else None,
            tenant=self.tenant,
            expected_tokens=None if self.expected is None else max(1, int(max_tokens * self.expected)),
        )

    def engine_request(self, id: str, world: EngineWorld, able: Capabilities) -> EngineRequest:
        """Make the request of an engine's world, without what the subject is not able to do."""
        is_drawn = able.seeds and self.temperature > 0
        return EngineRequest(
            id=id,
            prompt=self._prompt(world.longest),
            max_tokens=max(1, int(world.longest * self.output)),
            temperature=self.temperature if is_drawn else GREEDY,
            seed=self.seed if is_drawn else None,
            stop_token_ids=self.stop,
            priority=self.priority if able.priority else 0,
            salt=self.salt if able.salts else None,
            reads_cache=self.reads_cache or not able.private_rows,
            writes_cache=self.writes_cache or not able.private_rows,
            keeps=self.keeps if able.retention else None,
        )

    def _prompt(self, longest: int) -> list[int]:
        return self.prompt[: max(1, int((longest - 1) * self.share)) if self.share <= 1 else longest + 1]


def wishes() -> st.SearchStrategy[Wish]:
    """Requests that mostly fit, take each other's memory as they grow, and share prefixes."""
    return st.builds(
        Wish,
        prompt=prompts(longest=24),
        share=st.sampled_from([0.2, 0.3, 0.3, 0.3, 0.6, 0.6, 1.0, 2.0]),
        output=st.sampled_from([0.1, 0.4, 0.8, 1.0]),
        min_tokens=st.sampled_from([0, 0, 0, 2]),
        eos=st.sampled_from([None] * 5 + [0]),
        stop=st.sampled_from([()] * 5 + [(1,)]),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        num_sequences=st.sampled_from([1, 1, 1, 1, 1, 2, 3]),
        num_computed=st.sampled_from([0] * 8 + [3, 6]),
        salt=st.sampled_from([None, None, None, None, None, "a"]),
        reads_cache=st.sampled_from([True] * 9 + [False]),
        writes_cache=st.sampled_from([True] * 9 + [False]),
        keeps=st.sampled_from([None] * 6 + [(1, None), (2, 5.0), (3, 20.0)]),
        adapter=st.sampled_from([None] * 6 + ["a"]),
        extra_key=st.sampled_from([None] * 10 + ["a", ("a",), 1, True]),
        expected=st.sampled_from([None, None, 0.4, 1.0]),
        session=st.sampled_from([None, None, *SESSIONS]),
        tenant=st.sampled_from([None, None, "t"]),
    )


@dataclass(frozen=True)
class Knowledge:
    """A hint before it is cut to a world: `pick` chooses among the sessions, requests or prompts that there are."""

    action: str
    target: str
    pick: int
    length: int
    priority: int = 1
    lasts: float | None = None
    waits_for: str | None = None
    tenant: str | None = None


def knowledge() -> st.SearchStrategy[Knowledge]:
    """What a caller knows of content that will be used, or not."""
    return st.builds(
        Knowledge,
        action=st.sampled_from(["retain", "pin", "pin", "unpin", "prefetch", "prefetch", "demote", "end"]),
        target=st.sampled_from(["session", "session", "session", "request", "tokens", "tokens"]),
        pick=picks,
        length=st.integers(1, 24),
        priority=st.integers(1, 3),
        lasts=st.sampled_from([None, None, 3.0, 20.0]),
        waits_for=st.sampled_from([None, "tool", "person"]),
        tenant=st.sampled_from([None, None, "t"]),
    )


def engine_wishes() -> st.SearchStrategy[Wish]:
    """The same for an engine: one sequence each, greedy or drawn by a seed."""
    return st.builds(
        Wish,
        prompt=prompts(longest=16),
        share=st.sampled_from([0.2, 0.3, 0.3, 0.3, 0.6, 0.6, 1.0, 2.0]),
        output=st.sampled_from([0.1, 0.3, 0.6, 1.0]),
        stop=st.sampled_from([()] * 4 + [(1, 3)]),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        salt=st.sampled_from([None, None, None, None, None, "a"]),
        temperature=st.sampled_from([GREEDY, GREEDY, GREEDY, 1.5]),
        reads_cache=st.sampled_from([True] * 9 + [False]),
        writes_cache=st.sampled_from([True] * 9 + [False]),
        keeps=st.sampled_from([None] * 6 + [(1, None), (3, 20.0)]),
        seed=st.integers(0, 1),
    )


def _world(*, known_outputs: int | None, host_blocks: int, max_pinned: int, **sizes: Any) -> World:
    """Make a world. `resumes_known`, `max_lead` and `elsewhere` follow from unrelated draws, which saves three. A host
    of one block comes with everything that lets content come and go there, so that what a batch reads of it is soon
    written over."""
    if host_blocks == 1:
        sizes |= {"host_caching": True, "prefix_caching": True, "max_sequences": 8}
        sizes["block_size"] = max(2, sizes["block_size"])
    sizes["max_pinned"] = min(max_pinned, sizes["num_blocks"] - 2)
    if sizes["policy"] == "paged-cached":
        sizes["max_lead"] = 4.0 * sizes["event_stride"]
    sizes |= {"resumes_known": known_outputs == 2, "elsewhere": sizes["vocabulary"] - 2}
    return World(known_outputs=known_outputs, host_blocks=host_blocks, **sizes)


def scheduler_worlds() -> st.SearchStrategy[World]:
    """A few blocks, with every limit that a scheduler has."""
    return st.builds(
        _world,
        num_blocks=st.integers(3, 12),
        block_size=st.sampled_from([1, 2, 4]),
        host_blocks=st.sampled_from([0, 0, 1, 2, 4, 8, 8]),
        prefix_caching=st.sampled_from([True, True, True, True, True, True, False]),
        host_caching=st.sampled_from([True, True, False]),
        policy=st.sampled_from(DRAWN),
        max_tokens_per_step=st.sampled_from([2, 4, 8, 32, 32]),
        max_sequences=st.sampled_from([1, 2, 4, 8]),
        max_chunk=st.sampled_from([None, None, None, 1, 2, 3, 4]),
        max_model_len=st.sampled_from([None, None, None, 10]),
        max_waiting=st.sampled_from([None, None, None, 4]),
        max_outstanding=st.sampled_from([4, 4, 3, 1]),
        vocabulary=st.sampled_from([2, 3]),
        event_stride=st.sampled_from([0, 0, 1, 3]),
        drafts=st.sampled_from([0, 0, 1, 4]),
        steps_ahead=st.sampled_from([0, 0, 1, 1, 2]),
        watermark=st.sampled_from([None, None, 0.2, 0.4]),
        preemption=st.sampled_from([None, None, "swap"]),
        max_preemptions=st.sampled_from([None, None, 1, 2]),
        known_outputs=st.sampled_from([None, 0, 2]),
        max_pinned=st.sampled_from([0, 0, 0, 1, 2, 4, 8]),
        max_pinned_per_tenant=st.sampled_from([None, None, 1]),
        max_cached_per_tenant=st.sampled_from([None, None, None, 0, 3]),
    )


Kind = Literal["full", "window", "chunk", "state"]
KINDS: tuple[tuple[Kind, ...], ...] = (
    *(("full", "window"),) * 2,
    *(("full", "state"),) * 2,
    *(("full", "window", "state"),) * 2,
    ("full",),
    ("window",),
    ("state",),
    ("full", "chunk"),
    ("window", "state"),
    ("full", "window", "window"),
    ("full", "chunk", "window", "state"),
    ("full", "state", "state"),
)
"""Which groups a model has, in the order of its layers."""
ON_DEMAND = ("paged",) * 5 + tuple(name for name in DRAWN if name not in (*PREALLOCATES, "paged"))
"""Policies that draw blocks when tokens need them: the others are refused for layers of several kinds."""


@st.composite
def layer_groups(draw: st.DrawFn, kinds: Sequence[tuple[Kind, ...]] = KINDS) -> tuple[LayerGroup, ...]:
    """Groups of a model: windows and chunks of a few tokens, blocks of one to three pages."""
    groups: dict[tuple[str, int, int], LayerGroup] = {}
    for number, kind in enumerate(draw(st.sampled_from(kinds))):
        reach = draw(st.integers(1, 9)) if kind in ("window", "chunk") else 0
        while (kind, reach, 0) in groups:
            reach += 1
        pages = draw(st.sampled_from([1, 1, 2, 3]))
        groups[kind, reach, number if kind == "state" else 0] = LayerGroup(kind, reach, pages)
    return tuple(groups.values())


@st.composite
def retaining_worlds(draw: st.DrawFn) -> World:
    """Those of `layer_worlds` that show best what is retained of windows, chunks and states beside full layers."""
    groups = draw(layer_groups([kinds for kinds in KINDS if kinds[0] == "full" and len(kinds) > 1]))
    world = replace(draw(layer_worlds()), groups=groups, block_size=draw(st.integers(2, 4)), prefix_caching=True)
    need = pages_for(groups, world.max_model_len or 0, world.block_size)
    pinned = draw(st.sampled_from([0, need]))
    return replace(
        world,
        num_blocks=need * draw(st.integers(5, 8)) // 4 + pinned,
        max_pinned=pinned,
        max_cached_per_tenant=None,
        event_stride=0,
    )


@st.composite
def layer_worlds(draw: st.DrawFn) -> World:
    """Layers of several kinds, and a pool for one sequence of full length, hardly two; or four, for hits."""
    groups, block_size, longest = draw(layer_groups()), draw(st.integers(1, 4)), draw(st.integers(4, 20))
    need = pages_for(groups, longest, block_size)
    num_blocks = need * draw(st.sampled_from([2, 3, 4, 4, 5, 6, 8, 16])) // 4
    keeps = draw(st.sampled_from([True, True, False]))
    host_blocks, preemption = draw(st.sampled_from([(0, None), (0, None), (1, "swap"), (2, "swap"), (3, "swap")]))
    host_caching = draw(st.sampled_from([False, False, True]))
    if host_caching:
        # A pool for hardly more than one sequence: what others left is on the host.
        num_blocks, keeps, host_blocks = max(2, min(num_blocks, need * 5 // 4)), True, max(host_blocks, 2)
    world = World(
        num_blocks=max(2, num_blocks),
        block_size=block_size,
        host_blocks=host_blocks * num_blocks // 2,
        host_caching=host_caching,
        preemption=preemption,
        prefix_caching=keeps,
        groups=groups,
        max_model_len=longest,
        policy=draw(st.sampled_from(ON_DEMAND)),
        max_tokens_per_step=draw(st.sampled_from([2, 4, 8, 32, 32])),
        max_sequences=draw(st.sampled_from([1, 2, 4, 8])),
        max_chunk=draw(st.sampled_from([None, None, None, 1, 2, 3, 4])),
        max_waiting=draw(st.sampled_from([None, None, None, 4])),
        max_outstanding=draw(st.sampled_from([4, 4, 3, 1])),
        event_stride=draw(st.sampled_from([0, 0, 1, 3])) if groups[0].kind == "full" else 0,
        drafts=draw(st.sampled_from([0, 1, 4, 4])),
        resumes_known=draw(st.sampled_from([False, False, True])),
        steps_ahead=draw(st.sampled_from([0, 1, 1, 2])),
        watermark=draw(st.sampled_from([None, None, 0.2])),
        # With windows and several batches out, a request at this bound holds more than was reserved for it.
        max_preemptions=draw(st.sampled_from([None, None, 1, 2])),
        known_outputs=draw(st.sampled_from([None, 0, 2])),
        # As much as one sequence of full length leaves; the pool is larger by that.
        max_pinned=draw(st.sampled_from([0, 0, 0, need])),
        max_cached_per_tenant=draw(st.sampled_from([None, None, None, 0, 3])),
    )
    return replace(world, num_blocks=world.num_blocks + world.max_pinned)


def manager_worlds() -> st.SearchStrategy[ManagerWorld]:
    """A few blocks, with and without a host tier, a cache, and a reader of its events."""
    return st.builds(
        ManagerWorld,
        num_blocks=st.integers(3, 12),
        block_size=st.sampled_from([1, 2, 4]),
        host_blocks=st.sampled_from([0, 2, 4, 8]),
        prefix_caching=st.sampled_from([True, True, True, True, True, True, False]),
        host_caching=st.sampled_from([True, True, False]),
        least_load=st.sampled_from([0, 0, 0, 3]),
        event_stride=st.sampled_from([0, 1, 2, 3]),
        lag=st.sampled_from([0, 0, 0, 1, 3, 99]),
    )


def engine_worlds() -> st.SearchStrategy[EngineWorld]:
    """As for a scheduler, but smaller, since a model runs in it, and without limits that an engine does not have."""
    return st.builds(
        EngineWorld,
        num_blocks=st.integers(3, 6),
        block_size=st.sampled_from([1, 2, 2, 4]),
        host_blocks=st.sampled_from([0, 0, 4, 8]),
        prefix_caching=st.sampled_from([True, True, True, True, True, False]),
        host_caching=st.sampled_from([True, True, False]),
        policy=st.sampled_from(DRAWN_FOR_ENGINES),
        max_tokens_per_step=st.sampled_from([2, 4, 8, 32]),
        max_sequences=st.sampled_from([1, 2, 4, 4]),
        max_chunk=st.sampled_from([None, None, 1, 3]),
        max_model_len=st.sampled_from([None, None, None, 10]),
    )


@st.composite
def pressures(draw: st.DrawFn) -> tuple[EngineWorld, list[EngineRequest]]:
    """A world and two to five requests, each of which has room alone, though not all together."""
    # A policy that reserves everything is never short of memory.
    on_demand = [name for name in DRAWN if name not in RESERVES]
    world = replace(draw(engine_worlds()), max_model_len=None, policy=draw(st.sampled_from(on_demand)))
    room, requests = world.longest, []
    for number, tokens in enumerate(draw(st.lists(prompts(longest=16), min_size=2, max_size=5))):
        prompt = tokens[: max(1, room // 2)]
        most = room - len(prompt)
        # Together the first two know more tokens than there are slots, at the latest when the second is done.
        max_tokens = most if number < 2 else draw(st.integers(1, most))
        requests.append(EngineRequest(id=f"r{number}", prompt=prompt, max_tokens=max_tokens))
    return world, requests


def where(holds: Callable[[Any], object]) -> Any:
    """A precondition of a machine's rule: `holds(machine)` is true, or not empty."""
    return precondition(lambda machine: bool(holds(machine)))
