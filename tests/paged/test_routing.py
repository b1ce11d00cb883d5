"""A request goes where its first token is expected early and little is computed, and routers do not follow one another."""

from random import Random

import pytest

from paged.engine.replica_index import prompt_keys
from paged.engine.routing import Prompt, ReplicaLoad, Router, RoutingRules
from paged.errors import InvalidConfig, UnknownReplica

TOKENS = list(range(1600))


def prompt(id="x", tokens=TOKENS, tenant=""):
    return Prompt(id, prompt_keys(tokens, 16), len(tokens), tenant)


def router_of(*replicas, name="", seed=0, **rules):
    router = Router(16, RoutingRules(**rules), name=name, draw=Random(seed).random)
    for replica in replicas:
        router.add(replica)
        router.report(replica, ReplicaLoad(token_s=0.001), 0.0)
    return router


def test_a_request_goes_where_its_prompt_is_cached_until_the_wait_costs_more():
    router = router_of("a", "b", spared=0.0)
    router.index.store("b", prompt().keys[:50])
    chosen = []
    for wait in (0.0, 0.7, 0.9):
        router.report("b", ReplicaLoad(token_s=0.001, begin_s=wait), 0.0)
        chosen.append(router.choose(prompt(), 0.0).replicas[0])
    assert chosen == ["b", "b", "a"]


def test_computing_that_is_spared_counts_for_others_up_to_the_bound():
    router = router_of("a", "b", spared=1.0, bound_times=1.0, bound_s=0.5)
    router.index.store("b", prompt().keys[:50])
    for wait, best in ((1.2, "b"), (1.4, "a")):
        router.report("b", ReplicaLoad(token_s=0.001, begin_s=wait), 0.0)
        choice = router.choose(prompt(), 0.0)
        assert choice.replicas[0] == best
    assert choice.expected_s == pytest.approx(1.6) and choice.depth == 0


def test_computing_counts_more_where_much_was_computed_lately_as_it_evicts():
    router = router_of("a", "b", spared=0.0, crowded=3.0, lately_s=100.0, bound_s=9.0)
    first = Prompt("first", prompt_keys(range(9000, 9800), 16), 800)

    def chosen(wait, now, tokens):
        # b would begin so much later, and has computed nothing.
        for name, begin_s in (("a", 0.0), ("b", wait)):
            router.report(name, ReplicaLoad(token_s=0.001, begin_s=begin_s, cache_tokens=tokens, received={"": 1}), now)
        return router.choose(prompt(), now).replicas[0]

    assert chosen(0.1, 0.0, 1600) == "a"
    router.routed(first, "a", 0.0)
    # A half of its memory: 1,600 tokens, 1.6 s of computing, count 1.5 times more there.
    assert [chosen(wait, 0.0, 1600) for wait in (2.3, 2.5)] == ["b", "a"]
    # A hundred seconds later it is 1 / e of that: 0.88 s.
    assert [chosen(wait, 100.0, 1600) for wait in (0.86, 0.90)] == ["b", "a"]
    router.completed("first", 100.0)
    router.routed(first, "b", 100.0)
    assert chosen(0.1, 100.0, 1600) == "a"


def test_what_was_computed_counts_for_nothing_where_memory_is_not_known_or_nothing_is_lately():
    for rules, tokens in (({}, 0), ({"lately_s": 0.0}, 800)):
        router = router_of("a", "b", **rules)
        for name, wait in (("a", 0.0), ("b", 0.1)):
            router.report(name, ReplicaLoad(token_s=0.001, begin_s=wait, cache_tokens=tokens), 0.0)
        router.routed(Prompt("first", prompt_keys(range(9000, 9800), 16), 800), "a", 0.0)
        for name, wait in (("a", 0.0), ("b", 0.1)):
            router.report(name, ReplicaLoad(token_s=0.001, begin_s=wait, cache_tokens=tokens), 1.0)
        assert router.choose(prompt(), 1.0).replicas[0] == "a"


