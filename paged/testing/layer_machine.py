"""The state machine of a scheduler whose model has layers of several kinds: windows, chunks and states beside full ones, or without them."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from paged.testing.protocol import Capabilities
from paged.testing.scheduler_machine import MAX_LIVE, SchedulerMachine
from paged.testing.strategies import Wish, layer_worlds, picks, tails, where, wishes
from paged.testing.world import World


class LayerMachine(SchedulerMachine):
    """Its worlds have `groups`. No content on the host, which is refused for such layers."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        host_content=False,
        external_tokens=False,
    )

    @initialize(
        world=layer_worlds(),
        opening=st.lists(wishes(), min_size=1, max_size=4),
        is_alike=st.booleans(),
    )
    def begin(self, world: World, opening: list[Wish], is_alike: bool) -> None:
        """Requests that are there from the start, together; their prompts may begin alike. Where there is a host, their answers are long: they get
        in each other's way."""
        if world.host_blocks:
            opening = [replace(wish, output=1.0) for wish in opening]
        super().begin(world=world, opening=opening, is_alike=is_alike)

    @where(lambda self: self.rig.live and len(self.rig.live) < MAX_LIVE)
    @rule(pick=picks, length=st.integers(1, 20), more=tails(longest=2), steps=st.integers(0, 4), leaves=st.booleans())
    def part_from(self, pick: int, length: int, more: list[int], steps: int, leaves: bool) -> None:
        """Somebody's prompt begins like all that another one knows, and parts from it where windows have passed and states have gone; the
        other one may be gone, too."""
        id = self.rig.live[pick % len(self.rig.live)]
        known = self.rig.known(id, 0)[1]
        if leaves:
            self.rig.abort(id)
        self.add(Wish(known[:length] + more, output=0.4), again=False)
        self.go_on(steps, ())
