"""Layers of several kinds in one pool of pages: states beside windows and full layers, refusals, and what a whole life leaves behind."""

import numpy as np
import pytest

from paged import LayerGroup, Policy

HYBRID = (LayerGroup("full"), LayerGroup("state", pages=3))


def test_Q16_who_gives_way_with_a_state_gives_way_whole(make_scheduler, request_of, step):
    # 4 blocks and 2 states of a page each.
    groups = [LayerGroup("full"), LayerGroup("state")]
    scheduler = make_scheduler(6, 4, groups=groups, prefix_caching=False, policy="vllm")
    for id in ("first", "second"):
        scheduler.add(request_of(id, 4, max_tokens=8))
    for _ in range(5):
        step(scheduler)
    assert scheduler.manager.device.num_free == 0
    taken = step(scheduler)
    assert taken.tokens == {"first": 1}
    assert taken.batch.preempted == (("second", "recompute"),)
    assert scheduler.status("second") == "waiting"
    (row,) = scheduler.manager.rows.live.tolist()
    assert scheduler.manager.device.num_used == 4 and len(scheduler.manager.table(row)) == 3


def test_Q_a_cancelled_share_leaves_no_state_and_its_request_begins_anew(make_scheduler, run):
    scheduler = make_scheduler(12, 4, {"r": (6, 3)}, groups=HYBRID, prefix_caching=False)
    scheduler.update(scheduler.schedule(), np.array([7]))
    scheduler.cancel(scheduler.schedule())
    assert (scheduler.status("r"), scheduler.manager.device.num_used) == ("waiting", 0)
    batch = scheduler.schedule()
    assert (batch.num_tokens.tolist(), batch.groups[1].read.tolist()) == ([7], [[-1, -1, -1]])
    (output,) = scheduler.update(batch, np.array([8]))
    assert output.token_ids == [8]
    run(scheduler)
    assert scheduler.stats().recomputed_tokens == 6


def test_Q_one_who_went_to_the_host_with_the_state_of_a_share_that_is_cancelled_begins_anew(make_scheduler, request_of):
    policy = Policy(name="swaps", preemption="swap", take="whole", composition="in_order")
    scheduler = make_scheduler(13, 4, groups=HYBRID, host_blocks=20, policy=policy)
    for name, fields in (("first", {"writes_cache": False}), ("away", {})):
        scheduler.add(request_of(name, 4 if name == "away" else 8, **fields))
    scheduler.update(scheduler.schedule(), [7])
    # The next share of "away" reads what the last one left, and writes another state, which goes to the host.
    batches = [scheduler.schedule() for _ in range(2)]
    assert batches[1].preempted == (("away", "swap"),)
    for batch in reversed(batches):
        scheduler.cancel(batch)
    assert scheduler.status("away") == "waiting"


def begun(scheduler, request):
    """Serve the request to its end; where each of its shares began, and the states that they read and wrote."""
    scheduler.add(request)
    starts, states = [], []
    while scheduler.has_unfinished:
        batch = scheduler.schedule()
        starts += (batch.seq_lens - batch.num_tokens).tolist()
        states += [(group.read[0].tolist(), group.write[0].tolist()) for group in batch.groups[-1:]]
        scheduler.update(batch, np.full(int(batch.samples.sum()), 7))
        assert scheduler.check() == []
    return starts, states


ALIKE = [LayerGroup("full"), LayerGroup("state")]


def test_Q8_a_state_is_kept_at_a_prompts_last_block_and_read_by_the_next_one(make_scheduler, request_of):
    scheduler = make_scheduler(30, 2, groups=ALIKE)
    starts, states = begun(scheduler, request_of("a", [1, 2, 3, 4, 5, 6, 7], max_tokens=1))
    # A chunk ends where a state is wanted.
    assert starts == [0, 6]
    kept = states[0][1]
    assert states[1][0] == kept != states[1][1]
    for id, last in (("b", 8), ("c", 9)):
        starts, states = begun(scheduler, request_of(id, [1, 2, 3, 4, 5, 6, last, last], max_tokens=1))
        assert starts == [6]
        # It stays what it was for the one after.
        assert states[0][0] == kept != states[0][1]


def test_Q9_full_blocks_alone_are_of_no_use_when_the_states_are_gone(make_scheduler, request_of):
    scheduler = make_scheduler(7, 4, groups=ALIKE)
    first = list(range(1, 9))
    begun(scheduler, request_of("a", first, max_tokens=1))
    # 13 tokens in 4 blocks, and 2 states: one page is left of what was there.
    begun(scheduler, request_of("b", list(range(11, 24)), max_tokens=1))
    starts, _ = begun(scheduler, request_of("c", first, max_tokens=1))
    assert starts[0] == 0


