"""Plans against brute force: the answer meets, and the next value does not; and `paged plan` from outside."""

import csv
import html
import io
import json
import math
import re

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st
from rich.console import Console
from rich.progress import Progress, TextColumn

from paged.study.hardware import budgets
from paged.study.simulator import Device, Load, Scenario, StepTime, Targets, outcome_of, plans, run, trial, what_binds
from paged.study.simulator.search import REACH, Counts, Rates, search
from paged.study.simulator.trial import Round, Trial, tried
from paged.study.traces import Trace

from .files_of_others import assert_by_hand, by_hand_in  # noqa: TID252

SLOW = StepTime(weights_ms=20, context_us=1, token_us=200)
REPLACE = msgspec.structs.replace


def poisson(requests=80, rate=20):
    """Of which 60 blocks serve about three quarters."""
    return f"synthetic:poisson,rate={rate},requests={requests},prompt=40,output_mean=12,output_sigma=0.6"


CROWD = poisson()


def plan_of(find, scenario, targets, **options):
    (plan,) = plans(find, [scenario], targets, **options)
    return plan


def scenario_of(trace=CROWD, *, rate=1.0, seed=0, **options):
    small = {"blocks": 60, "block_size": 4, "max_tokens_per_step": 64, "max_sequences": 16}
    return Scenario(load=Load(trace=trace, rate=rate, seed=seed), device=Device(formula=SLOW), **{**small, **options})


