"""The bodies of OpenAI's interface, with vLLM's additions, and a limit on each field.

No field is ignored. An unknown one is refused. An unsupported one of OpenAI's or vLLM's is refused, too, unless its value asks for nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StrictBool, StrictStr

from paged.serving.kv_hints import KvHintsEnvelope, Salt, SessionId
from paged.serving.strict import Body, Number, Reasons, Token

MAX_STOPS, MAX_STOP_CHARS = 16, 16_384
MAX_BIASES = 1024

AtLeast0 = Annotated[int, Field(strict=True, ge=0)]
AtLeast1 = Annotated[int, Field(strict=True, ge=1)]
StopText = Annotated[str, Field(strict=True, min_length=1, max_length=MAX_STOP_CHARS)]
Biases = Annotated[dict[str, Annotated[Number, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES)]
Label = Annotated[StrictStr | None, Field(description="Changes no answer.")]

_TOOLS = "calls of tools are not parsed out of an answer's text."
_TEXT = "prompts and answers are text."
_FORM = "structured_outputs names an answer's form."
_TEMPLATE = "messages become a prompt by the model's own chat template, which opens the assistant's next message."
_REASONING = "reasoning is part of an answer's text; chat_template_kwargs may have a switch of the template's."
_BOTH: Reasons = {
    "use_beam_search": ("there is no search over HTTP.", (False,)),
    "length_penalty": ("there is no search over HTTP.", (1,)),
    "prompt_logprobs": ("echo with logprobs gives those of a completion's prompt.", ()),
    "skip_special_tokens": ("special tokens stay in an answer's text.", (False,)),
    "spaces_between_special_tokens": ("an answer's text is as its tokens have it.", (True,)),
    "truncate_prompt_tokens": ("a prompt is computed whole, or refused.", ()),
    "prompt_embeds": (_TEXT, ()),
    "return_tokens_as_token_ids": ("an answer has text.", (False,)),
    "return_token_ids": ("an answer has text.", (False,)),
    "logits_processors": ("none run over HTTP.", ([],)),
    "guided_json": (_FORM, ()),
    "guided_regex": (_FORM, ()),
    "guided_choice": (_FORM, ()),
    "guided_grammar": (_FORM, ()),
    "kv_transfer_params": ("one engine computes a request from its beginning to its end.", ({},)),
    "vllm_xargs": ("there are no more arguments.", ({},)),
    "request_id": ("the header X-Request-Id names a request.", ()),
}
_CHAT: Reasons = {
    "tool_choice": (f"{_TOOLS} It can be none or auto", ("none", "auto")),
    "functions": ("tools describes what an assistant may call.", ([],)),
    "function_call": (_TOOLS, ("none", "auto")),
    "parallel_tool_calls": (_TOOLS, (True,)),
    "audio": (_TEXT, ()),
    "modalities": (_TEXT, (["text"], [])),
    "web_search_options": ("nothing is searched for.", ()),
    "prediction": ("drafts come from the server's --speculate.", ()),
    "reasoning_effort": (_REASONING, ()),
    "include_reasoning": (_REASONING, (True,)),
    "thinking_token_budget": (_REASONING, ()),
    "verbosity": ("the model has no such setting.", ("medium",)),
    "chat_template": (_TEMPLATE, ()),
    "add_generation_prompt": (_TEMPLATE, (True,)),
    "continue_final_message": (_TEMPLATE, (False,)),
    "add_special_tokens": (_TEMPLATE, (False,)),
    "documents": (_TEMPLATE, ([],)),
    "mm_processor_kwargs": (_TEXT, ({},)),
}


class StreamOptions(Body):
    """Options of a stream."""

    unsupported: ClassVar[Reasons] = {"include_obfuscation": ("pieces are not padded.", (False,))}
    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = False


class JsonSchema(Body):
    """A JSON schema that the answer follows."""

    name: StrictStr = "answer"
    description: Label = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: StrictBool | None = None


class ResponseFormat(Body):
    """The answer's form."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """The answer's form, as vLLM has it: exactly one of json, json_object, regex, choice and grammar."""

    unsupported: ClassVar[Reasons] = {
        "whitespace_pattern": ("disable_any_whitespace says whether JSON has white space.", ()),
        "structural_tag": ("grammar describes it.", ()),
        "disable_additional_properties": ("the schema's additionalProperties says it.", (False,)),
        "disable_fallback": ("there is one backend.", (False, True)),
    }
    json_: dict[str, Any] | StrictStr | None = Field(default=None, alias="json")
    json_object: StrictBool | None = None
    regex: Annotated[str, Field(strict=True, min_length=1, max_length=65_536)] | None = None
    choice: (
        Annotated[list[Annotated[str, Field(strict=True, min_length=1)]], Field(min_length=1, max_length=4096)] | None
    ) = None
    grammar: Annotated[str, Field(strict=True, min_length=1, max_length=262_144)] | None = None
    disable_any_whitespace: StrictBool = True


class _Request(Body):
    """The fields of both kinds of requests."""

    unsupported: ClassVar[Reasons] = _BOTH
    model: StrictStr | None = Field(None, description="A name that /v1/models lists; none: the one that is served.")
    n: AtLeast1 | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[Number, Field(ge=0, le=1e6)] | None = Field(None, description="0 is greedy; none: 1.")
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(strict=True, ge=-1, lt=2**31)] | None = Field(None, description="-1 and 0: all.")
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(strict=True, ge=-(2**63), lt=2**64)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Number, Field(ge=1e-6, le=1e6)] | None = None
    logit_bias: Biases | None = None
    allowed_token_ids: Annotated[list[Token], Field(min_length=1, max_length=2**20)] | None = None
    bad_words: Annotated[list[StopText], Field(max_length=MAX_BIASES)] | None = None
    min_tokens: AtLeast0 | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[Token], Field(max_length=MAX_BIASES)] | None = None
    include_stop_str_in_output: StrictBool | None = None
    ignore_eos: StrictBool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: Annotated[int, Field(strict=True, ge=-(2**31), lt=2**31)] | None = Field(
        None, description="Smaller is sooner."
    )
    cache_salt: Salt | None = Field(
        None, description="What is computed is found again by requests of the same salt alone."
    )
    session_id: SessionId | None = Field(
        None, description="The session that it is a turn of; what it leaves is kept for the next one."
    )
    kv_hints: KvHintsEnvelope | None = Field(None, description="What to do with what it leaves.")
    deadline_s: Annotated[Number, Field(gt=0, le=1e6)] | None = Field(
        None, description="Seconds after which the answer is not wanted any more."
    )
    user: Label = None
    metadata: Annotated[dict[str, Any] | None, Field(description="Changes no answer.")] = None
    store: Annotated[StrictBool | None, Field(description="Changes no answer.")] = None
    service_tier: Label = None
    safety_identifier: Label = None
    prompt_cache_key: Label = None
    prompt_cache_retention: Label = None


class CompletionRequest(_Request):
    """Text, or token ids, to be continued."""

    unsupported: ClassVar[Reasons] = _BOTH | {
        "suffix": ("a prompt is continued at its end.", ("",)),
        "add_special_tokens": ("a prompt has the tokenizer's own special tokens; token ids have none added.", (True,)),
    }
    prompt: (
        StrictStr
        | Annotated[list[Token], Field(min_length=1)]
        | Annotated[list[StrictStr], Field(min_length=1)]
        | Annotated[list[Annotated[list[Token], Field(min_length=1)]], Field(min_length=1)]
    )
    max_tokens: AtLeast1 | None = Field(None, description="None: 16.")
    best_of: AtLeast1 | None = None
    echo: StrictBool | None = None
    logprobs: AtLeast0 | None = None


class TextPart(Body):
    """Text of a message."""

    unsupported: ClassVar[Reasons] = {"type": (_TEXT, ("text",))}
    type: Literal["text"]
    text: StrictStr


class Message(Body):
    """One message; the chat template reads it."""

    unsupported: ClassVar[Reasons] = {
        "refusal": ("content is what was said.", ("",)),
        "audio": (_TEXT, ()),
        "annotations": ("content is what was said.", ([],)),
        "function_call": ("tool_calls are what an assistant called.", ()),
        "reasoning": ("reasoning_content is its name here.", ()),
    }
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: StrictStr | list[TextPart] | None = None
    name: StrictStr | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: StrictStr | None = None
    reasoning_content: StrictStr | None = None


class Tool(Body):
    """A tool, as the chat template takes it."""

    type: Literal["function"]
    function: dict[str, Any]


class ChatRequest(_Request):
    """A conversation to be continued by the assistant."""

    unsupported: ClassVar[Reasons] = _BOTH | _CHAT
    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: AtLeast1 | None = None
    max_completion_tokens: AtLeast1 | None = Field(None, description="None: as many as the context leaves.")
    logprobs: StrictBool | None = None
    top_logprobs: AtLeast0 | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class _OneText(Body):
    """A prompt, or messages as the chat template takes them."""

    unsupported: ClassVar[Reasons] = {
        name: _CHAT[name]
        for name in ("add_generation_prompt", "continue_final_message", "chat_template", "mm_processor_kwargs")
    }
    model: StrictStr | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: StrictBool | None = Field(None, description="Of a prompt that is text; none: true.")


class TokenizeRequest(_OneText):
    """Text, or messages, as token ids."""

    prompt: StrictStr | None = None
    return_token_strs: StrictBool | None = None


class ExplainRequest(_OneText):
    """A prompt, to explain why no more of it is in the cache."""

    prompt: StrictStr | Annotated[list[Token], Field(min_length=1)] | None = None
    tenant: StrictStr | None = Field(None, description="Whose it is; none: the server's own.")
    cache_salt: Salt | None = None


class DetokenizeRequest(Body):
    """Token ids as text."""

    model: StrictStr | None = None
    tokens: list[Token]


def field_of(message: str) -> str | None:
    """Return the field of a request that an error's message begins with; None if it begins with none."""
    first = message.split(maxsplit=1)[0].rstrip(":")
    return first if first in ChatRequest.model_fields or first in CompletionRequest.model_fields else None
