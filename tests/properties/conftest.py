"""What tests of the state machines share: in how many examples something occurred that they have to reach."""

from collections import Counter

import pytest


class Reached:
    """In how many examples of a machine each event of its rig occurred; `machine` is the one to run."""

    def __init__(self, machine):
        self.num_examples = 0
        self.examples = Counter()
        reached = self

        class Counting(machine):
            def teardown(self):
                super().teardown()
                reached.num_examples += 1
                reached.examples.update(name for name, times in self.rig.events.items() if times)

        self.machine = Counting

    def below(self, shares):
        """The events that occurred in a smaller share of the examples than they have to: {event: share}."""
        reached = {name: self.examples[name] / self.num_examples for name in shares}
        return {name: share for name, share in reached.items() if share < shares[name]}


@pytest.fixture(scope="session")
def reached_by():
    """`reached_by(machine)` is a `Reached`."""
    return Reached
