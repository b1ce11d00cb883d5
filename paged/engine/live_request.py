"""An engine's record of a live request: its sequences, their tokens and text so far, and their times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from paged.decoding.stop_strings import StopStrings
from paged.decoding.text import TextStream
from paged.engine.results import Alternatives, Completion, CompletionOutput, EngineOutput, Logprob, Timings
from paged.sampling.adjustments import NO_LANE
from paged.sampling.params import SamplingParams
from paged.scheduler import RequestUsage


class LiveSequence:
    """One answer while it grows. `lane`: where changes to its logits are kept; NO_LANE: there are none."""

    def __init__(self, request: LiveRequest, number: int, seed: int, lane: int = NO_LANE) -> None:
        self.request = request
        self.number = number
        self.seed = seed
        self.lane = lane
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        # Log-probabilities by place among the outputs. A later step may read a place again.
        self._read: dict[int, Alternatives] = {}
        self.cumulative_logprob = 0.0
        # A search's score of this answer, if it ranks them.
        self.score: float | None = None
        self.logprobs: list[Alternatives] = []
        params = request.params
        # No log-probabilities are read, and no stop string ends it.
        self.is_plain = not params.reads_logprobs and not params.stop
        self._stream = None if request.tokenizer is None else TextStream(request.tokenizer, request.prompt_ids)
        self._stops = StopStrings(params.stop_strings, included=params.include_stop_str_in_output)
        self.first: float | None = None
        self.latest: float | None = None
        self.longest_gap = 0.0

    @property
    def has_found_stop(self) -> bool:
        """Whether a stop string has come."""
        return self._stops.found is not None

    @property
    def prompt_ids(self) -> list[int]:
        """The request's prompt."""
        return self.request.prompt_ids

    def read_output(self, place: int, ids: Sequence[int], values: Sequence[float], ranks: Sequence[int]) -> None:
        """Take log-probabilities of tokens, from the logits that the output at this place is chosen from."""
        self._read[place] = self.request.alternatives(ids, values, ranks)

    def read_prompt(self, place: int, ids: Sequence[int], values: Sequence[float], ranks: Sequence[int]) -> None:
        """Take log-probabilities of tokens for the prompt's token at this place."""
        found = self.request.prompt_logprobs
        assert found is not None, "it was asked for"
        found[place] = self.request.alternatives(ids, values, ranks)

    def read_state(self, position: int, state: Any) -> None:
        """Raise: a sampled answer asks for no hidden states."""
        raise AssertionError("answers that are drawn do not ask for hidden states")

    def add_plain(self, tokens: list[int], now: float) -> str:
        """Take new tokens of a plain sequence that goes on, at `now`. Return the new text."""
        self._came(now)
        self.token_ids += tokens
        if self._stream is None:
            return ""
        text = self._stream.push_known(tokens)
        self.text += text
        return text

    def add(self, tokens: list[int], now: float, reason: str | None = None) -> tuple[list[int], str]:
        """Take new tokens, the last ones if there is a `reason`. Return those up to a stop string, and the new text."""
        if not tokens:
            return tokens, ""
        self._came(now)
        # A token that stops the sequence belongs to it, but not to its text.
        spoken = tokens[:-1] if reason == "stop" else tokens
        if self._stream is None:
            text = ""
        elif not self.request.params.stop:
            text = self._stream.push_known(spoken)
        else:
            text, num_kept = self._up_to_a_stop(spoken)
            tokens = tokens[:num_kept] if self.has_found_stop else tokens
        self.token_ids += tokens
        self.text += text
        return tokens, text

    def _came(self, now: float) -> None:
        """Note the time of new tokens."""
        if self.latest is None:
            self.first = now
        elif now - self.latest > self.longest_gap:
            self.longest_gap = now - self.latest
        self.latest = now

    def _up_to_a_stop(self, tokens: list[int]) -> tuple[str, int]:
        """Return the text of tokens up to a stop string, and their number."""
        assert self._stream is not None, "there is a tokenizer"
        text, num_before = "", len(self.token_ids)
        for count, token in enumerate(tokens, 1):
            counts = num_before + count > self.request.params.min_tokens
            text += self._stops.push(self._stream.push_known([token]), counts=counts)
            if self.has_found_stop:
                return text, count
        return text, len(tokens)

    def end(self, reason: str) -> str:
        """End the sequence. Return the text that was held back."""
        text = ""
        if self._stream is not None:
            text = self._stops.push(self._stream.finish()) + self._stops.finish()
        self.text += text
        if self.has_found_stop and reason == "length":
            reason = "stop"
        self.finish_reason = reason
        if reason == "stop":
            last = self.token_ids[-1] if self.token_ids else None
            is_asked = last is not None and last in self.request.params.stop_token_ids
            self.stop_reason = self._stops.found if self.has_found_stop else last if is_asked else None
        return text

    def output(self) -> CompletionOutput:
        """Return the whole answer, once it has ended."""
        assert self.finish_reason is not None, "it has ended"
        params, text = self.request.params, self.text
        if params.echo:
            prompt = self.request.prompt
            if prompt is None and self.request.tokenizer is not None:
                prompt = self.request.tokenizer.decode(self.prompt_ids)
            text = (prompt or "") + text
        keeps = params.logprobs is not None
        return CompletionOutput(
            self.number,
            text,
            self.token_ids,
            self.finish_reason,
            self.stop_reason,
            self.cumulative_logprob if self.request.params.reads_logprobs or self.score is not None else None,
            self.logprobs if keeps else None,
            self.score,
        )

    def take_logprobs(self, tokens: list[int]) -> list[Alternatives] | None:
        """Take and return the log-probabilities of the newest tokens, which are these; None if not asked for."""
        if not self.request.params.reads_logprobs:
            return None
        start = len(self.token_ids) - len(tokens)
        found = [self._read.pop(start + nth) for nth in range(len(tokens))]
        # In order, so that tokens of one step sum to the same bits as those of several.
        for each, token in zip(found, tokens, strict=True):
            self.cumulative_logprob += each[token].logprob
        if self.request.params.logprobs is None:
            return None
        self.logprobs += found
        return found


