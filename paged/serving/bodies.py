"""What clients send: the bodies of OpenAI's interface, with what vLLM adds to them, and limits on each field.

Fields that nobody here knows are ignored, as OpenAI's own clients expect. Knows shapes. Does not know what a field does.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr

MAX_STOPS, MAX_STOP_CHARS = 16, 16_384
MAX_BIASES = 1024

Number = StrictFloat | StrictInt
Token = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
StopText = Annotated[str, Field(strict=True, min_length=1, max_length=MAX_STOP_CHARS)]
Biases = Annotated[dict[str, Annotated[Number, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES)]


class StreamOptions(BaseModel):
    """What a stream says beside its text."""

    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = False


class JsonSchema(BaseModel):
    """A JSON schema that the answer follows."""

    model_config = ConfigDict(populate_by_name=True)

    name: StrictStr = "answer"
    schema_: dict[str, Any] = Field(alias="schema")
    strict: StrictBool | None = None


class ResponseFormat(BaseModel):
    """The answer's form."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(BaseModel):
    """The answer's form, as vLLM has it: exactly one of these."""

    json_: dict[str, Any] | StrictStr | None = Field(default=None, alias="json")
    json_object: StrictBool | None = None
    regex: Annotated[str, Field(strict=True, min_length=1, max_length=65_536)] | None = None
    choice: (
        Annotated[list[Annotated[str, Field(strict=True, min_length=1)]], Field(min_length=1, max_length=4096)] | None
    ) = None
    grammar: Annotated[str, Field(strict=True, min_length=1, max_length=262_144)] | None = None
    disable_any_whitespace: StrictBool = False


class _Asked(BaseModel):
    """What both kinds of requests may say."""

    model: StrictStr | None = Field(
        default=None, description="A name that /v1/models lists; none: the one that is served."
    )
    n: Annotated[int, Field(strict=True, ge=1)] | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[Number, Field(ge=0, le=1e6)] | None = Field(
        default=None, description="0 is greedy; none: 1."
    )
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(strict=True, ge=-1, lt=2**31)] | None = Field(
        default=None, description="-1 and 0: all."
    )
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(strict=True, ge=-(2**63), lt=2**64)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0, le=1e6)] | None = None
    logit_bias: Biases | None = None
    allowed_token_ids: Annotated[list[Token], Field(min_length=1, max_length=2**20)] | None = None
    bad_words: Annotated[list[StopText], Field(max_length=MAX_BIASES)] | None = None
    min_tokens: Annotated[int, Field(strict=True, ge=0)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[Token], Field(max_length=MAX_BIASES)] | None = None
    include_stop_str_in_output: StrictBool | None = None
    ignore_eos: StrictBool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: Annotated[int, Field(strict=True, ge=-(2**31), lt=2**31)] | None = Field(
        default=None, description="Smaller is sooner."
    )
    cache_salt: Annotated[str, Field(strict=True, min_length=1, max_length=1024)] | None = Field(
        default=None, description="What is computed is found again by requests of the same salt alone."
    )
    deadline_s: Annotated[Number, Field(gt=0, le=1e6)] | None = Field(
        default=None, description="Seconds after which nobody wants the answer any more."
    )
    user: StrictStr | None = None


class CompletionRequest(_Asked):
    """Text, or token ids, to be continued."""

    prompt: (
        StrictStr
        | Annotated[list[Token], Field(min_length=1)]
        | Annotated[list[StrictStr], Field(min_length=1)]
        | Annotated[list[Annotated[list[Token], Field(min_length=1)]], Field(min_length=1)]
    )
    max_tokens: Annotated[int, Field(strict=True, ge=1)] | None = Field(default=None, description="None: 16.")
    best_of: Annotated[int, Field(strict=True, ge=1)] | None = None
    echo: StrictBool | None = None
    logprobs: Annotated[int, Field(strict=True, ge=0)] | None = None


class TextPart(BaseModel):
    """Text of a message."""

    type: Literal["text"]
    text: StrictStr


class Message(BaseModel):
    """What somebody said."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: StrictStr | list[TextPart] | None = None


class Tool(BaseModel):
    """A tool, as the chat template takes it."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    function: dict[str, Any]


class ChatRequest(_Asked):
    """A conversation to be continued by the assistant."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(strict=True, ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(strict=True, ge=1)] | None = Field(
        default=None, description="None: as many as the context leaves."
    )
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[int, Field(strict=True, ge=0)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(BaseModel):
    """Text, or messages, as token ids."""

    model: StrictStr | None = None
    prompt: StrictStr | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: StrictBool = True
    return_token_strs: StrictBool | None = None


class DetokenizeRequest(BaseModel):
    """Token ids as text."""

    model: StrictStr | None = None
    tokens: list[Token]
