"""Text up to the first stop string, while it comes.

stop "\\n\\nQ:"     "… the end.\\n"  →  "… the end." is handed out, "\\n" may begin it and is held back
                  "\\nQ: what"     →  found: nothing more is handed out
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """The part of a text that may be handed out; `found` is the string that ended it, or None."""

    def __init__(self, strings: Sequence[str], *, included: bool = False) -> None:
        self.found: str | None = None
        self._strings = tuple(strings)
        self._included = included
        self._held = ""
        self._longest = max(map(len, self._strings), default=1)

    def push(self, text: str, *, counts: bool = True) -> str:
        """Return the text to hand out after this new text, "" after the end. Strings in text that does not count end nothing."""
        if self.found is not None:
            return ""
        if not counts or not self._strings:
            out, self._held = self._held + text, ""
            return out
        text = self._held + text
        begins = [(place, -len(string), string) for string in self._strings if (place := text.find(string)) >= 0]
        if begins:
            # The earliest; of those that begin there the longest.
            place, length, self.found = min(begins)
            self._held = ""
            return text[: place - length if self._included else place]
        num_held = next(
            (
                count
                for count in range(min(self._longest - 1, len(text)), 0, -1)
                if any(string.startswith(text[-count:]) for string in self._strings)
            ),
            0,
        )
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def finish(self) -> str:
        """Return the text that was held back, at the end."""
        out, self._held = self._held, ""
        return out
