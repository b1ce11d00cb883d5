"""Short programs that show one thing about vLLM's memory layer each: what was done, and what came of it, in a sentence.

Found by the kit's machines, or tried because a report of the field asked for it. Each function builds its own manager or scheduler and
returns what it saw; nothing is asserted here, the page says what it means. Knows vLLM's adapters.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from conformance.vllm.manager import VllmManager, request_of, vllm_names
from conformance.vllm.whole import VllmScheduler
from conformance.vllm.whole_machine import build_fcfs, build_priority
from paged import BlockManager, Request, Scheduler
from paged.testing.invariants import references
from paged.testing.scheduler_rig import SchedulerRig
from paged.testing.shadow_kv import ShadowKV
from paged.testing.violation import Violation
from paged.testing.world import World


def failed_step() -> str:
    """A step is scheduled, the engine fails before it computes, and the rows are given back."""
    manager, shadow = VllmManager(6, 2), ShadowKV(6, 2)
    row = manager.add([0, 1, 2])
    manager.allocate([row], [3])
    manager.free([row])
    hit = manager.lookup([0, 1, 5])
    held = shadow.read(hit.blocks, 2).tolist()
    words = [shadow.contents.describe(content) for content in held]
    manager.core.evict_blocks({int(block) + 1 for block in hit.blocks})
    after = manager.lookup([0, 1, 5]).num_tokens
    return f"{hit.num_tokens} tokens hit, their slots hold {words}; after `evict_blocks` of those blocks {after} tokens hit"


def double_free() -> str:
    """The pool's `free_blocks` gets a block of one reference twice in one call, then all free blocks are drawn."""
    pool = VllmManager(6, 2).pool
    blocks = pool.get_new_blocks(2)
    pool.free_blocks([blocks[0], blocks[0]])
    seen = f"accepted, ref count {blocks[0].ref_cnt}"
    try:
        pool.get_new_blocks(pool.get_num_free_blocks())
    except AssertionError:
        seen += f"; drawing the free blocks later fails an assertion and leaves {pool.get_num_free_blocks()} of them in the queue"
    return seen


def double_free_of_a_shared_block() -> str:
    """The same with a block that two requests hold, of which one ends."""
    manager = VllmManager(6, 2)
    first = manager.add([0, 1, 2])
    manager.allocate([first], [3])
    second = manager.add([0, 1, 3])
    shared, own = manager.core.pop_blocks_for_free(manager.requests.pop(first).request)
    manager.pool.free_blocks([own, shared, shared])
    return f"accepted; row {second} still names block {manager.table(second).tolist()[0]}; the kit: {references(manager)[0]}"


def free_twice() -> str:
    """`KVCacheManager.free` of a request that was freed."""
    manager = VllmManager(6, 2)
    row = manager.add([0, 1, 2])
    manager.allocate([row], [3])
    request = manager.requests[row].request
    manager.free([row])
    manager.core.free(request)
    return f"nothing happens; {manager.pool.get_num_free_blocks()} of 6 blocks can be drawn, check: {manager.check()}"


def salts() -> str:
    """Which requests with equal tokens share: an empty salt and none; a salt and an adapter of one spelling."""
    names = vllm_names()
    adapter = names.LoRARequest(lora_name="a", lora_int_id=1, lora_path="/a")
    plain, empty = request_of("x", [0, 1], 2, True), request_of("x", [0, 1], 2, True, cache_salt="")
    salted = request_of("x", [0, 1], 2, True, cache_salt="a")
    adapted = request_of("x", [0, 1], 2, True, lora_request=adapter)
    return (
        f"no salt and salt '' share: {plain.block_hashes == empty.block_hashes}; "
        f"salt 'a' and adapter 'a' share: {salted.block_hashes == adapted.block_hashes}"
    )


def hash_of_a_pickle() -> str:
    """Two requests that are equal in every value; in one of them two equal texts are one object."""
    names, path = vllm_names(), "/adapter"
    again = "".join(list(path))
    same = names.LoRARequest(lora_name=path, lora_int_id=1, lora_path=path)
    equal = names.LoRARequest(lora_name=path, lora_int_id=1, lora_path=again)
    shares = {}
    for hashing in (names.sha256, names.sha256_cbor):
        hasher = names.get_request_block_hasher(2, hashing)
        first, second = (
            names.Request(
                "x", [0, 1], names.SamplingParams(), None, lora_request=adapter, block_hasher=hasher
            ).block_hashes
            for adapter in (same, equal)
        )
        shares[hashing.__name__] = first == second
    hasher = names.get_request_block_hasher(2, names.sha256)
    plain, numpy_ids = (
        names.Request("x", tokens, names.SamplingParams(), None, block_hasher=hasher).block_hashes
        for tokens in ([0, 1], list(np.array([0, 1])))
    )
    return (
        f"the adapters compare equal: {same == equal}; the requests share: {shares}; "
        f"ids as int and as numpy.int64 share under sha256: {plain == numpy_ids}"
    )


