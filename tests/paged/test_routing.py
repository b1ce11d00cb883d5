"""A request goes where its first token is expected early and little is computed; and what replicas report."""

from random import Random

import pytest

from paged import BlockManager, Request, Scheduler
from paged.engine.pace import Pace
from paged.engine.replica_index import prompt_keys
from paged.engine.replica_load import load_of
from paged.engine.routing import Prompt, ReplicaLoad, Router, RoutingRules
from paged.errors import InvalidConfig, UnknownReplica

from .files_of_others import assert_by_hand, by_hand_in  # noqa: TID252

TOKENS = list(range(1600))


def prompt(id="x", tokens=TOKENS, tenant=""):
    return Prompt(id, prompt_keys(tokens, 16), len(tokens), tenant)


def router_of(*replicas, name="", seed=0, **rules):
    router = Router(16, RoutingRules(**rules), name=name, draw=Random(seed).random)
    for replica in replicas:
        router.add(replica)
        router.report(replica, ReplicaLoad(token_s=0.001), 0.0)
    return router


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
def test_no_choice_is_expected_later_than_at_the_median_replica_by_more_than_the_bound(seed):
    random = Random(seed)
    names = [str(number) for number in range(random.randint(1, 9))]
    router = router_of(*names, bound_s=0.2, bound_times=1.5, spared=10.0)
    for name in names:
        router.index.store(name, prompt().keys[: random.randint(0, 100)])
        router.report(name, ReplicaLoad(token_s=0.001, begin_s=random.choice([0.0, random.random() * 3])), 0.0)
    best = router.choose(prompt(), 0.0).expected_s
    alone = sorted(router.choose(prompt(), 0.0, [name]).expected_s for name in names)
    assert best <= alone[(len(names) - 1) // 2] * 1.5 + 0.2 + 1e-9


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


FAIR = ReplicaLoad(token_s=0.001, begin_s=10.0, queued={"many": 10_000, "few": 0}, is_fair=True)
RECEIVED = ReplicaLoad(token_s=0.001, received={"": 1})


def made(names="ab", *, cached=(), on_host=(), sent="", by_depth=False, waits=(), at=0.0, **rules):
    """A router of these replicas: what they have of the prompt, where it was sent, and what they report then."""
    router = router_of(*names, **rules)
    for tier, blocks in enumerate((cached, on_host)):
        for name, count in dict(blocks).items():
            router.index.store(name, prompt().keys[:count], tier)
    for name in sent:
        router.routed(prompt("1"), name, 0.0, *([router.choose(prompt("1"), 0.0).depth] if by_depth else []))
    for name, wait in dict(waits).items():
        load = wait if isinstance(wait, ReplicaLoad) else ReplicaLoad(token_s=0.001, begin_s=wait)
        router.report(name, load, at)
    return router


def choice(router, request=None, now=0.0):
    return router.choose(request or prompt("2"), now)


def order(router, request=None):
    return "".join(choice(router, request).replicas)


@pytest.mark.parametrize(("call", "by_hand"), by_hand_in("routing.txt"))
def test_a_choice_is_what_it_is_by_hand(call, by_hand):
    assert_by_hand(call, by_hand, globals())


def asked(prompt, outputs=1, tenant=None):
    """A request, but for its id."""
    return {"prompt": prompt, "max_tokens": outputs, "expected_tokens": outputs, "tenant": tenant}


FORTY, RUNS = asked(range(40)), asked(range(100, 104), 5)
QUEUED = [
    asked(range(40), tenant="a"),
    asked(range(200, 210), tenant="a"),
    asked(range(20)),
    asked(range(7), tenant="b"),
]
STEPS = [(tokens, 0.002 + 0.001 * tokens) for tokens in (1, 5, 9, 2, 40, 3) * 20]


def served(*after, waiting=(), num_blocks=100, **limits):
    """A scheduler to which these requests came."""
    scheduler = Scheduler(BlockManager(num_blocks, 4), max_tokens_per_step=50, **limits)
    for number, request in enumerate([*after, *waiting]):
        scheduler.add(Request(id=str(number), **request))
        if number < len(after):
            batch = scheduler.schedule()
            scheduler.update(batch, [7] * int(batch.samples.sum()))
    return scheduler


def noted(steps, between=0.0, rests=False):
    """A pace after steps of (tokens, seconds), with so many seconds between them."""
    pace, now = Pace(), 100.0
    for tokens, seconds in steps:
        pace.note(tokens, now, now + seconds)
        now += seconds + between
        if rests:
            pace.rest()
    return pace


def load(scheduler, **told):
    pace = noted([(tokens, 0.1 + 0.01 * tokens) for tokens in (10, 20, 10, 20)], rests=True)
    return load_of(scheduler.outlook(), pace, **told)


@pytest.mark.parametrize(("call", "by_hand"), by_hand_in("loads.txt"))
def test_a_report_is_what_it_is_by_hand(call, by_hand):
    assert_by_hand(call, by_hand, globals())