class LiveRequest:
    """A request's prompt and its sequences."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_ids: list[int],
        params: SamplingParams,
        arrival: float,
        tokenizer: Any,
    ) -> None:
        self.id = request_id
        self.prompt = prompt
        self.prompt_ids = prompt_ids
        self.params = params
        self.arrival = arrival
        self.tokenizer = tokenizer
        self.sequences: list[LiveSequence] = []
        self.prompt_logprobs: list[Alternatives | None] | None = None
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * len(prompt_ids)
        # Its last output; None while it lives.
        self.last: EngineOutput | None = None
        # Tokens of its prompt that came from below memory.
        self.loaded_tokens = 0

    @property
    def token_ids(self) -> list[int]:
        """Output tokens so far of the first sequence; [] for a search."""
        return self.sequences[0].token_ids if self.sequences else []

    @property
    def text(self) -> str:
        """Text so far of the first sequence; "" for a search."""
        return self.sequences[0].text if self.sequences else ""

    @property
    def live(self) -> list[LiveSequence]:
        """The sequences that go on."""
        return [sequence for sequence in self.sequences if sequence.finish_reason is None]

    def note_loaded(self, num_tokens: int) -> None:
        """Count so many tokens of the prompt, which came from below memory, as hits."""
        self.loaded_tokens += num_tokens

    def grown(self, sequence: LiveSequence, tokens: list[int], now: float) -> EngineOutput:
        """Take new tokens of a sequence, at `now`. Return its output."""
        kept, text = sequence.add(tokens, now)
        return EngineOutput(self.id, kept, text, sequence=sequence.number, logprobs=sequence.take_logprobs(kept))

    def ended(
        self,
        sequence: LiveSequence,
        tokens: list[int],
        reason: str,
        now: float,
        *,
        usage: RequestUsage | None = None,
        error: str | None = None,
    ) -> EngineOutput:
        """Take the last tokens of a sequence, if any, and end it. Return its last output."""
        kept, text = sequence.add(tokens, now, reason)
        logprobs = sequence.take_logprobs(kept)
        text += sequence.end(reason)
        is_last = not self.live
        if usage is not None and self.loaded_tokens:
            usage = msgspec.structs.replace(usage, hit_tokens=usage.hit_tokens + self.loaded_tokens)
        output = EngineOutput(
            self.id,
            kept,
            text,
            sequence.finish_reason,
            error,
            usage if is_last else None,
            self.timings(now) if is_last else None,
            sequence.number,
            is_last,
            logprobs,
            sequence.stop_reason,
        )
        if is_last:
            self.last = output
        return output

    def ended_all(
        self, reason: str, now: float, *, usage: RequestUsage | None = None, error: str | None = None
    ) -> list[EngineOutput]:
        """End all sequences that go on. Return their last outputs."""
        return [self.ended(sequence, [], reason, now, usage=usage, error=error) for sequence in self.live]

    def alternatives(self, ids: Sequence[int], values: Sequence[float], ranks: Sequence[int]) -> Alternatives:
        """Return log-probabilities of tokens at one place, by token id."""
        return {
            id: Logprob(value, rank, None if self.tokenizer is None else self.tokenizer.decode([id]))
            for id, value, rank in zip(ids, values, ranks, strict=True)
        }

    def completion(self) -> Completion:
        """Return the finished request, once it has ended."""
        last = self.last
        assert last is not None, "it has ended"
        assert last.timings is not None, "an end says when"
        sequences = self.sequences
        if len(sequences) > self.params.n and sequences[0].score is None:
            sequences = sorted(sequences, key=lambda each: -each.cumulative_logprob)[: self.params.n]
        outputs = [sequence.output() for sequence in sequences]
        return Completion(
            self.id,
            self.prompt,
            self.prompt_ids,
            outputs,
            last.usage,
            last.timings,
            last.error,
            self.prompt_logprobs,
        )

    def timings(self, now: float) -> Timings:
        """Return the request's times as if it ended now."""
        count, e2e = sum(len(each.token_ids) for each in self.sequences), now - self.arrival
        spans = [
            (each.first, each.latest, len(each.token_ids) - 1)
            for each in self.sequences
            if each.first is not None and each.latest is not None
        ]
        num_gaps = sum(gaps for _, _, gaps in spans)
        return Timings(
            ttft_s=min(first for first, _, _ in spans) - self.arrival if spans else None,
            itl_s=sum(latest - first for first, latest, _ in spans) / num_gaps if num_gaps else None,
            longest_gap_s=max(each.longest_gap for each in self.sequences) if num_gaps else None,
            e2e_s=e2e,
            tokens_per_s=count / e2e if e2e > 0 else 0.0,
        )