def an_id_again_in_flight() -> str:
    """At the scheduler itself: abort "a" while its step runs, add another "a", end the step."""
    scheduler = VllmScheduler(World(num_blocks=8, block_size=2))
    scheduler.add(Request(id="a", prompt=[0, 1, 2], max_tokens=4))
    batch = scheduler.schedule()
    scheduler.abort("a")
    scheduler.outstanding = set()
    scheduler.add(Request(id="a", prompt=[5, 6, 7, 8], max_tokens=4))
    outputs = scheduler.update(batch, np.array([3], np.int32))
    request = scheduler.core.requests["a"]
    return (
        f"the new request gets {[output.token_ids for output in outputs]} of the old one; its tokens are "
        f"{list(request.all_token_ids)}, in flight {request.num_in_flight_tokens}"
    )


def reset_with_requests_in_flight() -> str:
    """200 random runs of `reset_prefix_cache(reset_running_requests=True)` between a step's decision and its end."""
    steps = resets = 0
    for seed in range(200):
        chance = random.Random(seed)
        scheduler = VllmScheduler(World(num_blocks=8, block_size=2, max_sequences=4))
        for number in range(4):
            prompt = [chance.randrange(2) for _ in range(chance.randint(1, 6))]
            scheduler.add(Request(id=f"r{number}", prompt=prompt, max_tokens=chance.randint(1, 6)))
        while scheduler.has_unfinished and steps < 100_000:
            batch = scheduler.schedule()
            if chance.random() < 0.3:
                resets += scheduler.core.reset_prefix_cache(reset_running_requests=True)
                scheduler.rows.clear()
                scheduler.sync()
            scheduler.update(batch, np.zeros(int(batch.samples.sum()), np.int32))
            steps += 1
            found = references(scheduler.manager) + scheduler.check()
            if found:
                return f"seed {seed}: {found}"
        if scheduler.manager.device.num_used:
            return f"seed {seed}: {scheduler.manager.device.num_used} blocks left"
    return f"{steps} steps, {resets} resets: free queue, ref counts and hash table agree, and no block is left used"


def an_empty_step() -> str:
    """Priority policy, 4 blocks of 1: "low" and then "high" hold two each, and both want a third."""
    rig = SchedulerRig(World(num_blocks=4, block_size=1, max_sequences=4, policy="vllm"), build_priority)
    rig.add(Request(id="low", prompt=[0], max_tokens=3, priority=1))
    rig.step()
    rig.add(Request(id="high", prompt=[1, 0], max_tokens=2, priority=0))
    seen = []
    try:
        for _ in range(3):
            rig.step()
    except Violation as violation:
        seen = violation.found
    free = rig.manager.device.num_free + rig.manager.device.num_cached
    return f"the kit: {seen[0].split(':')[1].strip()}; {free} blocks can be drawn by then"


def long_prompts_in_a_small_pool() -> str:
    """270 blocks of 16: a prompt of 1,600; one of 4,080, 4,000 of them cached; one of 160. All have to finish."""
    world = World(
        num_blocks=270, block_size=16, max_tokens_per_step=2048, max_sequences=8, policy="vllm", vocabulary=50
    )
    seen = []
    for name, build in (("vLLM", build_fcfs), ("ours", _ours)):
        rig = SchedulerRig(world, build)
        shared = [n % 47 for n in range(4000)]
        rig.add(Request(id="before", prompt=[*shared, 1], max_tokens=1))
        rig.drain()
        rig.add(Request(id="a", prompt=[n % 31 for n in range(1600)], max_tokens=16))
        rig.add(Request(id="b", prompt=shared + [7] * 80, max_tokens=16))
        rig.add(Request(id="c", prompt=[n % 29 for n in range(160)], max_tokens=16))
        steps = 0
        while rig.has_work and steps < 300:
            rig.step()
            steps += 1
        seen.append(f"{name}: {'finished' if not rig.has_work else 'stuck'} after {steps} steps")
    return ", ".join(seen)


def twins() -> str:
    """8 requests with one prompt of 32 tokens that all answer the same 64 tokens, blocks of 4: the most blocks used at once."""
    world = World(num_blocks=400, block_size=4, max_tokens_per_step=512, max_sequences=8, policy="vllm", vocabulary=50)
    seen = []
    for name, build in (("vLLM", build_fcfs), ("ours", _ours)):
        rig, most = SchedulerRig(world, build), 0
        for number in range(8):
            rig.add(Request(id=f"r{number}", prompt=[n % 13 for n in range(32)], max_tokens=64))
        while rig.has_work:
            rig.step()
            most = max(most, int(rig.manager.device.num_used))
        seen.append(f"{name} {most}")
    return ", ".join(seen) + f" of {world.num_blocks}; one request alone needs 24"


PROGRAMS: list[Callable[[], str]] = [
    failed_step,
    double_free,
    double_free_of_a_shared_block,
    free_twice,
    salts,
    hash_of_a_pickle,
    an_id_again_in_flight,
    reset_with_requests_in_flight,
    an_empty_step,
    long_prompts_in_a_small_pool,
    twins,
]
"""In the order of the page."""


def _ours(world: World) -> Scheduler:
    manager = BlockManager(world.num_blocks, world.block_size)
    return Scheduler(
        manager,
        policy="paged",
        max_tokens_per_step=world.max_tokens_per_step,
        max_sequences=world.max_sequences,
        vocabulary_size=world.vocabulary,
    )
