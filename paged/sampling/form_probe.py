"""Trials of grammars; as a script, in a process of its own.

A grammar of a few lines can make llguidance overflow its stack or compute for minutes, in spite of llguidance's limits. The script reads a grammar
from standard input, and writes what is wrong with it, within limits on processor time and memory. It imports only llguidance, and takes 0.1 s.
"""

from __future__ import annotations

import sys
from threading import Thread, stack_size
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# The time to read a grammar depends on its size.
LIMITS = LLParserLimits(max_grammar_size=16_384)
STACK_BYTES = 256 * 2**20
"""Stack of a thread that reads a grammar: enough for the deepest nesting in structured.MAX_CHARS."""
CPU_S, MEMORY_BYTES = 4, 4 * 2**30
NUM_TRIED = 8


def read(tokenizer: Any, text: str) -> tuple[LLMatcher | None, str | None]:
    """Read a grammar. Return a matcher at its beginning, None if it cannot be read, and what is wrong with it."""
    try:
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=LIMITS)
    except ValueError as error:
        return None, str(error)
    return matcher, _fault_of(matcher)


def _fault_of(matcher: LLMatcher) -> str | None:
    """Try the first tokens of an answer. Return why there is none. The matcher keeps what it computed for the first token."""
    tried = matcher
    for _ in range(NUM_TRIED):
        bits = b"" if tried.is_error() else tried.compute_bitmask()
        if tried.is_error():
            # The rest is the state of the parser.
            wrong = str(tried.get_error()).split("<state>")[0]
            return "no answer has this form" if wrong.startswith("NoExtension") else " ".join(wrong.split())
        tried = tried.deep_copy()
        first = next((8 * place + (byte & -byte).bit_length() - 1 for place, byte in enumerate(bits) if byte), None)
        if tried.is_stopped() or first is None or not tried.try_consume_tokens([first]):
            return None
    return None


def _main() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    text = sys.stdin.buffer.read().decode()

    def say() -> None:
        sys.stdout.buffer.write((read(LLTokenizer("byte"), text)[1] or "").encode())

    stack_size(STACK_BYTES)
    reader = Thread(target=say)
    reader.start()
    reader.join()


if __name__ == "__main__":
    _main()
