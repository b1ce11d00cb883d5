"""The state machine of a scheduler whose model has layers of several kinds."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from paged.testing.protocol import Capabilities
from paged.testing.scheduler_machine import MAX_LIVE, SchedulerMachine
from paged.testing.strategies import Wish, layer_worlds, picks, retaining_worlds, tails, where, wishes
from paged.testing.world import World

Keeps = list[tuple[int, float | None] | None]
KEEPS = st.lists(st.sampled_from([None, (1, None), (2, None), (3, 6.0)]), min_size=1, max_size=2)
"""Level and time at which the turns of a conversation are retained, in turns."""


class LayerMachine(SchedulerMachine):
    """Its worlds have `groups`."""

    capabilities: ClassVar[Capabilities] = Capabilities(external_tokens=False)

    @initialize(
        world=layer_worlds() | retaining_worlds(),
        opening=st.lists(wishes(), min_size=1, max_size=4),
        is_alike=st.booleans(),
        num_turns=st.sampled_from([0, 2, 3, 4]),
        keeps=KEEPS,
    )
    def begin(  # type: ignore[override]
        self, world: World, opening: list[Wish], is_alike: bool, num_turns: int, keeps: Keeps
    ) -> None:
        """Requests that are there from the start; their prompts may begin alike, or come after a conversation. Where
        there is a host, answers are long, so that the requests press each other."""
        if world.host_blocks:
            opening = [replace(wish, output=1.0) for wish in opening]
        super().begin(world=world, opening=[] if num_turns else opening, is_alike=is_alike)
        if num_turns:
            self.take_turns(prompt=[0, 0], more=[0], num_turns=num_turns, num_alike=2, keeps=keeps)
            for wish in opening:
                self.add(wish, again=False)

    @where(lambda self: self.rig.live and len(self.rig.live) < MAX_LIVE)
    @rule(pick=picks, length=st.integers(1, 20), more=tails(longest=2), steps=st.integers(0, 4), leaves=st.booleans())
    def part_from(self, pick: int, length: int, more: list[int], steps: int, leaves: bool) -> None:
        """A prompt parts from what another request knows where windows and states were released."""
        id = self.rig.live[pick % len(self.rig.live)]
        known = self.rig.known(id, 0)[1]
        if leaves:
            self.rig.abort(id)
        self.add(Wish(known[:length] + more, output=0.4), again=False)
        self.go_on(steps, ())

    @where(lambda self: not self.rig.flights and len(self.rig.live) < MAX_LIVE - 2)
    @rule(
        prompt=tails(longest=5),
        more=tails(longest=3),
        num_turns=st.integers(1, 4),
        num_alike=st.sampled_from([1, 1, 2]),
        keeps=KEEPS,
    )
    def take_turns(self, prompt: list[int], more: list[int], num_turns: int, num_alike: int, keeps: Keeps) -> None:
        """A conversation: a turn is ended, and may be retained; the next one begins with all that it knew."""
        for turn in range(num_turns):
            id = f"r{self.rig.num_added}"
            for number in range(num_alike):
                # Another one parts from it where it ended.
                its = [*prompt[: -len(more) - 2], 1, 0, 1] if number else prompt
                self.add(Wish(its, output=0.4, priority=-1, keeps=keeps[turn % len(keeps)]), again=False)
            for _ in range(2):
                if self.rig.has_work:
                    self.rig.step(ahead=0)
            if id not in self.rig.live or len(self.rig.live) > MAX_LIVE - 2:
                break
            prompt = self.rig.known(id, 0)[1] + more
            self.rig.finish(id)
        self.go_on(2, ())
