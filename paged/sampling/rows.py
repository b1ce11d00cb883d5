"""Sampling values by row, which a step gathers at once instead of request by request; and the sampling itself.

rows of a batch → how each is sampled → logits adjusted → a token each → log-probabilities to their readers
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from paged.sampling.adjustments import NO_LANE, Adjustments
from paged.sampling.logprobs import Logprobs, logprobs
from paged.sampling.params import SamplingParams
from paged.sampling.sampler import sample

if TYPE_CHECKING:
    from torch import Tensor

    from paged.sampling.grammars import Grammar

_NO_LIMIT = 2**62
_NUM_TOP_UNREAD = -1
_LEAST = -(2**63)
# Values of a row by dtype: a step gathers all of one dtype at once.
_REAL = ("temperature", "top_p", "min_p", "typical_p")
_WHOLE = ("top_k", "seeds", "prompt_len", "lanes", "numbers", "num_top", "num_prompt_top", "waits", "wants_states")
_PLACE = {name: place for names in (_REAL, _WHOLE) for place, name in enumerate(names)}


class Reader(Protocol):
    """Reads log-probabilities (natural) and hidden states. Lists begin with the token itself, followed by the likeliest tokens, the likeliest first."""

    @property
    def prompt_ids(self) -> list[int]:
        """Token ids of the prompt."""

    def read_output(self, place: int, ids: Sequence[int], values: Sequence[float], ranks: Sequence[int]) -> None:
        """Take the log-probabilities at the output token of this place."""

    def read_prompt(self, place: int, ids: Sequence[int], values: Sequence[float], ranks: Sequence[int]) -> None:
        """Take the log-probabilities at the prompt token of this place."""

    def read_state(self, position: int, state: Tensor) -> None:
        """Take the last hidden state of the token at this position, float32 [hidden size], from which logits are computed."""


class Asked(NamedTuple):
    """How each of n rows is sampled. Each column has a property of its name, [n]."""

    rows: NDArray[np.int64]
    real: NDArray[np.float64]
    whole: NDArray[np.int64]
    all_readers: NDArray[np.object_]
    # The highest value of each whole column, in these rows or the rows that they are taken from: a quick test that no row wants something.
    highest: list[int]

    def of(self, places: NDArray[Any]) -> Asked:
        """Return the same for some of the rows."""
        return Asked(self.rows[places], self.real[:, places], self.whole[:, places], self.all_readers, self.highest)

    def _any(self, name: str, least: int) -> bool:
        """Whether any row has at least this value in a column."""
        place = _PLACE[name]
        return self.highest[place] >= least and bool((self.whole[place] >= least).any())

    @property
    def adjusts(self) -> bool:
        """Whether the logits of any row are changed."""
        return self._any("lanes", 0)

    @property
    def any_reads(self) -> bool:
        """Whether any row reads log-probabilities of its outputs."""
        return self._any("num_top", 0)

    @property
    def any_reads_prompt(self) -> bool:
        """Whether any row reads log-probabilities of its prompt."""
        return self._any("num_prompt_top", 0)

    @property
    def any_waits(self) -> bool:
        """Whether any row waits."""
        return self._any("waits", 1)

    @property
    def any_wants_states(self) -> bool:
        """Whether any row reads hidden states."""
        return self._any("wants_states", 1)

    @property
    def only_draws(self) -> bool:
        """Whether all rows only draw a token from their logits."""
        reads = self.any_reads or self.any_reads_prompt or self.any_wants_states
        return not (reads or self.adjusts or self.any_waits)

    @property
    def temperature(self) -> NDArray[np.float64]:
        """That of SamplingParams, like the next ones, in which a number without effect stands for off."""
        return self.real[_PLACE["temperature"]]

    @property
    def top_p(self) -> NDArray[np.float64]:
        """1: off."""
        return self.real[_PLACE["top_p"]]

    @property
    def min_p(self) -> NDArray[np.float64]:
        """0: off."""
        return self.real[_PLACE["min_p"]]

    @property
    def typical_p(self) -> NDArray[np.float64]:
        """1: off."""
        return self.real[_PLACE["typical_p"]]

    @property
    def top_k(self) -> NDArray[np.int64]:
        """Larger than any vocabulary: off."""
        return self.whole[_PLACE["top_k"]]

    @property
    def seeds(self) -> NDArray[np.uint64]:
        """Seeds of draws."""
        return self.whole[_PLACE["seeds"]].view(np.uint64)

    @property
    def prompt_len(self) -> NDArray[np.int64]:
        """Tokens of the prompt."""
        return self.whole[_PLACE["prompt_len"]]

    @property
    def lanes(self) -> NDArray[np.int64]:
        """NO_LANE: logits stay as they are."""
        return self.whole[_PLACE["lanes"]]

    @property
    def numbers(self) -> NDArray[np.int64]:
        """Number of the sequence in the lane; the lane may have another one by now."""
        return self.whole[_PLACE["numbers"]]

    @property
    def num_top(self) -> NDArray[np.int64]:
        """Likeliest tokens that are read with each output token; below 0: no log-probabilities are read."""
        return self.whole[_PLACE["num_top"]]

    @property
    def num_prompt_top(self) -> NDArray[np.int64]:
        """The same for prompt tokens."""
        return self.whole[_PLACE["num_prompt_top"]]

    @property
    def waits(self) -> NDArray[np.bool_]:
        """Whether the row's token is chosen elsewhere, by a search."""
        return self.whole[_PLACE["waits"]] != 0

    @property
    def wants_states(self) -> NDArray[np.bool_]:
        """Whether hidden states of all the row's tokens are read."""
        return self.whole[_PLACE["wants_states"]] != 0

    @property
    def readers(self) -> NDArray[np.object_]:
        """The Reader of each row."""
        return self.all_readers[self.rows]