def test_Q11_a_hit_ends_where_a_state_is_kept_though_more_blocks_are_there(make_scheduler, request_of):
    # 51 tokens are computed in 4 blocks; one state is kept at 32, where the prompt's last full block ends, and no page is left for another.
    scheduler = make_scheduler(6, 16, groups=ALIKE)
    prompt = list(range(40))
    begun(scheduler, request_of("a", prompt, max_tokens=12))
    starts, _ = begun(scheduler, request_of("b", prompt + [7] * 10, max_tokens=1))
    assert starts[0] == 32


def test_Q12_the_whole_prompt_again_begins_where_a_row_ended_within_a_block(make_scheduler, request_of):
    # One row ends at 33, 2 blocks and a token; another one computes 4 full blocks of the same.
    scheduler = make_scheduler(60, 16, groups=ALIKE, max_tokens_per_step=70)
    prompt = list(range(70))
    begun(scheduler, request_of("a", prompt[:33], max_tokens=1))
    starts, _ = begun(scheduler, request_of("b", prompt[:49], max_tokens=1))
    assert starts == [33, 48]
    starts, states = begun(scheduler, request_of("c", [*prompt[:33], *range(500, 530)], max_tokens=1))
    # It is still there for others, and nobody writes what is kept.
    assert starts[0] == 33 and states[0][0] != states[0][1]
    starts, _ = begun(scheduler, request_of("d", prompt, max_tokens=1))
    assert (starts[0], scheduler.manager.device.num_used) == (49, 0)


@pytest.mark.parametrize(
    "groups", [ALIKE, [*ALIKE, LayerGroup("window", 20, pages=2)], [LayerGroup("window", 9), ALIKE[1]]]
)
def test_the_next_turn_of_a_conversation_computes_nothing_twice(make_scheduler, request_of, groups):
    scheduler, known = make_scheduler(200, 16, groups=groups), list(range(21))
    for turn in range(5):
        looked_up = scheduler.manager.lookup(known).num_tokens
        starts, _ = begun(scheduler, request_of(str(turn), known, max_tokens=9))
        # The last token of an answer is computed with the next turn.
        assert starts[0] == looked_up == (len(known) - 4 if turn else 0)
        known += [7] * 9 + [100 + turn] * 3
    assert scheduler.manager.reset_cache()
    assert scheduler.manager.device.num_free == 200


def test_a_newer_end_replaces_the_one_before(make_scheduler, request_of):
    scheduler = make_scheduler(80, 16, groups=ALIKE)
    begun(scheduler, request_of("a", range(20), max_tokens=1))
    begun(scheduler, request_of("b", range(25), max_tokens=1))
    assert scheduler.manager.lookup([*range(30)]).num_tokens == 25
    assert scheduler.manager.lookup([*range(24), 0, 0]).num_tokens == 16
    # A node's blocks, its state, and what the newer end has.
    assert scheduler.manager.device.num_cached == 1 + 1 + 2


def test_Q15_chunks_end_where_a_state_is_wanted_and_nowhere_over_it(make_scheduler, request_of):
    for budget in (1600, 1000, 364, 331, 1599, 1601, 2531):
        scheduler = make_scheduler(500, 16, groups=ALIKE, max_tokens_per_step=budget)
        starts, _ = begun(scheduler, request_of(f"r{budget}", 3602, max_tokens=1))
        assert 3600 in starts
        whole = [start for start in starts if start < 3600]
        assert whole == list(range(0, 3600, budget))


def test_Q18_pages_of_one_kind_become_those_of_another(make_scheduler, request_of):
    groups = [LayerGroup("full"), LayerGroup("state", pages=3)]
    scheduler = make_scheduler(15, 2, groups=groups)
    begun(scheduler, request_of("a", 12, max_tokens=1))
    manager = scheduler.manager
    assert (manager.device.num_cached, manager.device.num_free) == (12, 3)
    starts, _ = begun(scheduler, request_of("b", 8, max_tokens=1))
    # Its 4 blocks and a state were wanted, and 3 pages were free.
    assert (starts[0], manager.device.num_used) == (0, 0)


def test_Q10_a_state_is_found_while_the_row_that_wrote_it_still_runs(make_scheduler, request_of):
    scheduler = make_scheduler(30, 4, {"a": ([1, 2, 3, 4, 6], 9)}, groups=ALIKE)
    for _ in range(3):
        batch = scheduler.schedule()
        scheduler.update(batch, np.full(int(batch.samples.sum()), 7))
    scheduler.add(request_of("b", [1, 2, 3, 4, 5], max_tokens=1))
    batch = scheduler.schedule()
    assert dict(zip(batch.ids, batch.num_tokens.tolist(), strict=True)) == {"a": 1, "b": 1}
    place = batch.ids.tolist().index("b")
    state = batch.groups[1]
    assert state.read[place].tolist() != state.write[place].tolist()
    assert (state.read[place] >= 0).all()


