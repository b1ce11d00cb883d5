"""vLLM's `KVCacheManager` behind the names of the kit's `KVManager`, so that the kit can test it.

One group of full-attention layers, sha256 block hashes, no connector, no speculation. A row is one vLLM `Request`; block ids are
moved down by one, because vLLM keeps its block 0 as a placeholder. What vLLM does not do is False in CAPABILITIES. Three things the
adapter adds, because vLLM leaves them to its scheduler: row numbers, refusing several rows as one where their blocks do not fit,
and the token counts of a row in flight. Importing this needs no vLLM; making a manager does.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged import Moves
from paged.errors import OutOfBlocks
from paged.testing import ManagerAdapter
from paged.testing.content import typed

CAPABILITIES = replace(ManagerAdapter.capabilities, sharing_in_flight=True)
MOST_TOKENS = 1 << 16
"""The model's limit where a test has none of its own."""
QUIET = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}


class VllmMissing(ImportError):
    """vLLM cannot be imported by this Python."""


@cache
def vllm_names() -> SimpleNamespace:
    """Everything that is used of vLLM. Raises VllmMissing."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import vllm
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256, sha256_cbor
        from vllm.v1 import kv_cache_interface
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.request import Request
    except ImportError as error:
        raise VllmMissing(
            f"vLLM is not installed for this Python ({error}). Run conformance.vllm.run by one that has vLLM 0.32; "
            "its CPU build will do."
        ) from error
    # A refused reset is a warning there, and the machines ask for thousands.
    logging.getLogger("vllm").setLevel(logging.ERROR)
    kv_cache_utils.init_none_hash(sha256)
    import torch

    return SimpleNamespace(
        version=vllm.__version__,
        torch=torch,
        LoRARequest=LoRARequest,
        SamplingParams=SamplingParams,
        sha256=sha256,
        sha256_cbor=sha256_cbor,
        interface=kv_cache_interface,
        get_block_hash=kv_cache_utils.get_block_hash,
        get_request_block_hasher=kv_cache_utils.get_request_block_hasher,
        KVCacheManager=KVCacheManager,
        Request=Request,
    )


def pool_of(num_blocks: int, block_size: int) -> Any:
    """vLLM's description of a pool with so many usable blocks."""
    names = vllm_names()
    spec = names.interface.FullAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=8, dtype=names.torch.bfloat16
    )
    groups = [names.interface.KVCacheGroupSpec(["layer"], spec)]
    return names.interface.KVCacheConfig(num_blocks=num_blocks + 1, kv_cache_tensors=[], kv_cache_groups=groups)


def salt_of(namespace: object) -> str | None:
    """A namespace of the kit as vLLM's cache salt, which has to be a text."""
    return None if namespace is None else repr(typed(namespace))


def request_of(id: str, tokens: Sequence[int], block_size: int, caching: bool, **fields: Any) -> Any:
    """A vLLM request; its block hashes are computed here, as its engine core does it."""
    names = vllm_names()
    return names.Request(
        request_id=id,
        prompt_token_ids=[int(token) for token in tokens],
        sampling_params=fields.pop("sampling_params", None) or names.SamplingParams(max_tokens=1 << 16),
        pooling_params=None,
        block_hasher=names.get_request_block_hasher(block_size, names.sha256) if caching else None,
        **fields,
    )


@dataclass
class Row:
    """One vLLM request, its namespace, and how many of its tokens are in flight."""

    request: Any
    namespace: object
    scheduled: int = 0


