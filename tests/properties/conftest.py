"""What tests of the state machines share: in how many examples something occurred that they have to reach."""

from collections import Counter

import pytest


class Reached:
    """In how many examples of a machine each event of its rig, or its own, occurred; `machine` is the one to run."""

    def __init__(self, machine):
        self.num_examples = 0
        self.examples = Counter()
        reached = self

        class Counting(machine):
            def teardown(self):
                super().teardown()
                reached.num_examples += 1
                events = self.events if hasattr(self, "events") else self.rig.events
                reached.examples.update(name for name, times in events.items() if times)

        self.machine = Counting

    def below(self, shares):
        """Of {share: events that have to occur in so many of the examples, with commas between}, the events that do not: {event: share
        that they have}."""
        wanted = [(event, share) for share, events in shares.items() for event in events.split(", ")]
        reached = {event: self.examples[event] / self.num_examples for event, _ in wanted}
        return {event: reached[event] for event, share in wanted if reached[event] < share}


@pytest.fixture(scope="session")
def reached_by():
    """`reached_by(machine)` is a `Reached`."""
    return Reached
