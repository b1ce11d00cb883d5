"""How each row is sampled, by row, so that a step gathers it instead of asking each request; and the choice itself.

    rows of a batch → how each is sampled → logits adjusted → a token each → what those want that read log-probabilities

Knows sampling values by row, logits, and whom to tell. Does not know batches, blocks or text.
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
_DTYPES: dict[str, Any] = {
    "temperature": np.float64,
    "top_k": np.int64,
    "top_p": np.float64,
    "min_p": np.float64,
    "typical_p": np.float64,
    "seeds": np.uint64,
    "prompt_len": np.int64,
    "lanes": np.int64,
    "numbers": np.int64,
    "num_top": np.int64,
    "num_prompt_top": np.int64,
    "readers": np.object_,
    "waits": np.bool_,
    "wants_states": np.bool_,
}


class Reader(Protocol):
    """Who is told how likely tokens are. Values are natural logarithms, likeliest first behind the token itself."""

    @property
    def prompt_ids(self) -> list[int]:
        """The prompt."""

    def read_output(self, place: int, ids: Sequence[int], values: Sequence[float], ranks: Sequence[int]) -> None:
        """Of the output that is chosen for this place."""

    def read_prompt(self, place: int, ids: Sequence[int], values: Sequence[float], ranks: Sequence[int]) -> None:
        """Of the prompt's token at this place."""

    def read_state(self, position: int, state: Tensor) -> None:
        """A hidden state, float32 [hidden size], of the token at this position: what logits are computed from."""


class Asked(NamedTuple):
    """How each of n rows is sampled: arrays [n]. `numbers` say which sequence it was that asked, `readers` whom to tell; a row that
    waits gets no token from its own logits, one that `wants_states` is told the hidden states of all its tokens."""

    temperature: NDArray[np.float64]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]
    typical_p: NDArray[np.float64]
    seeds: NDArray[np.uint64]
    prompt_len: NDArray[np.int64]
    lanes: NDArray[np.int64]
    numbers: NDArray[np.int64]
    num_top: NDArray[np.int64]
    num_prompt_top: NDArray[np.int64]
    readers: NDArray[np.object_]
    waits: NDArray[np.bool_]
    wants_states: NDArray[np.bool_]

    def of(self, places: NDArray[Any]) -> Asked:
        """That of some of them."""
        return Asked(*(column[places] for column in self))

    @property
    def adjusts(self) -> bool:
        """Whether any wants its logits changed."""
        return bool((self.lanes >= 0).any())


