"""`explain`: an answer that an operator can act on, for a request in any state."""

import pytest

from paged.errors import NeverFits


def test_a_request_that_waits_for_memory_says_how_much_and_who_holds_it(make_scheduler, request_of, step):
    scheduler = make_scheduler(8, 4, {"big": 20, "small": 4}, policy="vllm")
    step(scheduler)
    scheduler.add(request_of("late", 16))
    step(scheduler)
    answer = scheduler.explain("late")
    assert answer.status == "waiting"
    # 4 blocks for its prompt; 6 and 2 are held.
    assert (answer.blocks_needed, answer.blocks_free) == (4, 0)
    assert (dict(answer.holders), answer.holders[0][0]) == ({"big": 6, "small": 2}, "big")
    sentence = str(answer)
    for part in ("late", "4", "big", "6"):
        assert part in sentence


@pytest.mark.parametrize(
    ("id", "status", "words"),
    [
        ("next", "waiting", ["max_sequences"]),
        ("idle", "running", ["append"]),
        ("loads", "loading", ["load"]),
        ("huge", "rejected", ["huge", "26", "20"]),
    ],
)
def test_a_request_says_what_it_waits_for_or_why_it_does_not(make_scheduler, request_of, id, status, words):
    scheduler = make_scheduler(20, 4, max_sequences=1)
    scheduler.add(request_of("loads", 18, num_computed=12))
    for name in ("idle", "next"):
        scheduler.add(request_of(name, 4))
    with pytest.raises(NeverFits):
        scheduler.add(request_of("huge", 100))
    scheduler.update(scheduler.schedule(), [], [0])
    answer = scheduler.explain(id)
    assert answer.status == status
    assert [word for word in words if word not in str(answer)] == []


def test_a_follower_names_its_leader(make_scheduler, request_of, step):
    scheduler = make_scheduler(40, 4, max_tokens_per_step=16, max_chunk=8)
    shared = list(range(24))
    scheduler.add(request_of("leader", [*shared, 50]))
    scheduler.add(request_of("follower", [*shared, 60]))
    step(scheduler)
    answer = scheduler.explain("follower")
    assert answer.status == "running"
    assert "leader" in str(answer)
    assert "follow" in answer.reason or "share" in answer.reason


@pytest.mark.parametrize(("policy", "status"), [("vllm", "waiting"), ("paged", "paused")])
def test_a_preempted_request_says_that_it_was_and_what_it_needs(make_scheduler, step, policy, status):
    scheduler = make_scheduler(6, 4, {"a": 12, "b": 12}, policy=policy, prefix_caching=False)
    step(scheduler)
    step(scheduler)
    answer = scheduler.explain("b")
    assert answer.status == status
    assert "preempted" in str(answer)
    # 13 tokens need 4 blocks; a paused one kept 2 of them.
    assert answer.blocks_needed == {"vllm": 4, "paged": 2}[policy]
    assert ("a", 4) in list(answer.holders)


def test_explaining_changes_nothing(make_scheduler, step, unchanged):
    scheduler = make_scheduler(6, 4, {"a": 10, "b": 10, "c": 10})
    step(scheduler)
    with unchanged(scheduler):
        for name in ("a", "b", "c"):
            str(scheduler.explain(name))


def test_a_running_request_that_was_left_out_says_which_blocks_it_lacks(make_scheduler, request_of):
    scheduler = make_scheduler(5, 4, {"a": 8}, policy="vllm")
    scheduler.add(request_of("b", 12, num_computed=11))
    scheduler.update(scheduler.schedule(), [7])
    # What "b" loads is on its way, so nothing can be taken from it.
    assert scheduler.schedule().is_empty
    answer = scheduler.explain("a")
    assert (answer.status, answer.blocks_needed, answer.blocks_free) == ("running", 1, 0)
    assert "1 block" in str(answer)
    assert '"b" 3' in str(answer)
    scheduler.abort("b")


def test_blocks_that_several_hold_count_once(make_scheduler, request_of, step):
    scheduler = make_scheduler(24, 4, policy="vllm")
    shared = list(range(32))
    scheduler.add(request_of("group", [*shared, 50], num_sequences=3))
    for name, last in (("a", 60), ("b", 61)):
        scheduler.add(request_of(name, [*shared, last]))
    step(scheduler)
    scheduler.add(request_of("late", 60))
    answer = scheduler.explain("late")
    # 8 blocks of the prompt that all share, and a tail each.
    assert dict(answer.holders) == {"group": 8 + 3, "a": 1, "b": 1}
    assert sum(blocks for _, blocks in answer.holders) == scheduler.manager.device.num_used == 13
    # What the request holds itself is not kept from it.
    assert dict(scheduler.explain("a").holders) == {"group": 3, "b": 1}


FIRST, SECOND, SHORT = range(8), range(20, 36), range(3)
NEVER = "; what follows was never computed here in full blocks, or its eviction is not remembered."


@pytest.mark.parametrize(
    ("memory", "prompt", "salt", "says"),
    [
        ((5, 0), FIRST, "x", "4 of 8 tokens are cached on the device; the next 1 block left the device in step 2 (time 7), which admitted b."),
        ((6, 0), FIRST, "x", "8 of 8 tokens are cached on the device."),
        ((6, 0), range(12), "x", f"8 of 12 tokens are cached on the device{NEVER}"),
        ((6, 0), FIRST, None, f"0 of 8 tokens are cached on the device{NEVER} Another salt, adapter or extra_key has its first block."),
        ((6, 0), range(9, 17), None, f"0 of 8 tokens are cached on the device{NEVER}"),
        ((6, 0), SHORT, "x", "0 of 3 tokens are cached on the device; they do not fill a block."),
        ((5, 4), range(12), "x", f"4 of 12 tokens are cached on the device, and 4 more on the host{NEVER}"),
    ],
)  # fmt: skip
def test_a_prefix_says_what_is_cached_of_it_and_why_no_more_is(make_scheduler, request_of, memory, prompt, salt, says):
    num_blocks, host_blocks = memory
    scheduler = make_scheduler(
        num_blocks, host_blocks=host_blocks, host_caching=host_blocks > 0, remember_evicted=1, max_tokens_per_step=64
    )
    for time, request in ((3, request_of("a", FIRST, 1, salt="x")), (7, request_of("b", SECOND, 1))):
        scheduler.add(request, now=time)
        scheduler.update(scheduler.schedule(now=time), [1], now=time)
    assert str(scheduler.explain_prefix(list(prompt), salt=salt)) == says
