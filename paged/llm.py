"""Answers to a list of prompts, in their order: the engine driven to the end.

Knows an engine. Does not know how a step is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from block_manager import InvalidConfig
from paged.engine import Engine
from paged.model.loading import LoadedModel
from paged.results import Completion, EngineOutput
from paged.sampling.params import SamplingParams


class LLM:
    """A model that answers prompts. Takes what Engine takes."""

    def __init__(self, model: LoadedModel | str | Path | None = None, **options: Any) -> None:
        if model is None:
            from paged.checkpoint import checkpoint_path

            model = checkpoint_path()
        self.engine = Engine(model, **options)

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_output: Callable[[EngineOutput], None] | None = None,
    ) -> list[Completion]:
        """Answer every prompt, text or token ids. `params` holds for all, or is a list, one a prompt. `on_output` sees every piece
        as it comes.

        Raises as Engine.add_request does, before anything runs.
        """
        several: list[Any] = [prompts] if isinstance(prompts, str) else list(prompts)
        if isinstance(params, SamplingParams) or params is None:
            each = [params] * len(several)
        else:
            each = list(params)
        if len(each) != len(several):
            raise InvalidConfig(f"{len(several)} prompts and {len(each)} sampling parameters; one for each is needed.")
        engine = self.engine
        ids: list[str] = []
        try:
            for prompt, its in zip(several, each, strict=True):
                ids.append(engine.add_request(prompt, its))
        except Exception:
            for request_id in ids:
                engine.abort(request_id)
            raise
        live = {request_id: engine.live_request(request_id) for request_id in ids}
        done: dict[str, Completion] = {}
        while len(done) < len(ids):
            for output in engine.step():
                if on_output is not None:
                    on_output(output)
                request = live.get(output.id)
                if request is not None and output.finish_reason is not None:
                    done[output.id] = request.completion(output)
        return [done[request_id] for request_id in ids]
