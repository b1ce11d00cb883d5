"""Steps taken at once leave behind exactly what the same steps leave, taken one by one: down to the ids of the blocks."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st, target

from paged import POLICIES, BlockManager, Request, Scheduler
from paged.errors import NeverFits, WrongTokens
from paged.study import static, tgi
from paged.study.simulator.stretch import skip, steady_batch, steady_steps
from paged.testing.snapshots import snapshot

ON_DEMAND = static("lockstep on demand", reserves=False)
APART = [
    POLICIES["tgi"],
    tgi("by ratio", ratio=0.5, most_steps=None),
    msgspec.structs.replace(tgi("on demand", most_steps=7), reservation="prompt"),
    msgspec.structs.replace(POLICIES["tgi"], name="swapping", reservation="prompt", take="tail", preemption="swap"),
]
CAUTIOUS = msgspec.structs.replace(POLICIES["paged"], name="cautious", known_outputs=0)


def arrivals(steps, min_size, max_size, **fields):
    """Requests as (step of arrival, fields), by arrival."""
    requests = st.lists(st.tuples(steps, st.fixed_dictionaries(fields)), min_size=min_size, max_size=max_size)
    return requests.map(lambda drawn: sorted(drawn, key=lambda request: request[0]))


def worlds(requests, pool, limits):
    return st.tuples(requests, st.fixed_dictionaries(pool), st.fixed_dictionaries(limits))


ANY_REQUESTS = arrivals(
    st.integers(0, 40), 1, 7,
    prompt=st.lists(st.integers(0, 1), min_size=1, max_size=9),
    max_tokens=st.integers(1, 30),
    priority=st.integers(0, 1),
)  # fmt: skip
ANY_POOL = {
    "num_blocks": st.integers(4, 14),
    "block_size": st.integers(1, 4),
    "host_blocks": st.sampled_from([0, 0, 6]),
    "prefix_caching": st.booleans(),
}
ANY_LIMITS = {
    "policy": st.sampled_from([*sorted(POLICIES), CAUTIOUS]),
    "max_tokens_per_step": st.integers(2, 12),
    "max_sequences": st.integers(1, 6),
}
# Long prompts that are walked token by token, of which some begin alike; not all requests use the cache.
LOCKSTEP_REQUESTS = arrivals(
    st.sampled_from([0, 0, 0, 9]), 2, 6,
    prompt=st.builds(
        lambda times, token, length: [1, 0, 1, 1] * times + [token] * length,
        st.integers(0, 2), st.integers(0, 3), st.integers(1, 30),
    ),
    max_tokens=st.integers(1, 12),
    reads_cache=st.booleans(),
    writes_cache=st.booleans(),
)  # fmt: skip
LOCKSTEP_POOL = {
    "num_blocks": st.integers(40, 160),
    "block_size": st.integers(1, 4),
    "prefix_caching": st.sampled_from([True, True, False]),
}
LOCKSTEP_LIMITS = {
    "policy": st.sampled_from([POLICIES["static"], ON_DEMAND]),
    "max_tokens_per_step": st.sampled_from([6, 12, 64]),
    "max_sequences": st.integers(3, 6),
}
# Many wait, under policies that compute prompts or decodes, never both.
APART_LIMITS = ANY_LIMITS | {"policy": st.sampled_from(APART), "max_sequences": st.integers(1, 4)}
WORKLOADS = {
    "under any policy": worlds(ANY_REQUESTS, ANY_POOL, ANY_LIMITS),
    "in the middle of prompts": worlds(LOCKSTEP_REQUESTS, LOCKSTEP_POOL, LOCKSTEP_LIMITS),
    "until newcomers interrupt": worlds(ANY_REQUESTS, ANY_POOL, APART_LIMITS),
}
"""Strategies for (requests, pool, limits)."""


class Run:
    """One way through a workload: its own scheduler, the steps it took, and what each decided."""

    def __init__(self, requests, pool, limits):
        self.manager = BlockManager(**pool)
        self.scheduler = Scheduler(self.manager, **limits)
        self.requests = list(enumerate(requests))
        self.num_steps = self.num_skipped = 0
        self.log = []

    def add_arrived(self):
        while self.requests and self.requests[0][1][0] <= self.num_steps:
            number, (_, fields) = self.requests.pop(0)
            try:
                self.scheduler.add(Request(id=f"r{number}", **fields), now=float(number))
            except NeverFits:
                self.log.append((self.num_steps, "never fits", number))

    def step(self):
        self.add_arrived()
        batch = self.scheduler.schedule(float(self.num_steps))
        tokens = sampled(batch.ids[batch.samples], batch.seq_lens[batch.samples])
        outputs = self.scheduler.update(batch, tokens, now=float(self.num_steps))
        decided = (batch.ids.tolist(), batch.num_tokens.tolist(), batch.admitted, batch.preempted)
        if any(decided):
            self.log.append((self.num_steps, *decided, batch.slot_mapping.tolist(), outputs.finish.tolist()))
        self.num_steps += 1

    def skip(self, most):
        """Take what is steady of the coming steps, at most `most`, at once, and note what they would have."""
        if self.requests:
            most = min(most, self.requests[0][1][0] - self.num_steps)
        count = steady_steps(self.scheduler, most)
        if not count:
            return
        ids, known, num_samples = steady_batch(self.scheduler)
        tokens = [sampled(ids[:num_samples], known[:num_samples] + j) for j in range(count)]
        skip(self.scheduler, np.stack(tokens, axis=1), now=float(self.num_steps + count - 1))
        tables = [self.manager.table(self.scheduler.rows_of(id)[0]) for id in ids]
        size = self.manager.block_size
        for j in range(count):
            last = [(table, n + j - 1) for table, n in zip(tables, known, strict=True)]
            slots = [int(table[place // size]) * size + place % size for table, place in last]
            self.log.append((self.num_steps + j, ids.tolist(), [1] * len(ids), (), (), slots, [0] * num_samples))
        self.num_steps += count
        self.num_skipped += count

    def state(self):
        manager, scheduler = self.manager, self.scheduler
        return snapshot(manager), manager.stats(), scheduler.stats(), scheduler.counts(), scheduler.check()


def sampled(ids, lengths):
    """What each request samples at each length: int32, out of two tokens."""
    return np.array(
        [(int(id[1:]) * 7 + int(n) * 5 + int(n) // 3) % 2 for id, n in zip(ids, lengths, strict=True)], np.int32
    )


@pytest.mark.parametrize("kind", WORKLOADS)
@given(data=st.data(), most=st.integers(1, 50))
def test_steps_taken_at_once_are_the_steps_one_by_one(kind, data, most):
    target(float(compare(data.draw(WORKLOADS[kind]), most).num_skipped))


def test_so_are_they_where_one_that_returns_takes_the_budget():
    prompts_and_most = [([0], 1, 1), ([0, 0], 3, 0), ([0, 0], 6, 0), ([0], 4, 0), ([0, 0], 1, 0)]
    requests = [(0, {"prompt": p, "max_tokens": n, "priority": first}) for p, n, first in prompts_and_most]
    limits = {"policy": "trtllm-max-utilization", "max_tokens_per_step": 4, "max_sequences": 3}
    compare((requests, {"num_blocks": 4, "block_size": 3, "prefix_caching": False}, limits), most=1)


def compare(workload, most):
    """Serve the workload both ways; after each stretch both have the same state. Returns the run that skipped."""
    slow, fast = Run(*workload), Run(*workload)
    while fast.requests or fast.scheduler.has_unfinished:
        fast.step()
        fast.skip(most)
        while slow.num_steps < fast.num_steps:
            slow.step()
        assert slow.state() == fast.state()
        assert fast.num_steps < 3000
    assert slow.log == fast.log
    assert not slow.scheduler.has_unfinished
    return fast


def decoding(**world):
    scheduler = Scheduler(BlockManager(64, 4), max_sequences=8, **world)
    for id, prompt in (("a", [1, 2, 3, 4, 5]), ("b", [2, 2, 3, 4, 5])):
        scheduler.add(Request(id=id, prompt=prompt, max_tokens=40))
    for _ in range(2):
        scheduler.update(scheduler.schedule(), [5, 6])
    return scheduler


def test_the_step_in_which_somebody_ends_is_not_skipped():
    scheduler = decoding()
    assert steady_steps(scheduler, 1000) == 37
    assert steady_steps(scheduler, 7) == 7
    skip(scheduler, np.ones((2, 37), np.int32))
    assert steady_steps(scheduler, 1000) == 0
    batch = scheduler.schedule()
    assert scheduler.update(batch, [1, 1]).finish.tolist() != [0, 0]


def test_requests_that_wait_do_not_end_a_stretch_before_they_may_interrupt():
    scheduler = decoding(policy="tgi")
    for number in range(2):
        scheduler.add(Request(id=str(number), prompt=[1] * 60, max_tokens=200))
    # One step of decoding is behind, and 20 are to be.
    assert steady_steps(scheduler, 1000) == 19
    skip(scheduler, np.ones((2, 19), np.int32))
    assert steady_steps(scheduler, 1000) == 0
    assert scheduler.update(scheduler.schedule(), [1, 1]).finish.tolist() == [0, 0]
    # They do not fit, so nobody need look again until somebody ends.
    assert steady_steps(scheduler, 1000) == 17


def test_a_step_in_which_somebody_stops_at_a_token_is_not_skipped():
    scheduler = Scheduler(BlockManager(64, 4))
    scheduler.add(Request(id="a", prompt=[1, 2, 3, 4, 5], max_tokens=40, stop_token_ids=[9]))
    for _ in range(2):
        scheduler.update(scheduler.schedule(), [5])
    before = snapshot(scheduler.manager)
    with pytest.raises(WrongTokens, match="stop id"):
        skip(scheduler, [[5, 9]])
    assert snapshot(scheduler.manager) == before
    assert skip(scheduler, [[5, 5, 5]]).tolist() == [0, 0, 1]
