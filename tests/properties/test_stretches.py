"""Steps taken at once leave behind exactly what the same steps leave, taken one by one: down to the ids of the blocks."""

import msgspec
import numpy as np
import pytest
from hypothesis import event, given, strategies as st, target

from paged import POLICIES, BlockManager, NeverFits, Request, Scheduler, WrongTokens

CAUTIOUS = msgspec.structs.replace(POLICIES["paged"], name="cautious", known_outputs=0)


@st.composite
def workloads(draw):
    """Requests as (step of arrival, prompt, max_tokens, priority), and the world that they meet."""
    prompts = st.lists(st.integers(0, 1), min_size=1, max_size=9)
    requests = draw(
        st.lists(st.tuples(st.integers(0, 40), prompts, st.integers(1, 30), st.integers(0, 1)), min_size=1, max_size=7)
    )
    world = {
        "num_blocks": draw(st.integers(4, 14)),
        "block_size": draw(st.integers(1, 4)),
        "host_blocks": draw(st.sampled_from([0, 0, 6])),
        "prefix_caching": draw(st.booleans()),
        "policy": draw(st.sampled_from([*sorted(POLICIES), CAUTIOUS])),
        "budget": draw(st.integers(2, 12)),
        "seats": draw(st.integers(1, 6)),
    }
    return sorted(requests, key=lambda request: request[0]), world


class Run:
    """One way through a workload: its own scheduler, the steps it took, and what each decided."""

    def __init__(self, requests, world):
        self.manager = BlockManager(
            world["num_blocks"],
            world["block_size"],
            host_blocks=world["host_blocks"],
            prefix_caching=world["prefix_caching"],
        )
        self.scheduler = Scheduler(
            self.manager, policy=world["policy"], max_tokens_per_step=world["budget"], max_sequences=world["seats"]
        )
        self.requests = list(enumerate(requests))
        self.num_steps = self.num_skipped = 0
        self.log = []

    def add_arrived(self):
        while self.requests and self.requests[0][1][0] <= self.num_steps:
            number, (_, prompt, max_tokens, priority) = self.requests.pop(0)
            try:
                self.scheduler.add(
                    Request(id=f"r{number}", prompt=prompt, max_tokens=max_tokens, priority=priority), now=float(number)
                )
            except NeverFits:
                self.log.append((self.num_steps, "never fits", number))

    def step(self):
        self.add_arrived()
        batch = self.scheduler.schedule(float(self.num_steps))
        tokens = sampled(batch.ids[batch.samples], batch.context_lens[batch.samples])
        outputs = self.scheduler.update(batch, tokens, now=float(self.num_steps))
        decided = (batch.ids.tolist(), batch.num_tokens.tolist(), batch.admitted, batch.preempted)
        if any(decided):
            self.log.append((self.num_steps, *decided, batch.slot_mapping.tolist(), outputs.finish.tolist()))
        self.num_steps += 1

    def skip(self, most):
        """Take what is steady of the coming steps, at most `most`, at once, and note what they would have."""
        if self.requests:
            most = min(most, self.requests[0][1][0] - self.num_steps)
        count = self.scheduler.steady_steps(most)
        if not count:
            return
        ids, known = self.scheduler.steady_ids()
        tokens = np.stack([sampled(ids, known + j) for j in range(count)], axis=1)
        self.scheduler.skip(tokens, now=float(self.num_steps + count - 1))
        rows = [self.scheduler.manager.table(row) for row in rows_of(self.scheduler, ids)]
        size = self.manager.block_size
        for j in range(count):
            slots = [
                int(table[(n + j - 1) // size]) * size + (n + j - 1) % size
                for table, n in zip(rows, known, strict=True)
            ]
            self.log.append((self.num_steps + j, ids.tolist(), [1] * len(ids), (), (), slots, [0] * len(ids)))
        self.num_steps += count
        self.num_skipped += count

    def state(self):
        return (
            self.manager.snapshot(),
            self.manager.stats(),
            self.scheduler.stats(),
            self.scheduler.counts(),
            self.scheduler.check(),
        )


def sampled(ids, lengths):
    """What each request samples at each length: int32, out of two tokens."""
    return np.array(
        [(int(id[1:]) * 7 + int(n) * 5 + int(n) // 3) % 2 for id, n in zip(ids, lengths, strict=True)], np.int32
    )


def rows_of(scheduler, ids):
    return [scheduler._state.requests[id].rows[0] for id in ids]


@given(workload=workloads(), most=st.integers(1, 50))
def test_steps_taken_at_once_are_the_steps_one_by_one(workload, most):
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
    event(f"skipped {min(9, fast.num_skipped * 10 // fast.num_steps)} of 10")
    target(float(fast.num_skipped))


def decoding(**world):
    scheduler = Scheduler(BlockManager(64, 4), max_sequences=8, **world)
    for id, prompt in (("a", [1, 2, 3, 4, 5]), ("b", [2, 2, 3, 4, 5])):
        scheduler.add(Request(id=id, prompt=prompt, max_tokens=40))
    for _ in range(2):
        scheduler.update(scheduler.schedule(), [5, 6])
    return scheduler


def test_the_step_in_which_somebody_ends_is_not_skipped():
    scheduler = decoding()
    assert scheduler.steady_steps(1000) == 37
    assert scheduler.steady_steps(7) == 7
    scheduler.skip(np.ones((2, 37), np.int32))
    assert scheduler.steady_steps(1000) == 0
    batch = scheduler.schedule()
    assert scheduler.update(batch, [1, 1]).finish.tolist() != [0, 0]


def test_somebody_who_comes_ends_the_stretch():
    scheduler = decoding()
    scheduler.add(Request(id="c", prompt=[1], max_tokens=2))
    assert scheduler.steady_steps(1000) == 0


def test_a_step_in_which_somebody_stops_at_a_token_is_not_skipped():
    scheduler = Scheduler(BlockManager(64, 4))
    scheduler.add(Request(id="a", prompt=[1, 2, 3, 4, 5], max_tokens=40, stop_token_ids=[9]))
    for _ in range(2):
        scheduler.update(scheduler.schedule(), [5])
    before = scheduler.manager.snapshot()
    with pytest.raises(WrongTokens, match="stop id"):
        scheduler.skip([[5, 9]])
    assert scheduler.manager.snapshot() == before
    assert scheduler.skip([[5, 5, 5]]).tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    "tokens", [np.ones((2, 39), np.int32), np.ones((1, 2), np.int32), np.ones(2, np.int32), [[1], [-1]], [[1.5], [2.5]]]
)
def test_tokens_for_other_steps_than_the_steady_ones_are_refused_and_change_nothing(tokens):
    scheduler = decoding()
    before = scheduler.manager.snapshot(), scheduler.stats()
    with pytest.raises(WrongTokens):
        scheduler.skip(tokens)
    assert (scheduler.manager.snapshot(), scheduler.stats()) == before
