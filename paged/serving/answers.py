"""Answers to clients: completions and conversations in OpenAI's form, whole or in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from paged.engine.results import Alternatives, Completion, EngineOutput, Logprob
from paged.scheduler import RequestUsage
from paged.serving.kv_hints import KvOutcome

encode = msgspec.json.Encoder().encode
_REASONS = {"rejected": "length"}
"""OpenAI's finish reasons, by ours, where they differ."""


class Usage(msgspec.Struct):
    """The tokens of an answer and of its prompts; cached_tokens of these were found in the cache."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: dict[str, int] = msgspec.field(default_factory=lambda: {"cached_tokens": 0})

    def add(self, used: RequestUsage) -> None:
        """Add a prompt and its answers."""
        self.prompt_tokens += used.prompt_tokens
        self.completion_tokens += used.output_tokens
        self.total_tokens = self.prompt_tokens + self.completion_tokens
        self.prompt_tokens_details["cached_tokens"] += used.hit_tokens


def text_logprobs(
    places: Sequence[Alternatives | None], tokens: Sequence[int], count: int, offset: int = 0
) -> dict[str, list[Any]]:
    """Return the log-probabilities of a completion's tokens, with their alternatives unless `count` is 0. `offset`: characters before them."""
    texts: list[str] = []
    logprobs, alternatives, offsets = list[float | None](), list[dict[str, float] | None](), list[int]()
    for each, token in zip(places, tokens, strict=True):
        mine = None if each is None else each.get(token)
        texts.append("" if mine is None else _text_of(token, mine))
        logprobs.append(None if mine is None else mine.logprob)
        alternatives.append(
            None if each is None or not count else {_text_of(*other): other[1].logprob for other in each.items()}
        )
        offsets.append(offset)
        offset += len(texts[-1])
    return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": alternatives, "text_offset": offsets}


def chat_logprobs(places: Sequence[Alternatives], tokens: Sequence[int], count: int) -> dict[str, list[Any]]:
    """Return the log-probabilities of a message's tokens, with the `count` likeliest alternatives of each."""
    content = []
    for each, token in zip(places, tokens, strict=True):
        likeliest = sorted(each.items(), key=lambda item: item[1].rank)[:count]
        others = [_likelihood(*other) for other in likeliest]
        content.append({**_likelihood(token, each[token]), "top_logprobs": others})
    return {"content": content}


def _text_of(token: int, found: Logprob) -> str:
    return found.decoded_token if found.decoded_token is not None else f"token_id:{token}"


def _likelihood(token: int, found: Logprob) -> dict[str, Any]:
    text = _text_of(token, found)
    return {"token": text, "logprob": found.logprob, "bytes": list(text.encode())}


@dataclass
class Form:
    """The form of one request's answers: their common head, and the fields beside the text."""

    id: str
    created: int
    model: str
    is_chat: bool
    num_logprobs: int | None
    # By choice, characters so far: where a completion's next token begins.
    _num_chars: dict[int, int] = field(default_factory=dict)

    def opening(self, index: int) -> bytes:
        """Return the first piece of a message, with its role."""
        return self._piece([_choice(index, "delta", {"role": "assistant", "content": ""})])

    def piece(self, outputs: Sequence[EngineOutput], index: int, usage: Usage | None = None) -> bytes | None:
        """Return the new text of one choice as one piece; None if a client would see nothing."""
        text = "".join(output.text for output in outputs)
        last = outputs[-1]
        if not text and last.finish_reason is None and self.num_logprobs is None:
            return None
        tokens = [token for output in outputs for token in output.token_ids]
        places = [place for output in outputs for place in output.logprobs or ()]
        offset = self._num_chars.get(index, 0)
        self._num_chars[index] = offset + len(text)
        said: tuple[str, Any] = ("delta", {"content": text}) if self.is_chat else ("text", text)
        return self._piece([_choice(index, *said, self._logprobs(places, tokens, offset), last)], usage)

    def last_piece(self, usage: Usage | None, hinted: list[KvOutcome] | None) -> bytes:
        """Return the last piece of a stream: its usage and the outcomes of its hints; b"" if both are None."""
        if usage is None and hinted is None:
            return b""
        return self._piece([], usage, hinted)

    def whole(self, completions: Sequence[Completion], usage: Usage, hinted: list[KvOutcome] | None = None) -> bytes:
        """Return the body with all answers, and the outcomes of the request's hints."""
        choices: list[dict[str, Any]] = []
        for completion in completions:
            for output in completion.outputs:
                places: list[Any] = list(output.logprobs or ())
                tokens = list(output.token_ids)
                if completion.prompt_logprobs is not None:
                    places, tokens = [*completion.prompt_logprobs, *places], [*completion.prompt_token_ids, *tokens]
                message = {"role": "assistant", "content": output.text}
                said: tuple[str, Any] = ("message", message) if self.is_chat else ("text", output.text)
                choices.append(_choice(len(choices), *said, self._logprobs(places, tokens, 0), output))
        return encode(self._answer("", choices, usage, hinted))

    def _logprobs(self, places: Sequence[Any], tokens: Sequence[int], offset: int) -> Any:
        """Return the log-probabilities of these tokens, which begin behind `offset` characters; None if the client wants none."""
        if self.num_logprobs is None:
            return None
        if self.is_chat:
            return chat_logprobs(places, tokens, self.num_logprobs)
        return text_logprobs(places, tokens, self.num_logprobs, offset)

    def _piece(
        self, choices: list[dict[str, Any]], usage: Usage | None = None, hinted: list[KvOutcome] | None = None
    ) -> bytes:
        return event(self._answer(".chunk", choices, usage, hinted))

    def _answer(
        self, suffix: str, choices: list[dict[str, Any]], usage: Usage | None, hinted: list[KvOutcome] | None
    ) -> dict[str, Any]:
        """Return a whole answer, or a piece of a stream (`suffix` ".chunk"). A piece has a usage only if the client asked for one."""
        kind = f"chat.completion{suffix}" if self.is_chat else "text_completion"
        found = {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}
        if usage is not None:
            found["usage"] = usage
        if hinted is not None:
            found["kv_hint_outcomes"] = hinted
        return found


def _choice(index: int, name: str, said: Any, logprobs: Any = None, last: Any = None) -> dict[str, Any]:
    """Return a choice, or a piece of one, with what is said under this name. `last`: its last output; None: there is none yet."""
    reason: Any = None if last is None else last.finish_reason
    stop = None if last is None else last.stop_reason
    reason = _REASONS.get(reason, reason)
    return {"index": index, name: said, "logprobs": logprobs, "finish_reason": reason, "stop_reason": stop}


DONE = b"data: [DONE]\n\n"


def event(content: Any) -> bytes:
    """Return an event of a stream: a piece of an answer, or the body of an error."""
    return b"data: " + encode(content) + b"\n\n"
