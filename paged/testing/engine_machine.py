"""The state machine of a serving engine: Hypothesis draws what clients do, the rig compares."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from paged.testing.engine_rig import EngineRig
from paged.testing.engine_world import EngineWorld, build_engine
from paged.testing.protocol import Capabilities
from paged.testing.rig_machine import RigMachine, cut_to
from paged.testing.strategies import Wish, engine_wishes, engine_worlds, picks, tails, where

MAX_LIVE = 6


class EngineMachine(RigMachine):
    """Subclass it and override `build`; `capabilities`, too, if the engine does not say them itself.

    `reference` says what a request is answered alone; None: the engine itself, with room for one.
    """

    build: ClassVar[Any] = staticmethod(build_engine)
    capabilities: ClassVar[Capabilities | None] = None
    reference: ClassVar[Any] = None

    rig: EngineRig

    @initialize(world=engine_worlds(), opening=st.lists(engine_wishes(), min_size=1, max_size=3))
    def begin(self, world: EngineWorld, opening: list[Wish]) -> None:
        """Requests that are there from the start, together."""
        able, kind = self.capabilities, type(self)
        world = world if able is None else cut_to(able, world)
        self.rig = EngineRig(world, kind.build, reference=kind.reference, capabilities=able)
        for wish in opening:
            self.add(wish, again=False)

    @where(lambda self: len(self.rig.live) < MAX_LIVE)
    @rule(wish=engine_wishes(), again=st.sampled_from([False, False, False, True]))
    def add(self, wish: Wish, again: bool) -> None:
        number = max(0, self.rig.num_added - 1) if again else self.rig.num_added
        self.rig.add(wish.engine_request(f"r{number}", self.rig.world, self.rig.able))

    @where(lambda self: len(self.rig.live) < MAX_LIVE)
    @rule(wish=engine_wishes(), more=tails())
    def arrive_together(self, wish: Wish, more: list[int]) -> None:
        """Two requests whose prompts begin alike, at once: the second shares or follows."""
        self.add(wish, again=False)
        self.add(replace(wish, prompt=wish.prompt + more), again=False)

    @where(lambda self: len(self.rig.live) < MAX_LIVE)
    @rule(wish=engine_wishes(), steps=st.integers(2, 8))
    def crowd(self, wish: Wish, steps: int) -> None:
        """Three short prompts that grow until they are in each other's way."""
        for salt in (None, "a", "b"):
            self.add(replace(wish, share=0.2, output=1.0, salt=salt), again=False)
        self.serve(steps)

    @where(lambda self: self.rig.has_work)
    @rule(steps=st.integers(1, 6))
    def serve(self, steps: int) -> None:
        self.rig.step(steps)

    @where(lambda self: self.rig.able.abort and self.rig.live)
    @rule(pick=picks)
    def abort(self, pick: int) -> None:
        self.rig.abort(sorted(self.rig.live)[pick % len(self.rig.live)])

    @where(lambda self: self.rig.able.abort and self.rig.calls[-1][0] != "abort")
    @rule(pick=picks)
    def abort_anyone(self, pick: int) -> None:
        """Also of requests that have ended, or never were; not twice in a row, which would say nothing new."""
        self.rig.abort(f"r{pick}")
