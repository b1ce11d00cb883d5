"""Admission that looks ahead: the peak against a walk step by step, what a scheduler makes of it, and output lengths as quantiles and means."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st

from paged.block_manager import BlockManager, LayerGroup
from paged.scheduler import POLICIES, Request, Scheduler
from paged.scheduler.foresight import ROWS, STRIDE, WINDOW, OutputLengths, peak

from ..driving import step, steps_of  # noqa: TID252

STEERED = msgspec.structs.replace(POLICIES["paged"], name="steered", quantile=0.4, stall_target=None)
ORACLE = msgspec.structs.replace(POLICIES["paged"], name="oracle", foresight="expected")
SEQUENCES = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 40)), min_size=1, max_size=8)


@given(SEQUENCES)
def test_the_peak_is_the_fullest_moment_of_a_walk_step_by_step(sequences):
    held, remaining = (np.array(column, np.int64) for column in zip(*sequences, strict=True))
    moments = [
        sum(tokens + step for tokens, left in sequences if left >= step) for step in range(1, int(remaining.max()) + 1)
    ]
    assert peak(held, remaining) == max(moments)


def scheduler_on(num_blocks, policy=ORACLE, **limits):
    return Scheduler(BlockManager(num_blocks, 4, prefix_caching=False), policy=policy, **limits)


def request(name, prompt_len, max_tokens, expected=None):
    return Request(id=name, prompt=[1] * prompt_len, max_tokens=max_tokens, expected_tokens=expected)


def running(num_rows, policy):
    """A scheduler in whose ample pool so many small requests run."""
    scheduler = scheduler_on(1000, policy, max_tokens_per_step=400)
    for number in range(num_rows):
        scheduler.add(request(str(number), 4, 40))
    step(scheduler)
    return scheduler


def test_who_would_fit_now_waits_where_it_would_not_later():
    scheduler = scheduler_on(20)
    scheduler.add(request("a", 8, 40, 40))
    scheduler.add(request("b", 8, 40, 40))
    assert step(scheduler).admitted == ("a",)
    reason = scheduler.explain("b").reason
    assert "at their peak" in reason and "room for 80" in reason and "112" not in reason
    batch, reason = scheduler.schedule(), scheduler.explain("b").reason
    scheduler.update(batch, [7])
    assert scheduler.explain("b").reason != reason
    while scheduler.status("b") == "waiting":
        step(scheduler)
    # 8 + 2 held on average, and what is left of both: b comes in before a has ended.
    assert scheduler.status("a") == "running"
    steps_of(scheduler)
    assert scheduler.stats().preemptions == 0


@pytest.mark.parametrize(
    ("num_blocks", "groups"),
    [
        (30, [LayerGroup("full")]),
        (30, [LayerGroup("full"), LayerGroup("window", 8)]),
        (16, [LayerGroup("window", 12)]),
        (40, [LayerGroup("full"), LayerGroup("state", pages=2)]),
        (50, [LayerGroup("chunk", 8), LayerGroup("full", pages=2)]),
    ],
    ids=lambda value: "+".join(each.kind for each in value) if isinstance(value, list) else None,
)
def test_with_true_lengths_nobody_is_preempted_and_the_greedy_one_preempts(num_blocks, groups):
    def preemptions(policy):
        manager = BlockManager(num_blocks, 4, prefix_caching=False, groups=groups)
        scheduler = Scheduler(manager, policy=policy, max_tokens_per_step=64)
        for number in range(40):
            output = 5 + 13 * number % 40
            scheduler.add(request(str(number), 1 + 7 * number % 20, output, output))
        steps_of(scheduler)
        return scheduler.stats().preemptions

    greedy = msgspec.structs.replace(ORACLE, name="greedy", foresight="none", waste_target=None, max_passes=0)
    assert preemptions(ORACLE) == 0 < preemptions(greedy)


def test_the_first_few_come_in_by_todays_use_and_more_only_as_the_assumed_lengths_allow():
    scheduler = scheduler_on(400, POLICIES["paged"], max_tokens_per_step=4000)
    for number in range(100):
        scheduler.add(request(str(number), 4, 400))
    # Eight tokens each would fit at once; the most careful guess is of some hundred for each.
    assert len(step(scheduler).admitted) == ROWS


def test_once_enough_outputs_have_ended_their_lengths_alone_decide():
    scheduler = scheduler_on(400, POLICIES["paged"], max_tokens_per_step=4000)
    for number in range(POLICIES["paged"].known_outputs):
        scheduler.add(request(f"known{number}", 4, 40))
    steps_of(scheduler)
    for name in "ab":
        scheduler.add(request(name, 700, 400))
    # 40 tokens each, as those before: 1,400 + 80 and what is left over of blocks fit into 1,600.
    assert step(scheduler).admitted == ("a", "b")
    scheduler.add(request("c", 80, 400))
    assert step(scheduler).admitted == ()


def test_an_empty_system_admits_whatever_has_room():
    scheduler = scheduler_on(6)
    scheduler.add(request("a", 8, 4000, 4000))
    assert step(scheduler).admitted == ("a",)


@pytest.mark.parametrize(
    ("num_big", "num_small", "waiting"),
    # Four pass a head, and no more. Only one of the next four behind it does.
    [(1, 6, "big0 small4 small5"), (5, 1, "big0 big1 big2 big3 big4 small0")],
)
def test_one_behind_passes_a_head_that_does_not_fit_so_often_and_from_so_near(num_big, num_small, waiting):
    scheduler = scheduler_on(30, max_tokens_per_step=200)
    scheduler.add(request("first", 4, 60, 60))
    for number in range(num_big):
        scheduler.add(request(f"big{number}", 100, 10, 10))
    for number in range(num_small):
        scheduler.add(request(f"small{number}", 1, 2, 2))
    step(scheduler)
    assert scheduler.waiting_ids() == waiting.split()


@pytest.mark.parametrize(("num_blocks", "admitted"), [(17, ("b",)), (16, ())])
def test_a_newcomer_takes_one_place_more_for_one_output(num_blocks, admitted):
    scheduler = Scheduler(BlockManager(num_blocks, 1, prefix_caching=False), policy=ORACLE)
    scheduler.add(request("a", 4, 9, 9))
    step(scheduler)
    # Fullest when "b" has its output: ten tokens beside the five of "a", and one more of each.
    scheduler.add(request("b", 10, 1))
    assert step(scheduler).admitted == admitted


def test_a_head_that_did_not_fit_is_looked_at_again_after_some_steps_when_somebody_ends_and_when_somebody_comes():
    scheduler = scheduler_on(20)
    scheduler.add(request("a", 8, 40, 40))
    scheduler.add(request("b", 8, 40, 40))
    step(scheduler)
    looked, fits = [], scheduler._state.foresight.fits
    scheduler._state.foresight.fits = lambda wish: looked.append(wish.id) or fits(wish)
    for _ in range(STRIDE):
        step(scheduler)
    assert len(looked) == 1
    scheduler.add(request("c", 8, 40, 40))
    step(scheduler)
    # The head, and the one behind that may pass it.
    assert len(looked) == 3


def test_a_head_that_did_not_fit_is_looked_at_again_where_the_next_batch_would_be_empty():
    scheduler = scheduler_on(20)
    scheduler.add(request("a", 8, 10, 10))
    scheduler.add(request("b", 57, 20, 20))
    for _ in range(9):
        assert "b" not in step(scheduler).admitted
    # The last output of "a" is out.
    assert [scheduler.schedule().admitted for _ in range(2)] == [(), ("b",)]


MAKES_ROOM = {
    "abort": lambda scheduler, batch: (scheduler.update(batch, [7, 7]), scheduler.abort("c")),
    "finish": lambda scheduler, batch: (scheduler.update(batch, [7, 7]), scheduler.finish("c")),
    "append": lambda scheduler, batch: (scheduler.update(batch, [7], counts=[1, 0]), scheduler.append("c", [1])),
    "cancel": lambda scheduler, batch: scheduler.cancel(batch),
}


@pytest.mark.parametrize("way", MAKES_ROOM)
def test_whatever_may_make_room_lets_the_head_be_looked_at_at_once(way):
    scheduler = scheduler_on(20)
    for name, expected in (("a", 40), ("c", 4), ("b", 40)):
        scheduler.add(request(name, 8, 40, expected))
    assert step(scheduler).admitted == ("a", "c")
    looked, fits = [], scheduler._state.foresight.fits
    scheduler._state.foresight.fits = lambda wish: looked.append(wish.id) or fits(wish)
    step(scheduler)
    batch = scheduler.schedule()
    assert looked == []
    MAKES_ROOM[way](scheduler, batch)
    scheduler.schedule()
    assert looked[:1] == ["b"]


def test_the_more_rows_run_the_later_it_is_looked_whether_a_change_made_room(monkeypatch):
    monkeypatch.setattr("paged.scheduler.foresight.PATIENCE", 2)
    scheduler = scheduler_on(20)
    for name, expected in (("a", 40), *((f"c{number}", 2) for number in range(7)), ("b", 40)):
        scheduler.add(request(name, 4, 40, expected))
    assert len(step(scheduler).admitted) == 8
    looked, fits = [], scheduler._state.foresight.fits
    scheduler._state.foresight.fits = lambda wish: looked.append(wish.id) or fits(wish)
    scheduler.abort("c0")
    # Three steps after it did not fit, because seven rows run.
    assert [(step(scheduler), looked[:])[1] for _ in range(4)] == [[], [], ["b"], ["b"]]


def test_the_quantile_is_bold_without_waste_as_said_at_the_target_and_careful_beyond_up_to_its_bounds():
    policy = msgspec.structs.replace(STEERED, known_outputs=0)
    foresight = scheduler_on(30, policy)._state.foresight
    stats = foresight._stats

    def quantile_at(waste):
        # Long enough for what was before to be forgotten.
        for _ in range(20):
            stats.computed_tokens += 100_000
            stats.recomputed_tokens += round(100_000 * waste)
            foresight.finished(pause=0)
        return foresight.quantile

    stats.computed_tokens, stats.recomputed_tokens = 50, 1
    foresight.finished(pause=0)
    assert foresight.quantile == pytest.approx(0.5)
    assert quantile_at(0.01) == pytest.approx(0.4, abs=0.01)
    assert quantile_at(0.02) == pytest.approx(0.5, abs=0.01)
    assert quantile_at(0.5) == policy.quantile_range[1]
    assert quantile_at(0.0) == pytest.approx(0.3, abs=0.01)


def test_the_fewer_outputs_have_ended_the_more_careful_is_the_quantile():
    scheduler = running(16, msgspec.structs.replace(STEERED, known_outputs=4, waste_target=None))
    foresight, found = scheduler._state.foresight, []
    for _ in range(6):
        found.append(foresight._quantile_now())
        scheduler._state.lengths.note(10)
        foresight.finished(pause=0)
    assert found == pytest.approx([0.8, 0.7, 0.6, 0.5, 0.4, 0.4])


def test_the_quantile_rests_where_as_many_stand_still_for_long_as_may():
    policy = msgspec.structs.replace(STEERED, known_outputs=0, waste_target=None, stall_target=0.01, stall_limit=5)
    foresight = scheduler_on(30, policy)._state.foresight

    def quantile_after(num, pause):
        for _ in range(num):
            foresight.finished(pause=pause)
        return foresight.quantile

    assert quantile_after(1, 6) == pytest.approx(0.42)
    assert quantile_after(99, 5) == pytest.approx(0.4)
    assert quantile_after(10_000, 0) == policy.quantile_range[0]
    assert quantile_after(1_000, 6) == policy.quantile_range[1]
    assert quantile_after(99, 0) == pytest.approx(policy.quantile_range[1] - 0.02)


@pytest.mark.parametrize(
    ("num_rows", "quantile", "kept"), [(0, 0.8, 0), (1, 0.8, 20), (4, 0.55, 20), (16, 0.4, 20), (64, 0.325, 10)]
)
def test_more_rows_need_less_care_each_and_less_of_the_watermark(num_rows, quantile, kept):
    scheduler = running(num_rows, msgspec.structs.replace(STEERED, known_outputs=0))
    assert scheduler._state.foresight._quantile_now() == pytest.approx(quantile)
    assert scheduler._state.books.watermark() == kept


def test_where_admission_does_not_look_ahead_the_watermark_is_whole():
    plain = running(64, msgspec.structs.replace(POLICIES["vllm"], watermark=0.02))
    assert plain._state.books.watermark() == 20


def test_a_request_stands_still_from_when_blocks_are_taken_until_it_runs_again():
    policy = msgspec.structs.replace(STEERED, foresight="none", waste_target=None, max_preemptions=None, watermark=0.0)
    scheduler = scheduler_on(10, policy, max_tokens_per_step=64)
    for name in "ab":
        scheduler.add(request(name, 8, 20))
    seen = []
    while seen[-1:] != ["running"] or "paused" not in seen:
        step(scheduler)
        seen.append(scheduler.status("b"))
    assert scheduler._state.requests["b"].longest_pause == seen.count("paused") > 0


NONE = np.empty(0, np.int64)


def lengths_of(*noted, assumed=0, cap=1000):
    lengths = OutputLengths(cap, assumed)
    for length in noted:
        lengths.note(length)
    return lengths


def remaining(lengths, written, going=NONE):
    return lengths.mean_remaining(np.array(written), np.array(going, np.int64)).tolist()


@given(st.lists(st.integers(1, 30), max_size=40), st.integers(0, 45), st.sampled_from([0.0, 0.1, 0.4, 0.5, 0.8, 1.0]))
def test_a_guess_is_the_least_length_that_few_enough_of_those_still_there_are_longer_than(lengths, written, quantile):
    cap = 40
    known = lengths_of(*lengths, cap=cap)

    def longer(than):
        return sum(length > than for length in [*lengths, cap])

    found = int(known.remaining(np.array([written]), quantile)[0])
    allowed = (1.0 - quantile) * longer(written)
    expected = next(length for length in range(cap + 1) if longer(length) <= allowed)
    assert max(found, 1) == max(expected - written, 1)


def test_one_length_is_forgotten_for_each_that_comes():
    lengths = [(7 * number) % 90 + 1 for number in range(WINDOW + 300)]
    known = lengths_of(*lengths, cap=100)
    rising = sorted([*lengths[-WINDOW:], 100])
    assert known.remaining(np.array([0]), 0.5).tolist() == [rising[WINDOW - (WINDOW + 1) // 2]]
    assert [-length for length in known._rising] == [*reversed(rising), 0]


def test_with_the_cap_alone_an_output_is_as_long_as_it_may_be():
    assert OutputLengths(100).remaining(np.array([0, 30, 100]), 0.1).tolist() == [100, 70, 0]


def test_before_any_output_has_ended_all_orders_of_magnitude_are_as_likely():
    known = OutputLengths(4096, 64)
    guesses = [int(known.remaining(np.array([0]), share)[0]) for share in (0.25, 0.5, 0.75)]
    assert guesses == pytest.approx([8, 64, 512], rel=0.15)
    # What has gone on for long is taken to go on for about as long again.
    assert 1.5 < known.remaining(np.array([300]), 0.5)[0] / 300 < 3.5
    for _ in range(64):
        known.note(20)
    assert known.remaining(np.array([0]), 0.9).tolist() == [20]
    assert known.remaining(np.array([20]), 0.1).tolist() == [4076]


def test_the_mean_leaves_assumed_lengths_the_cap_and_what_left_the_window_out():
    assert lengths_of(assumed=64).mean is None
    assert (lengths_of(10, 20, assumed=64).mean, lengths_of(*[5] * 300, *[7] * WINDOW).mean) == (15, 7)
    assert lengths_of(*[5] * WINDOW, *[7] * (WINDOW // 2)).mean == 6


def test_a_sequence_goes_on_as_those_did_that_were_longer_where_any_are_known():
    assert remaining(lengths_of(10, 20, 30), [0, 9, 10, 15, 29]) == pytest.approx([20, 11, 15, 10, 1])
    assert np.isnan(remaining(lengths_of(), [0])).all()
    assert np.isnan(remaining(lengths_of(10), [10, 50])).all()


def test_those_that_go_on_count_as_longer():
    # Of four, all reach 10 and one ends, of three one ends at 20, of two one ends at 30; the last goes on, and ends at one in 100 ÷ 3.
    expected = 10 + 7.5 + 5 + 100 / 3 / 4
    assert remaining(lengths_of(10, 20, 30), [0, 40], [40]) == pytest.approx([expected, 100 / 3])


def test_what_ended_early_does_not_make_all_short():
    chance = np.random.default_rng(1)
    lengths = chance.geometric(1 / 200, 1000)
    ended = lengths_of(*lengths[lengths < 100].tolist())
    assert ended.mean < 60
    (found,) = remaining(ended, [0], [100] * int((lengths >= 100).sum()))
    assert found == pytest.approx(200, rel=0.15)
