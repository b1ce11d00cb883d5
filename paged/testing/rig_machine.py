"""The end that the state machines of all rigs share: drain the rig, and report to Hypothesis what happened in it."""

from __future__ import annotations

from typing import Any

from hypothesis import event
from hypothesis.stateful import RuleBasedStateMachine


class RigMachine(RuleBasedStateMachine):
    """A state machine around a `rig`, which its first rule makes."""

    rig: Any

    def teardown(self) -> None:
        """A rig that has failed has said so already."""
        if hasattr(self, "rig") and not self.rig.has_failed:
            self.rig.drain()
            for name in sorted(self.rig.events):
                if self.rig.events[name]:
                    event(name)
