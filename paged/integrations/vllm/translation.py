"""Our request for one of vLLM."""

from __future__ import annotations

from typing import Any

from paged.scheduler import Request


def request_of(theirs: Any, prompt: Any, max_tokens: int, *, transfers: bool = False) -> Request:
    """Return our request for `theirs` with this prompt (its own, with outputs after a withdrawal) and so many tokens to go.

    Stop ids end it here, in one check of all rows. vLLM's sampler enforces min_tokens: it samples no stop id before. Adapter and salt are part of the
    identity of content. `transfers`: a connector may load any of its tokens, and saves its blocks.
    """
    sampling, adapter = theirs.sampling_params, theirs.lora_request
    return Request(
        id=theirs.request_id,
        prompt=prompt,
        max_tokens=max_tokens,
        eos_token_id=sampling.eos_token_id,
        stop_token_ids=tuple(sampling.stop_token_ids or ()),
        priority=theirs.priority,
        salt=theirs.cache_salt,
        adapter=None if adapter is None else adapter.lora_name,
        reads_cache=not theirs.skip_reading_prefix_cache,
        num_computed=len(prompt) if transfers and not theirs.skip_reading_prefix_cache else 0,
        saves=transfers,
    )


def stop_reason_of(theirs: Any, last_token: int) -> int | None:
    """Return the stop id with which a request ended; None: its end-of-sequence token."""
    return None if last_token == theirs.sampling_params.eos_token_id else last_token