class RowSampling:
    """Sampling values by row, and what sequences want done to their logits, by lane."""

    def __init__(self) -> None:
        self.adjustments = Adjustments()
        self._columns = Asked(**{name: np.zeros(0, dtype) for name, dtype in _DTYPES.items()})

    def open(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        stops: Sequence[int],
        bad_words: Sequence[Sequence[int]],
        grammar: Grammar | None = None,
    ) -> int:
        """A lane for a sequence whose logits are to be changed; NO_LANE for one whose are not."""
        if not params.adjusts:
            return NO_LANE
        return self.adjustments.open(params, prompt, stops=stops, bad_words=bad_words, grammar=grammar)

    def close(self, lane: int) -> None:
        """The sequence in it has ended."""
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
        """The row serves a sequence of this request from now on; `reader` is told what it asked for."""
        if row >= len(self._columns.lanes):
            grown = (np.concatenate([column, np.zeros(row + 1, column.dtype)]) for column in self._columns)
            self._columns = Asked(*grown)
        its = self._columns
        its.temperature[row] = params.temperature
        its.top_k[row] = params.top_k if params.top_k is not None else _NO_LIMIT
        its.top_p[row] = params.top_p if params.top_p is not None else 1.0
        its.min_p[row] = params.min_p if params.min_p is not None else 0.0
        its.typical_p[row] = params.typical_p if params.typical_p is not None else 1.0
        its.seeds[row] = seed
        its.prompt_len[row] = prompt_len
        its.lanes[row] = lane
        its.numbers[row] = self.adjustments.number_of(lane)
        its.num_top[row] = _NUM_TOP_UNREAD
        its.num_prompt_top[row] = _NUM_TOP_UNREAD
        its.readers[row] = reader
        its.waits[row] = its.wants_states[row] = False
        if reader is not None:
            if params.reads_logprobs:
                its.num_top[row] = params.logprobs or 0
            if params.prompt_logprobs is not None:
                its.num_prompt_top[row] = params.prompt_logprobs

    def set_branch(self, row: int, reader: Reader, num_top: int, *, wants_states: bool) -> None:
        """The row serves a branch of a search from now on: `reader` is told its likeliest next tokens, of which somebody else chooses."""
        self.set(row, SamplingParams(), seed=0, prompt_len=0, reader=reader)
        self._columns.num_top[row] = num_top
        self._columns.waits[row] = True
        self._columns.wants_states[row] = wants_states

    def of(self, rows: NDArray[np.int64]) -> Asked:
        """How these rows are sampled now."""
        return self._columns.of(rows)

    def choose(self, logits: Tensor, asked: Asked, places: NDArray[np.int64]) -> NDArray[np.int32]:
        """The next token of each row, int32 [n], whose output has places[i] tokens before it. May change `logits`, [n, vocabulary]. Raises
        BadLogits or ProcessorFailed."""
        reads = (asked.num_top >= 0).nonzero()[0]
        # The model's own, before anything is done to them.
        read = logits[reads] if len(reads) else None
        if asked.adjusts:
            self.adjustments.apply(logits, asked.lanes, places, asked.numbers)
        tokens = _drawn(logits, asked, places)
        self.note(asked, places, tokens)
        if read is not None:
            told = [reader.read_output for reader in asked.readers[reads]]
            _tell(told, read, places[reads], tokens[reads], asked.num_top[reads])
        return tokens

    def guess(self, logits: Tensor, asked: Asked, places: NDArray[np.int64]) -> NDArray[np.int32]:
        """As `choose`, by logits of a model that guesses: nobody is told, no logits processor is asked, and no logits are refused."""
        if asked.adjusts:
            self.adjustments.apply(logits, asked.lanes, places, asked.numbers, asks_processors=False)
        tokens = _drawn(logits.nan_to_num(), asked, places)
        self.note(asked, places, tokens)
        return tokens

    def note(self, asked: Asked, places: NDArray[np.int64], tokens: NDArray[np.int32]) -> None:
        """These are outputs at these places, or may be: what the next tokens are chosen after."""
        if asked.adjusts:
            self.adjustments.note(asked.lanes, places, tokens, asked.numbers)

    def prompt_places(
        self, asked: Asked, num_tokens: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> NDArray[np.bool_] | None:
        """Of the packed tokens of rows, so many of each: which are followed by a token of a prompt that its request wants to know the
        likelihood of, bool [tokens]; None where none is."""
        if not (asked.num_prompt_top >= 0).any():
            return None
        wants = (asked.num_prompt_top >= 0).repeat(num_tokens)
        found: NDArray[np.bool_] = wants & (positions + 1 < asked.prompt_len.repeat(num_tokens))
        return found if found.any() else None


def _drawn(logits: Tensor, asked: Asked, places: NDArray[np.int64]) -> NDArray[np.int32]:
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


def state_places(asked: Asked, num_tokens: NDArray[np.int64]) -> NDArray[np.bool_] | None:
    """Of the packed tokens of rows, so many of each: whose hidden states are wanted, bool [tokens]; None where none are."""
    return asked.wants_states.repeat(num_tokens) if asked.wants_states.any() else None


def tell_states(states: Tensor, asked: Asked, positions: NDArray[np.int64]) -> None:
    """Tell each row's reader the hidden state at a position, of [n, hidden size]."""
    for reader, position, state in zip(asked.readers, positions.tolist(), states.cpu(), strict=True):
        reader.read_state(position, state)


def tell_prompts(logits: Tensor, asked: Asked, places: NDArray[np.int64]) -> None:
    """Tell each row's reader how likely the prompt's token at a place was, by logits [n, vocabulary] after the one before it."""
    tokens = np.array([reader.prompt_ids[place] for reader, place in zip(asked.readers, places, strict=True)], np.int32)
    _tell([reader.read_prompt for reader in asked.readers], logits, places, tokens, asked.num_prompt_top)


def _tell(
    told: list[Callable[..., None]],
    logits: Tensor,
    places: NDArray[np.int64],
    tokens: NDArray[np.int32],
    num_top: NDArray[np.int64],
) -> None:
    """Tell whoever wants it how likely the token at a place was, and so many of the likeliest."""
    found = logprobs(logits, tokens, int(num_top.max()))
    for i, (tell, place, count) in enumerate(zip(told, places.tolist(), num_top.tolist(), strict=True)):
        tell(place, *_line(found, tokens, i, count))


def _line(found: Logprobs, tokens: NDArray[np.int32], i: int, count: int) -> tuple[list[int], list[float], list[int]]:
    """The token at a place and the `count` likeliest, by id once: ids, values, ranks."""
    ids, values = [tokens.item(i)], [found.chosen.item(i)]
    ranks = [found.ranks.item(i)]
    for nth in range(count):
        if found.top_ids.item(i, nth) != ids[0]:
            ids.append(found.top_ids.item(i, nth))
            values.append(found.top.item(i, nth))
            ranks.append(nth + 1)
    return ids, values, ranks
