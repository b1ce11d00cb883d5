"""The names of transformers' continuous batching that the plug-in uses, and a check of the installed version. Imports transformers only on a call."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from paged.base.extras import installed_by
from paged.errors import UnsupportedTransformers
from paged.integrations.fitting import Needed, must_fit, undefined_in, wrong_with

TRIED = ("5.17.0", "5.23.0")
"""Versions with which all tests were run."""

_BATCHING = "transformers.generation.continuous_batching"

NEEDED: Needed = {
    f"{_BATCHING}.continuous_api:ContinuousBatchingManager": ("_create_batch_processor", "cancel_request", "warmup"),
    f"{_BATCHING}.continuous_api:ContinuousBatchProcessor": ("prepare_next_batch", "update_batch", "reset"),
    f"{_BATCHING}.continuous_api:ContinuousMixin": (
        "init_continuous_batching",
        "destroy_cached_continuous_batching_manager",
    ),
    f"{_BATCHING}.continuous_api:OutputRouter": ("fail_and_deliver",),
    f"{_BATCHING}.requests:FutureRequestState": ("state", "has_new_token", "complete_blocks", "query_length"),
    f"{_BATCHING}.requests:RequestState": (
        "request_id",
        "initial_tokens",
        "max_new_tokens",
        "eos_token_id",
        "num_children",
        "tokens_to_process",
        "generated_tokens",
        "remaining_prefill_tokens",
        "position_offset",
        "created_time",
        "status",
        "fork",
    ),
    f"{_BATCHING}.requests:RequestStatus": ("PREFILLING", "DECODING", "FINISHED"),
    f"{_BATCHING}.scheduler:Scheduler": (
        "add_waiting_request",
        "clear_cancelled_requests",
        "finish_request",
        "has_pending_requests",
        "reset",
        "schedule_batch",
        "set_request_cancellation",
    ),
    "transformers.generation.configuration_utils:ContinuousBatchingConfig": (
        "allow_block_sharing",
        "cpu_offload_space",
        "use_async_batching",
    ),
}
"""By module and name, the fields, members or methods that are used. block_store.py has the layouts of caches."""


def must_have_all() -> None:
    """Raise UnsupportedTransformers unless the installed transformers has everything in NEEDED."""
    try:
        installed = version("transformers")
    except PackageNotFoundError:
        raise UnsupportedTransformers(
            f"paged.integrations.transformers plugs into transformers, which is not installed here; {installed_by('engine')} brings it."
        ) from None
    must_fit(wrong_with(NEEDED), UnsupportedTransformers, f"transformers {installed}", TRIED)


def must_define_all(*ours: type) -> None:
    """Raise UnsupportedTransformers unless these classes define every method that transformers makes abstract."""
    must_fit(undefined_in(*ours), UnsupportedTransformers, f"transformers {version('transformers')}", TRIED)
