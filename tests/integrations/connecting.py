"""A KV connector for tests, found by vLLM's factory as its own are: it answers what a test has set, and remembers what it was told."""

from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA


class Scripted(KVConnectorBase_V1):
    """The scheduler's side.

    elsewhere  called with a request and its hit: what get_num_new_matched_tokens answers
    delays     called with a request that has ended and its blocks: whether they are still needed, and what to say of that
    told       of each admission: id, block ids, how many of them are without content yet, tokens to load
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self.elsewhere: Any = lambda request, hit: (0, False)
        self.delays: Any = lambda request, blocks: (False, None)
        self.told: list[tuple[str, list[int], int, int]] = []
        self.ended: list[tuple[str, list[int]]] = []
        self.outputs: list[Any] = []
        self.come: list[str] = []
        self.pushes, self.can_reset, self.is_shut = False, True, False
        self.figures: Any = None

    def on_new_request(self, request: Any) -> None:
        self.come.append(request.request_id)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.elsewhere(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        (held,) = blocks.blocks
        num_new = sum(block._block_hash is None for block in held)
        self.told.append((request.request_id, [block.block_id for block in held], num_new, num_external_tokens))

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> Any:
        return {"host": num_external_tokens}

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        state = scheduler_output.kv_connector_block_state
        return SimpleNamespace(blocks={id: state.resolve_block_ids(id)[0] for id in state.req_ids})

    def update_connector_output(self, connector_output: Any) -> None:
        self.outputs.append(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, Any]:
        self.ended.append((request.request_id, block_ids))
        return self.delays(request, block_ids)

    def get_kv_connector_stats(self) -> Any:
        return self.figures

    def has_pending_push_work(self) -> bool:
        return self.pushes

    def reset_cache(self) -> bool:
        return self.can_reset

    def shutdown(self) -> None:
        self.is_shut = True

    # The worker's side.

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...


class OfAllGroups(Scripted, SupportsHMA):
    """One that is told the blocks of each group."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, Any]:
        (blocks,) = block_ids
        return self.request_finished(request, blocks)


class Counting(Scripted):
    """One that counts references of vLLM's own blocks."""

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None: ...