@pytest.mark.parametrize("seed", range(12))
def test_no_choice_is_expected_later_than_at_the_least_loaded_by_more_than_the_bound(seed):
    random = Random(seed)
    names = [str(number) for number in range(random.randint(1, 9))]
    router = router_of(*names, bound_s=0.2, bound_times=1.5, spared=10.0)
    for name in names:
        router.index.store(name, prompt().keys[: random.randint(0, 100)])
        router.report(name, ReplicaLoad(token_s=0.001, begin_s=random.choice([0.0, random.random() * 3])), 0.0)
    best = router.choose(prompt(), 0.0).expected_s
    alone = [router.choose(prompt(), 0.0, [name]).expected_s for name in names]
    assert best <= min(alone) * 1.5 + 0.2 + 1e-9


def test_what_was_sent_since_a_report_counts_until_a_report_counts_it():
    router = router_of("a", "b")
    made = router.routed(prompt("1"), "a", 0.0)
    assert router.choose(prompt("2", TOKENS[::-1]), 0.0).replicas == ["b", "a"]
    for received, first in (({}, "b"), ({"": made.number}, "a")):
        router.report("a", ReplicaLoad(token_s=0.001, received=received), 0.0)
        router.report("b", ReplicaLoad(token_s=0.001, begin_s=0.1), 0.0)
        assert router.choose(prompt("2", TOKENS[::-1]), 0.0).replicas[0] == first


def test_a_prompt_that_was_just_sent_is_taken_to_be_cached_there_until_all_its_requests_have_ended():
    router = router_of("a", "b", settle_s=0.1)
    for id in "12":
        router.routed(prompt(id), "b", 0.0)
    router.report("b", ReplicaLoad(token_s=0.001, begin_s=0.5), 1.0)
    router.completed("1", 1.0)
    assert router.choose(prompt("3"), 1.2).replicas[0] == "b"
    router.completed("2", 1.2)
    for now, best in ((1.25, "b"), (1.4, "a")):
        assert router.choose(prompt("3"), now).replicas[0] == best


def test_a_request_that_was_never_sent_lapses_with_its_note():
    router = router_of("a", "b", lapse_s=5.0)
    router.routed(prompt("1"), "b", 0.0)
    found = []
    for now in (4.0, 6.0, 7.0):
        router.report("b", ReplicaLoad(token_s=0.001, begin_s=0.5), now)
        found += router.choose(prompt("2"), now).replicas[:1]
    assert found == ["b", "b", "a"] and router.replica_of("1") is None


def test_routers_that_tell_one_another_spread_a_burst():
    routers = [router_of("a", "b", "c", "d", name=str(number)) for number in range(4)]
    sent = []
    for number in range(40):
        router = routers[number % 4]
        each = prompt(str(number), [number * 7 + place for place in range(1600)])
        made = router.routed(each, router.choose(each, 0.0).replicas[0], 0.0)
        for other in routers:
            other.heard(made, 0.0)
        sent.append(made.replica)
    assert [sent.count(name) for name in "abcd"] == [10] * 4


def test_a_tenant_waits_for_as_much_of_others_as_it_has_itself():
    router = router_of("a", "b", spared=0.0)
    queued = {"many": 10_000, "few": 0}
    router.report("a", ReplicaLoad(token_s=0.001, begin_s=10.0, queued=queued, is_fair=True), 0.0)
    router.report("b", ReplicaLoad(token_s=0.001, begin_s=2.0), 0.0)
    short = TOKENS[:160]
    assert router.choose(prompt("1", short, "few"), 0.0).replicas[0] == "a"
    assert router.choose(prompt("2", short, "many"), 0.0).replicas[0] == "b"


def test_replicas_that_are_full_come_last():
    router = router_of("a", "b", "c")
    router.report("a", ReplicaLoad(token_s=0.001, is_full=True), 0.0)
    router.report("c", ReplicaLoad(token_s=0.001, begin_s=9.0), 0.0)
    assert router.choose(prompt(), 0.0).replicas == ["b", "c", "a"]


def test_tokens_on_the_host_count_as_those_on_the_device():
    router = router_of("a", "b", spared=0.0)
    router.index.store("a", prompt().keys[:20])
    router.index.store("b", prompt().keys[:60], 1)
    assert router.choose(prompt(), 0.0).replicas == ["b", "a"]


def test_a_wait_that_was_reported_grows_shorter_with_time():
    router = router_of("a")
    router.report("a", ReplicaLoad(token_s=0.001, begin_s=2.0), 10.0)
    assert [router.choose(prompt(), now).expected_s for now in (10.0, 11.0, 13.0)] == pytest.approx([3.6, 2.6, 1.6])


