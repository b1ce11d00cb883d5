"""A scheduler whose model has layers of several kinds, through every call that there is, in any order.

The device is a shadow: each slot of each page knows the prefix, the group and the part of a block that were written there, each state the
prefix that it has seen; batches run late, some are cancelled before they ran and some half way. `check()` and the invariants are looked at
after every rule, and at the end all pages are back. `make campaign` runs the same machine for as many examples as it is told.
"""

import pytest

from paged import LayerGroup
from paged.testing.machines import LayerMachine, run_machine
from paged.testing.shadow_groups import ShadowGroups

# Hypothesis switches rules off for many examples at a time: of a hundred, few see what is rarer.
SHARES = {
    0.3: "retained, raised page seen, evicted beside what is raised",
    0.1: "preempted by recompute, switch, void, none sampled, append, several outstanding, computes unknown tokens",
    0.03: "hit, abort in flight, cancel of states, drafts accepted, drafts rejected, set back by drafts",
    0.02: "preempted by swap",
    0.01: "content offloaded, content loaded",
    0.005: "state is void, hit within a block",
}


@pytest.fixture(scope="module")
def reached(reached_by):
    reached = reached_by(LayerMachine)
    with pytest.MonkeyPatch.context() as patch:
        # Prompts of a few blocks have even restarts then.
        for module in ("paged.block_manager.layout", "paged.testing.naive_layers"):
            patch.setattr(f"{module}.LEAST_DISTANCE", 1)
        run_machine(reached.machine, few=170, steps=15)
    return reached


def test_whatever_is_called_every_read_finds_what_the_rules_of_its_group_promise(reached):
    assert reached.num_examples >= 80


def test_the_machine_reaches_what_matters(reached):
    assert reached.below(SHARES) == {}


def test_a_prompt_begins_only_where_some_page_holds_what_each_group_reads():
    shadow = ShadowGroups([LayerGroup("full"), LayerGroup("window", 2), LayerGroup("state")], 3, 2)
    first, second = shadow.contents.path(None, [0, 1]).tolist()
    full, window, state = shadow.pages
    # Parts are numbered over all groups: the full one's is 0, the window's 1, the state's 2.
    full[:] = 3 * first, 3 * second
    window[1] = 3 * second + 1
    state[:] = 3 * first + 2
    assert [each.split(" at ")[0] for each in shadow.lacking(None, [0, 1])] == ["part 0 of group 2"]
    state[:] = 3 * second + 2
    assert shadow.lacking(None, [0, 1]) == []
    window[1] = 3 * second
    assert [each.split(" at ")[0] for each in shadow.lacking(None, [0, 1])] == ["part 0 of group 1"]
