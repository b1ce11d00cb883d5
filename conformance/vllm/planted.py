"""Faults planted in vLLM, one at a time: whether the machines would have noticed, had they been there.

Each is a patch of one method for the time of a run. Knows vLLM's internals by name; another version may need other patches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from conformance.vllm.manager import vllm_names


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """`owner.name` is what `make` makes of the original."""
    with patch.object(owner, name, make(getattr(owner, name))):
        yield


def planted() -> dict[str, tuple[str, Callable[[], Any]]]:
    """Sentence → (which machine, what plants it)."""
    vllm_names()
    from vllm.v1.core.block_pool import BlockHashToBlockMap, BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

    def forget_touch(original: Any) -> Any:
        def touch(self: Any, blocks: Any) -> None:
            for block in blocks:
                block.ref_cnt += 1

        return touch

    def free_front_first(original: Any) -> Any:
        def free(self: Any, request_id: str) -> None:
            self.block_pool.free_blocks(self.pop_blocks_for_free(request_id))

        return free

    def keep_the_hash(original: Any) -> Any:
        return lambda self, block: False

    def one_block_less(original: Any) -> Any:
        def cache(self: Any, request: Any, num_tokens: int, *more: Any, **named: Any) -> None:
            original(self, request, max(0, num_tokens - 1), *more, **named)

        return cache

    def drop_all_copies(original: Any) -> Any:
        return lambda self, key, block_id: self._cache.pop(key, None)

    def newest_first(original: Any) -> Any:
        def free_blocks(self: Any, ordered: Any) -> None:
            for block in ordered:
                block.ref_cnt -= 1
                if block.ref_cnt == 0:
                    self.free_block_queue.prepend_n([block])

        return free_blocks

    def resume_where_it_was(original: Any) -> Any:
        def preempt(self: Any, request: Any, *more: Any, **named: Any) -> None:
            computed = request.num_computed_tokens
            original(self, request, *more, **named)
            request.num_computed_tokens = min(1, computed)

        return preempt

    def leak_on_abort(original: Any) -> Any:
        def free(self: Any, request: Any) -> None:
            if request.status.name != "FINISHED_ABORTED":
                original(self, request)

        return free

    def lose_new_blocks(original: Any) -> Any:
        def make(self: Any, running: Any, *more: Any) -> Any:
            data = original(self, running, *more)
            for index, id in enumerate(data.req_ids):
                if index and id not in data.resumed_req_ids:
                    data.new_block_ids[index] = None
            return data

        return make

    def last_in_line(original: Any) -> Any:
        def preempt(self: Any, request: Any, *more: Any, **named: Any) -> None:
            original(self, request, *more, **named)
            self.waiting.remove_request(request)
            self.waiting.add_request(request)

        return preempt

    def ignore_the_salt(original: Any) -> Any:
        def init(self: Any, *more: Any, cache_salt: Any = None, **named: Any) -> None:
            original(self, *more, **named)

        return init

    def token_twice(original: Any) -> Any:
        def update(self: Any, request: Any, tokens: Any, *more: Any, **named: Any) -> Any:
            tokens, stopped = original(self, request, tokens, *more, **named)
            return (tokens * 2 if stopped else tokens), stopped

        return update

    def plant(owner: Any, name: str, make: Any) -> Callable[[], Any]:
        return lambda: replaced(owner, name, make)

    return {
        "a hit leaves its block in the free queue": ("manager", plant(BlockPool, "touch", forget_touch)),
        "blocks are given back front first": ("manager", plant(SingleTypeKVCacheManager, "free", free_front_first)),
        "an evicted block keeps its hash": ("manager", plant(BlockPool, "_maybe_evict_cached_block", keep_the_hash)),
        "a block is cached one token late": (
            "manager",
            plant(SingleTypeKVCacheManager, "cache_blocks", one_block_less),
        ),
        "evicting one copy forgets the others": ("manager", plant(BlockHashToBlockMap, "pop", drop_all_copies)),
        "the newest content is evicted first": ("manager", plant(BlockPool, "free_blocks", newest_first)),
        "the salt is not hashed": ("manager", plant(vllm_names().Request, "__init__", ignore_the_salt)),
        "a preempted request resumes behind its first token": (
            "scheduler",
            plant(Scheduler, "_preempt_request", resume_where_it_was),
        ),
        "an abort leaks": ("scheduler", plant(KVCacheManager, "free", leak_on_abort)),
        "the runner is not told of a new block": (
            "scheduler",
            plant(Scheduler, "_make_cached_request_data", lose_new_blocks),
        ),
        "a preempted request goes last in line": ("scheduler", plant(Scheduler, "_preempt_request", last_in_line)),
        "the last token is delivered twice": (
            "scheduler",
            plant(Scheduler, "_update_request_with_output", token_twice),
        ),
    }
