"""The sizes that the small worlds of all rigs begin with, that of a scheduler with every limit, and our own in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import msgspec

from paged.base.arguments import checked_integer
from paged.block_manager import BlockManager, LayerGroup
from paged.errors import InvalidConfig, UnknownPolicy
from paged.testing.naive_layers import full_pages, longest_in, pages_for, spare_pages
from paged.testing.protocol import StepScheduler
from paged.testing.reserving import IN_REGIONS, PREALLOCATES, RESERVES, most_blocks
from paged.testing.violation import ShortRepr


@dataclass(frozen=True, repr=False)
class MemoryWorld(ShortRepr):
    """Sizes in blocks and tokens. Raises InvalidConfig for one that is out of range."""

    num_blocks: int = 8
    block_size: int = 2
    host_blocks: int = 0
    prefix_caching: bool = True
    host_caching: bool = False

    def __post_init__(self) -> None:
        for name, least in (("num_blocks", 1), ("block_size", 1), ("host_blocks", 0)):
            checked_integer(name, getattr(self, name), least)

    @property
    def keeps_content_on_host(self) -> bool:
        """Whether content that leaves the device goes to the host: as far as the other sizes allow it."""
        return self.host_caching and self.host_blocks > 0 and self.prefix_caching


def manager_in(world: MemoryWorld, groups: tuple[LayerGroup, ...] = ()) -> BlockManager:
    """Our own manager; without `groups` for layers that are all full, a page a block."""
    several: dict[str, Any] = {"groups": groups} if groups else {}
    return BlockManager(
        world.num_blocks,
        world.block_size,
        host_blocks=world.host_blocks,
        prefix_caching=world.prefix_caching,
        host_caching=world.keeps_content_on_host,
        **several,
    )


@dataclass(frozen=True, repr=False)
class World(MemoryWorld):
    """Sizes in blocks, tokens and sequences, as the constructors of manager and scheduler take them."""

    policy: str = "paged"
    max_tokens_per_step: int = 8
    max_sequences: int = 4
    max_chunk: int | None = None
    max_model_len: int | None = None
    max_waiting: int | None = None
    vocabulary: int = 3
    event_stride: int = 0
    max_outstanding: int = 4
    drafts: int = 0
    """The most tokens that are guessed for a row that runs; not all of them are right."""
    resumes_known: bool = False
    steps_ahead: int = 0
    """How many more batches a whole step of the engine schedules before it ends the oldest."""
    watermark: float | None = None
    """Share of the pool that admission leaves available; None: the policy's, which is no block of a pool this small."""
    preemption: str | None = None
    """How requests are preempted; None: as the policy says, by which blocks this small are hardly worth a copy."""
    max_preemptions: int | None = None
    """Preemptions after which a request's worst case is reserved; None: the policy's, more than most here have."""
    known_outputs: int | None = None
    """Assumed output lengths that foresight begins with; None: the policy's, more than outputs that end here."""
    max_lead: float | None = None
    """Seconds, one a batch, by which order `cached` lets a request pass; None: the policy's, longer than programs."""
    max_pinned: int = 0
    """Blocks that hints may pin; requests cannot have them."""
    max_pinned_per_tenant: int | None = None
    max_cached_per_tenant: int | None = None
    elsewhere: int = 0
    """Seed of what exists elsewhere of requests with `num_computed`, which the scheduler asks for as it admits them; 0:
    it does not ask, and all of `num_computed` exists."""
    groups: tuple[LayerGroup, ...] = ()
    """Layers of several kinds, whose blocks take pages of the pool; without any, a block is a page."""

    @property
    def capacity(self) -> int:
        """Blocks that requests can have."""
        return self.num_blocks - self.max_pinned

    def exists_elsewhere(self, id: str, have: int) -> tuple[int, bool]:
        """How many tokens of a request exist elsewhere behind the first `have`, and that they come late."""
        return (0, 0, 3, 4, 8, 16)[crc32(f"{self.elsewhere} {id} {have}".encode()) % 6], True

    @property
    def longest(self) -> int:
        """The most tokens that one sequence can have here, prompt and outputs."""
        return self._longest_of(1)

    def limit_of(self, request: Any) -> int:
        """The most tokens that each sequence of a request can have, as far as is known before it runs."""
        return self._longest_of(request.num_sequences)

    def _longest_of(self, num_sequences: int) -> int:
        blocks = most_blocks(self.policy, self.capacity, num_sequences)
        most = blocks * self.block_size
        if self.groups:
            if self.max_model_len is None and all(group.kind != "full" for group in self.groups):
                raise InvalidConfig(f"max_model_len has to be set where no group is full; groups are {self.groups}.")
            blocks -= self.spare_pages
            most = longest_in(self.groups, blocks, self.block_size, self.max_model_len or most)
        return most if self.max_model_len is None else min(most, self.max_model_len)

    def can_hold(self, request: Any) -> bool:
        """Whether an empty pool holds the prompt, of which sequences share full blocks, and one output of each."""
        num_tokens = len(request.prompt)
        shares = self.prefix_caching and self.policy not in RESERVES
        shared = (num_tokens - 1) // self.block_size if shares else 0
        each = -(-(num_tokens + 1) // self.block_size)
        blocks = request.num_sequences * (each - shared) + shared
        if self.groups:
            pages = request.num_sequences * pages_for(self.groups, num_tokens + 1, self.block_size)
            num_twice = request.num_sequences * each - blocks
            blocks = pages - num_twice * full_pages(self.groups) + request.num_sequences * self.spare_pages
        return num_tokens + 1 <= self.limit_of(request) and blocks <= self.capacity

    @property
    def may_save(self) -> bool:
        """Whether blocks of requests that have ended may stay held."""
        return not self.groups and self.policy not in IN_REGIONS

    @property
    def spare_pages(self) -> int:
        """Pages that a sequence needs on top for a while."""
        return spare_pages(self.groups, self.prefix_caching)

    @property
    def preallocates(self) -> bool:
        """Whether a row gets all the blocks that it reserves when it is admitted."""
        return self.policy in PREALLOCATES


Builder = Callable[[World], StepScheduler]
_LIMITS = (
    *("max_tokens_per_step", "max_sequences", "max_chunk", "max_model_len", "max_waiting", "max_outstanding"),
    "resumes_known",
)
_CAPS = ("max_pinned", "max_pinned_per_tenant", "max_cached_per_tenant")


def build_scheduler(world: World, scheduler: Callable[..., StepScheduler] | None = None) -> StepScheduler:
    """Our own scheduler over our own manager, or another one with the same arguments. Raises UnknownPolicy."""
    import paged.study  # noqa: F401  (registers its policies)
    from paged import POLICIES, Scheduler

    if world.policy not in POLICIES:
        raise UnknownPolicy(world.policy, POLICIES)
    limits: dict[str, Any] = {name: getattr(world, name) for name in _LIMITS} | {"vocabulary_size": world.vocabulary}
    limits |= {name: getattr(world, name) for name in _CAPS if getattr(world, name) not in (0, None)}
    if world.elsewhere:
        limits["elsewhere"] = world.exists_elsewhere
    build: Callable[..., StepScheduler] = Scheduler if scheduler is None else scheduler
    wishes = {name: getattr(world, name) for name in ("watermark", "preemption", "max_preemptions")}
    if world.policy in RESERVES:
        # A policy that reserves everything preempts no request, and refuses these options.
        wishes["preemption"] = wishes["max_preemptions"] = None
    policy = POLICIES[world.policy]
    if policy.foresight != "none":
        wishes["known_outputs"] = world.known_outputs
    if policy.order == "cached":
        wishes["max_lead"] = world.max_lead
    changes = {name: wish for name, wish in wishes.items() if wish is not None}
    return build(manager_in(world, world.groups), policy=msgspec.structs.replace(policy, **changes), **limits)
