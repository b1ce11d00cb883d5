"""Tenants that share a cache do not share content: nobody can tell by what was cached what somebody else has asked."""

import numpy as np
from hypothesis import given, strategies as st

from paged import BlockManager, Request, Scheduler

PROMPTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), max_size=6)
NAMESPACES = st.sampled_from(
    [
        ({"salt": "a"}, {"salt": "b"}), ({"salt": "a"}, {}), ({"salt": "a"}, {"adapter": "a"}),
        ({"adapter": "a"}, {"extra_key": "a"}), ({"salt": ""}, {}), ({"extra_key": 1}, {"extra_key": True}),
        ({"extra_key": 1}, {"extra_key": "1"}), ({"extra_key": "a"}, {"extra_key": b"a"}),
        ({"extra_key": ("a", "b")}, {"extra_key": (("a", "b"),)}),
        ({"salt": "ab", "adapter": "c"}, {"salt": "a", "adapter": "bc"}),
    ]
)  # fmt: skip


def hits(ours, theirs, block_size, turns):
    """What our requests found in the cache, theirs coming in between: before, in the same batch, and after."""
    mine, others = ours[0], theirs[0]
    scheduler = Scheduler(BlockManager(300, block_size), max_tokens_per_step=1000, max_sequences=64)
    found = {}

    def step():
        batch = scheduler.schedule()
        for output in scheduler.update(batch, np.zeros(int(batch.samples.sum()), np.int32)):
            if output.usage is not None:
                found[output.id] = output.usage.hit_tokens

    for i in range(max(len(ours[1]), len(theirs[1]))):
        for kind, namespace, prompts in (("theirs", others, theirs[1]), ("ours", mine, ours[1])):
            if i < len(prompts):
                scheduler.add(Request(id=f"{kind} {i}", prompt=prompts[i], max_tokens=2, **namespace))
        if turns[i % len(turns)]:
            step()
    while scheduler.has_unfinished:
        step()
    assert scheduler.check() == []
    return [found[f"ours {i}"] for i in range(len(ours[1]))]


@given(NAMESPACES, PROMPTS, PROMPTS, st.sampled_from([1, 2, 4]), st.lists(st.booleans(), min_size=1, max_size=3))
def test_what_others_asked_shows_in_nobodys_hits(namespaces, ours, theirs, block_size, turns):
    mine, others = namespaces
    for asked in (theirs, ours):
        assert hits((mine, ours), (others, asked), block_size, turns) == hits(
            (mine, ours), (others, []), block_size, turns
        )


def test_the_same_prompts_of_one_tenant_do_show():
    ours, alike = ({"salt": "a"}, [[0, 1, 0, 1, 0]]), ({"salt": "a"}, [[0, 1, 0, 1, 0]])
    assert (hits(ours, alike, 2, [True]), hits(ours, ({"salt": "b"}, alike[1]), 2, [True])) == ([4], [0])
