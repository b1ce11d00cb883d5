"""Conversations as prompts, by the checkpoint's chat template, or by a plain one for the models that ship."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

from paged.base.words import shown
from paged.engine.door import checked_text
from paged.errors import InvalidChat

ROLES = ("system", "user", "assistant", "tool")
# The template of the models that ship, which were not trained on conversations.
_PLAIN = {"system": "{}\n\n", "user": "Question: {}\n", "assistant": "Answer:{}\n\n", "tool": "Result: {}\n"}
# Fields that a message may have besides role and content, for templates with tools.
_MORE = {"name", "tool_calls", "tool_call_id", "reasoning_content"}
_ANSWER = "Answer:"

Message = Mapping[str, Any]


def chat_prompt(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    is_shipped: bool,
    tools: Sequence[Mapping[str, Any]] | None = None,
    options: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the token ids of a prompt that the assistant's next message continues.

    tokenizer   the model's tokenizer, with its chat template; None is refused
    messages    mappings with "role", one of ROLES, and "content", text; the last one is not the assistant's
    is_shipped  the model is one that ships, which has no template
    tools       tools that the assistant may call, as the template takes them
    options     more variables of the template

    Raises InvalidChat, or InvalidRequest for a lone surrogate.
    """
    messages = _checked_messages(messages)
    if tokenizer is None:
        raise InvalidChat("the model has no tokenizer, so messages cannot become a prompt.")
    if is_shipped:
        _must_be_plain(messages, tools, options)
        parts = [_PLAIN[each["role"]].format(_as_said(each)) for each in messages]
        found: Any = tokenizer.encode("".join(parts) + _ANSWER, verbose=False)
        return [int(token) for token in found]
    if not tokenizer.chat_template:
        raise InvalidChat("the model's tokenizer has no chat template; make a prompt of the messages yourself.")
    _must_be_read(tokenizer, tools, options or {})
    # Imported here: transformers, which tokenizers need, brings it.
    from jinja2 import TemplateError

    try:
        found = tokenizer.apply_chat_template(
            list(map(dict, messages)),
            tools=None if tools is None else list(map(dict, tools)),
            add_generation_prompt=True,
            tokenize=True,
            **(options or {}),
        )
    except (TemplateError, TypeError, ValueError) as error:
        raise InvalidChat(f"the chat template does not take these messages: {error}") from None
    ids = found["input_ids"] if isinstance(found, Mapping) else found
    return [int(token) for token in ids]


def _must_be_plain(messages: Sequence[Message], tools: Any, options: Any) -> None:
    """Raise InvalidChat for anything that the plain template would leave out."""
    named = {name for message in messages for name in message if message[name]} - {"role", "content", "tool_call_id"}
    named |= {name for name, value in (("tools", tools), ("chat_template_kwargs", options)) if value}
    if named:
        raise InvalidChat(f"{min(named)}: the model that ships has no chat template that could read it.")


def _must_be_read(tokenizer: Any, tools: Any, options: Mapping[str, Any]) -> None:
    """Raise InvalidChat for tools and options that the chat template does not read."""
    template = tokenizer.chat_template
    text = template if isinstance(template, str) else " ".join(template.values())
    own = signature(tokenizer.apply_chat_template).parameters
    for name in (*options, *(("tools",) if tools else ())):
        if (name in own and name not in ("tools", "documents")) or not re.search(rf"\b{re.escape(name)}\b", text):
            of = f"chat_template_kwargs: {name[:100]}" if name in options else name
            raise InvalidChat(f"{of}: the model's chat template does not read it.")


def _as_said(message: Message) -> str:
    """Return the content. An answer begins as it was generated, with a space or a line's end, so that its blocks are found in the cache."""
    content = message["content"]
    return f" {content}" if message["role"] == "assistant" and not content[:1].isspace() else content


def _checked_messages(messages: Any) -> list[Message]:
    """Return the messages as a list, since an iterator gives them once. Raise InvalidChat unless an answer can follow them."""
    if isinstance(messages, str | bytes | Mapping) or not hasattr(messages, "__iter__"):
        raise InvalidChat(f"messages have to be a list of mappings with role and content; got {shown(messages)}.")
    several = list(messages)
    if not several:
        raise InvalidChat("there is no message; at least one of the user is needed.")
    for number, message in enumerate(several):
        if not isinstance(message, Mapping) or set(message) - _MORE != {"role", "content"}:
            raise InvalidChat(f"message {number} has to be a mapping with role and content; got {shown(message)}.")
        if message["role"] not in ROLES:
            raise InvalidChat(
                f"message {number}: role has to be one of {', '.join(ROLES)}; got {shown(message['role'])}."
            )
        if not isinstance(message["content"], str):
            raise InvalidChat(f"message {number}: content has to be text; got {shown(message['content'])}.")
        checked_text(message["content"])
    if several[-1]["role"] == "assistant":
        raise InvalidChat("the last message is the assistant's; an answer follows one of the user.")
    return several
