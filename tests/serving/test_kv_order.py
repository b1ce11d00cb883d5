"""A reader of KV events that loses some, comes late or outlives the publisher has what the memory layer holds; all of it without sockets."""

from itertools import count

import pytest
from hypothesis import event, given, settings, strategies as st

from paged import LayerGroup
from paged.errors import EventsLost, InconsistentEvent
from paged.serving.kv_index import KvIndex
from paged.serving.kv_journal import Journal
from paged.serving.kv_subscriber import KvFollower
from paged.serving.kv_wire import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, decoded

from .tiny_engine import TinyEngine, shown  # noqa: TID252

PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=24)
SALTS = st.sampled_from([None, None, "one", "two"])
ADD = st.tuples(st.just("add"), PROMPTS, st.integers(1, 9), SALTS)
STEP = st.tuples(st.sampled_from(["step", "step", "step", "lost step", "lost step"]))
CALLS = st.one_of(
    ADD, ADD, STEP, STEP, STEP, st.tuples(st.sampled_from(["ask", "late", "settle", "reset", "begin again"]))
)


class Reader:
    """A follower and its index, which ask a journal directly."""

    def __init__(self):
        self.follower, self.index = KvFollower(), KvIndex()

    def see(self, seq, batch):
        # What comes while an answer is awaited is in the answer.
        if self.follower.wants is None:
            self.apply(self.follower.see(seq, batch))

    def ask(self, journal):
        while self.follower.wants is not None:
            answer = [(seq, decoded(payload)) for seq, payload in journal.since(self.follower.wants)]
            self.apply(self.follower.hear(answer))

    def apply(self, batches):
        for seq, batch in batches:
            assert self.index.apply(seq, batch)


class World:
    """An engine, what it published, and its readers, of which some lose what is published."""

    def __init__(self, kept, groups=()):
        self.kept, self.groups, self.clock, self.readers, self.prompts = kept, groups, count(), [Reader()], []
        self.begin()

    def begin(self):
        self.engine = TinyEngine(40, groups=self.groups) if self.groups else TinyEngine()
        self.journal = Journal(4, self.kept, restart_points=bool(self.groups))
        self.publish(is_lost=True)

    def publish(self, is_lost=False):
        events = list(self.engine.manager.take_events(restart_points=True))
        if events or not self.journal.next_seq:
            seq, payload = self.journal.add(float(next(self.clock)), events)
            for reader in [] if is_lost else self.readers:
                reader.see(seq, decoded(payload))

    def settle(self):
        self.publish(is_lost=True)
        for reader in self.readers:
            reader.follower.doubt()
            reader.ask(self.journal)
            assert shown(reader.index) == self.engine.contents()
            assert reader.index.next_seq == self.journal.next_seq
            for prompt, salt in self.prompts[-4:]:
                namespace = None if salt is None else (salt, None, None)
                hit = self.engine.manager.lookup(prompt, namespace)
                assert reader.index.hits(prompt, namespace) == (hit.num_tokens, hit.host_tokens)

    def call(self, name, *given):
        if name == "add":
            prompt, max_tokens, salt = given
            self.engine.add(prompt, max_tokens, salt=salt)
            self.prompts.append((prompt, salt))
        elif name in ("step", "lost step"):
            self.engine.step()
            self.publish(is_lost=name == "lost step")
        elif name == "ask":
            for reader in self.readers:
                reader.ask(self.journal)
        elif name == "late":
            self.readers.append(Reader())
        elif name == "reset":
            self.engine.finish()
            self.engine.manager.reset_cache()
        elif name == "begin again":
            self.begin()
            for reader in self.readers:
                reader.follower.doubt()
        else:
            self.settle()


@settings(max_examples=100)
@given(st.lists(CALLS, min_size=10, max_size=80), st.integers(1, 6))
def test_whatever_is_lost_a_reader_that_asks_has_what_the_engine_holds(program, kept):
    world = World(kept)
    for call in program:
        world.call(*call)
    world.settle()
    event(f"old batches are gone: {world.journal.next_seq > kept}")
    event(f"the host has some: {bool(world.engine.contents()['CPU'])}")


@pytest.mark.parametrize("side", [LayerGroup("window", 6), LayerGroup("chunk", 8), LayerGroup("state")])
@settings(max_examples=20)
@given(program=st.lists(CALLS, min_size=10, max_size=60), kept=st.integers(1, 6))
def test_where_layers_are_of_several_kinds_it_has_the_deepest_restart_point(side, program, kept):
    world = World(kept, (LayerGroup("full"), side))
    for call in program:
        world.call(*call)
    world.settle()


@settings(max_examples=100)
@given(st.lists(PROMPTS, min_size=1, max_size=12), SALTS)
def test_a_summary_tells_parents_before_children_and_its_summary_is_the_same(prompts, salt):
    world = World(1)
    world.engine.serve(*prompts, salt=salt)
    world.settle()
    told = list(world.readers[0].index.summary())
    again = KvIndex()
    assert again.apply(0, EventBatch(0.0, told))
    assert list(again.summary()) == told
    anywhere = set().union(*world.engine.contents().values())
    known = {None}
    for stored in told:
        assert stored.parent_block_hash in known or stored.parent_block_hash not in anywhere
        known |= set(stored.block_hashes)


