"""What a router knows of the content of replicas is what their memories have."""

import numpy as np
import pytest

from paged import BlockManager, LayerGroup, Request, RestartPoint, Scheduler
from paged.engine.replica_index import DEVICE, HOST, RESTART, ReplicaIndex, key_of, prompt_keys
from paged.errors import InvalidConfig, UnknownReplica

from ..driving import steps_of  # noqa: TID252

FOUR = prompt_keys(range(100, 117), 4)
SEVEN = np.array([7], np.uint64)


def index_of(*replicas):
    index = ReplicaIndex()
    for replica in replicas:
        index.add(replica)
    return index


def serve(scheduler, id, prompt, salt=None):
    scheduler.add(Request(id=id, prompt=prompt, max_tokens=1, salt=salt))
    steps_of(scheduler, token=0)


def num_until_last(keys, some):
    return max([number for number, key in enumerate(keys.tolist(), 1) if key in some], default=0)


@pytest.mark.parametrize("salt", [None, "salt"])
def test_keys_are_the_last_64_bits_of_the_hashes_of_memory(salt):
    scheduler = Scheduler(BlockManager(8, 4))
    serve(scheduler, "a", range(9), salt)
    [stored] = scheduler.manager.take_events()
    assert prompt_keys(range(9), 4, salt and (salt, None, None)).tolist() == [
        key_of(digest) for digest in stored.hashes
    ]


@pytest.mark.parametrize("seed", range(20))
def test_depths_are_those_of_a_look_up_in_each_memory(seed):
    random = np.random.default_rng(seed)
    index, schedulers = index_of("a", "b", "c"), {}
    heads = [random.integers(0, 9, 20).tolist() for _ in range(3)]
    prompts = [
        heads[random.integers(3)][: random.integers(1, 20)] + random.integers(0, 9, 9).tolist() for _ in range(20)
    ]
    for name in "abc":
        schedulers[name] = Scheduler(BlockManager(int(random.integers(16, 40)), 2, host_blocks=8))
    for number, prompt in enumerate(prompts):
        name = "abc"[random.integers(3)]
        serve(schedulers[name], str(number), prompt)
        index.apply(name, schedulers[name].manager.take_events())
        for asked in prompts:
            found = index.depths(prompt_keys(asked, 2))
            for each, scheduler in schedulers.items():
                hit = scheduler.manager.lookup(asked)
                assert found.get(each, 0) == (hit.num_tokens + hit.host_tokens) // 2


@pytest.mark.parametrize("seed", range(10))
def test_depths_and_the_deepest_are_those_of_a_set_of_blocks_for_each_replica(seed):
    random = np.random.default_rng(seed)
    paths = random.integers(1, 1 << 63, (3, 70), np.uint64)
    for path in paths[1:]:
        shared = random.integers(70)
        path[:shared] = paths[0, :shared]
    index, names, all_keys = index_of("a", "b"), "abc", set(paths.ravel().tolist())
    index.add("c", restart_points=True)
    has = {(name, place): set() for name in names for place in (DEVICE, HOST, RESTART)}
    for _ in range(100):
        name, path = names[random.integers(3)], paths[random.integers(3)]
        place = random.choice([DEVICE, HOST, RESTART] if name == "c" else [DEVICE, HOST])
        # Blocks go tail first: what is left is the beginning of a path.
        left = path[: random.integers(70)] if place != RESTART else random.choice(path, 5)
        match random.integers(9):
            case 0:
                index.clear(name)
                has.update({(name, each): set() for each in (DEVICE, HOST, RESTART)})
            case 8:
                index.remove(name)
                assert name not in index.depths(path)
                index.add(name, restart_points=name == "c")
                has.update({(name, each): set() for each in (DEVICE, HOST, RESTART)})
            case 1 | 2:
                index.drop(name, all_keys - set(left.tolist()), place)
                has[name, place] &= set(left.tolist())
            case _:
                index.store(name, left, place)
                has[name, place] |= set(left.tolist())
        for keys in paths:
            depths, deepest = index.depths(keys), index.deepest(keys)
            for each in names:
                blocks = has[each, DEVICE] | has[each, HOST]
                depth = next((i for i, key in enumerate(keys.tolist()) if key not in blocks), 70)
                ends = has[each, RESTART] if each == "c" else blocks
                assert depths.get(each, 0) == num_until_last(keys[:depth], ends)
                assert deepest.get(each, 0) == num_until_last(keys, has[each, DEVICE])


@pytest.mark.parametrize("num", [1, 2, 5, 64, 200])
def test_depths_of_a_long_prompt_are_exact_for_few_replicas_and_for_many_a_64th_too_low_at_most(num):
    random = np.random.default_rng(num)
    keys, names = random.integers(0, 1 << 63, 5000, np.uint64), [str(number) for number in range(num)]
    index, had = index_of(*names), dict(zip(names, random.integers(1, 5001, num).tolist(), strict=True))
    for name, depth in had.items():
        index.store(name, keys[:depth])
    found = index.depths(keys)
    missed = [had[name] - found[name] for name in names]
    assert min(missed) == 0 and max(missed) <= (0 if num <= 5 else 5000 // 64 + 1)
    assert max(found.values()) == max(had.values())


@pytest.mark.parametrize("side", [LayerGroup("window", 6), LayerGroup("state")])
def test_a_replica_with_layers_of_several_kinds_has_its_deepest_restart_point(side):
    random = np.random.default_rng(0)
    scheduler = Scheduler(BlockManager(60, 4, groups=[LayerGroup("full"), side]), max_tokens_per_step=16)
    index, blocks, deeper = index_of("plain"), index_of("a"), 0
    index.add("a", restart_points=True)
    index.store("plain", FOUR)
    head = random.integers(0, 50, 40).tolist()
    for number in range(30):
        prompt = head[: random.integers(4, 40)] + random.integers(0, 50, random.integers(1, 30)).tolist()
        serve(scheduler, str(number), prompt)
        events = scheduler.manager.take_events(restart_points=True)
        index.apply("a", events)
        blocks.apply("a", [event for event in events if not isinstance(event, RestartPoint)])
        for asked in (prompt, head, head[:21]):
            keys = prompt_keys(asked, 4)
            expected = scheduler.manager.lookup(asked).num_tokens // 4
            assert index.depths(keys).get("a", 0) == expected
            deeper += blocks.depths(keys).get("a", 0) != expected
    assert deeper, "some restart points were not the deepest blocks"
    assert index.depths(FOUR)["plain"] == 4


def test_blocks_of_replicas_that_are_gone_are_swept():
    index = index_of("a", "b")
    index.store("b", [7])
    for _ in range(3):
        index.store("a", range(60_000))
        index.clear("a")
    assert len(index) < 130_000 and index.depths(SEVEN) == {"b": 1}


def test_blocks_that_are_stored_twice_count_once():
    index = index_of("a")
    for _ in range(2):
        index.store("a", range(60_000))
    index.clear("a")
    assert len(index) == 60_000, "too few for a sweep"


def test_masks_do_not_grow_with_what_was_cleared():
    index = index_of("a")
    for number in range(30):
        index.store("a", range(20_000) if number % 2 else ())
        index.clear("a")
    index.store("a", [7])
    assert index._masks[DEVICE][7] < 1 << 10


def test_replicas_are_named_once_and_known():
    index = index_of("a")
    with pytest.raises(InvalidConfig, match="'a' already"):
        index.add("a")
    for call in (index.clear, index.remove, lambda name: index.store(name, [1]), lambda name: index.drop(name, [1])):
        with pytest.raises(UnknownReplica, match='unknown replica "z"; known are a'):
            call("z")
