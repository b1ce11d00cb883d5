"""Outputs that were not handed out yet, so that an error in a callback loses none."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import msgspec

from paged.base.uninterrupted import Uninterrupted
from paged.engine.results import EngineOutput


class Undelivered:
    """Outputs of requests, each request's in the order in which they came."""

    def __init__(self) -> None:
        # Filed by request only when one request's are asked for: usually a step takes all at once.
        self._latest: list[EngineOutput] = []
        self._by_request: dict[str, list[EngineOutput]] = {}

    def __bool__(self) -> bool:
        return bool(self._latest or self._by_request)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._filed()

    def add(self, outputs: list[EngineOutput]) -> None:
        """Add new outputs."""
        self._latest += outputs

    def take_all(self) -> list[EngineOutput]:
        """Hand out everything."""
        if not self._by_request:
            taken, self._latest = self._latest, []
            return taken
        filed, self._by_request = self._filed(), {}
        return [output for outputs in filed.values() for output in outputs]

    def take_each(self, request_ids: Collection[str]) -> Iterator[EngineOutput]:
        """Hand out the outputs of these requests, one by one: what is not read stays."""
        for request_id in [each for each in self._filed() if each in request_ids]:
            while outputs := self._filed().get(request_id):
                output = outputs.pop(0)
                if not outputs:
                    del self._by_request[request_id]
                yield output

    def take_joined(self, request_id: str) -> EngineOutput | None:
        """Hand out a request's outputs of its latest sequence as one; others stay for the next step. None: nothing."""
        every = self._filed().pop(request_id, [])
        outputs = [output for output in every if output.sequence == every[-1].sequence]
        if len(outputs) < len(every):
            self._by_request[request_id] = [output for output in every if output.sequence != every[-1].sequence]
        if len(outputs) < 2:
            return outputs[0] if outputs else None
        return msgspec.structs.replace(
            outputs[-1],
            token_ids=[token for output in outputs for token in output.token_ids],
            text="".join(output.text for output in outputs),
            logprobs=None
            if outputs[-1].logprobs is None
            else [each for output in outputs for each in output.logprobs or ()],
        )

    def _filed(self) -> dict[str, list[EngineOutput]]:
        """Return all outputs by request."""
        if self._latest:
            with Uninterrupted():
                for output in self._latest:
                    self._by_request.setdefault(output.id, []).append(output)
                self._latest = []
        return self._by_request
