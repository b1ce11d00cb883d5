"""The named policies, each by what sets it apart: what it reserves, how it fills a step, and what it says while somebody waits."""

import pytest

from paged.errors import NeverFits
from paged.study import static

LEFT = static("left", is_padded=True)


def drawn(scheduler, id):
    return [int(scheduler.manager.rows.num_blocks[row]) for row in scheduler.rows_of(id)]


def tokens_of(steps):
    return [step.tokens for step in steps]


def test_a_static_batch_begins_at_its_shortest_prompt_and_goes_on_in_lockstep(make_scheduler, run):
    scheduler = make_scheduler(20, 4, {"short": (3, 2), "long": (6, 2)}, policy="static")
    # The long prompt goes on a token a step, and samples when it has none left.
    steps = run(scheduler)
    both = {"short": 1, "long": 1}
    assert tokens_of(steps) == [{"short": 3, "long": 3}, both, {"long": 1}, {"long": 1}, {"long": 1}]
    assert [int(step.batch.samples.sum()) for step in steps] == [1, 1, 0, 1, 1]


def test_a_static_batch_that_pads_on_the_left_begins_with_all_prompts(make_scheduler, run):
    scheduler = make_scheduler(20, 4, {"short": (3, 2), "long": (6, 2)}, policy=LEFT)
    assert tokens_of(run(scheduler)) == [{"short": 3, "long": 6}, {"short": 1, "long": 1}]


@pytest.mark.parametrize("policy", ["static", LEFT], ids=["none", "left"])
def test_each_row_of_a_static_batch_is_preallocated_to_the_longest(make_scheduler, step, policy):
    scheduler = make_scheduler(20, 4, {"long prompt": (12, 2), "long output": (3, 20)}, policy=policy)
    step(scheduler)
    # 12 + 20 tokens each, though none can have so many.
    assert (drawn(scheduler, "long prompt"), drawn(scheduler, "long output")) == ([8], [8])


def test_a_static_batch_is_as_large_as_its_longest_rows_allow(make_scheduler, request_of, step):
    scheduler = make_scheduler(20, 4, {"a": (4, 4), "b": (4, 4)}, policy="static")
    # Three rows of 32 tokens are 24 blocks.
    scheduler.add(request_of("c", 16, max_tokens=16))
    assert step(scheduler).tokens == {"a": 4, "b": 4}
    assert (drawn(scheduler, "a"), drawn(scheduler, "b")) == ([2], [2])


def test_the_budget_splits_a_static_batchs_first_forward_and_nobody_runs_ahead(make_scheduler, run):
    requests = {"a": (3, 2), "b": (3, 2)}
    scheduler = make_scheduler(20, 4, requests, policy="static", max_tokens_per_step=4, prefix_caching=False)
    assert tokens_of(run(scheduler)) == [{"a": 3, "b": 1}, {"b": 2}, {"a": 1, "b": 1}]


def test_orca_max_gives_each_a_region_of_the_models_context(make_scheduler, request_of, step):
    scheduler = make_scheduler(20, 4, policy="orca-max", max_model_len=32)
    for name in ("a", "b", "c"):
        scheduler.add(request_of(name, 4, max_tokens=1 + len(name)))
    assert step(scheduler).tokens == {"a": 4, "b": 4}
    assert (drawn(scheduler, "a"), drawn(scheduler, "b")) == ([8], [8])
    answer = scheduler.explain("c")
    # There would be blocks for the four tokens, and for the few that follow.
    assert (answer.blocks_needed, answer.blocks_free) == (8, 4)


def test_a_region_that_is_not_there_is_named_though_as_many_blocks_are_free(make_scheduler, request_of, step):
    # Two regions of 2 in 7 blocks: 4 | 2 | 1 becomes 2 taken, 2 taken and free, 1.
    scheduler = make_scheduler(7, 4, policy="orca-oracle", prefix_caching=False)
    for name, length in (("a", 4), ("b", 4), ("c", 8)):
        scheduler.add(request_of(name, length, max_tokens=4, expected_tokens=4))
    assert step(scheduler).tokens == {"a": 4, "b": 4}
    answer = scheduler.explain("c")
    assert (answer.blocks_needed, answer.blocks_free) == (3, 3)
    words = "1 contiguous region of 3 blocks, rounded up to a power of two; the largest that is free has 2"
    assert words in str(answer)


@pytest.mark.parametrize(
    ("policy", "expected", "blocks"),
    [
        # 4 prompt tokens and 5 outputs; 4 and 8; 4 and 20; 4 and 20.
        ("orca-oracle", 5, 3),
        ("orca-pow2", 5, 3),
        ("orca-pow2", 9, 5),
        ("orca-oracle", 9, 4),
        # 32 outputs would be more than max_tokens.
        ("orca-pow2", 17, 6),
        # Nobody knows: max_tokens.
        ("orca-oracle", None, 6),
        ("orca-pow2", None, 6),
        ("tgi", 5, 6),
    ],
)
def test_what_is_reserved_at_once_is_drawn(make_scheduler, request_of, step, policy, expected, blocks):
    scheduler = make_scheduler(32, 4, policy=policy)
    scheduler.add(request_of("a", 4, max_tokens=20, expected_tokens=expected))
    step(scheduler)
    assert drawn(scheduler, "a") == [blocks]