class VllmManager:
    """One pool of `num_blocks` usable blocks. `core` takes a KVCacheManager that is there already, a scheduler's own."""

    capabilities = CAPABILITIES
    num_host_blocks = 0
    host = SimpleNamespace(num_blocks=0, num_free=0, num_cached=0, num_used=0, ref_counts=np.zeros(0, np.int64))

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True, core: Any = None) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.core = core or vllm_names().KVCacheManager(
            pool_of(num_blocks, block_size),
            max_model_len=MOST_TOKENS,
            scheduler_block_size=block_size,
            hash_block_size=block_size,
            enable_caching=prefix_caching,
        )
        self.requests: dict[int, Row] = {}
        self.paths: dict[bytes, tuple[bytes, ...]] = {}
        self.collisions: list[str] = []
        self.num_requests = 0
        self.batch = 1
        # The rows of each batch that has not ended, by its number, oldest first.
        self.batches: dict[int, list[Row]] = {}
        self.unconfirmed: set[int] = set()

    @property
    def pool(self) -> Any:
        """vLLM's block pool."""
        return self.core.block_pool

    @property
    def blocks(self) -> list[Any]:
        """Its blocks but for the placeholder."""
        return list(self.pool.blocks[1:])

    @property
    def device(self) -> SimpleNamespace:
        """Figures of the blocks. States: 0 no content and no references, 1 cached, 2 used."""
        states = np.array([2 if b.ref_cnt else int(b.block_hash is not None) for b in self.blocks], np.int64)
        num_free, num_cached = int(self.pool.get_num_free_blocks()), int((states == 1).sum())
        return SimpleNamespace(
            num_blocks=self.num_blocks,
            num_free=num_free - num_cached,
            num_cached=num_cached,
            num_used=self.num_blocks - num_free,
            ref_counts=np.array([block.ref_cnt for block in self.blocks], np.int64),
            states=states,
        )

    @property
    def rows(self) -> SimpleNamespace:
        """Figures of the rows; there is no host tier."""
        return SimpleNamespace(
            live=np.array(sorted(self.requests), np.int64),
            num_tokens=self._column(lambda row: row.request.num_tokens),
            num_computed=self._column(lambda row: row.request.num_computed_tokens - row.scheduled),
            num_scheduled=self._column(lambda row: row.scheduled),
            num_on_host=lambda row: 0,
        )

    def next_batch(self) -> int:
        """vLLM's manager knows no batches: what is published is seen by all. The adapter counts them."""
        self.batch += 1
        return self.batch

    def lookup(self, tokens: Any, namespace: Any = None, /) -> Any:
        """`get_computed_blocks` for a request that is thrown away."""
        blocks, num_tokens, _ = self.core.get_computed_blocks(self._request(tokens, namespace))
        return SimpleNamespace(num_tokens=num_tokens, blocks=ids_of(blocks))

    def add(self, tokens: Any, /, *, namespace: Any = None) -> int:
        """A request that adopts its prefix hit at once; vLLM's scheduler does so with its first allocation."""
        request = self._request(tokens, namespace)
        blocks, num_tokens, _ = self.core.get_computed_blocks(request)
        if num_tokens:
            adopted = self.core.allocate_slots(request, 0, num_tokens, blocks)
            assert adopted is not None, "a hit takes no block that is not there"
            request.num_computed_tokens = num_tokens
        number = next(number for number in range(len(self.requests) + 1) if number not in self.requests)
        self.requests[number] = Row(request, namespace)
        return number

    def append(self, row: int, tokens: Any, /) -> None:
        self.requests[row].request.append_output_token_ids([int(token) for token in tokens])
        self.learn(self.requests[row].request, self.requests[row].namespace)

    def allocate(self, rows: Any, counts: Any, /) -> Moves:
        """`allocate_slots` for each row. Where vLLM says None for one row, or the sum of several does not fit: OutOfBlocks."""
        free = int(self.pool.get_num_free_blocks())
        wanted = sum(
            max(
                0,
                -(-(self.requests[row].request.num_computed_tokens + count) // self.block_size) - len(self.table(row)),
            )
            for row, count in zip(rows, counts, strict=True)
        )
        if len(rows) > 1 and wanted > free:
            raise OutOfBlocks(wanted, free)
        for row, count in zip(rows, counts, strict=True):
            request = self.requests[row].request
            if self.core.allocate_slots(request, count) is None:
                raise OutOfBlocks(wanted, free)
            request.num_computed_tokens += count
            self.requests[row].scheduled = count
            self.batches.setdefault(self.batch, []).append(self.requests[row])
        return Moves()

    def confirm(self) -> int:
        """Nothing to tell vLLM: it counted the tokens as computed when they were scheduled. Returns the oldest batch's number."""
        number = next(iter(self.batches))
        if number == self.batch:
            self.next_batch()
        for row in self.batches.pop(number):
            row.scheduled = 0
        return number

    def free(self, rows: Any, /) -> None:
        for row in rows:
            self.core.free(self.requests.pop(row).request)

    def table(self, row: int, /) -> NDArray[np.int64]:
        if row not in self.requests:
            # An abort takes the blocks at once, its batch outstanding or not.
            return np.zeros(0, np.int64)
        return np.array(self.core.get_block_ids(self.requests[row].request.request_id)[0], np.int64) - 1

    def slots(self, row: int, start: int, stop: int) -> NDArray[np.int64]:
        """Where vLLM's worker writes these positions: block * block_size + offset."""
        positions = np.arange(start, stop)
        return self.table(row)[positions // self.block_size] * self.block_size + positions % self.block_size

    def cached_contents(self) -> set[tuple[bytes, ...]]:
        """The content behind every key of vLLM's hash table, but for keys that only blocks of `unconfirmed` carry."""
        get_block_hash = vllm_names().get_block_hash
        return {
            self.paths[get_block_hash(key)]
            for key, entry in self.pool.cached_block_hash_to_block._cache.items()
            if {block.block_id - 1 for block in carriers_of(entry)} - self.unconfirmed
        }

    def reset_cache(self) -> bool:
        return bool(self.core.reset_prefix_cache())

    def snapshot(self) -> Any:
        """Everything that can be seen, to be compared."""
        rows = {
            number: (self.table(number).tolist(), row.request.num_tokens, row.scheduled)
            for number, row in self.requests.items()
        }
        keys = [(block.block_id, block.ref_cnt, block.block_hash) for block in self.pool.blocks]
        return rows, keys, [block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()]

    def check(self) -> list[str]:
        """The free queue, the ref counts and the hash table of vLLM's pool against each other; two contents with one hash."""
        free = [block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()]
        found = list(self.collisions)
        if len(set(free)) < len(free) or len(free) != self.pool.get_num_free_blocks():
            found.append(f"the free queue holds {free}, its count says {self.pool.get_num_free_blocks()}")
        if set(free) != {block.block_id for block in self.blocks if block.ref_cnt == 0}:
            found.append(
                f"the free queue holds {free}, ref counts are {self.device.ref_counts.tolist()} from block 1 on"
            )
        keyed: dict[int, list[Any]] = {}
        for key, entry in self.pool.cached_block_hash_to_block._cache.items():
            for block in carriers_of(entry):
                keyed.setdefault(block.block_id, []).append(key)
        for block in self.pool.blocks:
            if keyed.get(block.block_id, []) != ([] if block.block_hash is None else [block.block_hash]):
                found.append(f"block {block.block_id} says one hash, the table another")
        if any(0 in self.core.get_block_ids(row.request.request_id)[0] for row in self.requests.values()):
            found.append("a table names the placeholder, block 0")
        return found

    def learn(self, request: Any, namespace: object) -> None:
        """Which content each of a request's block hashes stands for; one that stands for two is a collision."""
        root, size = repr(typed(namespace)).encode(), 4 * self.block_size
        data = np.array(request.all_token_ids, np.int32).tobytes()
        path: tuple[bytes, ...] = (root,)
        for index, digest in enumerate(request.block_hashes):
            path = (*path, data[index * size : (index + 1) * size])
            if self.paths.setdefault(digest, path) != path:
                self.collisions.append(f"{path} and {self.paths[digest]} have one hash")

    def _request(self, tokens: Any, namespace: object) -> Any:
        self.num_requests += 1
        name = f"row-{self.num_requests}"
        request = request_of(name, tokens, self.block_size, self.prefix_caching, cache_salt=salt_of(namespace))
        self.learn(request, namespace)
        return request

    def _column(self, read: Any) -> NDArray[np.int64]:
        column = np.zeros(max(self.requests, default=-1) + 1, np.int64)
        for number, row in self.requests.items():
            column[number] = read(row)
        return column


def ids_of(blocks: Any) -> NDArray[np.int64]:
    """The ids of vLLM's blocks, counted from the first usable one."""
    return np.array(blocks.get_block_ids()[0], np.int64) - 1


def carriers_of(entry: Any) -> list[Any]:
    """The blocks behind one key of vLLM's hash table: one, or a dict of several."""
    return list(entry.values()) if isinstance(entry, dict) else [entry]