def p99(values):
    """The nearest rank, counted by hand."""
    values = sorted(value for value in values if not math.isnan(value))
    return values[-(-99 * len(values) // 100) - 1] if values else -math.inf


def meets(scenario, *, ttft_s=math.inf, gap_s=math.inf):
    """The verdict on whole simulations, from what they say of each request."""
    outcome = run(scenario)
    is_whole = outcome.result.rejected == 0 and (
        outcome.result.output_tokens == scenario.load.build().output_tokens.sum()
    )
    return is_whole and p99(outcome.ttft_s) <= ttft_s and p99(outcome.longest_gap_s) <= gap_s


CROWDED = {
    "vllm": scenario_of(poisson(101), policy="vllm"),
    "static": scenario_of(poisson(60), policy="static"),
    "swapping": scenario_of(poisson(201), host_blocks=60),
}


@pytest.mark.parametrize("name", CROWDED)
def test_giving_up_early_changes_no_verdict_at_the_very_edge(name, monkeypatch):
    """At the very 99th percentile that a run comes to, and at the number below it."""
    monkeypatch.setattr(trial, "LOOK_EVERY", 1)
    scenario = CROWDED[name]
    result = run(scenario).result
    edges = {"ttft_s": result.ttft_s.p99, "gap_s": result.longest_gap_s.p99, "itl_s": result.itl_s.p99}
    for target, edge in edges.items():
        for limit, is_met in ((edge, True), (math.nextafter(edge, 0), False)):
            targets = Targets(**{target: limit})
            one = Trial(scenario=scenario, targets=targets)
            tally = tried(one)
            misses = Round(1, 1, targets, (one,)).misses([tally])
            assert [miss.promise for miss in misses] == ([] if is_met else [target])
            if is_met:
                assert (tally.broken, tally.steps) == (None, result.steps)
            else:
                # One value too many is above the limit, and it is noticed when that one comes.
                assert tally.broken == target
                assert tally.steps <= result.steps


def test_a_replica_is_given_up_only_when_all_of_them_together_have_missed(monkeypatch):
    monkeypatch.setattr(trial, "LOOK_EVERY", 1)
    scenario = scenario_of(poisson(230), rate=3)
    whole = [tried(Trial(scenario=scenario, replica=replica, replicas=3)) for replica in range(3)]
    edge = p99(np.concatenate([tally.ttft_s for tally in whole]))
    # Two of 230 may be above the edge; of the 77 of a replica alone none might.
    assert max((tally.ttft_s > edge).sum() for tally in whole) > 0
    for limit, is_met in ((edge, True), (math.nextafter(edge, 0), False)):
        targets = Targets(ttft_s=limit)
        trials = tuple(Trial(scenario=scenario, replica=replica, replicas=3, targets=targets) for replica in range(3))
        tallies = [tried(one) for one in trials]
        verdicts = [Round(3, 3, targets, trials).misses(tallies[:n]) for n in (1, 2, 3)]
        assert [tally.broken for tally in tallies] == [None] * 3 or not is_met
        assert verdicts[:2] == [None, None] or not is_met
        assert (verdicts[-1] == ()) == is_met


def test_a_run_that_is_saturated_is_given_up_after_a_fraction_of_its_steps(monkeypatch):
    monkeypatch.setattr(trial, "LOOK_EVERY", 16)
    scenario = scenario_of(poisson(400, rate=200))
    whole = tried(Trial(scenario=scenario))
    short = tried(Trial(scenario=scenario, targets=Targets(ttft_s=0.5)))
    assert (whole.broken, short.broken) == (None, "ttft_s")
    assert short.steps < whole.steps / 10


def test_the_smallest_memory_is_the_one_that_trying_many_finds():
    scenario = scenario_of(poisson(20, rate=10))
    plan = plan_of("memory", scenario, Targets(ttft_s=0.2), tolerance=0)
    # The outcome is monotone here, which the search cannot know.
    for count in {*range(15, 61, 7), *range(plan.answer - 3, plan.answer + 3)}:
        assert meets(plan.scenario_at(count), ttft_s=0.2) == (count >= plan.answer)
    assert 20 < plan.answer < 60
    assert plan.missed == plan.answer - 1
    assert all(probe.met == (probe.value >= plan.answer) for probe in plan.probes)


def test_the_highest_rate_meets_when_simulated_again_and_two_percent_more_does_not():
    targets = {"ttft_s": 2.0, "gap_s": 0.15}
    plan = plan_of("rate", scenario_of(poisson(40)), Targets(**targets))
    assert plan.answer < plan.missed <= plan.answer * 1.02
    assert meets(plan.scenario_at(plan.answer), **targets)
    assert not meets(plan.scenario_at(plan.missed), **targets)
    assert plan.best.met and plan.best.value == plan.answer
    result = run(plan.scenario_at(plan.answer)).result
    assert (plan.best.p99.ttft_s, plan.best.p99.gap_s) == (result.ttft_s.p99, result.longest_gap_s.p99)
    assert plan.best.p99.itl_s == result.itl_s.p99


def test_the_fewest_devices_are_those_that_dealing_by_hand_finds():
    scenario, ttft_s = scenario_of(rate=3), 0.05
    plan = plan_of("devices", scenario, Targets(ttft_s=ttft_s))
    trace = scenario.load.build()

    def dealt_p99(replicas):
        ttft = []
        for replica in range(replicas):
            mine = np.arange(len(trace)) % replicas == replica
            part = Trace.from_lengths(trace.arrival_s[mine], trace.prompt_tokens[mine], trace.output_tokens[mine])
            simulation = scenario.simulation(trace=part)
            for _ in simulation.steps():
                pass
            ttft += outcome_of(scenario, simulation).ttft_s.tolist()
        return p99(ttft)

    assert plan.answer > 1
    assert dealt_p99(plan.answer) <= ttft_s < dealt_p99(plan.answer - 1)
    assert (plan.missed, plan.best.simulations) == (plan.answer - 1, plan.answer)


def test_targets_that_nothing_meets_are_answered_with_the_best_at_its_end_and_by_how_much_it_misses():
    for find in ("rate", "memory", "devices"):
        (plan,) = plans(find, [scenario_of(poisson(20))], Targets(ttft_s=0.001, itl_s=10))
        assert (plan.answer, plan.exceptions) == (None, ())
        (miss,) = plan.best.misses
        assert miss.promise == "ttft_s"
        assert miss.found == plan.best.p99.ttft_s > 0.001
        values = [probe.value for probe in plan.probes]
        assert values == sorted(values)
        assert plan.best.value == (values[0] if find == "rate" else values[-1])


def test_more_memory_lets_more_rows_decode_together_and_may_miss_where_less_meets():
    """Ten requests at once; a step with more of them takes longer."""
    slow_context = Device(formula=StepTime(weights_ms=1, context_us=500, token_us=1))
    load = Load(trace="synthetic:at-once,requests=10,prompt=20,output=20")
    scenario = REPLACE(scenario_of(), load=load, device=slow_context, policy="orca-oracle", blocks=200)
    plan = plan_of("memory", scenario, Targets(gap_s=0.1), tolerance=0)
    more = [probe for probe in plan.probes if probe.value > plan.answer]
    assert meets(plan.scenario_at(plan.answer), gap_s=0.1)
    assert plan.exceptions == tuple(probe for probe in more if not probe.met)
    assert {probe.value for probe in plan.exceptions} >= {200, plan.probes[-1].value}


def test_with_several_seeds_each_of_them_has_to_meet():
    targets = Targets(ttft_s=0.2)
    scenario = scenario_of(poisson(20))
    alone = [
        plan_of("rate", REPLACE(scenario, load=REPLACE(scenario.load, seed=seed)), targets, tolerance=0.2)
        for seed in range(3)
    ]
    together = plan_of("rate", scenario, targets, seeds=3, tolerance=0.2)
    assert len({plan.answer for plan in alone}) > 1
    loads = [REPLACE(scenario.load, seed=seed, rate=together.answer) for seed in range(3)]
    found = [run(REPLACE(scenario, load=load)).result.ttft_s.p99 for load in loads]
    assert together.best.p99.ttft_s == max(found) <= 0.2
    assert together.answer <= min(plan.missed for plan in alone)
    assert together.best.simulations == 3


def test_the_same_plans_come_out_of_any_number_of_processes():
    scenarios = [scenario_of(poisson(15), rate=2, policy=policy) for policy in ("paged", "vllm")]
    seen = []

    def without_host_time(plan):
        return REPLACE(plan, probes=tuple(REPLACE(probe, wall_s=0.0) for probe in plan.probes))

    one, two = (
        plans("rate", scenarios, Targets(ttft_s=0.2), seeds=2, jobs=jobs, tolerance=0.2, watch=seen.append)
        for jobs in (1, 2)
    )
    assert list(map(without_host_time, one)) == list(map(without_host_time, two))
    for place, plan in enumerate(one):
        values = [progress.value for progress in seen if progress.place == place]
        tries = len(plan.probes)
        assert (len(values), values[: tries + 1]) == (2 * (tries + 1), values[tries + 1 :])
        assert sorted(values[:tries]) == [probe.value for probe in plan.probes]
        assert values[tries] is None


def found(axis, meets):
    """What the search returns, and what it tried, in order."""
    tried, tries = {}, search(axis)
    try:
        value = next(tries)
        while True:
            assert value not in tried
            tried[value] = meets(value)
            value = tries.send(tried[value])
    except StopIteration as end:
        return *end.value, tried


@st.composite
def counts(draw, **options):
    fewest = draw(st.integers(1, 50))
    most = draw(st.integers(fewest, fewest + 5000))
    return Counts(draw(st.integers(fewest, most)), fewest, most, **options)


@given(counts(), st.data())
def test_the_fewest_of_a_monotone_outcome_is_found_exactly(axis, data):
    enough = data.draw(st.integers(axis.fewest, axis.most + 1))
    answer, missed, tried = found(axis, lambda count: count >= enough)
    assert answer == (enough if enough <= axis.most else None)
    if answer is not None:
        assert missed == (answer - 1 if answer > axis.fewest else None)
    # A third of the bracket is left at best, two thirds at worst; close to the end one count less.
    assert len(tried) <= math.log(axis.most, 2) + math.log(axis.most, 1.5) + 5


@given(st.floats(0.01, 100), st.floats(1 / REACH, REACH), st.sampled_from([0.02, 0.3]))
def test_the_highest_rate_of_a_monotone_outcome_is_found_within_the_tolerance(start, share, tolerance):
    highest = start * share
    answer, missed, _ = found(Rates(start, tolerance), lambda rate: rate <= highest)
    # Powers of two reach one step less than the end in either direction.
    assert answer is not None or share < 2 / REACH
    if answer is not None:
        assert answer <= highest
        assert missed is not None or answer > start * REACH / 2
        assert missed is None or highest < missed <= answer * (1 + tolerance)


@given(st.floats(0.01, 100), st.randoms(use_true_random=False))
def test_whatever_the_outcome_all_lower_rates_that_were_tried_met_and_all_higher_ones_missed(start, random):
    answer, missed, tried = found(Rates(start, 0.02), lambda rate: random.random() < 0.5)
    if answer is None:
        assert not any(tried.values())
        return
    assert all(met == (rate <= answer) for rate, met in tried.items())
    higher = [rate for rate in tried if rate > answer]
    assert missed == (min(higher) if higher else None)


@given(counts(turns=True), st.randoms(use_true_random=False))
def test_whatever_the_outcome_the_answer_met_and_the_nearest_fewer_that_was_tried_missed(axis, random):
    answer, missed, tried = found(axis, lambda count: random.random() < 0.3)
    if answer is None:
        assert not any(tried.values())
        assert {axis.fewest, axis.most} <= set(tried)
        return
    fewer = [count for count in tried if count < answer]
    assert tried[answer]
    assert not any(tried[count] for count in fewer)
    assert missed == (max(fewer) if fewer else None)


@given(st.integers(1, 500), st.integers(2, 4), st.integers(1, 3000))
def test_where_more_does_not_help_less_is_tried_down_to_the_fewest_that_meet(low, width, above):
    # A band that is as wide as a step cannot be stepped over.
    high = low * width
    axis = Counts(high + above, 1, 10_000, turns=True)
    answer, missed, tried = found(axis, lambda count: low <= count <= high)
    assert (answer, missed) == (low, low - 1 if low > 1 else None)
    assert tried[10_000] is False


ON_TIME = Targets(ttft_s=1.0, gap_s=0.05)


def on_a100(**options):
    load = Load(trace="azure", limit=30, rate=40, context=8192)
    return Scenario(load=load, device=Device(model="llama-3-8b", device="a100-80g"), **options)


@pytest.fixture(scope="module")
def two_replicas():
    return plan_of("devices", on_a100(), ON_TIME)


def test_the_weighed_budget_has_the_best_answer_of_all_budgets(two_replicas):
    plan = two_replicas
    some = {budgets(16)[0], budgets(16)[-1], plan.scenario.max_tokens_per_step}
    alone = {budget: plan_of("devices", on_a100(max_tokens_per_step=budget), ON_TIME).answer for budget in some}
    assert (plan.answer, alone[plan.scenario.max_tokens_per_step]) == (min(alone.values()), plan.answer)
    assert max(alone.values()) > plan.answer
    weighed = plan.weighed
    assert weighed.limit_s == 0.05
    assert weighed.step_s < 0.05
    assert set(weighed.against) | {plan.scenario.max_tokens_per_step} >= set(budgets(16))


def small(**options):
    """Six rows of a token each, 20 ms a step, and requests that come at once."""
    usual = {"blocks": 400, "max_tokens_per_step": 128, "max_sequences": 64}
    return scenario_of("synthetic:poisson,rate=20,requests=30,prompt=40,output=12", **{**usual, **options})


def test_what_is_scarce_binds_and_its_effect_is_what_a_plan_with_more_of_it_finds():
    """Of two plans, asked about together."""
    scarce = {"rows": ("max_sequences", 2), "memory": ("blocks", 30)}
    targets = Targets(ttft_s=0.5)
    found = [plan_of("rate", small(**{option: few}), targets, tolerance=0.1) for option, few in scarce.values()]
    for (knob, (option, few)), plan, binding in zip(scarce.items(), found, what_binds(found), strict=True):
        assert binding.binds.knob == knob
        with_more = plan_of("rate", small(**{option: 2 * few}), targets, tolerance=0.1)
        assert binding.binds.answer == pytest.approx(with_more.answer, rel=0.1)
        assert binding.binds.gain == pytest.approx(binding.binds.answer / plan.answer)
        assert binding.binds.gain > 1.1
        assert set(binding.not_varied) == {"arithmetic", "bandwidth", "host"}


def test_where_nothing_meets_the_budget_that_would_is_said():
    """A lone prompt of 2,000 tokens takes 0.4 s in one step, and another request decodes meanwhile."""
    load = Load(trace="synthetic:deterministic,rate=1,requests=6,prompt=2000,output=60")
    plan = plan_of("devices", REPLACE(small(blocks=9000, max_tokens_per_step=4096), load=load), Targets(ttft_s=0.3))
    assert plan.answer is None
    (binding,) = what_binds([plan])
    assert binding.tried_at == plan.best.value == 6
    assert binding.binds is None
    assert {effect.answer for effect in binding.effects} == {None}
    slow = Device(model="llama-3-8b", device="a100-80g", published=True)
    tight = plan_of("devices", REPLACE(plan.scenario, device=slow, blocks=None), Targets(ttft_s=0.15))
    (binding,) = what_binds([tight])
    assert tight.answer is None
    assert (binding.binds.knob, binding.binds.gain) == ("arithmetic", math.inf)


NAMED = ("paged", "vllm", "tgi", "static")
ROWS = ("0,8,30", "5,30,9", "10,20,3")
NEVER = ("0,8,3", "1,999,9", "2,8,3", "3,220,40")


@pytest.mark.parametrize(("call", "by_hand"), by_hand_in("plans.txt"))
def test_a_plan_is_what_it_is_by_hand(trace_file, call, by_hand):
    def of_rows(*rows, context=None, **options):
        load = Load(trace=str(trace_file(*rows)), context=context)
        return REPLACE(scenario_of(**options), load=load)

    assert_by_hand(call, by_hand, globals() | locals())


TRACE = "synthetic:poisson,rate=20,requests=20,prompt=40,output_mean=12,output_sigma=0.6"
SLOWLY = ["--weights-ms", 20, "--context-us", 1, "--token-us", 200]
SMALL = ["--block-size", 4, "--max-tokens-per-step", 64, "--max-sequences", 16, *SLOWLY]
POOL = [*SMALL, "--blocks", 60, "--jobs", 1]
ROUGHLY = ["--tolerance", 0.2]


def test_the_json_has_the_answer_and_what_the_answer_simulated_again_says(document):
    find = ["--find", "memory", "--ttft", 0.5, "--gap", 0.5]
    (plan,) = document("plan", TRACE, *POOL, "--rate-scale", 0.6, *find)
    assert (plan["find"], plan["policy"], plan["left_out"]) == ("memory", "paged", 0)
    assert plan["targets"] == {"ttft_s": 0.5, "gap_s": 0.5, "itl_s": None}
    assert plan["requests_per_s"] is None
    assert plan["best"] == plan["answer"] == plan["missed"] + 1
    blocks = f"{plan['missed']},{plan['answer']}"
    less, enough = document("simulate", TRACE, *SMALL, "--rate-scale", 0.6, "--blocks", blocks)
    assert enough["ttft_s"]["p99"] <= 0.5
    assert enough["longest_gap_s"]["p99"] <= 0.5
    assert less["ttft_s"]["p99"] > 0.5 or less["longest_gap_s"]["p99"] > 0.5
    (probe,) = (probe for probe in plan["probes"] if probe["value"] == plan["answer"])
    assert probe["met"] is True
    assert probe["p99"]["ttft_s"] == enough["ttft_s"]["p99"]


def test_what_nothing_meets_is_status_1_with_the_best_and_by_how_much_it_misses(paged, trace_file):
    options = [*POOL, "--find", "devices", "--ttft", 0.001]
    status, out, err = paged("plan", "synthetic:poisson,rate=9,requests=8,prompt=40,output=9", *options)
    assert (status, out.splitlines()[0].split()[0], err.count("\n")) == (1, "replicas", 1)
    assert err.startswith("paged: with policy paged no number of replicas meets p99 first within 1 ms; nearest of ")
    assert "is 8 replicas, p99 first 20 ms, 19 ms over 1 ms" in err
    status, out, err = paged(
        "plan", TRACE, *POOL, "--policy", "vllm,paged", "--find", "rate", "--itl", 0.001, "--no-explain", "--json"
    )
    assert (status, [plan["answer"] for plan in json.loads(out)], err.count("\n")) == (1, [None, None], 2)
    # A request that never fits is said with what would do.
    path = trace_file("0,8,3", "1,999,9", "2,8,3")
    find = [*POOL, "--find", "rate", "--ttft", 10]
    status, _, err = paged("plan", path, *find, "--no-explain")
    assert status == 1 and re.search("1 request rejected.*60 blocks.*--context", err)
    assert paged("plan", path, *find, "--no-explain", "--context", 200)[0] == 0


def test_what_binds_is_in_the_json_unless_nobody_asks(document):
    rows = ["plan", TRACE, *POOL, "--max-sequences", 2, "--find", "rate", "--ttft", 0.5, *ROUGHLY]
    (plan,) = document(*rows)
    binds = plan["binding"]["binds"]
    assert (binds["knob"], binds["was"], binds["becomes"]) == ("rows", 2, 4)
    assert binds["answer"] == pytest.approx(binds["gain"] * plan["answer"])
    assert plan["binding"]["tried_at"] == pytest.approx(1.1 * plan["answer"], rel=1e-5)
    assert document(*rows, "--no-explain")[0]["binding"] is None


def test_a_plan_is_written_as_a_page_and_as_a_table(printed, document, tmp_path):
    page, table = tmp_path / "plan.html", tmp_path / "plan.csv"
    targets = ["--find", "rate", "--ttft", 0.5, "--gap", 0.5, "--tolerance", 0.5]
    out = printed("plan", TRACE, *POOL, *targets, "--html", page, "--csv", table)
    text = page.read_text(encoding="utf-8")
    for line in out.splitlines():
        if line.startswith(("Highest rate", "What binds", "No change", "Median")):
            assert html.escape(line) in text
    assert "default-src 'none'" in text
    rows = list(csv.DictReader(table.read_text().splitlines()))
    (plan,) = document("plan", TRACE, *POOL, *targets, "--no-explain")
    assert [float(row["value"]) for row in rows] == [probe["value"] for probe in plan["probes"]]
    assert [row["met"] for row in rows] == [str(probe["met"]) for probe in plan["probes"]]
    assert [float(row["value"]) for row in rows if row["is_answer"] == "True"] == [plan["answer"]]
    figures = json.loads(re.search(r'id="figures">(.*?)</script>', text, flags=re.DOTALL)[1])
    met, missed, target = figures[0]["data"][:3]
    whole = [probe for probe in plan["probes"] if probe["p99"] is not None]
    assert met["x"] == [probe["value"] for probe in whole if probe["met"]]
    assert met["y"] == [probe["p99"]["ttft_s"] for probe in whole if probe["met"]]
    assert (missed["x"], target["y"]) == ([probe["value"] for probe in whole if not probe["met"]], [0.5, 0.5])


def test_who_waits_at_a_terminal_sees_which_value_is_being_tried(printed, monkeypatch):
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=200)
    column = TextColumn("{task.description}")

    class Eager(Progress):
        """Draws at each update, so that what is seen does not depend on the machine's load."""

        def update(self, *arguments, **changes):
            super().update(*arguments, **changes)
            self.refresh()

    monkeypatch.setattr("paged.cli.plan.progress_bar", lambda *_: Eager(column, console=terminal, auto_refresh=False))
    printed("plan", TRACE, *POOL, "--find", "rate", "--ttft", 0.1, *ROUGHLY, "--no-explain")
    assert "paged: trying 1" in screen.getvalue()
    assert "paged: trying 0.5, 1 misses" in screen.getvalue()
