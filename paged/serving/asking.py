"""A client's body as the engine takes it: token ids and sampling parameters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from paged.engine.door import checked_text
from paged.errors import InvalidChat, InvalidRequest, InvalidSampling
from paged.model.chat import chat_prompt
from paged.sampling.params import SamplingParams
from paged.sampling.structured import StructuredOutputsParams
from paged.serving.bodies import (
    ChatRequest,
    CompletionRequest,
    ExplainRequest,
    Message,
    ResponseFormat,
    StructuredOutputs,
    TokenizeRequest,
    Tool,
    field_of,
)
from paged.serving.errors import wrong
from paged.serving.settings import Settings

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for a completion."""
_AS_GIVEN = (
    *("n", "presence_penalty", "frequency_penalty", "repetition_penalty", "allowed_token_ids", "bad_words"),
    *("min_tokens", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos"),
)
"""Sampling parameters that are as a body has them."""


class Asking:
    """Turns bodies into prompts and parameters. `tokenizer` None: prompts have to be token ids."""

    def __init__(self, settings: Settings, tokenizer: Any, is_shipped: bool) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._is_shipped = is_shipped
        # Characters: a text of n of them has at least n ÷ this tokens.
        self._longest_token = max(map(len, tokenizer.get_vocab()), default=1) if tokenizer is not None else 1

    def prompts(self, body: CompletionRequest, most: int) -> list[list[int]]:
        """Return the token ids of each prompt of a completion. Raises ApiError, also for text that cannot fit into `most` tokens."""
        prompt = body.prompt
        several: Sequence[Any]
        if isinstance(prompt, str) or isinstance(prompt[0], int):
            several = [prompt]
        else:
            several = prompt
        if len(several) > self._settings.max_prompts:
            raise wrong(f"{len(several):,} prompts; a request may have {self._settings.max_prompts:,}.", "prompt")
        return [self.encoded(each, most) if isinstance(each, str) else list(each) for each in several]

    def encoded(self, text: str, most: int | None = None, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. Raises ApiError; before it is tokenized for text that cannot fit into `most` tokens."""
        if self._tokenizer is None:
            raise wrong("the model has no tokenizer; prompts have to be token ids.", "prompt")
        try:
            checked_text(text)
        except InvalidRequest as error:
            raise wrong(str(error), "prompt") from None
        self._must_not_be_longer(len(text), most, "prompt")
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        if not found:
            raise wrong("the prompt is empty; at least one token is needed.", "prompt")
        return found

    def _must_not_be_longer(self, num_chars: int, most: int | None, param: str) -> None:
        if most is not None and num_chars > most * self._longest_token:
            raise wrong(
                f"the text has {num_chars:,} characters, which make more than {most:,} tokens.",
                param,
                "context_length_exceeded",
            )

    def chat(
        self,
        messages: list[Message],
        tools: list[Tool] | None,
        options: dict[str, Any] | None = None,
        most: int | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation, by the model's chat template. Raises ApiError."""
        plain = [_plain(message) for message in messages]
        self._must_not_be_longer(sum(len(each["content"]) for each in plain), most, "messages")
        try:
            return chat_prompt(
                self._tokenizer,
                plain,
                is_shipped=self._is_shipped,
                tools=[tool.model_dump() for tool in tools] if tools else None,
                options=options,
            )
        except (InvalidChat, InvalidRequest) as error:
            raise wrong(str(error), field_of(str(error)) or "messages") from None

    def one_text(self, body: TokenizeRequest | ExplainRequest, most: int | None = None) -> list[int]:
        """Return the token ids of a body's prompt or messages. Raises ApiError, also unless it has one of them, and only what goes with it."""
        prompt, messages = body.prompt, body.messages
        if (prompt is None) == (messages is None):
            raise wrong("one of prompt and messages is needed.", "prompt")
        for name in ("add_special_tokens",) if prompt is None else ("tools", "chat_template_kwargs"):
            if getattr(body, name):
                raise wrong(f"{name} goes with {'prompt' if prompt is None else 'messages'}.", name)
        if messages is not None:
            return self.chat(messages, body.tools, body.chat_template_kwargs, most)
        if isinstance(prompt, list):
            return prompt
        return self.encoded(prompt or "", most, add_special_tokens=body.add_special_tokens is not False)

    def text(self, tokens: list[int]) -> str:
        """Return the text of token ids. Raises ApiError."""
        if self._tokenizer is None:
            raise wrong("the model has no tokenizer.", "tokens")
        size = len(self._tokenizer)
        for token in tokens:
            if token >= size:
                raise wrong(f"token id {token} is outside the vocabulary of {size:,}.", "tokens")
        return str(self._tokenizer.decode(tokens))

    def token_texts(self, tokens: list[int]) -> list[str]:
        """Return each token as the tokenizer writes it."""
        return [str(each) for each in self._tokenizer.convert_ids_to_tokens(tokens)]

    def completion_params(self, body: CompletionRequest) -> SamplingParams:
        """Return the sampling parameters of a completion. Raises ApiError."""
        n = body.n or 1
        if body.best_of is not None and body.stream and body.best_of > n:
            raise wrong("best_of does not go with stream: which answers are best is known at the end.", "best_of")
        return self._params(
            body,
            max_tokens=body.max_tokens or DEFAULT_MAX_TOKENS,
            logprobs=body.logprobs,
            best_of=body.best_of,
            prompt_logprobs=body.logprobs if body.echo else None,
        )

    def chat_params(self, body: ChatRequest, room: int) -> SamplingParams:
        """Return the sampling parameters of a conversation; `room` is the default of max_tokens. Raises ApiError."""
        if body.top_logprobs is not None and not body.logprobs:
            raise wrong("top_logprobs goes with logprobs: true.", "top_logprobs")
        most = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        if body.max_tokens not in (None, most):
            raise wrong(
                f"max_tokens {body.max_tokens} and max_completion_tokens {most} differ; one is enough.", "max_tokens"
            )
        return self._params(
            body, max_tokens=most or max(1, room), logprobs=(body.top_logprobs or 0) if body.logprobs else None
        )

    def _params(
        self, body: CompletionRequest | ChatRequest, *, max_tokens: int, logprobs: int | None, **more: Any
    ) -> SamplingParams:
        settings = self._settings
        temperature = 1.0 if body.temperature is None else float(body.temperature)
        n, best_of = body.n or 1, more.get("best_of")
        if max(n, best_of or 1) > settings.max_n:
            name = "n" if n > settings.max_n else "best_of"
            raise wrong(f"{max(n, best_of or 1):,} answers; a request may have {settings.max_n:,}.", name)
        if logprobs is not None and logprobs > settings.max_logprobs:
            name = "top_logprobs" if isinstance(body, ChatRequest) else "logprobs"
            raise wrong(f"{logprobs:,} alternatives; a request may have {settings.max_logprobs:,}.", name)
        draws = temperature > 0
        values = {name: getattr(body, name) for name in _AS_GIVEN if getattr(body, name) is not None}
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
        }
        form = _form(body.response_format, body.structured_outputs)
        options = body.stream_options
        if options is not None and not body.stream and (options.include_usage or options.continuous_usage_stats):
            raise wrong("stream_options goes with stream: true; a whole answer always has its usage.", "stream_options")
        if body.min_tokens is not None and body.min_tokens > max_tokens:
            raise wrong(f"min_tokens {body.min_tokens} is above max_tokens {max_tokens}.", "min_tokens")
        try:
            return SamplingParams(
                temperature=temperature,
                # A greedy answer draws nothing.
                top_k=body.top_k if draws and body.top_k is not None and body.top_k > 0 else None,
                top_p=body.top_p if draws and body.top_p is not None and body.top_p < 1 else None,
                min_p=body.min_p if draws and body.min_p else None,
                seed=body.seed % 2**64 if draws and body.seed is not None else None,
                logit_bias=_biases(body.logit_bias),
                max_tokens=max_tokens,
                logprobs=logprobs,
                structured_outputs=form,
                **given,
                **more,
            )
        except InvalidSampling as error:
            raise wrong(str(error), field_of(str(error))) from None


def _plain(message: Message) -> dict[str, Any]:
    """Return a message as a chat template takes it."""
    found = message.model_dump(exclude_none=True)
    content = message.content
    if isinstance(content, list):
        found["content"] = "".join(part.text for part in content)
    elif content is None:
        found["content"] = ""
    if message.role == "developer":
        found["role"] = "system"
    return found


def _biases(named: dict[str, Any] | None) -> dict[int, float] | None:
    if not named:
        return None
    found = {}
    for token, bias in named.items():
        if not (token.isascii() and token.isdigit() and len(token) <= 10):
            raise wrong(f'the keys of logit_bias have to be token ids; got "{token[:20]}".', "logit_bias")
        found[int(token)] = float(bias)
    return found


def _text_of(schema: dict[str, Any]) -> str:
    """Return a schema as text, for the engine: MessagePack has no integers of more than 64 bits."""
    try:
        return json.dumps(schema, ensure_ascii=False)
    except (ValueError, RecursionError) as error:
        raise InvalidSampling(f"json is no JSON: {error}.") from None


def _form(asked: ResponseFormat | None, structured: StructuredOutputs | None) -> StructuredOutputsParams | None:
    named = asked is not None and asked.type != "text"
    if structured is not None and named:
        raise wrong(
            "response_format and structured_outputs both name a form; one of them is enough.", "response_format"
        )
    try:
        if structured is not None:
            fields = structured.model_dump(by_alias=True, exclude_none=True)
            if isinstance(structured.json_, dict):
                fields["json"] = _text_of(structured.json_)
            if "choice" in fields:
                fields["choice"] = tuple(fields["choice"])
            return StructuredOutputsParams(**fields)
        if asked is None:
            return None
        if asked.json_schema is not None and asked.type != "json_schema":
            raise wrong(f"json_schema goes with type json_schema; type is {asked.type}.", "response_format.type")
        if not named:
            return None
        if asked.type == "json_object":
            return StructuredOutputsParams(json_object=True)
        if asked.json_schema is None:
            raise wrong("response_format json_schema needs json_schema.", "response_format")
        return StructuredOutputsParams(json=_text_of(asked.json_schema.schema_))
    except InvalidSampling as error:
        raise wrong(str(error), "response_format" if structured is None else "structured_outputs") from None