def test_a_replica_that_went_is_not_chosen_and_its_requests_are_forgotten():
    router = router_of("a", "b")
    router.routed(prompt("1"), "a", 0.0)
    router.remove("a")
    router.completed("1", 0.0)
    assert router.choose(prompt("2"), 1.0).replicas == ["b"] == router.replicas
    with pytest.raises(UnknownReplica, match='"a"; known are b'):
        router.choose(prompt("2"), 1.0, ["a"])
    router.remove("b")
    with pytest.raises(InvalidConfig, match="'2' has no replica"):
        router.choose(prompt("2"), 1.0)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_rules_are_finite_and_not_negative(value):
    with pytest.raises(InvalidConfig, match=f"bound_s is {value}"):
        Router(16, RoutingRules(bound_s=value), draw=Random(0).random)


def test_a_depth_that_was_chosen_by_is_what_is_not_reserved():
    router = router_of("a")
    router.index.store("a", prompt().keys)
    choice = router.choose(prompt(), 0.0)
    assert router.routed(prompt(), "a", 0.0, choice.depth).tokens == 1600 - 99 * 16
    assert choice.depth == 99


@pytest.mark.parametrize("goes_elsewhere", [True, False])
def test_a_request_that_was_not_sent_where_it_was_routed_counts_as_computed_where_it_went_alone(goes_elsewhere):
    router = router_of("a", "b", spared=0.0, bound_s=9.0)
    for name in "ab":
        router.report(name, ReplicaLoad(token_s=0.001, cache_tokens=1600), 0.0)
    made = router.routed(prompt("1"), "a", 0.0)
    if goes_elsewhere:
        assert router.routed(prompt("1"), "b", 0.0).number == made.number
    else:
        assert router.withdraw("1", 0.0) == made.number
    # What is computed at b evicts; what never came to a does not.
    for name, wait in (("a", 0.1), ("b", 0.0)):
        load = ReplicaLoad(token_s=0.001, begin_s=wait, cache_tokens=1600, received={"": made.number})
        router.report(name, load, 0.0)
    other = Prompt("2", prompt_keys(TOKENS[::-1], 16), 1600)
    assert router.choose(other, 0.0).replicas[0] == ("a" if goes_elsewhere else "b")
    assert router.withdraw("none", 0.0) is None


def test_what_another_router_sent_counts_once_however_often_it_is_told():
    router, other = router_of("a"), router_of("a", name="other")
    made = other.routed(prompt("1"), "a", 0.0)
    for _ in range(3):
        router.heard(made, 0.0)
    assert router.choose(prompt("2"), 0.0).expected_s == pytest.approx(3.2)


def test_routers_that_do_not_tell_one_another_draw_where_one_request_makes_the_difference():
    chosen = set()
    for seed in range(20):
        router = router_of("a", "b", "c", seed=seed, num_untold=3)
        router.report("b", ReplicaLoad(token_s=0.001, begin_s=0.5), 0.0)
        router.report("c", ReplicaLoad(token_s=0.001, begin_s=3.0), 0.0)
        chosen.add(router.choose(prompt(), 0.0).replicas[0])
    assert chosen == {"a", "b"}


def test_what_is_on_the_host_and_was_sent_counts_once():
    router = router_of("a")
    router.index.store("a", prompt().keys[:98], 1)
    router.routed(prompt("1"), "a", 0.0)
    router.report("a", ReplicaLoad(token_s=0.001, received={"": 1}), 0.0)
    assert router.choose(prompt("2"), 0.0).expected_s == pytest.approx(0.001 * (1600 - 98 * 16))


def test_what_was_sent_is_noted_from_what_was_cached_on():
    router = router_of("a")
    router.index.store("a", prompt().keys[:50])
    router.routed(prompt("1"), "a", 0.0, router.choose(prompt("1"), 0.0).depth)
    router.report("a", ReplicaLoad(token_s=0.001, received={"": 1}), 0.0)
    assert router.choose(prompt("2"), 0.0).expected_s == pytest.approx(0.001 * (1600 - 64 * 16))
    assert router.choose(prompt("3", TOKENS[:1000]), 0.0).expected_s == pytest.approx(0.001 * (1000 - 50 * 16))
