"""One small world for a serving engine, the requests in it, and our own engine on a model of a few thousand weights.

Loads torch and transformers when our own engine is built, not before; a tester of another engine passes another
builder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from paged.sampling.params import SamplingParams
from paged.scheduler import Request, Scheduler
from paged.testing.protocol import Capabilities
from paged.testing.reserving import most_blocks
from paged.testing.world import MemoryWorld, manager_in

# Of a draft model's weights: about half of its drafts are right.
_NOISE = 0.03

# One object, by which a request that says nothing else is known.
GREEDY = 0.0


@dataclass(frozen=True, repr=False)
class EngineWorld(MemoryWorld):
    """Sizes in blocks, tokens and sequences. `num_blocks`, `block_size` and `max_model_len` decide how long an
    answer can be, and every engine has to keep them; a builder leaves out what else its engine does not have."""

    policy: str = "paged"
    max_tokens_per_step: int = 8
    max_sequences: int = 4
    max_chunk: int | None = None
    max_model_len: int | None = None
    vocabulary: int = 8
    backend: str = "auto"
    kv_dtype: str = "auto"

    @property
    def longest(self) -> int:
        """The most tokens that one sequence can have here, prompt and outputs."""
        pool = most_blocks(self.policy, self.num_blocks) * self.block_size
        return pool if self.max_model_len is None else min(pool, self.max_model_len)

    def num_outputs(self, request: EngineRequest) -> int:
        """Tokens that the request gets here if no stop id ends it sooner; below 1: it can never be served."""
        return min(request.max_tokens, self.longest - len(request.prompt))

    def ample(self, num_tokens: int) -> EngineWorld:
        """The same engine with room for one sequence of so many tokens, computed in one step; nothing is cached."""
        return replace(
            self,
            num_blocks=-(-num_tokens // self.block_size) + 1,
            host_blocks=0,
            prefix_caching=False,
            policy=EngineWorld.policy,
            max_tokens_per_step=num_tokens,
            max_sequences=1,
            max_chunk=None,
            max_model_len=None,
        )


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """A request to an engine, as plain data. `temperature` 0 is greedy; else `seed` decides (None: the id may)."""

    id: str
    prompt: list[int]
    max_tokens: int = 4
    temperature: float = GREEDY
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    priority: int = 0
    salt: str | None = None
    reads_cache: bool = True
    writes_cache: bool = True
    keeps: tuple[int, float | None] | None = None
    """Priority of what it leaves in the cache, and for how long."""

    @property
    def params(self) -> SamplingParams:
        """How its tokens are chosen, and when they stop. An end of text that the model knows does not count."""
        return SamplingParams(
            temperature=self.temperature,
            seed=self.seed if self.temperature > 0 else None,
            max_tokens=self.max_tokens,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=True,
        )


Builder = Callable[[EngineWorld], Any]
"""What makes a `ServingEngine` for a world."""


def submit(engine: Any, request: EngineRequest, able: Capabilities) -> None:
    """Call `add_request` with what the request has; what the engine cannot do is left out."""
    more: dict[str, Any] = {}
    if request.priority and able.priority:
        more["priority"] = request.priority
    if request.salt is not None and able.salts:
        more["salt"] = request.salt
    if able.private_rows:
        more |= {name: False for name in ("reads_cache", "writes_cache") if not getattr(request, name)}
    if request.keeps is not None and able.retention:
        from paged import Retention

        more["retention"] = Retention(priority=request.keeps[0], lasts=request.keeps[1])
    engine.add_request(list(request.prompt), request.params, id=request.id, **more)


def scheduler_in(world: EngineWorld, *, max_model_len: int | None, vocabulary: int) -> Scheduler:
    """Our own scheduler over our own manager, for engines that are made of them here."""
    import paged.study  # noqa: F401  (registers its policies)

    return Scheduler(
        manager_in(world),
        policy=world.policy,
        max_tokens_per_step=world.max_tokens_per_step,
        max_sequences=world.max_sequences,
        max_chunk=world.max_chunk,
        max_model_len=max_model_len,
        vocabulary_size=vocabulary,
    )


def request_of(
    prompt: Sequence[int], params: SamplingParams, id: str, *, priority: int = 0, salt: str | None = None, **cache: Any
) -> Request:
    """The request that those engines make of `add_request`; `cache`: the fields of a Request about the cache."""
    return Request(
        id=id,
        prompt=list(prompt),
        max_tokens=params.max_tokens,
        stop_token_ids=params.stop_token_ids,
        priority=priority,
        salt=salt,
        **cache,
    )


def build_engine(
    world: EngineWorld, steps_ahead: int = 0, speculate: str | None = None, disk_cache: str | Path | None = None
) -> Any:
    """Our own engine, batch-invariant, in float32, on a decoder of random weights; a draft model has some noise more.
    Raises MissingExtra without the extra `engine`."""
    import paged.study  # noqa: F401  (registers its policies)
    from paged import Engine
    from paged.base.extras import import_with_extra

    tiny_model = import_with_extra("paged.testing.tiny_model", "Engine").tiny_model
    return Engine(
        tiny_model(world.vocabulary),
        speculate=speculate,
        draft_model=tiny_model(world.vocabulary, _NOISE) if speculate == "draft" else None,
        num_blocks=world.num_blocks,
        block_size=world.block_size,
        host_blocks=world.host_blocks,
        prefix_caching=world.prefix_caching,
        host_caching=world.keeps_content_on_host,
        policy=world.policy,
        max_tokens_per_step=world.max_tokens_per_step,
        max_sequences=world.max_sequences,
        max_chunk=world.max_chunk,
        max_model_len=world.max_model_len,
        backend=world.backend,
        kv_cache_dtype=world.kv_dtype,
        steps_ahead=steps_ahead,
        disk_cache=disk_cache,
    )
