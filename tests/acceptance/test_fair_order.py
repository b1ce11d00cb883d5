"""Fairness between tenants: who competes gets tokens by weight, whoever sends more waits for himself."""

from itertools import pairwise

from hypothesis import given, strategies as st

from paged import BlockManager, Policy, Request, Scheduler

from ..driving import step, steps_of  # noqa: TID252

FAIR = Policy(name="fair", order="fair", composition="in_order")
COSTS = st.tuples(st.integers(1, 12), st.integers(1, 9))


def one_seat(weights=None, policy=FAIR, **limits):
    manager = BlockManager(64, 4, prefix_caching=False)
    return Scheduler(manager, policy=policy, tenant_weights=weights, **{"max_sequences": 1} | limits)


def add(scheduler, name, tenant, prompt=4, outputs=4, **fields):
    wish = {"max_tokens": outputs, "expected_tokens": outputs} | fields
    scheduler.add(Request(id=name, prompt=[1] * prompt, tenant=tenant, **wish))


def admissions(scheduler):
    return [name for batch in steps_of(scheduler) for name in batch.admitted]


def test_tenants_take_turns_whoever_came_first():
    scheduler = one_seat()
    for number in range(4):
        add(scheduler, f"a{number}", "a")
    for number in range(2):
        add(scheduler, f"b{number}", "b")
    expected = ["a0", "b0", "a1", "b1", "a2", "a3"]
    assert scheduler.waiting_ids() == expected
    assert admissions(scheduler) == expected


def test_an_empty_name_is_a_name():
    scheduler = one_seat({"": 3.0})
    for name, tenant in (("n0", None), ("n1", None), ("e0", ""), ("e1", ""), ("e2", "")):
        add(scheduler, name, tenant)
    assert admissions(scheduler) == ["n0", "e0", "e1", "e2", "n1"]


def test_priority_comes_before_any_share():
    scheduler = one_seat()
    add(scheduler, "a0", "a")
    add(scheduler, "a1", "a", priority=-1)
    add(scheduler, "b0", "b")
    add(scheduler, "a2", "a", priority=-1)
    assert admissions(scheduler) == ["a1", "a2", "b0", "a0"]


def test_who_waited_for_nothing_has_no_credit():
    scheduler = one_seat()
    for number in range(8):
        add(scheduler, f"a{number}", "a")
    first = [name for _ in range(17) for name in step(scheduler).admitted]
    assert first == ["a0", "a1", "a2", "a3", "a4"]
    for number in range(3):
        add(scheduler, f"b{number}", "b")
    # From now on in turns: "b" is not given five first.
    assert admissions(scheduler) == ["b0", "a5", "b1", "a6", "b2", "a7"]


def test_what_a_request_did_not_take_is_given_back_when_it_ends():
    scheduler = one_seat()
    for number in range(3):
        # Each may take 100 tokens, and stops after one.
        add(scheduler, f"a{number}", "a", outputs=100, expected_tokens=None, stop_token_ids=(7,))
        add(scheduler, f"b{number}", "b", outputs=4, stop_token_ids=())
    order = admissions(scheduler)
    # "a" was given 5 tokens, and not 104, when its second one competes with the second one of "b" at 8.
    assert order == ["a0", "b0", "a1", "b1", "a2", "b2"]


def test_a_request_that_is_aborted_while_it_runs_was_given_what_it_took():
    scheduler = one_seat()
    add(scheduler, "a0", "a", outputs=200)
    step(scheduler)
    for name, tenant in (("a1", "a"), ("b0", "b"), ("b1", "b")):
        add(scheduler, name, tenant)
    assert scheduler.waiting_ids() == ["b0", "b1", "a1"]
    scheduler.abort("a0")
    # Its prompt of four and one output: less than the eight of "b0".
    assert scheduler.waiting_ids() == ["b0", "a1", "b1"]


def test_hits_are_given_for_nothing():
    scheduler = Scheduler(BlockManager(64, 4), policy=FAIR, max_sequences=1)
    for name, tenant in (("a0", "a"), ("b0", "b")):
        scheduler.add(Request(id=name, prompt=range(41), max_tokens=1, tenant=tenant))
    # "b0" finds the first 40 tokens of its prompt, which "a0" has computed: tenants share what their salts let them share.
    assert admissions(scheduler) == ["a0", "b0"]
    assert scheduler.stats().hit_tokens == 40
    add(scheduler, "c", "c")
    step(scheduler)
    for name, tenant in (("a1", "a"), ("b1", "b"), ("b2", "b")):
        add(scheduler, name, tenant)
    assert scheduler.waiting_ids()[:2] == ["a1", "b1"]


