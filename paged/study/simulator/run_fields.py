"""The fields of vLLM's configuration in a recorded run: those that are read, those that are refused unless their value changes nothing, and harmless
ones. The result of a validation names any other field."""

from __future__ import annotations

from itertools import chain
from typing import Any

READ = {
    "model": ("model",),
    "dtype": ("dtype",),
    "kv_dtype": ("kv_cache_dtype",),
    "quantization": ("quantization",),
    "tensor_parallel": ("tensor_parallel_size",),
    "data_parallel": ("data_parallel_size",),
    "max_tokens_per_step": ("max_num_batched_tokens",),
    "max_sequences": ("max_num_seqs",),
    "max_model_len": ("max_model_len",),
    "num_blocks": ("num_gpu_blocks_override", "num_gpu_blocks"),
    "block_size": ("block_size",),
    "prefix_caching": ("enable_prefix_caching",),
    "memory_share": ("gpu_memory_utilization",),
    "runs_ahead": ("async_scheduling",),
}
"""By field of a `RunSetup`, vLLM's fields, of which the first that is set counts. `enable_expert_parallel` is read, too."""
WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "pipeline_parallel_size": (1,),
    "decode_context_parallel_size": (1,),
    "prefill_context_parallel_size": (1,),
    "speculative_config": (),
    "speculative_model": (),
    "num_speculative_tokens": (),
    "enable_lora": (),
    "lora_config": (),
    "cpu_offload_gb": (),
    "kv_transfer_config": (),
    "kv_offloading_size": (),
    "enable_chunked_prefill": (True,),
    "policy": ("fcfs",),
    "scheduling_policy": ("fcfs",),
    "long_prefill_token_threshold": (),
    "max_num_partial_prefills": (1,),
    "max_long_partial_prefills": (1,),
    "disable_hybrid_kv_cache_manager": (),
    "is_encoder_decoder": (),
}
"""Refused with any value but these, none, 0 and false; `enable_chunked_prefill` is refused if false."""
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
"""Fields that change neither decisions nor a step's work."""


def read(given: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a `RunSetup` that are given."""
    found = ((field, [given[name] for name in names if given.get(name, "") != ""]) for field, names in READ.items())
    return {field: next(filter(None, values), values[0]) for field, values in found if values}


def refused(given: dict[str, Any]) -> list[str]:
    """Return the fields that change the meaning of a run and are not modelled, with their values."""
    set_ = {name: value for name, value in given.items() if value or (name, value) == ("enable_chunked_prefill", False)}
    return [
        f"{name} = {set_[name]!r}"
        for name, allowed in WITHOUT_EFFECT.items()
        if name in set_ and set_[name] not in allowed
    ]


def unknown(given: dict[str, Any]) -> list[str]:
    """Return the fields that are set and whose effect is not known, with their values."""
    known = {*chain(*READ.values()), "enable_expert_parallel", *WITHOUT_EFFECT, *HARMLESS}
    return [f"{name} = {value!r}" for name, value in given.items() if value and name not in known]