def test_Q17_the_state_that_was_used_longest_ago_makes_room_for_a_wanted_one(make_scheduler, request_of):
    # Each leaves two: at its last full block, and at its end. Of the first one's the older went for the third's.
    scheduler = make_scheduler(5, 2, groups=[LayerGroup("state")])
    for token in (1, 2, 3):
        begun(scheduler, request_of(f"r{token}", [token] * 3, max_tokens=1))
    found = [begun(scheduler, request_of(f"again{token}", [token] * 3, max_tokens=1))[0][0] for token in (2, 3, 1)]
    assert found == [2, 2, 0]


def test_a_state_is_kept_where_the_caller_says_that_others_begin(make_scheduler, request_of, run):
    scheduler = make_scheduler(200, 4, groups=HYBRID, max_chunk=100)
    scheduler.add(request_of("first", range(30), max_tokens=1, keep_at=(9, 22)))
    ends = [step.batch.seq_lens.tolist() for step in run(scheduler)]
    assert ends[:3] == [[8], [20], [28]]
    for id, alike, hit in (("at 20", 23, 20), ("at 8", 12, 8), ("before", 7, 0)):
        scheduler.add(request_of(id, [*range(alike), *range(500, 510)], max_tokens=1))
        usage = next(output.usage for step in run(scheduler) for output in step.outputs.values())
        assert (id, usage.hit_tokens) == (id, hit)


@pytest.mark.parametrize("beside", [LayerGroup("state", pages=3), LayerGroup("window", 6)])
def test_what_a_prompt_shares_with_those_that_wait_is_kept_the_first_time(make_scheduler, request_of, run, beside):
    scheduler = make_scheduler(60, 4, groups=(LayerGroup("full"), beside), max_sequences=1, max_chunk=100)
    for number, length in enumerate((40, 23, 23)):
        scheduler.add(request_of(str(number), [*range(length), *range(500 + 50 * number, 510)], max_tokens=1))
    hits = {id: output.usage.hit_tokens for step in run(scheduler) for id, output in step.outputs.items()}
    assert hits == {"0": 0, "1": 20, "2": 20}


def test_of_what_is_retained_together_states_leave_before_full_blocks(make_manager, compute):
    manager = make_manager(12, 4, groups=HYBRID)
    row = manager.add(range(17))
    compute(manager, row, 16)
    compute(manager, row, 1)
    manager.free([row])
    assert (manager.retain(range(16), priority=1), manager.lookup(range(17)).num_tokens) == (16, 16)
    # This takes the end of the row, which is not retained, and one page more the first of what is.
    other = manager.add(range(100, 108))
    compute(manager, other)
    assert manager.lookup(range(17)).num_tokens == 16
    manager.reserve([other], [3])
    # The four blocks that were retained, and the other row's two.
    assert (manager.lookup(range(17)).num_tokens, len(manager.cached_contents())) == (0, 6)


def test_states_that_two_rows_read_in_one_batch_are_kept_each_for_its_own_row(make_manager):
    manager = make_manager(40, 4, groups=ALIKE)
    prompts = range(13), range(100, 113)
    rows = [manager.add(prompt, keep_at=[4]) for prompt in prompts]
    for count in (4, 8):
        manager.allocate(rows, count)
        manager.confirm()
    assert [manager.lookup(prompt).num_tokens for prompt in prompts] == [4, 4]


