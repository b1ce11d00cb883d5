"""Outputs that have come and were not handed out, so that what a callback raises loses none.

Knows outputs and whose they are. Does not know where they come from.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import msgspec

from paged.results import EngineOutput


class Undelivered:
    """Outputs by request, in the order in which they came."""

    def __init__(self) -> None:
        self._outputs: dict[str, list[EngineOutput]] = {}

    def __bool__(self) -> bool:
        return bool(self._outputs)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._outputs

    def add(self, output: EngineOutput) -> None:
        """An output has come."""
        self._outputs.setdefault(output.id, []).append(output)

    def take_all(self) -> list[EngineOutput]:
        """Hand out everything, request by request."""
        taken, self._outputs = self._outputs, {}
        return [output for outputs in taken.values() for output in outputs]

    def take_each(self, request_ids: Collection[str]) -> Iterator[EngineOutput]:
        """Hand out what these requests have brought. An output is taken when it is asked for, and may be taken back
        until then."""
        for request_id in [each for each in self._outputs if each in request_ids]:
            while outputs := self._outputs.get(request_id):
                output = outputs.pop(0)
                if not outputs:
                    del self._outputs[request_id]
                yield output

    def take_joined(self, request_id: str) -> EngineOutput | None:
        """Hand out all that the request has brought as one output; None: nothing."""
        outputs = self._outputs.pop(request_id, [])
        if len(outputs) < 2:
            return outputs[0] if outputs else None
        return msgspec.structs.replace(
            outputs[-1],
            token_ids=[token for output in outputs for token in output.token_ids],
            text="".join(output.text for output in outputs),
        )
