"""What the state machines of all rigs share: worlds without what the subject cannot do, and the end of an example."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from hypothesis import event
from hypothesis.stateful import RuleBasedStateMachine

from paged.testing.protocol import Capabilities

_WITHOUT: dict[str, dict[str, Any]] = {
    "host_tier": {"host_blocks": 0},
    "prefix_cache": {"prefix_caching": False},
    "host_content": {"host_caching": False},
    "events": {"event_stride": 0},
    "drafts": {"drafts": 0},
    "hints": {"max_pinned": 0, "max_pinned_per_tenant": None, "max_cached_per_tenant": None},
}


def cut_to(able: Capabilities, world: Any) -> Any:
    """The world without what a subject that is `able` to do so much cannot do."""
    sizes = [usual for flag, usual in _WITHOUT.items() if not getattr(able, flag)]
    return replace(world, **{name: size for usual in sizes for name, size in usual.items() if hasattr(world, name)})


class RigMachine(RuleBasedStateMachine):
    """A state machine around a `rig`, which its first rule makes."""

    rig: Any

    def __init__(self) -> None:
        super().__init__()
        self._handled = sys.exception()

    def teardown(self) -> None:
        """Drain the rig, unless a rule has raised, and tell Hypothesis what happened in it."""
        if hasattr(self, "rig") and sys.exception() is self._handled:
            self.rig.drain()
            for name in sorted(self.rig.events):
                if self.rig.events[name]:
                    event(name)
