"""The plug-in's record of a live request."""

from __future__ import annotations

from typing import Any

import msgspec


class Live(msgspec.Struct, eq=False):
    """A live request of vLLM.

    request       vLLM's Request
    prompt        token ids with which our scheduler begins: its prompt, and after a withdrawal its outputs, too
    num_left      output tokens that it may still have
    is_submitted  our scheduler has it
    was_admitted  it has run before
    is_sent       the runner has it
    problem       why it is refused
    """

    request: Any
    id: str
    prompt: Any = None
    num_left: int = 0
    is_submitted: bool = False
    was_admitted: bool = False
    is_sent: bool = False
    problem: str | None = None

    def __post_init__(self) -> None:
        self.prompt = self.request.prompt_token_ids
        self.num_left = self.request.max_tokens

    @property
    def is_watched(self) -> bool:
        """Whether vLLM's own Request needs each token, for a grammar or the search for repetitions."""
        sampling = self.request.sampling_params
        return self.request.use_structured_output or sampling.repetition_detection is not None

    @property
    def wants_more(self) -> bool:
        """Whether every output of it has more than tokens."""
        sampling = self.request.sampling_params
        return (
            self.is_watched
            or sampling.num_logprobs is not None
            or sampling.prompt_logprobs is not None
            or self.request.trace_headers is not None
        )
