"""vLLM's objects for tests of the plug-in: its own where it is installed, stand-ins where it is not: of 0.32, or of the
version that VLLM_RECORD names. Importing this decides which."""

import os
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

from integrations import stand_ins

IS_REAL = find_spec("vllm") is not None
if not IS_REAL:
    stand_ins.install(os.environ.get("VLLM_RECORD", ""))


def request(id: str, prompt: list[int], *, most: int = 16, sampling: dict[str, Any] | None = None, **given: Any) -> Any:
    """A vllm.v1.request.Request for so many tokens at most; `sampling` are further fields of its SamplingParams."""
    asked = {"max_tokens": most} | (sampling or {})
    if not IS_REAL:
        return stand_ins.StandInRequest(id, prompt, stand_ins.sampling(**asked), **given)
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    eos = asked.pop("eos_token_id", None)
    params = SamplingParams(temperature=0.0, **asked)
    params._eos_token_id = eos
    skips, grammar = given.pop("skip_reading_prefix_cache", False), given.pop("structured_output_request", None)
    made = Request(request_id=id, prompt_token_ids=prompt, sampling_params=params, pooling_params=None, **given)
    made.skip_reading_prefix_cache, made.structured_output_request = skips, grammar
    return made


def config(**given: Any) -> Any:
    """The fields of a VllmConfig that the plug-in reads, those of a small model of one kind of layer."""
    no = dict.fromkeys
    scheduler = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "long_prefill_token_threshold": 0, "policy": "fcfs"}
    scheduler |= {"long_prefill_token_threshold_adaptive": False, "enable_chunked_prefill": True}
    scheduler |= {"async_scheduling": False, "disable_hybrid_kv_cache_manager": True} | no(
        ("max_num_active_seqs", "max_num_scheduled_tokens")
    )
    model = {"max_model_len": 64, "runner_type": "generate"}
    model |= no(("is_encoder_decoder", "is_diffusion", "supports_multimodal_inputs", "return_sampling_mask"), False)
    sizes = ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size")
    parts = {"scheduler_config": scheduler, "model_config": model, "parallel_config": no(sizes, 1)}
    rest = {"additional_config": {}, "num_speculative_tokens": 0, "use_v2_model_runner": False}
    rest |= no(("kv_transfer_config", "ec_transfer_config", "kv_events_config", "speculative_config", "lora_config"))
    made = SimpleNamespace(**{name: SimpleNamespace(**fields) for name, fields in parts.items()}, **rest)
    for name, value in given.items():
        owner = next((getattr(made, part) for part, fields in parts.items() if name in fields), made)
        setattr(owner, name, value)
    return made


def spec(kind: str, block_size: int, **given: Any) -> Any:
    """What the layers of a group keep, by the name of vLLM's class, with fields of it."""
    sizes: dict[str, Any] = {"num_kv_heads": 1, "head_size": 1, "dtype": None}
    if kind == "MambaSpec":
        sizes = {"shapes": ((1,),), "dtypes": (None,), "mamba_cache_mode": "none"}
    if kind == "SlidingWindowSpec":
        sizes["extra_retained_tokens"] = 0
    return getattr(import_module("vllm.v1.kv_cache_interface"), kind)(block_size=block_size, **sizes | given)


def memory(num_blocks: int, *specs: Any, zeroes: bool = False) -> Any:
    """The fields of a KVCacheConfig that the plug-in reads; vLLM keeps the first of the blocks. `zeroes`: new ones have to be cleared."""
    groups = [SimpleNamespace(kv_cache_spec=each) for each in specs]
    return SimpleNamespace(num_blocks=num_blocks, kv_cache_groups=groups, needs_kv_cache_zeroing=zeroes)


def asked_tier(host_blocks: Any) -> Any:
    """The fields of a KVTransferConfig that ask for a host tier."""
    fields = {"kv_connector": "HostTier", "kv_connector_module_path": "paged.integrations.vllm.host_tier"}
    return SimpleNamespace(**fields, kv_connector_extra_config={"host_blocks": host_blocks})


