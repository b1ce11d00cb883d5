"""Answers to a list of prompts, in their order: an engine that runs until all have ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from paged.base.uninterrupted import Uninterrupted
from paged.base.words import shown
from paged.engine.config import EngineConfig
from paged.engine.engine import Engine
from paged.engine.live_request import LiveRequest
from paged.engine.results import Completion, EngineOutput
from paged.errors import InvalidConfig, InvalidRequest, InvalidSampling
from paged.model.chat import chat_prompt
from paged.model.checkpoint import is_shipped
from paged.model.loading import LoadedModel
from paged.sampling.params import SamplingParams
from paged.sampling.search_params import BeamSearchParams, ContrastiveSearchParams, SearchParams

Params = SamplingParams | SearchParams
OnOutput = Callable[[EngineOutput], None]
OnCompletion = Callable[[int, Completion], None]


class LLM:
    """A model that answers prompts. Takes the arguments of Engine."""

    def __init__(self, model: EngineConfig | LoadedModel | str | Path | None = None, **options: Any) -> None:
        self.engine = Engine(model, **options)

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        on_output: OnOutput | None = None,
        on_completion: OnCompletion | None = None,
        use_tqdm: bool | None = None,
    ) -> list[Completion]:
        """Answer every prompt, text or token ids. `sampling_params` is one for all, or a list with one for each prompt.
        A bar on standard error shows how many are answered; with `use_tqdm` None only on a terminal.

        `on_output` sees each piece of these answers as it comes. It may abort a request, which then ends with reason
        "abort", and may add requests to the engine. The engine keeps outputs of other requests for its next `step`.
        `on_completion` is called with an answer's place among the prompts, and the answer, when that has ended: the
        answer is complete, even if the call ends with an error.

        Raises as Engine.add_request, before anything runs, and as Engine.step; errors of a callback and Ctrl-C pass
        through. After any error these requests have been aborted, and the engine can be used. A generate or a step
        within a callback, or while another thread calls the engine, raises EngineInUse.
        """
        for name, callback in (("on_output", on_output), ("on_completion", on_completion)):
            if callback is not None and not callable(callback):
                raise InvalidRequest(f"{name} has to be a function, or None; got {shown(callback)}.")
        several = _listed(prompts)
        each = _one_each(sampling_params, len(several))
        with self.engine.turns.alone("generate"):
            requests: list[LiveRequest] = []
            try:
                for prompt, its in zip(several, each, strict=True):
                    # An interrupt must not come between adding a request and noting it.
                    with Uninterrupted():
                        request = self.engine.live_request(self.engine.add_request(prompt, its))
                        assert request is not None, "a request that was just added lives"
                        requests.append(request)
                with tqdm(
                    total=len(requests), desc="answers", disable=None if use_tqdm is None else not use_tqdm
                ) as bar:
                    self._drive(requests, on_output, on_completion, bar)
            except BaseException:
                self.engine.forget([request.id for request in requests])
                raise
            return [request.completion() for request in requests]

    def chat(
        self,
        messages: Sequence[Mapping[str, str]] | Sequence[Sequence[Mapping[str, str]]],
        sampling_params: Params | Sequence[Params] | None = None,
        **options: Any,
    ) -> list[Completion]:
        """Answer a conversation, or each of several, with the assistant's next message; `options` are generate's.

        messages  mappings with "role" (system, user or assistant) and "content"; the chat template joins them

        The cache has what a conversation shares with an earlier one. Raises InvalidChat, and as `generate`.
        """
        is_several = isinstance(messages, list | tuple) and bool(messages) and isinstance(messages[0], list | tuple)
        several: list[Any] = list(messages) if is_several else [messages]
        model = self.engine.model
        ships = is_shipped(model.path)
        prompts = [chat_prompt(model.tokenizer, conversation, is_shipped=ships) for conversation in several]
        return self.generate(prompts, sampling_params, **options)

    def beam_search(
        self, prompts: str | Sequence[str] | Sequence[Sequence[int]], params: BeamSearchParams, **options: Any
    ) -> list[Completion]:
        """Search the `params.n` likeliest answers to every prompt, the best first; `options` are generate's."""
        return self.generate(prompts, _must_be(BeamSearchParams, params), **options)

    def contrastive_search(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: ContrastiveSearchParams | None = None,
        **options: Any,
    ) -> list[Completion]:
        """Answer every prompt without repeating earlier text; `options` are generate's."""
        params = ContrastiveSearchParams() if params is None else params
        return self.generate(prompts, _must_be(ContrastiveSearchParams, params), **options)

    def get_tokenizer(self) -> Any:
        """Return the model's Hugging Face tokenizer. Raises InvalidRequest if the checkpoint has none."""
        if self.engine.model.tokenizer is None:
            raise InvalidRequest(f"{self.engine.model.path}: no tokenizer there.")
        return self.engine.model.tokenizer

    def _drive(
        self,
        requests: list[LiveRequest],
        on_output: OnOutput | None,
        on_completion: OnCompletion | None,
        bar: Any,
    ) -> None:
        """Step until each of the requests has ended, by itself or by an abort."""
        engine, ids = self.engine, {request.id: place for place, request in enumerate(requests)}
        going = deque(requests)
        while True:
            while going and going[0].last is not None:
                going.popleft()
            if not going:
                return
            engine.advance()
            for output in engine.outputs_of(ids):
                if output.finished:
                    bar.update()
                if on_output is not None:
                    on_output(output)
                if on_completion is not None and output.finished:
                    place = ids[output.id]
                    on_completion(place, requests[place].completion())


def _must_be(kind: type[Params], params: Params) -> Params:
    """Return the parameters of a search. Raises InvalidSampling for others."""
    if not isinstance(params, kind):
        raise InvalidSampling(f"params have to be {kind.__name__}; got {shown(params)}.")
    return params


def _listed(prompts: Any) -> list[Any]:
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping | bytes | bytearray) or not hasattr(prompts, "__iter__"):
        raise InvalidRequest(
            f"prompts have to be text, or a list of prompts, each text or token ids; got {shown(prompts)}."
        )
    several = list(prompts)
    for prompt in several:
        if not isinstance(prompt, str) and not hasattr(prompt, "__len__"):
            raise InvalidRequest(
                f"a prompt has to be text, or a sequence of token ids; got {shown(prompt)}. "
                f"One prompt of token ids is a list within a list."
            )
    return several


def _one_each(params: Any, num_prompts: int) -> list[Params | None]:
    if isinstance(params, Params) or params is None:
        return [params] * num_prompts
    if isinstance(params, str | Mapping) or not isinstance(params, Iterable):
        raise InvalidConfig(f"params have to be SamplingParams, or a list of them; got {params!r}.")
    each = list(params)
    if len(each) != num_prompts:
        raise InvalidConfig(f"{num_prompts} prompts and {len(each)} sampling parameters; one for each is needed.")
    return each
