"""The memory layer and the scheduler beside a naive model, through every call that there is, in any order.

After each call, or whole step, the kit recomputes the invariants (docs/invariants.md), compares with the dictionary model and with what every
KV slot holds, and at the end drains: everything has to finish and every block has to come back. `make campaign` runs the same
machines for as many examples as it is told. The machines have to reach what matters, too: each event named here is expected in
a share of the examples. Shares are a third to a half of what is usual: Hypothesis draws by what modules are loaded, too.
"""

import pytest

from paged.testing.machines import ManagerMachine, SchedulerMachine, run_machine

MANAGER_SHARES = {
    0.3: "hit",
    0.2: "no room",
    0.1: "evict, fork, swap out, row in several batches, unknown tokens, learns later, append in flight, free in flight, "
    "confirm of a void share, fork in flight, evict pending content",
    0.05: "swap in, shared with a batch that is out, swap out in flight, pending content on the host",
    0.03: "switch, truncate in flight",
    0.02: "shared in flight, cancel of pending nodes, sharer gave up its table",
    0.015: "cancel of a fork",
    0.01: "copy on write, several copied in, swap in in flight, pending node gave way, cancel of a swapped row, "
    "cancel of a clipped share",
    0.004: "copy of content",
}
SCHEDULER_SHARES = {
    0.3: "hit",
    0.2: "switch, computes unknown tokens, void, append",
    0.1: "preempted by recompute, cancel with full blocks, abort in flight, several outstanding, several sampled, none sampled, "
    "cancel behind another, drafts accepted, drafts rejected, load",
    0.05: "several tokens refused, finish, fork",
    0.02: "too many outstanding, became paused",
    0.01: "preempted by swap, swapped in, shared in flight, follow",
    0.005: "preempted in flight, delivered elsewhere, a cancel without moves refused",
}
MACHINES = {"manager": (ManagerMachine, 180, MANAGER_SHARES), "scheduler": (SchedulerMachine, 300, SCHEDULER_SHARES)}


@pytest.fixture(scope="module", params=MACHINES)
def ran(request, reached_by):
    """What a machine reached, and the shares that it has to reach."""
    machine, few, shares = MACHINES[request.param]
    reached = reached_by(machine)
    run_machine(reached.machine, few=few)
    return reached, shares


def test_whatever_is_called_every_invariant_holds_and_all_agrees_with_the_naive_model(ran):
    reached, _ = ran
    assert reached.num_examples >= 100


# The name is known to tools/mutants.py.
def test_the_machine_reaches_what_matters(ran):
    reached, shares = ran
    assert reached.below(shares) == {}
