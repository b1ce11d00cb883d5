"""Structured outputs: the tokens that a form allows next, by llguidance, for all rows at once.

    {"a": 1 | may be followed by a digit, "}" or a space, and by nothing else

They depend on a row's answer so far, drafts included. A grammar goes back to where the new answer and the last one
differ, and on from there, so places may be asked for in any order.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import Any

import llguidance.hf
import llguidance.numpy
import numpy as np
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray

from paged.errors import InvalidSampling
from paged.sampling import form_probe
from paged.sampling.structured import StructuredOutputsParams

_PROBE_S = 60.0

# Grammars that are kept for forms that come again.
_MOST_KEPT = 64


class Grammar:
    """One answer's place in a grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher
        self._followed: NDArray[np.int32] = np.empty(0, np.int32)

    def follow(self, tokens: NDArray[np.int32]) -> bool:
        """Move to the place after these tokens. Return whether the grammar allows them."""
        shorter = min(len(tokens), len(self._followed))
        parts = np.flatnonzero(tokens[:shorter] != self._followed[:shorter])
        num_shared = int(parts[0]) if len(parts) else shorter
        if num_shared < len(self._followed):
            self.matcher.rollback(len(self._followed) - num_shared)
        num_more = self.matcher.try_consume_tokens(tokens[num_shared:].tolist())
        self._followed = tokens[: num_shared + num_more].copy()
        return len(self._followed) == len(tokens)


class Grammars:
    """The grammars of one model's answers. For several threads: llguidance does not block the others while it reads a form."""

    def __init__(self, tokenizer: Any, vocabulary_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = llguidance.hf.from_tokenizer(
            tokenizer, n_vocab=vocabulary_size, eos_token=list(eos_token_ids)
        )
        self._known: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = Lock()

    def __contains__(self, form: StructuredOutputsParams) -> bool:
        """Whether the form has been read, and is kept."""
        return _grammar_of(form) in self._known

    def open(self, form: StructuredOutputsParams) -> Grammar:
        """Return the beginning of an answer of this form. Raises InvalidSampling for a form that llguidance cannot read, that is beyond its limits, or that no
        answer has."""
        text = _grammar_of(form)
        with self._lock:
            matcher = self._known.get(text)
        if matcher is None:
            matcher, wrong = form_probe.read(self._tokenizer, text)
            if matcher is None or wrong is not None:
                raise _cannot_follow(form, str(wrong))
        with self._lock:
            self._known[text] = matcher
            self._known.move_to_end(text)
            if len(self._known) > _MOST_KEPT:
                self._known.popitem(last=False)
        return Grammar(matcher.deep_copy())


def probe(form: StructuredOutputsParams) -> None:
    """Raise InvalidSampling unless another process reads the form within limits, so that a form that crashes llguidance crashes only that process."""
    # Without -P the script could import files next to it.
    command = [sys.executable, "-P", form_probe.__file__]
    try:
        done = subprocess.run(
            command, input=_grammar_of(form).encode(), capture_output=True, timeout=_PROBE_S, check=False
        )
    except subprocess.TimeoutExpired:
        done = None
    if done is None or done.returncode:
        raise _cannot_follow(
            form,
            f"it takes more than {form_probe.CPU_S} s of a processor, or {form_probe.MEMORY_BYTES >> 30} GiB, to read",
        )
    if done.stdout:
        raise _cannot_follow(form, done.stdout.decode())


def _cannot_follow(form: StructuredOutputsParams, why: str) -> InvalidSampling:
    return InvalidSampling(f"structured_outputs: {_name_of(form)} cannot be followed: {why}")


def allowed_tokens(grammars: Sequence[Grammar], vocabulary_size: int) -> NDArray[np.bool_]:
    """Return the tokens that each of n different grammars allows next, bool [n, vocabulary]."""
    bits = llguidance.numpy.allocate_token_bitmask(len(grammars), vocabulary_size)
    if len(grammars) == 1:
        llguidance.numpy.fill_next_token_bitmask(grammars[0].matcher, bits)
    else:
        each = [(grammar.matcher, place) for place, grammar in enumerate(grammars)]
        llguidance.numpy.fill_next_token_bitmask_par(_executor(), each, bits)
    spread = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")
    return spread[:, :vocabulary_size].astype(np.bool_)


_EXECUTOR: list[LLExecutor] = []


def _executor() -> LLExecutor:
    """Return llguidance's threads, one set for the process, made at the first call."""
    if not _EXECUTOR:
        _EXECUTOR.append(LLExecutor())
    return _EXECUTOR[0]


def _name_of(form: StructuredOutputsParams) -> str:
    return next(
        name for name in ("json", "regex", "choice", "grammar", "json_object") if getattr(form, name) is not None
    )


def _grammar_of(form: StructuredOutputsParams) -> str:
    """Return the form as llguidance's grammar. Raises InvalidSampling for a schema that nests too deeply for it."""
    if form.regex is not None:
        return str(LLMatcher.grammar_from_regex(form.regex))
    if form.choice is not None:
        return str(LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, form.choice))))
    if form.grammar is not None:
        return str(LLMatcher.grammar_from_lark(form.grammar))
    assert form.schema is not None, "one of them is there"
    options: Any = {"whitespace_flexible": False} if form.disable_any_whitespace else None
    try:
        return str(LLMatcher.grammar_from_json_schema(form.schema, overrides=options))
    except ValueError as error:
        raise _cannot_follow(form, str(error)) from None
