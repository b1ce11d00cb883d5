"""The features of vLLM that the plug-in does not carry. They are refused with a sentence each, before the engine starts or for a single request.

docs/integrations/vllm.md has the same table of features, and a test compares them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from paged.errors import RefusedByPaged
from paged.integrations.vllm.groups import CARRIED, Groups, groups_of, others_in, states_in
from paged.integrations.vllm.options import Options, is_host_tier
from paged.integrations.vllm.transfers import counting_connectors
from paged.scheduler import POLICIES


class Refusal(NamedTuple):
    """A feature, whether a configuration uses it, and why it is not carried; a text that `is_asked_for` returns is put into the sentence."""

    feature: str
    is_asked_for: Callable[[Any, Any], bool | str]
    why: str


def _takes_pictures(config: Any, _: Any) -> bool:
    return bool(getattr(config.model_config, "supports_multimodal_inputs", False))


def _drafts_elsewhere(config: Any, _: Any) -> bool:
    speculative = config.speculative_config
    return speculative is not None and speculative.method != "ngram"


def _has_states_in_columns(_: Any, memory: Any) -> str:
    return ", ".join(sorted({spec.mamba_cache_mode for spec in states_in(memory)} - {"none"}))


def _guesses_beside_states(config: Any, memory: Any) -> bool:
    return bool(states_in(memory)) and config.speculative_config is not None


def _replays_states(config: Any, memory: Any) -> bool:
    return bool(states_in(memory)) and bool(getattr(getattr(config, "cache_config", None), "use_replayssm", False))


def _swaps_groups(config: Any, memory: Any) -> bool:
    # Other kinds are refused anyway, and groups_of does not take them.
    return is_host_tier(config.kv_transfer_config) and not others_in(memory) and not groups_of(memory).is_plain


def _transfers_groups(config: Any, memory: Any) -> bool:
    asked = config.kv_transfer_config
    return asked is not None and not is_host_tier(asked) and not others_in(memory) and not groups_of(memory).is_plain


REFUSALS = (
    Refusal("other kinds of layers", lambda _, memory: ", ".join(others_in(memory)), f"found: {{}}; groups of {CARRIED} are carried"),
    Refusal(
        "states by position",
        _has_states_in_columns,
        "mamba_cache_mode is {}, in which the runner copies a request's state from block to block; ours is written in one block, and copied "
        "where it is kept. Give --no-enable-prefix-caching, with which the mode is none; paged shares prefixes all the same",
    ),
    Refusal(
        "states beside asynchronous scheduling",
        lambda config, memory: bool(states_in(memory)) and config.scheduler_config.async_scheduling,
        "a request that goes on in another state has to be sent again, with tokens that are only being sampled; give --no-async-scheduling",
    ),
    Refusal("speculation beside states", _guesses_beside_states, "the runner writes a state a draft, and ours has one a step"),
    Refusal("states with a ring of inputs", _replays_states, "what the ring holds is counted by request, and a copied state has another; leave --use-replayssm away"),
    Refusal("a host tier for layers of several kinds", _swaps_groups, "the connector copies a block of every layer, and here a block belongs to one group"),
    Refusal("pooling models", lambda config, _: config.model_config.runner_type == "pooling", "it reads a prompt once and keeps nothing: there is nothing to manage"),
    Refusal("diffusion models", lambda config, _: bool(getattr(config.model_config, "is_diffusion", False)), "it writes no token after another"),
    Refusal("encoder-decoder models", lambda config, _: bool(config.model_config.is_encoder_decoder), "cross-attention keeps blocks of another length"),
    Refusal(
        "multi-modal inputs",
        _takes_pictures,
        "the encoder's budget bounds how far a prompt gets in a step, and our scheduler takes no such bound; for text alone start it with "
        "--language-model-only, or with --limit-mm-per-prompt and 0 for each kind",
    ),
    Refusal("KV connectors that count vLLM's blocks", lambda config, _: counting_connectors(config), "{} takes hold of vLLM's own block pool, and there is none"),
    Refusal("KV connectors for layers of several kinds", _transfers_groups, "what is loaded is full layers alone, with a page a block"),
    Refusal(
        "KV connectors beside asynchronous scheduling",
        lambda config, _: config.kv_transfer_config is not None and config.scheduler_config.async_scheduling and not is_host_tier(config.kv_transfer_config),
        "a step that is out could still write a block that is loaded into; give --no-async-scheduling",
    ),
    Refusal(
        "encoder connectors that produce",
        lambda config, _: config.ec_transfer_config is not None and config.ec_transfer_config.is_ec_producer,
        "there are no encoder inputs; one that consumes is carried, for text",
    ),
    Refusal(
        "KV cache events",
        lambda config, _: config.kv_events_config is not None and config.kv_events_config.enable_kv_cache_events,
        "they name blocks by vLLM's hashes; ours are chained SHA-256 of exact tokens (BlockManager.take_events)",
    ),
    Refusal("draft models", _drafts_elsewhere, "a drafter writes keys and values beyond what was scheduled; n-gram speculation is carried"),
    Refusal(
        "an adaptive threshold for long prompts",
        lambda config, _: bool(getattr(config.scheduler_config, "long_prefill_token_threshold_adaptive", False)),
        "long_prefill_token_threshold is one number for every step here; leave --long-prefill-token-threshold-adaptive away",
    ),
    Refusal(
        "drafts by batch size",
        lambda config, _: bool(getattr(config.speculative_config, "num_speculative_tokens_per_batch_size", None)),
        "every step may guess equally many; give num_speculative_tokens alone",
    ),
    Refusal("sampling masks", lambda config, _: bool(getattr(config.model_config, "return_sampling_mask", False)), "outputs carry none here; leave return_sampling_mask away"),
    Refusal("pipeline parallelism", lambda config, _: config.parallel_config.pipeline_parallel_size > 1, "several batches are out at a time, and stages get tokens from the scheduler"),
    Refusal(
        "context parallelism",
        lambda config, _: max(config.parallel_config.decode_context_parallel_size, config.parallel_config.prefill_context_parallel_size) > 1,
        "a block's tokens lie on several devices",
    ),
    Refusal(
        "per-request speculation metrics",
        lambda config, _: getattr(getattr(config, "observability_config", None), "per_request_spec_decode_metrics", "none") != "none",
        "drafts are counted over all requests; leave --per-request-spec-decode-metrics away",
    ),
    Refusal(
        "metrics of single blocks",
        lambda config, _: bool(getattr(getattr(config, "observability_config", None), "kv_cache_metrics", False)),
        "how long a block lives and lies idle is not sampled; leave --kv-cache-metrics away",
    ),
    Refusal("auxiliary outputs", lambda config, _: bool(getattr(getattr(config, "aux_output_config", None), "enabled", False)), "they come through a connector of vLLM's scheduler"),
)  # fmt: skip
"""In the order of the page."""


def carried(config: Any, memory: Any, options: Options, block_size: int, *, is_ahead: bool) -> Groups:
    """Return what the model's layers keep. Raises RefusedByPaged for a VllmConfig or KVCacheConfig with features that are not carried, and for options
    that contradict them. `is_ahead`: for the class for asynchronous scheduling."""
    asked_for = [(refusal, asked) for refusal in REFUSALS if (asked := refusal.is_asked_for(config, memory))]
    if asked_for:
        features = "; ".join(f"{refusal.feature} ({refusal.why.format(asked)})" for refusal, asked in asked_for)
        raise RefusedByPaged(
            f"paged's scheduler does not carry: {features}. Leave --scheduler-cls away for vLLM's own."
        )
    _must_be_the_right_class(config, is_ahead=is_ahead)
    policy = POLICIES[options.policy]
    if policy.layout == "region":
        raise RefusedByPaged(
            f"policy {options.policy!r} reserves regions, as systems without block tables do; vLLM's runner addresses every block through "
            "a table. Take one that draws blocks, such as 'paged'."
        )
    if policy.order == "fair":
        raise RefusedByPaged(
            f"policy {options.policy!r} is fair between tenants, and vLLM's requests name none. Take 'paged'."
        )
    groups = groups_of(memory)
    if groups.is_plain and groups.block_size != block_size:
        raise RefusedByPaged(
            f"the runner's blocks hold {groups.block_size} tokens and the scheduler's {block_size}; one table needs one size. Give "
            f"--block-size {groups.block_size}."
        )
    if memory.num_blocks < 2:
        raise RefusedByPaged(
            f"there are {memory.num_blocks} blocks, and vLLM keeps block 0 for itself: at least 2 are needed. Raise "
            "--num-gpu-blocks-override or --gpu-memory-utilization."
        )
    return groups


def _must_be_the_right_class(config: Any, *, is_ahead: bool) -> None:
    if config.scheduler_config.async_scheduling and not is_ahead:
        raise RefusedByPaged(
            "paged.integrations.vllm.Scheduler has one batch out at a time, and asynchronous scheduling two: take "
            "paged.integrations.vllm.AsyncScheduler, or start vLLM with --no-async-scheduling."
        )
    if is_ahead and not config.scheduler_config.async_scheduling:
        raise RefusedByPaged(
            "paged.integrations.vllm.AsyncScheduler has two batches out at a time, and asynchronous scheduling is off, as it always is on "
            "a CPU: take paged.integrations.vllm.Scheduler, or start vLLM with --async-scheduling."
        )
    if is_ahead and config.speculative_config is not None:
        raise RefusedByPaged(
            "speculation beside asynchronous scheduling is not carried: a step's drafts are known after it was scheduled. Take "
            "paged.integrations.vllm.Scheduler and --no-async-scheduling."
        )


def why_not(request: Any) -> str | None:
    """Return why this request, a vllm.v1.request.Request, is not carried; None: it is."""
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return "prompts of embeddings are not carried: equal token ids would not mean equal content"
    if request.mm_features:
        return "multi-modal inputs are not carried"
    if request.pooling_params is not None:
        return "pooling is not carried"
    if getattr(request.sampling_params, "prompt_logprob_token_ids", None) is not None:
        return "prompt_logprob_token_ids is not carried: these are not put into outputs; prompt_logprobs is carried"
    if request.resumable:
        return "sessions whose input streams in are not carried"
    return None
