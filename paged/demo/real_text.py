"""Prompts of real text for a trace that says only how long each was, and which parts were shared.

The text is `pydoc`'s topics, which every Python has. A segment's content id chooses a paragraph to begin at, so equal segments are
equal text. Knows a tokenizer. Does not know the model.
"""

from __future__ import annotations

from pydoc_data import topics
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged.traces import Trace
from paged.traces.content import content_ids

# Enough to choose from, and quick to cut into tokens.
MOST_CHARACTERS = 200_000
SHORTEST_PARAGRAPH = 80


class RealText:
    """Prompts for the requests of `trace`, each as long as the trace says."""

    def __init__(self, trace: Trace, tokenizer: Any) -> None:
        self._trace = trace
        starts: list[int] = []
        stream: list[int] = []
        text = "\n\n".join(topics.topics[name].strip() for name in sorted(topics.topics))[:MOST_CHARACTERS]
        for paragraph in text.split("\n\n"):
            if len(paragraph) >= SHORTEST_PARAGRAPH and paragraph[0].isalpha():
                starts.append(len(stream))
            stream += tokenizer.encode(paragraph + "\n\n", add_special_tokens=False, verbose=False)
        self._stream = np.array(stream, np.int32)
        self._starts = np.array(starts, np.int64)

    def prompt(self, request: int) -> NDArray[np.int32]:
        """int32 [the trace's length]: the prompt of one request, the same at every call."""
        trace = self._trace
        segments = slice(trace.segment_starts[request], trace.segment_starts[request + 1])
        contents = content_ids(trace.segment_ids[segments], request)
        parts = []
        for content, length in zip(contents.tolist(), trace.segment_lengths[segments].tolist(), strict=True):
            start = int(self._starts[content * 2_654_435_761 % len(self._starts)])
            parts.append(np.take(self._stream, np.arange(start, start + length), mode="wrap"))
        return np.concatenate(parts)
