"""Answers to clients: completions and conversations in OpenAI's form, whole or in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from paged.engine.results import Alternatives, Completion, EngineOutput, Logprob
from paged.scheduler import RequestUsage
from paged.serving.kv_hints import KvOutcome

encode = msgspec.json.Encoder().encode
_REASONS = {"stop": "stop", "length": "length", "abort": "abort", "rejected": "length"}
"""OpenAI's finish reasons, by ours."""


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
        """Add a prompt and its answers."""
        self.prompt_tokens += used.prompt_tokens
        self.completion_tokens += used.output_tokens
        self.total_tokens = self.prompt_tokens + self.completion_tokens
        self.prompt_tokens_details.cached_tokens += used.hit_tokens


class TextLogprobs(msgspec.Struct):
    """The log-probabilities of a completion's tokens."""

    tokens: list[str] = msgspec.field(default_factory=list)
    token_logprobs: list[float | None] = msgspec.field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = msgspec.field(default_factory=list)
    text_offset: list[int] = msgspec.field(default_factory=list)


class TokenLogprob(msgspec.Struct):
    """The log-probability of a token of a message, or of an alternative to one."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(TokenLogprob):
    """The log-probability of a message's token, with its alternatives."""

    top_logprobs: list[TokenLogprob] = msgspec.field(default_factory=list)


class ChatLogprobs(msgspec.Struct):
    """The log-probabilities of a message's tokens."""

    content: list[ChosenLogprob]


class TextChoice(msgspec.Struct):
    """One continuation, or a piece of it."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class MessagePart(msgspec.Struct, omit_defaults=True):
    """The role and text of a message, or of a piece of one."""

    role: str | None = None
    content: str | None = None


class ChatChoice(msgspec.Struct):
    """One message."""

    index: int
    message: MessagePart
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class ChatPiece(msgspec.Struct):
    """A piece of a message."""

    index: int
    delta: MessagePart
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


Choice = TextChoice | ChatChoice | ChatPiece


class Answer(msgspec.Struct):
    """A whole answer, or a piece of a stream. A piece has a usage only if the client asked for one."""

    id: str
    object: str
    created: int
    model: str
    choices: Sequence[Choice]
    usage: Usage | msgspec.UnsetType = msgspec.UNSET
    kv_hint_outcomes: list[KvOutcome] | msgspec.UnsetType = msgspec.UNSET


def text_logprobs(
    places: Sequence[Alternatives | None], tokens: Sequence[int], count: int, offset: int = 0
) -> TextLogprobs:
    """Return the log-probabilities of a completion's tokens, with their alternatives unless `count` is 0. `offset`: characters before them."""
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
    """Return the log-probabilities of a message's tokens, with the `count` likeliest alternatives of each."""
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
        # By choice, characters so far: where a completion's next token begins.
        self._num_chars: dict[int, int] = {}
        self._piece_of = "chat.completion.chunk" if is_chat else "text_completion"

    def opening(self, index: int) -> bytes:
        """Return the first piece of a message, with its role."""
        return self._piece(ChatPiece(index, MessagePart("assistant", "")))

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
        return self._piece(self._choice(index, text, self._logprobs(places, tokens, offset), last), usage)

    def last_piece(self, usage: Usage | None, hinted: list[KvOutcome] | None) -> bytes:
        """Return the last piece of a stream: its usage and the outcomes of its hints; b"" if both are None."""
        if usage is None and hinted is None:
            return b""
        return self._piece(None, usage, hinted)

    def whole(self, completions: Sequence[Completion], usage: Usage, hinted: list[KvOutcome] | None = None) -> bytes:
        """Return the body with all answers, and the outcomes of the request's hints."""
        choices: list[Choice] = []
        for completion in completions:
            for output in completion.outputs:
                places: list[Any] = list(output.logprobs or ())
                tokens = list(output.token_ids)
                if completion.prompt_logprobs is not None:
                    places, tokens = [*completion.prompt_logprobs, *places], [*completion.prompt_token_ids, *tokens]
                logprobs = self._logprobs(places, tokens, 0)
                choices.append(self._choice(len(choices), output.text, logprobs, output, "assistant"))
        kind = "chat.completion" if self.is_chat else "text_completion"
        return encode(Answer(self.id, kind, self.created, self.model, choices, usage, _given(hinted)))

    def _logprobs(self, places: Sequence[Any], tokens: Sequence[int], offset: int) -> Any:
        """Return the log-probabilities of these tokens, which begin behind `offset` characters; None if the client wants none."""
        if self.num_logprobs is None:
            return None
        if self.is_chat:
            return chat_logprobs(places, tokens, self.num_logprobs)
        return text_logprobs(places, tokens, self.num_logprobs, offset)

    def _choice(self, index: int, text: str, logprobs: Any, last: Any, role: str | None = None) -> Choice:
        """Return a choice with this text, whose last output is `last`; a whole one if its role is given, else a piece."""
        end = _REASONS.get(last.finish_reason, last.finish_reason), last.stop_reason
        if not self.is_chat:
            return TextChoice(index, text, logprobs, *end)
        return (ChatPiece if role is None else ChatChoice)(index, MessagePart(role, text), logprobs, *end)

    def _piece(self, choice: Choice | None, usage: Usage | None = None, hinted: list[KvOutcome] | None = None) -> bytes:
        choices = () if choice is None else (choice,)
        head = self.id, self._piece_of, self.created, self.model
        return event(Answer(*head, choices, _given(usage), _given(hinted)))


def _given(value: Any) -> Any:
    return msgspec.UNSET if value is None else value


DONE = b"data: [DONE]\n\n"


def event(content: Any) -> bytes:
    """Return an event of a stream: a piece of an answer, or the body of an error."""
    return b"data: " + encode(content) + b"\n\n"