def test_a_preempted_request_comes_back_before_any_that_was_never_in():
    # 6 blocks of 4: "a0" and "b0" grow until the later one gives its blocks up.
    scheduler = Scheduler(BlockManager(6, 4, prefix_caching=False), policy=FAIR, max_sequences=2)
    add(scheduler, "a0", "a", prompt=8, outputs=9)
    add(scheduler, "b0", "b", prompt=8, outputs=9)
    step(scheduler)
    add(scheduler, "c0", "c", prompt=1, outputs=1)
    for _ in range(8):
        step(scheduler)
        if scheduler.status("b0") == "waiting":
            break
    assert scheduler.waiting_ids() == ["b0", "c0"]
    assert scheduler.explain("c0").reason == 'it is behind 1 request in the queue, the first of which is "b0".'
    assert admissions(scheduler) == ["b0", "c0"]


@given(
    weights=st.tuples(*[st.sampled_from([0.5, 1.0, 2.0, 3.0])] * 2),
    ours=st.lists(COSTS, min_size=8, max_size=20),
    theirs=st.lists(COSTS, min_size=8, max_size=20),
    seats=st.integers(1, 4),
)
def test_two_tenants_that_always_want_more_differ_by_at_most_one_request_each(weights, ours, theirs, seats):
    """Start-time fair queueing's law, for what was let in: |given(a) ÷ weight(a) − given(b) ÷ weight(b)| is at most the largest request of
    either, ÷ its weight, whenever both have requests that wait."""
    scheduler = one_seat(dict(zip("ab", weights, strict=True)), max_sequences=seats)
    wanted = {"a": ours, "b": theirs}
    for tenant, requests in wanted.items():
        for number, (prompt, outputs) in enumerate(requests):
            add(scheduler, f"{tenant}{number}", tenant, prompt, outputs)
    given_per_weight = dict.fromkeys("ab", 0.0)
    bound = max(max(map(sum, wanted[t])) / w for t, w in zip("ab", weights, strict=True))
    while {name[0] for name in scheduler.waiting_ids()} == {"a", "b"}:
        for name in step(scheduler).admitted:
            weight = weights["ab".index(name[0])]
            given_per_weight[name[0]] += sum(wanted[name[0]][int(name[1:])]) / weight
            assert abs(given_per_weight["a"] - given_per_weight["b"]) <= bound + 1e-9


@given(
    before=st.lists(st.tuples(st.sampled_from("abc"), COSTS, st.integers(1, 9)), max_size=20),
    num_steps=st.integers(0, 30),
    seats=st.integers(1, 3),
)
def test_a_newcomer_stands_behind_at_most_one_request_of_each_other_tenant(before, num_steps, seats):
    """Whatever guesses of theirs were wrong: each may end earlier than is expected of it."""
    scheduler = one_seat(max_sequences=seats)
    for number, (tenant, (prompt, outputs), expected) in enumerate(before):
        add(scheduler, f"{tenant}{number}", tenant, prompt, outputs, expected_tokens=min(expected, outputs))
    for _ in range(num_steps):
        step(scheduler)
    add(scheduler, "new", "new")
    waiting = scheduler.waiting_ids()
    ahead = [name[0] for name in waiting[: waiting.index("new")]]
    assert len(ahead) == len(set(ahead))


@given(
    wanted=st.lists(st.tuples(st.sampled_from([None, "a", "b"]), COSTS), max_size=20),
    weights=st.sampled_from([None, {"a": 3.0}]),
    calls=st.lists(st.sampled_from(["step", "abort"]), max_size=20),
)
def test_the_next_seat_goes_to_the_head_and_each_tenants_requests_stay_in_order(wanted, weights, calls):
    scheduler = one_seat(weights)
    tenants = {}
    for number, (tenant, (prompt, outputs)) in enumerate(wanted):
        tenants[f"{number}"] = tenant
        add(scheduler, f"{number}", tenant, prompt, outputs)
    for call in calls:
        waiting = scheduler.waiting_ids()
        for each in set(tenants.values()):
            numbers = [int(name) for name in waiting if tenants[name] == each]
            assert all(first < second for first, second in pairwise(numbers))
        if call == "abort" and waiting:
            scheduler.abort(waiting[len(waiting) // 2])
            continue
        assert list(step(scheduler).admitted) in ([], waiting[:1])
