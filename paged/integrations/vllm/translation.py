"""A request of vLLM's as one of ours."""

from __future__ import annotations

from typing import Any

from paged.scheduler import Request


def request_of(theirs: Any, prompt: Any, max_tokens: int, *, transfers: bool = False) -> Request:
    """`theirs` with this prompt (its own, or that and what it has answered) and so many tokens to go.

    Its stop ids end it here, in one look at all rows. The least number of tokens is vLLM's sampler's business: before it is reached no stop
    id can be chosen, so that vLLM's own scheduler ends at one whenever it comes. The adapter's name and the salt are part of what content is.
    `transfers`: a connector may load any of its tokens, and saves its blocks.
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
    """The stop id that a stopped request ended with; None: its end-of-sequence token."""
    return None if last_token == theirs.sampling_params.eos_token_id else last_token