class RowSampling:
    """Sampling values by row, and changes of logits by lane."""

    def __init__(self) -> None:
        self.adjustments = Adjustments()
        self._real = np.zeros((len(_REAL), 0), np.float64)
        self._whole = np.zeros((len(_WHOLE), 0), np.int64)
        self._readers = np.zeros(0, np.object_)
        # The rows of the last call of `of`, and its result, unless a row was set since.
        self._latest: tuple[bytes, Asked] | None = None

    def open(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        stops: Sequence[int],
        bad_words: Sequence[Sequence[int]],
        grammar: Grammar | None = None,
    ) -> int:
        """Open a lane for a sequence, and return it; NO_LANE if its logits are not changed."""
        if not params.adjusts:
            return NO_LANE
        return self.adjustments.open(params, prompt, stops=stops, bad_words=bad_words, grammar=grammar)

    def close(self, lane: int) -> None:
        """Close the lane of a sequence that has ended; NO_LANE does nothing."""
        if lane != NO_LANE:
            self.adjustments.close(lane)

    def set(
        self,
        row: int,
        params: SamplingParams,
        *,
        seed: int,
        prompt_len: int,
        lane: int = NO_LANE,
        reader: Reader | None,
    ) -> None:
        """Note that the row serves a sequence of this request from now on; `reader` gets its log-probabilities."""
        self._latest = None
        if row >= len(self._readers):
            self._real = np.pad(self._real, ((0, 0), (0, row + 1)))
            self._whole = np.pad(self._whole, ((0, 0), (0, row + 1)))
            self._readers = np.concatenate([self._readers, np.zeros(row + 1, np.object_)])
        self._real[:, row] = (
            params.temperature,
            params.top_p if params.top_p is not None else 1.0,
            params.min_p if params.min_p is not None else 0.0,
            params.typical_p if params.typical_p is not None else 1.0,
        )
        self._whole[:, row] = (
            params.top_k if params.top_k is not None else _NO_LIMIT,
            np.uint64(seed).view(np.int64),
            prompt_len,
            lane,
            self.adjustments.number_of(lane),
            (params.logprobs or 0) if reader is not None and params.reads_logprobs else _NUM_TOP_UNREAD,
            params.prompt_logprobs if reader is not None and params.prompt_logprobs is not None else _NUM_TOP_UNREAD,
            False,
            False,
        )
        self._readers[row] = reader

    def set_branch(self, row: int, reader: Reader, num_top: int, *, wants_states: bool) -> None:
        """Note that the row serves a branch of a search from now on: `reader` gets its likeliest next tokens, and chooses."""
        self.set(row, SamplingParams(), seed=0, prompt_len=0, reader=reader)
        self._whole[_PLACE["num_top"], row] = num_top
        self._whole[_PLACE["waits"], row] = True
        self._whole[_PLACE["wants_states"], row] = wants_states

    def of(self, rows: NDArray[np.int64]) -> Asked:
        """Return how these rows are sampled now."""
        key = rows.tobytes()
        # Decodes mostly have the rows of the step before, unchanged.
        if self._latest is None or self._latest[0] != key:
            self._latest = key, self._of(rows)
        return self._latest[1]

    def _of(self, rows: NDArray[np.int64]) -> Asked:
        whole = self._whole[:, rows]
        return Asked(rows, self._real[:, rows], whole, self._readers, whole.max(1, initial=_LEAST).tolist())

    def choose(self, logits: Tensor, asked: Asked, places: NDArray[np.int64]) -> NDArray[np.int32]:
        """Choose the next token of each row, int32 [n], by logits [n, vocabulary], which it may change; row i has places[i] output tokens before it. Calls
        readers. Raises BadLogits or CannotAdjust."""
        reads = (asked.num_top >= 0).nonzero()[0] if asked.any_reads else np.empty(0, np.int64)
        # Copied before they are adjusted.
        read = logits[reads] if len(reads) else None
        if asked.adjusts:
            self.adjustments.apply(logits, asked.lanes, places, asked.numbers)
        tokens = drawn(logits, asked, places)
        self.note(asked, places, tokens)
        if read is not None:
            calls = [reader.read_output for reader in asked.readers[reads]]
            _call_readers(calls, read, places[reads], tokens[reads], asked.num_top[reads])
        return tokens

    def guess(self, logits: Tensor, asked: Asked, places: NDArray[np.int64]) -> NDArray[np.int32]:
        """Choose as `choose` does, by logits of a draft model: calls neither readers nor logits processors, and refuses no logits."""
        if asked.adjusts:
            self.adjustments.apply(logits, asked.lanes, places, asked.numbers, is_guess=True)
        tokens = drawn(logits.nan_to_num(), asked, places)
        self.note(asked, places, tokens)
        return tokens

    def note(self, asked: Asked, places: NDArray[np.int64], tokens: NDArray[np.int32]) -> None:
        """Note output tokens at these places, which may be drafts: the next tokens are chosen after them."""
        if asked.adjusts:
            self.adjustments.note(asked.lanes, places, tokens, asked.numbers)


