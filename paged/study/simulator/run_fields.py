"""Which fields of vLLM's configuration change what a recorded run means: those that are read, those that are refused unless they have a
value that changes nothing, and those that are harmless. Any other field is named in the answer."""

from __future__ import annotations

from typing import Any

READ = (
    "model",
    "dtype",
    "kv_cache_dtype",
    "quantization",
    "tensor_parallel_size",
    "data_parallel_size",
    "enable_expert_parallel",
    "max_num_batched_tokens",
    "max_num_seqs",
    "max_model_len",
    "num_gpu_blocks",
    "num_gpu_blocks_override",
    "block_size",
    "enable_prefix_caching",
    "gpu_memory_utilization",
    "async_scheduling",
)
"""By which a run is set up here."""
WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "pipeline_parallel_size": (1,),
    "decode_context_parallel_size": (1,),
    "prefill_context_parallel_size": (1,),
    "speculative_config": (),
    "speculative_model": (),
    "num_speculative_tokens": (0,),
    "enable_lora": (),
    "lora_config": (),
    "cpu_offload_gb": (0,),
    "kv_transfer_config": (),
    "kv_offloading_size": (0,),
    "enable_chunked_prefill": (True,),
    "policy": ("fcfs",),
    "scheduling_policy": ("fcfs",),
    "long_prefill_token_threshold": (0,),
    "max_num_partial_prefills": (1,),
    "max_long_partial_prefills": (1,),
    "disable_hybrid_kv_cache_manager": (),
    "is_encoder_decoder": (),
}
"""Refused with any other value than these, and than none or false (of `enable_chunked_prefill` than none)."""
HARMLESS = {
    "seed",
    "tokenizer",
    "tokenizer_mode",
    "tokenizer_revision",
    "skip_tokenizer_init",
    "trust_remote_code",
    "download_dir",
    "load_format",
    "revision",
    "code_revision",
    "served_model_name",
    "disable_log_stats",
    "disable_log_requests",
    "enable_log_requests",
    "generation_config",
    "override_generation_config",
    "hf_token",
    "hf_config_path",
    "config_format",
    "model_impl",
    "runner",
    "convert",
    "task",
    "max_logprobs",
    "distributed_executor_backend",
    "worker_cls",
    "worker_extension_cls",
    "swap_space",
    "max_seq_len_to_capture",
    "data_parallel_backend",
    "data_parallel_address",
    "data_parallel_rpc_port",
    "data_parallel_rank",
    "data_parallel_size_local",
    "data_parallel_start_rank",
    "api_server_count",
    "show_hidden_metrics_for_version",
    "otlp_traces_endpoint",
    "collect_detailed_traces",
    "limit_mm_per_prompt",
    "allowed_local_media_path",
    "use_tqdm_on_load",
}
"""They change neither decisions nor a step's work."""


def refused(given: dict[str, Any]) -> list[str]:
    """Fields that change what a run means and are not modelled, with their values."""
    found = []
    for name, allowed in WITHOUT_EFFECT.items():
        value = given.get(name)
        is_nothing = value is None or (value is False and name != "enable_chunked_prefill") or value in ("", {}, [])
        if not is_nothing and value not in allowed:
            found.append(f"{name} = {value!r}")
    return found


def unknown(given: dict[str, Any]) -> list[str]:
    """Fields that are set, and of which nobody here knows what they change, with their values."""
    known = {*READ, *WITHOUT_EFFECT, *HARMLESS}
    return [
        f"{name} = {value!r}"
        for name, value in given.items()
        if name not in known and value not in (None, False, "", {}, [])
    ]