@pytest.mark.parametrize("policy", ["orca-oracle", "orca-pow2"])
def test_after_a_hint_that_was_too_small_max_tokens_are_reserved(make_scheduler, request_of, run, policy):
    scheduler = make_scheduler(8, 4, policy=policy, prefix_caching=False)
    for name in "ab":
        scheduler.add(request_of(name, 8, max_tokens=12, expected_tokens=8))
    run(scheduler)
    stats = scheduler.stats()
    assert (stats.preemptions, stats.max_preemptions, stats.finished, stats.output_tokens) == (1, 1, 2, 24)


@pytest.mark.parametrize("policy", ["orca-max", "orca-pow2", "orca-oracle"])
def test_a_prompt_over_the_largest_region_never_fits(make_scheduler, request_of, run, policy):
    # 12 blocks: a region of 8 is the largest, 32 tokens.
    scheduler = make_scheduler(12, 4, policy=policy)
    with pytest.raises(NeverFits, match="1 contiguous region of 9 blocks .* at most. Raise num_blocks to 16") as caught:
        scheduler.add(request_of("over", 32, max_tokens=1))
    assert (caught.value.blocks_needed, caught.value.num_blocks) == (9, 8)
    scheduler.add(request_of("fits", 31, max_tokens=9))
    steps = run(scheduler)
    assert (steps[-1].outputs["fits"].finish_reason, scheduler.stats().output_tokens) == ("length", 1)


def test_what_is_kept_by_count_grows_with_what_is_appended(make_scheduler, step):
    scheduler = make_scheduler(8, 4, {"a": (4, 4)}, policy="trtllm-guaranteed-no-evict")
    step(scheduler)
    # 8 tokens in all, of which one block is held; then 16.
    assert scheduler.num_reserved == 1
    scheduler.append("a", [1] * 8)
    assert scheduler.num_reserved == 3


def test_a_group_takes_a_region_for_each_of_its_sequences(make_scheduler, request_of, step):
    scheduler = make_scheduler(12, 4, policy="orca-oracle")
    with pytest.raises(NeverFits, match="3 contiguous region"):
        scheduler.add(request_of("over", 16, max_tokens=4, num_sequences=3))
    scheduler.add(request_of("fits", 8, max_tokens=4, num_sequences=3))
    step(scheduler)
    assert drawn(scheduler, "fits") == [3, 3, 3]


def test_tgi_lets_newcomers_interrupt_when_there_are_enough_of_them(make_scheduler, request_of, step):
    scheduler = make_scheduler(80, 4, policy="tgi")
    for name in "abcde":
        scheduler.add(request_of(name, 4, max_tokens=40))
    assert set(step(scheduler).tokens) == set("abcde")
    # floor(1.2 * 5) are 6.
    for number in range(5):
        scheduler.add(request_of(f"n{number}", 4, max_tokens=4))
    for _ in range(3):
        assert set(step(scheduler).tokens) == set("abcde")
    assert str(scheduler.explain("n0")).endswith(
        "policy tgi interrupts decoding when 6 requests can enter together, and 5 wait, or after 20 steps that decode, and "
        "there were 3."
    )
    scheduler.add(request_of("n5", 4, max_tokens=4))
    assert set(step(scheduler).tokens) == {f"n{number}" for number in range(6)}
    assert len(step(scheduler).tokens) == 11


def test_tgi_is_not_interrupted_by_many_who_cannot_enter_together(make_scheduler, request_of, step):
    scheduler = make_scheduler(16, 4, {"a": (4, 40), "b": (4, 8)}, policy="tgi")
    step(scheduler)
    for number in range(5):
        scheduler.add(request_of(f"n{number}", 4, max_tokens=4))
    # 2 of 16 blocks are free and one newcomer takes 2; floor(1.2 * 2) are 2.
    assert scheduler.manager.device.num_available == 2
    assert set(step(scheduler).tokens) == {"a", "b"}


def test_guaranteed_no_evict_draws_on_demand_what_it_has_promised(make_scheduler, step, run):
    requests = {"a": (4, 8), "b": (4, 8)}
    scheduler = make_scheduler(4, 4, requests, policy="trtllm-guaranteed-no-evict", prefix_caching=False)
    assert step(scheduler).tokens == {"a": 4}
    assert (drawn(scheduler, "a"), scheduler.manager.device.num_available) == ([1], 3)
    answer = scheduler.explain("b")
    assert (answer.blocks_needed, answer.blocks_free) == (3, 1)
    run(scheduler)
    assert scheduler.stats().preemptions == 0