def stored(*hashes, parent=None, size=2, tokens=None, medium="GPU", extra_keys=None):
    tokens = [*range(size * len(hashes))] if tokens is None else tokens
    return BlockStored(list(hashes), parent, tokens, size, None, medium, None, extra_keys)


def batch(ts, *events):
    return EventBatch(float(ts), list(events))


def test_an_index_refuses_a_batch_before_which_others_are_missing_and_says_which():
    index = KvIndex()
    assert index.apply(0, batch(0, stored(b"a")))
    assert not index.apply(3, batch(3, stored(b"d")))
    assert (index.missing, shown(index)) == (range(1, 3), {"GPU": {b"a"}, "CPU": set()})
    assert index.apply(1, batch(1, stored(b"b"))) and index.missing == range(0)


def test_a_batch_that_was_applied_is_passed_over_and_one_that_clears_first_is_taken_whatever_its_number():
    index = KvIndex()
    index.apply(0, batch(0, stored(b"a")))
    index.apply(1, batch(1, BlockRemoved([b"a"], "GPU")))
    assert index.apply(0, batch(0, stored(b"a")))
    assert (shown(index)["GPU"], index.next_seq) == (set(), 2)
    for seq in (7, 3):
        assert index.apply(seq, batch(seq, AllBlocksCleared(), stored(bytes([seq]))))
        assert (shown(index)["GPU"], index.next_seq) == ({bytes([seq])}, seq + 1)


@pytest.mark.parametrize(
    ("event", "problem"),
    [
        (stored(b"b", tokens=[1]), "1 blocks of 2 tokens, and 1 tokens"),
        (stored(b"b", size=0), "1 blocks of 0 tokens"),
        (stored(b"b", tokens=[1, -(2**40)]), "no int32: -1099511627776"),
        (stored(b"b", extra_keys=[None, None]), "1 blocks, and extra keys of 2"),
    ],
)
def test_an_event_that_contradicts_itself_is_told_and_changes_nothing(event, problem):
    index = KvIndex()
    index.apply(0, batch(0, stored(b"a")))
    with pytest.raises(InconsistentEvent, match=problem):
        index.apply(1, batch(1, BlockRemoved([b"a"], "GPU"), event))
    assert (shown(index)["GPU"], index.next_seq) == ({b"a"}, 1)


def test_hashes_that_are_integers_and_media_that_are_not_named_are_taken_too():
    index = KvIndex()
    index.apply(0, batch(0, stored(11, 12, medium=None), stored(13, parent=12, medium="CPU")))
    assert index.hit_blocks([11, 12, 13, 14]) == (2, 1)
    index.apply(1, batch(1, BlockRemoved([12], None)))
    assert index.hit_blocks([11, 12, 13]) == (1, 0)


def test_a_block_in_two_media_is_known_until_it_has_left_both():
    index = KvIndex()
    index.apply(0, batch(0, stored(b"a"), stored(b"a", medium="CPU"), BlockRemoved([b"a"], "GPU")))
    assert list(index.summary()) == [stored(b"a", medium="CPU")]
    index.apply(1, batch(1, BlockRemoved([b"a"], "CPU")))
    assert list(index.summary()) == []


def test_a_summary_begins_with_what_came_to_be_known_last_where_the_rest_hangs_off_it():
    index = KvIndex()
    index.apply(0, batch(0, stored(b"c", parent=b"b"), stored(b"b", parent=b"a"), stored(b"a")))
    (told,) = index.summary()
    assert (told.parent_block_hash, told.block_hashes, told.token_ids) == (None, [b"a", b"b", b"c"], [0, 1] * 3)


def following(*answer):
    """A follower that has heard this answer, and doubts nothing."""
    follower = KvFollower()
    follower.hear(list(answer))
    return follower


FIRST = (0, batch(0, AllBlocksCleared()))


def test_a_batch_that_came_with_an_answer_is_passed_over_and_one_of_its_number_at_a_later_time_is_a_new_publishers():
    follower = following(FIRST, (1, batch(1)), (2, batch(2)))
    assert [follower.see(seq, batch(seq)) for seq in (1, 2, 3)] == [[], [], [(3, batch(3))]]
    assert follower.wants is None
    assert follower.see(1, batch(11)) == [] and follower.wants == 3
    # A gap is asked for from the last batch that is known.
    follower = following(FIRST, (1, batch(1)))
    assert follower.see(3, batch(3)) == [] and follower.wants == 1


def test_a_publisher_that_forgot_and_cannot_sum_up_is_told():
    follower = following(FIRST)
    follower.doubt()
    with pytest.raises(EventsLost, match="batches from 0 on are wanted; the publisher's replay has 5"):
        follower.hear([(5, batch(5))])
    assert follower.wants == 0
    with pytest.raises(EventsLost) as found:
        follower.hear([FIRST, (2, batch(2))])
    assert (found.value.seq, found.value.wanted) == (2, 0)


def test_number_0_of_a_publisher_clears_also_where_it_does_not_say_so():
    follower = following(FIRST)
    follower.doubt()
    assert follower.hear([(0, batch(10))]) == []
    index = KvIndex()
    for each in [(0, batch(0, stored(b"a"))), *follower.hear([(0, batch(10, stored(b"b"))), (1, batch(11))])]:
        assert index.apply(*each)
    assert shown(index)["GPU"] == {b"b"}