def test_a_state_is_wanted_where_a_third_prompt_parts_from_two_that_parted_there(make_manager, serve):
    manager = make_manager(40, 4, groups=ALIKE, row_ends=False)
    for length, last in ((8, 60), (8, 70)):
        serve(manager, [*range(length), *range(last, last + 2 + last // 70 * 8)])
    assert manager.next_end(manager.add([*range(8), *range(80, 90)]), 18) == 8


def drafted(make_scheduler, request_of, drafts, num_pages=12, length=3, **options):
    """A scheduler with request "r", whose prompt is computed and whose first output is 70, and the batch in which that has these drafts."""
    scheduler = make_scheduler(num_pages, 4, {"r": (length, 20)}, groups=HYBRID, **options)
    scheduler.update(scheduler.schedule(), [70])
    return scheduler, scheduler.schedule(drafts={"r": drafts})


def states_of(batch):
    """The pages from which the first row of a batch reads its states, and those to which it writes them."""
    return batch.groups[1].read[0].tolist(), batch.groups[1].write[0].tolist()


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("right", [[], [71]])
def test_wrong_drafts_set_a_row_back_to_its_old_states(make_scheduler, request_of, right, caching):
    scheduler, batch = drafted(make_scheduler, request_of, [71, 72], prefix_caching=caching)
    read, _ = states_of(batch)
    (output,) = scheduler.update(batch, [*right, 9], [len(right) + 1])
    # The tokens are answers all the same.
    assert output.token_ids == [*right, 9]
    row, rows = scheduler.row_of("r"), scheduler.manager.rows
    assert (int(rows.num_computed[row]), int(rows.num_scheduled[row])) == (3, 0)
    assert scheduler.manager.device.num_used == 1 + 3
    # More than one token to go is no decode: it takes no drafts, and there is nothing to go back from.
    batch = scheduler.schedule(drafts={"r": [1, 2]})
    assert (batch.token_ids.tolist(), batch.num_drafts.tolist()) == ([70, *right, 9], [0])
    assert states_of(batch) == (read, read)
    scheduler.update(batch, [10])
    batch = scheduler.schedule(drafts={"r": [1, 2]})
    assert (batch.token_ids.tolist(), batch.num_drafts.tolist()) == ([10, 1, 2], [2])
    assert scheduler.stats().recomputed_tokens == 1 + len(right)
    scheduler.cancel(batch)


def test_a_row_whose_states_find_no_page_gets_no_drafts(make_scheduler, request_of):
    # A block and 3 pages of states are held; 2 and 3 are free. Its fifth token takes a block of those 3, too.
    for num_pages, length, count in ((6, 2, 0), (7, 2, 1), (7, 3, 0), (8, 3, 1)):
        scheduler, batch = drafted(make_scheduler, request_of, [71], num_pages, length, prefix_caching=False)
        assert batch.num_drafts.tolist() == [count]
        scheduler.cancel(batch)


def test_a_row_without_drafts_takes_no_pages_from_those_of_the_next_one(make_scheduler):
    scheduler = make_scheduler(11, 4, {"a": (2, 9), "b": (2, 9)}, groups=HYBRID, prefix_caching=False)
    scheduler.update(scheduler.schedule(), [70, 70])
    assert scheduler.schedule(drafts={"b": [71]}).num_drafts.tolist() == [0, 1]


@pytest.mark.parametrize("length", [5, 7])
def test_the_state_that_drafts_left_is_not_that_of_a_token_more_or_less(make_scheduler, length):
    scheduler = make_scheduler(20, 4, {"r": ([1, 2, 3], 20)}, groups=HYBRID)
    for token in range(4, length + 2):
        scheduler.update(scheduler.schedule(), [token])
    scheduler.update(scheduler.schedule(drafts={"r": [length + 2]}), [length + 2, length + 3], [2])
    assert scheduler.manager.lookup(range(1, 20)).num_tokens == 0


def test_drafts_behind_a_first_token_have_no_states_to_go_back_to(make_scheduler):
    scheduler = make_scheduler(12, 4, {"r": (1, 9)}, groups=HYBRID)
    scheduler.cancel(scheduler.schedule())
    batch = scheduler.schedule(drafts={"r": [1, 2]})
    assert (batch.num_drafts.tolist(), batch.positions.tolist()) == ([2], [0, 1, 2])
    assert batch.groups[1].read.tolist() == [[-1, -1, -1]]
    scheduler.update(batch, [7])
    # Not even a first block is left.
    assert scheduler.manager.device.num_used == 0
    batch = scheduler.schedule()
    assert (batch.positions.tolist(), batch.groups[1].read.tolist()) == ([0, 1], [[-1, -1, -1]])


@pytest.mark.parametrize(
    ("beside", "num_pages"), [(LayerGroup("state", pages=8), 86), (LayerGroup("window", 16, pages=4), 104)]
)
def test_what_a_conversation_left_makes_room_before_what_another_needs(make_scheduler, request_of, beside, num_pages):
    # Three of them take turns in a pool that holds one state, or one window, of each, and little else.
    scheduler = make_scheduler(num_pages, 4, groups=[LayerGroup("full"), beside], max_tokens_per_step=64)
    known = {name: [1000 * name + token for token in range(18)] for name in (1, 2, 3)}
    for turn in range(5):
        for name, tokens in known.items():
            starts, _ = begun(scheduler, request_of(f"{name}.{turn}", tokens, max_tokens=6))
            assert starts[0] >= len(tokens) - 8 or not turn
            known[name] = tokens + [7] * 6 + [2000 + turn] * 3


def test_Q_two_requests_of_one_batch_read_one_state_and_each_lets_go_of_it(make_scheduler, request_of, step):
    scheduler = make_scheduler(60, 4, groups=HYBRID)
    for ends in ([9], [50, 60]):
        for end in ends:
            scheduler.add(request_of(f"r{end}", [*range(8), end], max_tokens=3))
        while scheduler.has_unfinished:
            step(scheduler)
    assert scheduler.stats().hit_tokens == 16
    assert scheduler.manager.device.num_used == 0
