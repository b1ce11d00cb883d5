"""Tokens as text, while they come.

    prompt | output so far
       |window          |
        |known to be final|may change|

Each time only a window of the last tokens is decoded; its text beyond the last one is new. This is the idea of the
prefix offset and the read offset of vLLM's and TGI's detokenizers. Unlike theirs the window never waits for a token that
ends a character, so that even random bytes cost the same for each token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paged.base.arguments import token_array
from paged.errors import TextEnded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# A window of fewer characters could begin and end within the same character, which has at most four bytes.
_LEAST_CHARS = 4

# Tokens that usually have so many characters; a window is cut back to them when it has three times as many.
_LEAST_TOKENS = 8
_MOST_TOKENS = 24

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """The text of a growing output.

    What was returned never changes. All of it together is `tokenizer.decode(output)`, except that the output goes on where
    the prompt ended: it keeps a leading space that would be stripped there, and ends the prompt's last character if that has
    bytes missing. Bytes that are no character become U+FFFD. The tokenizer's clean-up of spaces, which rewrites text, is off.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, prompt_ids: list[int]) -> None:
        """Begin behind a prompt; only its end is read."""
        # Several times as fast as the tokenizer's own `decode`, which calls it.
        self._backend = tokenizer.backend_tokenizer
        self._has_ended = False
        self._window = self._end_of(prompt_ids)
        # Text of the window before the first new character. It may still change if it ends within one.
        self._before: str | None = self._decoded(self._window)
        # Characters of the window's text that are final.
        self._num_final = 0

    def push(self, ids: list[int]) -> str:
        """Return the text that is new and final once these tokens have come.

        A character whose bytes have not all come is held back, and so are byte tokens of a tokenizer that knows some
        characters by bytes alone (<0xE4>) until another token ends their run: it reads them all or none.

        Raises InvalidTokens for anything but token ids, and TextEnded after `finish`.
        """
        return self.push_known(token_array(ids).tolist())

    def push_known(self, ids: list[int]) -> str:
        """As `push`, for ids that need no check."""
        if self._has_ended:
            raise TextEnded("the stream was finished; tokens that come later need a stream of their own.")
        self._window += self._spoken(ids)
        if not self._window or self._is_byte(self._window[-1]):
            return ""
        text = self._advanced_to(_settled(self._decoded(self._window)))
        if len(self._window) > _MOST_TOKENS and self._before is None:
            self._window = self._end_of(self._window)
            self._num_final = len(_settled(self._decoded(self._window)))
        return text

    def finish(self) -> str:
        """Return the text that was held back. Nothing can be pushed after it; called again it returns nothing."""
        if self._has_ended:
            return ""
        self._has_ended = True
        return self._advanced_to(self._decoded(self._window))

    def _advanced_to(self, text: str) -> str:
        if self._before is not None:
            # The output may have changed the prompt's last character, by ending it.
            self._num_final = _num_shared(self._before, text)
        new = text[self._num_final :]
        if new:
            self._before = None
            self._num_final = len(text)
        return new

    def _end_of(self, ids: list[int]) -> list[int]:
        """Return the last tokens that can stand for all of them before more text; their number doubles until they can."""
        num_tokens = _LEAST_TOKENS
        while True:
            end = self._spoken(token_array(ids[-num_tokens:]).tolist())
            if num_tokens >= len(ids):
                return end
            is_one_run = all(map(self._is_byte, end))
            if not is_one_run and len(self._decoded(end)) >= _LEAST_CHARS:
                return end
            num_tokens *= 2

    def _spoken(self, ids: list[int]) -> list[int]:
        """Return the tokens without those that the tokenizer does not know, and its decoder skips: they are no context."""
        return [id for id in ids if self._backend.id_to_token(id) is not None]

    def _is_byte(self, id: int) -> bool:
        token = self._backend.id_to_token(id)
        return token is not None and len(token) == 6 and token.startswith("<0x") and token.endswith(">")

    def _decoded(self, ids: list[int]) -> str:
        text: str = self._backend.decode(ids, skip_special_tokens=False)
        return text


def _settled(text: str) -> str:
    """Return the text without what the next token may change: a character that has bytes missing is one U+FFFD, the last."""
    return text.removesuffix(_REPLACEMENT)


def _num_shared(one: str, other: str) -> int:
    """Return how many characters both begin with."""
    shorter = min(len(one), len(other))
    return next((place for place in range(shorter) if one[place] != other[place]), shorter)
