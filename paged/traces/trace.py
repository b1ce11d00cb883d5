"""A trace: requests in order of arrival, as columns.

Knows each request's arrival, lengths and segments. Makes a prompt's tokens only when asked for them: an hour of a chat service is
145 million prompt tokens, and its columns are 5 MB.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from paged import InvalidConfig
from paged.traces.content import content_ids, segment_tokens


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests 0 to n−1, sorted by arrival.

    arrival_s       float64 [n]    seconds after the first request, never falling
    output_tokens   int64 [n]      tokens that the service generated, at least 1
    segment_starts  int64 [n + 1]  request i's prompt is segments segment_starts[i] to segment_starts[i + 1] − 1
    segment_ids     int64 [k]      equal where tokens are equal; −1 where nobody else has them
    segment_lengths int64 [k]      tokens, at least 1
    """

    name: str
    arrival_s: NDArray[np.float64]
    output_tokens: NDArray[np.int64]
    segment_starts: NDArray[np.int64]
    segment_ids: NDArray[np.int64]
    segment_lengths: NDArray[np.int64]
    seed: int = 0

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def prompt_tokens(self) -> NDArray[np.int64]:
        """Each prompt's length in tokens, int64 [n]."""
        return np.add.reduceat(self.segment_lengths, self.segment_starts[:-1])

    def prompt(self, request: int) -> NDArray[np.int32]:
        """The prompt of one request, int32 [its length], the same at every call."""
        segments = slice(self.segment_starts[request], self.segment_starts[request + 1])
        contents = content_ids(self.segment_ids[segments], request)
        return segment_tokens(contents, self.segment_lengths[segments], self.seed)

    def head(self, count: int) -> "Trace":
        """The first `count` requests, or all of them where there are fewer. Raises InvalidConfig below 1."""
        if count < 1:
            raise InvalidConfig(f"{count} requests of a trace were asked for; at least 1 is needed")
        count = min(count, len(self))
        num_segments = self.segment_starts[count]
        return replace(
            self,
            arrival_s=self.arrival_s[:count],
            output_tokens=self.output_tokens[:count],
            segment_starts=self.segment_starts[: count + 1],
            segment_ids=self.segment_ids[:num_segments],
            segment_lengths=self.segment_lengths[:num_segments],
        )

    def scaled(self, *, rate: float = 1.0, prompts: float = 1.0, outputs: float = 1.0) -> "Trace":
        """The same requests, arriving `rate` times as fast, with prompts and outputs so many times as long.

        Every segment is scaled on its own and keeps at least one token, so what was shared stays shared. Raises InvalidConfig for a
        scale that is not a positive, finite number.
        """
        for what, scale in (("rate", rate), ("prompts", prompts), ("outputs", outputs)):
            if not (math.isfinite(scale) and scale > 0):
                raise InvalidConfig(f"the scale of {what} is {scale}; it must be a positive number")
        return replace(
            self,
            arrival_s=self.arrival_s / rate,
            output_tokens=_scaled_lengths(self.output_tokens, outputs),
            segment_lengths=_scaled_lengths(self.segment_lengths, prompts),
        )


def _scaled_lengths(tokens: NDArray[np.int64], scale: float) -> NDArray[np.int64]:
    return np.maximum(np.rint(tokens * scale), 1).astype(np.int64)
