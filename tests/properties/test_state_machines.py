"""The memory layer and the scheduler beside a naive model, through every call that there is, in any order.

After each call the kit recomputes the invariants (docs/invariants.md), compares with the dictionary model and with what every
KV slot holds, and at the end drains: everything has to finish and every block has to come back. `make campaign` runs the same
machines for as many examples as it is told. The machines have to reach what matters, too: each event named here is expected in
a share of the examples. Shares are a third to a half of what is usual: Hypothesis draws by what modules are loaded, too.
"""

import pytest

from paged.testing.machines import ManagerMachine, SchedulerMachine, run_machine

MANAGER_SHARES = {
    "hit": 0.3,
    "evict": 0.1,
    "no room": 0.2,
    "switch": 0.03,
    "shared in flight": 0.02,
    "cancel of pending nodes": 0.02,
    "fork": 0.1,
    "copy on write": 0.01,
    "swap out": 0.1,
    "swap in": 0.05,
    "several copied in": 0.01,
    "row in several batches": 0.1,
    "unknown tokens": 0.1,
    "told later": 0.1,
    "append in flight": 0.1,
    "shared with a batch that is out": 0.05,
    "free in flight": 0.1,
    "confirm of a void share": 0.1,
    "truncate in flight": 0.03,
    "fork in flight": 0.1,
    "copy of content": 0.004,
    "swap out in flight": 0.05,
    "swap in in flight": 0.01,
    "pending content on the host": 0.05,
    "evict pending content": 0.1,
    "pending node gave way": 0.01,
    "sharer gave up its table": 0.02,
    "cancel of a fork": 0.015,
    "cancel of a swapped row": 0.01,
    "cancel of a clipped share": 0.01,
}
SCHEDULER_SHARES = {
    "hit": 0.3,
    "switch": 0.2,
    "preempted by recompute": 0.1,
    "preempted by swap": 0.01,
    "swapped in": 0.01,
    "became paused": 0.05,
    "shared in flight": 0.01,
    "follow": 0.01,
    "cancel with full blocks": 0.1,
    "abort in flight": 0.1,
    "several outstanding": 0.1,
    "several sampled": 0.1,
    "none sampled": 0.1,
    "computes what nobody knows": 0.2,
    "void": 0.2,
    "preempted in flight": 0.005,
    "delivered elsewhere": 0.005,
    "cancel behind another": 0.1,
    "a cancel without moves refused": 0.02,
    "several tokens refused": 0.05,
    "too many outstanding": 0.02,
    "drafts accepted": 0.1,
    "drafts rejected": 0.1,
    "append": 0.2,
    "load": 0.1,
    "fork": 0.1,
    "finish": 0.05,
}


@pytest.fixture(scope="module")
def manager_run(reached_by):
    reached = reached_by(ManagerMachine)
    run_machine(reached.machine, few=240)
    return reached


@pytest.fixture(scope="module")
def scheduler_run(reached_by):
    reached = reached_by(SchedulerMachine)
    run_machine(reached.machine, few=260)
    return reached


def test_the_manager_agrees_with_the_naive_model_whatever_is_called(manager_run):
    assert manager_run.num_examples >= 100


def test_the_managers_machine_reaches_what_matters(manager_run):
    assert manager_run.below(MANAGER_SHARES) == {}


def test_the_scheduler_keeps_every_invariant_whatever_is_called(scheduler_run):
    assert scheduler_run.num_examples >= 100


def test_the_schedulers_machine_reaches_what_matters(scheduler_run):
    assert scheduler_run.below(SCHEDULER_SHARES) == {}
