"""Answers to clients: completions and conversations in OpenAI's form, whole or in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from paged.engine.results import Alternatives, Completion, EngineOutput, Logprob
from paged.scheduler import RequestUsage

encode = msgspec.json.Encoder().encode
_REASONS = {"stop": "stop", "length": "length", "abort": "abort", "rejected": "length"}


class PromptDetails(msgspec.Struct):
    """The prompt's tokens that were found in the cache."""

    cached_tokens: int = 0


class Usage(msgspec.Struct):
    """The tokens of an answer and of its prompts."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptDetails = msgspec.field(default_factory=PromptDetails)

    def add(self, used: RequestUsage) -> None:
        """One more prompt and its answers."""
        self.prompt_tokens += used.prompt_tokens
        self.completion_tokens += used.output_tokens
        self.total_tokens = self.prompt_tokens + self.completion_tokens
        self.prompt_tokens_details.cached_tokens += used.hit_tokens


class TextLogprobs(msgspec.Struct):
    """How likely each token of a completion was."""

    tokens: list[str] = msgspec.field(default_factory=list)
    token_logprobs: list[float | None] = msgspec.field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = msgspec.field(default_factory=list)
    text_offset: list[int] = msgspec.field(default_factory=list)


class TokenLogprob(msgspec.Struct):
    """The likelihood of a token of a message, or of an alternative to one."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(TokenLogprob):
    """The same with its alternatives."""

    top_logprobs: list[TokenLogprob] = msgspec.field(default_factory=list)


class ChatLogprobs(msgspec.Struct):
    """How likely each token of a message was."""

    content: list[ChosenLogprob]


class TextChoice(msgspec.Struct):
    """One continuation, or a piece of it."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Said(msgspec.Struct, omit_defaults=True):
    """A message, or a piece of it."""

    role: str | None = None
    content: str | None = None


class ChatChoice(msgspec.Struct):
    """One message."""

    index: int
    message: Said
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class ChatPiece(msgspec.Struct):
    """A piece of a message."""

    index: int
    delta: Said
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Answer(msgspec.Struct):
    """A whole answer, or a piece of a stream."""

    id: str
    object: str
    created: int
    model: str
    choices: Sequence[TextChoice | ChatChoice | ChatPiece]
    usage: Usage | None = None


class Piece(msgspec.Struct, omit_defaults=True):
    """A piece of a stream; it has a usage only if the client asked for that."""

    id: str
    object: str
    created: int
    model: str
    choices: Sequence[TextChoice | ChatPiece]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


def reason_of(finish_reason: str | None) -> str | None:
    """As OpenAI names it."""
    return None if finish_reason is None else _REASONS.get(finish_reason, finish_reason)


def text_logprobs(
    places: Sequence[Alternatives | None], tokens: Sequence[int], count: int, offset: int = 0
) -> TextLogprobs:
    """Of a completion's tokens at these places, with `count` alternatives of each; `offset`: characters before."""
    found = TextLogprobs()
    for each, token in zip(places, tokens, strict=True):
        mine = None if each is None else each.get(token)
        text = "" if mine is None else _text_of(token, mine)
        found.tokens.append(text)
        found.token_logprobs.append(None if mine is None else mine.logprob)
        found.top_logprobs.append(
            None if each is None or not count else {_text_of(*other): other[1].logprob for other in each.items()}
        )
        found.text_offset.append(offset)
        offset += len(text)
    return found


def chat_logprobs(places: Sequence[Alternatives], tokens: Sequence[int], count: int) -> ChatLogprobs:
    """The same of a message's."""
    content = []
    for each, token in zip(places, tokens, strict=True):
        mine = each[token]
        likeliest = sorted(each.items(), key=lambda item: item[1].rank)[:count]
        others = [TokenLogprob(_text_of(*other), other[1].logprob, _bytes_of(*other)) for other in likeliest]
        content.append(ChosenLogprob(_text_of(token, mine), mine.logprob, _bytes_of(token, mine), others))
    return ChatLogprobs(content)