def drawn(logits: Tensor, asked: Asked, places: NDArray[np.int64]) -> NDArray[np.int32]:
    """Draw a token for each row, int32 [n], without changing logits or calling readers."""
    return sample(
        logits,
        temperature=asked.temperature,
        top_k=asked.top_k,
        top_p=asked.top_p,
        min_p=asked.min_p,
        typical_p=asked.typical_p,
        seeds=asked.seeds,
        places=places,
    )


def prompt_places(
    asked: Asked, num_tokens: NDArray[np.int64], positions: NDArray[np.int64]
) -> NDArray[np.bool_] | None:
    """Return which packed tokens of rows, `num_tokens` of each, are followed by a prompt token whose log-probability is read, bool [tokens]; None if none
    is."""
    if not asked.any_reads_prompt:
        return None
    wants = (asked.num_prompt_top >= 0).repeat(num_tokens)
    found: NDArray[np.bool_] = wants & (positions + 1 < asked.prompt_len.repeat(num_tokens))
    return found if found.any() else None


def state_places(asked: Asked, num_tokens: NDArray[np.int64]) -> NDArray[np.bool_] | None:
    """Return which packed tokens of rows, `num_tokens` of each, have hidden states that are read, bool [tokens]; None if none has."""
    return asked.wants_states.repeat(num_tokens) if asked.any_wants_states else None


def tell_states(states: Tensor, asked: Asked, positions: NDArray[np.int64]) -> None:
    """Give each row's reader the hidden state at its position, of [n, hidden size]."""
    for reader, position, state in zip(asked.readers, positions.tolist(), states.cpu(), strict=True):
        reader.read_state(position, state)


def tell_prompts(logits: Tensor, asked: Asked, places: NDArray[np.int64]) -> None:
    """Give each row's reader the log-probabilities at the prompt token of a place, by logits [n, vocabulary] after the token before it."""
    tokens = np.array([reader.prompt_ids[place] for reader, place in zip(asked.readers, places, strict=True)], np.int32)
    _call_readers([reader.read_prompt for reader in asked.readers], logits, places, tokens, asked.num_prompt_top)


def _call_readers(
    calls: list[Callable[..., None]],
    logits: Tensor,
    places: NDArray[np.int64],
    tokens: NDArray[np.int32],
    num_top: NDArray[np.int64],
) -> None:
    """Call each of `calls` with the log-probabilities of the token at a place, and of the `num_top` likeliest tokens there."""
    found = logprobs(logits, tokens, int(num_top.max()))
    for i, (call, place, count) in enumerate(zip(calls, places.tolist(), num_top.tolist(), strict=True)):
        call(place, *_line(found, tokens, i, count))


def _line(found: Logprobs, tokens: NDArray[np.int32], i: int, count: int) -> tuple[list[int], list[float], list[int]]:
    """Return ids, log-probabilities and ranks of the token at a place and the `count` likeliest, each token once."""
    ids, values = [tokens.item(i)], [found.chosen.item(i)]
    ranks = [found.ranks.item(i)]
    for nth in range(count):
        if found.top_ids.item(i, nth) != ids[0]:
            ids.append(found.top_ids.item(i, nth))
            values.append(found.top.item(i, nth))
            ranks.append(nth + 1)
    return ids, values, ranks
