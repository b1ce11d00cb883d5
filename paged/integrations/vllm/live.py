"""The plug-in's record of a live request."""

from __future__ import annotations

from typing import Any

import msgspec


class Live(msgspec.Struct, eq=False):
    """A request of vLLM's on its way.

    request       vLLM's
    prompt        token ids that it begins with here: its prompt, and after it was withdrawn what it had answered, too
    num_left      tokens that it may still answer
    is_submitted  our scheduler knows it
    was_admitted  it has run before
    is_told       the runner knows it
    problem       why it is refused
    """

    request: Any
    id: str
    prompt: Any = None
    num_left: int = 0
    is_submitted: bool = False
    was_admitted: bool = False
    is_told: bool = False
    problem: str | None = None

    def __post_init__(self) -> None:
        self.prompt = self.request.prompt_token_ids
        self.num_left = self.request.max_tokens

    @property
    def is_watched(self) -> bool:
        """Whether vLLM's own Request has to know each token: a grammar reads it, or the search for repetitions."""
        sampling = self.request.sampling_params
        return self.request.use_structured_output or sampling.repetition_detection is not None

    @property
    def wants_more(self) -> bool:
        """Whether its outputs carry more than tokens, each time."""
        sampling = self.request.sampling_params
        return (
            self.is_watched
            or sampling.num_logprobs is not None
            or sampling.prompt_logprobs is not None
            or self.request.trace_headers is not None
        )