def _text_of(token: int, found: Logprob) -> str:
    return found.decoded_token if found.decoded_token is not None else f"token_id:{token}"


def _bytes_of(token: int, found: Logprob) -> list[int]:
    return list(_text_of(token, found).encode())


class Form:
    """The form of one request's answers: their common head, and the fields beside the text."""

    def __init__(self, id: str, created: int, model: str, *, is_chat: bool, num_logprobs: int | None) -> None:
        self.id, self.created, self.model = id, created, model
        self.is_chat = is_chat
        self.num_logprobs = num_logprobs
        # Characters said so far, by choice: where a completion's next token begins.
        self._said: dict[int, int] = {}
        self._piece_of = "chat.completion.chunk" if is_chat else "text_completion"

    def opening(self, index: int) -> bytes:
        """Return the first piece of a message, with its role."""
        return self._piece(ChatPiece(index, Said("assistant", "")))

    def piece(self, outputs: Sequence[EngineOutput], index: int, usage: Usage | None = None) -> bytes | None:
        """Return the new text of one choice as one piece; None if a client would see nothing."""
        text = "".join(output.text for output in outputs)
        last = outputs[-1]
        reason = reason_of(last.finish_reason)
        if not text and reason is None and self.num_logprobs is None:
            return None
        tokens = [token for output in outputs for token in output.token_ids]
        places = [place for output in outputs for place in output.logprobs or ()]
        if self.is_chat:
            likely = None if self.num_logprobs is None else chat_logprobs(places, tokens, self.num_logprobs)
            return self._piece(ChatPiece(index, Said(None, text), likely, reason, last.stop_reason), usage)
        of_text = None
        if self.num_logprobs is not None:
            said = self._said.get(index, 0)
            of_text = text_logprobs(places, tokens, self.num_logprobs, said)
            self._said[index] = said + len(text)
        return self._piece(TextChoice(index, text, of_text, reason, last.stop_reason), usage)

    def usage_piece(self, usage: Usage) -> bytes:
        """The last piece of a stream, where it was asked for."""
        return self._event(Piece(self.id, self._piece_of, self.created, self.model, (), usage))

    def whole(self, completions: Sequence[Completion], usage: Usage) -> bytes:
        """All answers at once."""
        choices: list[TextChoice | ChatChoice] = []
        for completion in completions:
            for output in completion.outputs:
                choices.append(self._choice(len(choices), completion, output))
        kind = "chat.completion" if self.is_chat else "text_completion"
        return encode(Answer(self.id, kind, self.created, self.model, choices, usage))

    def _choice(self, index: int, completion: Completion, output: Any) -> TextChoice | ChatChoice:
        reason = reason_of(output.finish_reason)
        if self.is_chat:
            likely = None
            if self.num_logprobs is not None:
                likely = chat_logprobs(output.logprobs or (), output.token_ids, self.num_logprobs)
            return ChatChoice(index, Said("assistant", output.text), likely, reason, output.stop_reason)
        of_text = None
        if self.num_logprobs is not None:
            places, tokens = list(output.logprobs or ()), list(output.token_ids)
            if completion.prompt_logprobs is not None:
                places, tokens = [*completion.prompt_logprobs, *places], [*completion.prompt_token_ids, *tokens]
            of_text = text_logprobs(places, tokens, self.num_logprobs)
        return TextChoice(index, output.text, of_text, reason, output.stop_reason)

    def _piece(self, choice: TextChoice | ChatPiece, usage: Usage | None = None) -> bytes:
        return self._event(
            Piece(
                self.id, self._piece_of, self.created, self.model, (choice,), msgspec.UNSET if usage is None else usage
            )
        )

    def _event(self, piece: Piece) -> bytes:
        return b"data: " + encode(piece) + b"\n\n"


DONE = b"data: [DONE]\n\n"


def error_event(body: dict[str, Any]) -> bytes:
    """An error in the middle of a stream."""
    return b"data: " + encode(body) + b"\n\n"
