"""A conversation as a prompt: the checkpoint's own template, or a plain one for the model that ships.

Knows messages and templates. Does not know how an answer is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paged.block_manager import PagedError
from paged.checkpoint import checkpoint_path
from paged.door import checked_text, shown

if TYPE_CHECKING:
    from paged.model.loading import LoadedModel

ROLES = ("system", "user", "assistant")
# Of the model that ships: it was never taught to talk.
_PLAIN = {"system": "{}\n\n", "user": "Question: {}\n", "assistant": "Answer:{}\n\n"}
_ANSWER = "Answer:"

Message = Mapping[str, str]


class InvalidChat(PagedError, ValueError):
    """Messages of the wrong shape, or a model without a template for them."""


def chat_prompt(model: LoadedModel, messages: Sequence[Message]) -> list[int]:
    """The token ids of a prompt that the assistant's next message continues.

    messages  mappings with "role", one of ROLES, and "content", text; the last one is not the assistant's

    Raises InvalidChat, or InvalidRequest for a lone surrogate.
    """
    checked_messages(messages)
    if model.tokenizer is None:
        raise InvalidChat(f"{model.path}: no tokenizer there, so messages cannot become a prompt.")
    if model.path == checkpoint_path():
        parts = [_PLAIN[each["role"]].format(_as_said(each)) for each in messages]
        found: Any = model.tokenizer.encode("".join(parts) + _ANSWER, verbose=False)
        return [int(token) for token in found]
    if not model.tokenizer.chat_template:
        raise InvalidChat(f"{model.path}: its tokenizer has no chat template; make a prompt of the messages yourself.")
    found = model.tokenizer.apply_chat_template(list(map(dict, messages)), add_generation_prompt=True, tokenize=True)
    ids = found["input_ids"] if isinstance(found, Mapping) else found
    return [int(token) for token in ids]


def _as_said(message: Message) -> str:
    """The content; an answer begins as it was generated, so that its blocks are found, with a space or a line's end."""
    content = message["content"]
    return f" {content}" if message["role"] == "assistant" and not content[:1].isspace() else content


def checked_messages(messages: Any) -> None:
    """Raise InvalidChat unless these are messages that an answer can follow."""
    if isinstance(messages, str | bytes | Mapping) or not hasattr(messages, "__iter__"):
        raise InvalidChat(f"messages have to be a list of mappings with role and content; got {shown(messages)}.")
    several = list(messages)
    if not several:
        raise InvalidChat("there is no message; at least one of the user is needed.")
    for number, message in enumerate(several):
        if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
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
