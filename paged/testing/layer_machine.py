"""The state machine of a scheduler whose model has layers of several kinds: windows, chunks and states beside full ones, or without them."""

from __future__ import annotations

from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import initialize

from paged.testing.protocol import Capabilities
from paged.testing.scheduler_machine import SchedulerMachine
from paged.testing.strategies import Wish, layer_worlds, wishes
from paged.testing.world import World


class LayerMachine(SchedulerMachine):
    """Its worlds have `groups`. No host tier, which is refused for such layers."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        events=False,
        host_tier=False,
        host_content=False,
        external_tokens=False,
    )

    @initialize(
        world=layer_worlds(),
        opening=st.lists(wishes(), min_size=1, max_size=4),
        is_alike=st.booleans(),
    )
    def begin(self, world: World, opening: list[Wish], is_alike: bool) -> None:
        """Requests that are there from the start, together; their prompts may begin alike."""
        super().begin(world=world, opening=opening, is_alike=is_alike)
