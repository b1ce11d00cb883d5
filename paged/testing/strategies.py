"""What the state machines draw: tiny worlds and tokens out of two or three, so that sharing and eviction happen all the time.

Knows Hypothesis. Does not know how a rig runs what is drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition

from paged.testing.protocol import Capabilities
from paged.testing.world import World

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
    """What a client wants, before it is cut to a world: lengths are shares of what the pool holds."""

    prompt: list[int]
    share: float = 1.0
    output: float = 0.5
    min_tokens: int = 0
    eos: int | None = None
    stop: tuple[int, ...] = ()
    priority: int = 0
    num_sequences: int = 1
    num_computed: int = 0
    salt: str | None = None
    adapter: str | None = None
    extra_key: object = None

    def request(self, id: str, world: World, able: Capabilities) -> Any:
        """The request that is made of it in a world."""
        from paged import Request

        longest = max(1, int((world.longest - 1) * self.share)) if self.share <= 1 else world.longest + 1
        max_tokens = max(1, int(world.longest * self.output))
        num_sequences = min(self.num_sequences, world.max_sequences) if able.groups else 1
        return Request(
            id=id,
            prompt=self.prompt[:longest],
            max_tokens=max_tokens,
            min_tokens=min(self.min_tokens, max_tokens),
            eos_token_id=self.eos,
            stop_token_ids=self.stop,
            priority=self.priority,
            num_sequences=num_sequences,
            num_computed=self.num_computed if able.external_tokens and num_sequences == 1 else 0,
            salt=self.salt,
            adapter=self.adapter,
            extra_key=self.extra_key,
        )


def wishes() -> st.SearchStrategy[Wish]:
    """Requests that mostly fit, grow into each other's memory, and share prefixes."""
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
        adapter=st.sampled_from([None] * 6 + ["a"]),
        extra_key=st.sampled_from([None] * 10 + ["a", ("a",), 1, True]),
    )


def where(holds: Callable[[Any], object]) -> Any:
    """A precondition of a machine's rule: one with nothing to do is not tried."""
    return precondition(lambda machine: bool(holds(machine)))