def asked_connector(name: str = "Scripted", **given: Any) -> Any:
    """The fields of a KVTransferConfig that ask for a connector of `connecting.py`."""
    fields = {"kv_connector_extra_config": {}, "kv_load_failure_policy": "recompute", "engine_id": "e"} | given
    return SimpleNamespace(kv_connector=name, kv_connector_module_path="integrations.connecting", **fields)


def transferred(**given: Any) -> Any:
    """A KVConnectorOutput: what the worker's side of a connector says of a step."""
    usual = {"finished_sending": None, "finished_recving": None, "kv_connector_stats": None}
    usual |= {"invalid_block_ids": set(), "failed_recving": set()}
    return SimpleNamespace(**usual | given)


class Grammars:
    """vLLM's StructuredOutputManager, of which a grammar is a function from a token to whether it is taken."""

    def accept_tokens(self, request: Any, tokens: list[int]) -> bool:
        grammar = request.structured_output_request
        return grammar is None or all(grammar.grammar(token) for token in tokens)

    def validate_tokens(self, request: Any, tokens: list[int]) -> list[int]:
        return tokens

    def grammar_bitmask(self, requests: Any, ids: list[str], drafts: Any) -> str:
        return f"mask of {' '.join(ids)}"


def plug_in(
    num_blocks: int = 8,
    block_size: int = 2,
    *,
    log_stats: bool = False,
    include_finished_set: bool = False,
    is_ahead: bool = False,
    specs: Sequence[Any] = (),
    zeroes: bool = False,
    **given: Any,
) -> Any:
    """Our scheduler as vLLM makes it, `is_ahead` the one for asynchronous scheduling; `num_blocks` are those that can be used. `specs`: one a
    group of layers; none: all of them keep all tokens."""
    from paged.integrations.vllm import AsyncScheduler, Scheduler

    return (AsyncScheduler if is_ahead else Scheduler)(
        vllm_config=config(**{"async_scheduling": is_ahead} | given),
        kv_cache_config=memory(num_blocks + 1, *(specs or [spec("FullAttentionSpec", block_size)]), zeroes=zeroes),
        structured_output_manager=Grammars(),
        block_size=block_size,
        hash_block_size=block_size,
        include_finished_set=include_finished_set,
        log_stats=log_stats,
    )


def core_of(*requests: Any, **given: Any) -> Any:
    """Our scheduler, to which these requests have come."""
    core = plug_in(**given)
    for each in requests:
        core.add_request(each)
    return core


def answer(output: Any, sampled: dict[str, list[int]], **given: Any) -> Any:
    """A runner's output of a step: its requests in an order of its own, and what each sampled."""
    ids = sorted(output.num_scheduled_tokens, reverse=True)
    fields = dict.fromkeys(("logprobs", "num_nans_in_logits", "kv_connector_output"))
    fields |= {"prompt_logprobs_dict": {}} | given
    return SimpleNamespace(
        req_ids=ids,
        req_id_to_index={id: place for place, id in enumerate(ids)},
        sampled_token_ids=[sampled.get(id, []) for id in ids],
        **fields,
    )


def reasons(made: dict[str, Any]) -> dict[str, str | None]:
    """Why each of these has ended, by its id; None: it goes on."""
    return {id: None if each.finish_reason is None else each.finish_reason.name for id, each in made.items()}


def step(core: Any, sampled: dict[str, list[int]] | None = None, told: Any = None) -> tuple[Any, dict[str, Any]]:
    """One step; every request that samples answers 5 unless `sampled` says otherwise; `told`: what became of transfers. The scheduler's output, and
    the outputs by id."""
    output = core.schedule()
    batch = core._out[-1][1]
    tokens = {} if batch is None else {id: [5] for id, yes in zip(batch.ids.tolist(), batch.samples.tolist()) if yes}
    made = core.update_from_output(output, answer(output, tokens | (sampled or {}), kv_connector_output=told))
    assert core.check() == []
    return output, {each.request_id: each for outputs in made.values() for each in outputs.outputs}
