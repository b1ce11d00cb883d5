"""Sampling values by row, which a step gathers at once; and the sampling itself.

rows of a batch → how each is sampled → logits adjusted → a token each → what those want that read log-probabilities
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

_NO_LIMIT = 2**62
_NUM_TOP_UNREAD = -1
_LEAST = -(2**63)
# Of a row, by kind: a step gathers each kind at once.
_REAL = ("temperature", "top_p", "min_p", "typical_p")
_WHOLE = ("top_k", "seeds", "prompt_len", "lanes", "numbers", "num_top", "num_prompt_top", "waits", "wants_states")
_PLACE = {name: place for place, name in enumerate(_WHOLE)}


class Reader(Protocol):
    """Reads how likely tokens are. Values are natural logarithms, likeliest first behind the token itself."""

    @property
    def prompt_ids(self) -> list[int]:
        """The prompt."""

    def read_output(self, place: int, ids: Sequence[int], values: Sequence[float], ranks: Sequence[int]) -> None:
        """Take those of the output that is chosen for this place."""

    def read_prompt(self, place: int, ids: Sequence[int], values: Sequence[float], ranks: Sequence[int]) -> None:
        """Take those of the prompt's token at this place."""

    def read_state(self, position: int, state: Tensor) -> None:
        """Take the hidden state, float32 [hidden size], of the token at this position, from which logits are computed."""


class Asked(NamedTuple):
    """How each of n rows is sampled: `real` and `whole` have the columns _REAL and _WHOLE, as of SamplingParams; what is off is a number without
    effect. `lanes` and `numbers` name the sequence, `readers` read its log-probabilities. A row that `waits` gets no token from its own logits; of
    one that `wants_states` all hidden states are read."""

    rows: NDArray[np.int64]
    real: NDArray[np.float64]
    whole: NDArray[np.int64]
    all_readers: NDArray[np.object_]
    # The highest value of each whole column, in these rows or more: mostly it shows that no row wants anything.
    highest: list[int]

    def of(self, places: NDArray[Any]) -> Asked:
        """Return how some of the rows are sampled."""
        return Asked(self.rows[places], self.real[:, places], self.whole[:, places], self.all_readers, self.highest)

    def _any(self, name: str, least: int) -> bool:
        """Whether any row has at least so much there."""
        place = _PLACE[name]
        return self.highest[place] >= least and bool((self.whole[place] >= least).any())

    @property
    def adjusts(self) -> bool:
        """Whether any row wants its logits changed."""
        return self._any("lanes", 0)

    @property
    def any_reads(self) -> bool:
        """Whether any row's reader wants log-probabilities of outputs."""
        return self._any("num_top", 0)

    @property
    def any_reads_prompt(self) -> bool:
        """Whether any row's reader wants log-probabilities of the prompt."""
        return self._any("num_prompt_top", 0)

    @property
    def any_waits(self) -> bool:
        """Whether any row waits."""
        return self._any("waits", 1)

    @property
    def any_wants_states(self) -> bool:
        """Whether any row's reader wants hidden states."""
        return self._any("wants_states", 1)

    @property
    def only_draws(self) -> bool:
        """Whether all rows want a token drawn from their logits, and nothing else."""
        reads = self.any_reads or self.any_reads_prompt or self.any_wants_states
        return not (reads or self.adjusts or self.any_waits)

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
        """The number of the sequence that had the lane."""
        return self.whole[_PLACE["numbers"]]

    @property
    def num_top(self) -> NDArray[np.int64]:
        """Likeliest tokens that are read beside each output; below 0: nothing is read."""
        return self.whole[_PLACE["num_top"]]

    @property
    def num_prompt_top(self) -> NDArray[np.int64]:
        """The same of the prompt."""
        return self.whole[_PLACE["num_prompt_top"]]

    @property
    def waits(self) -> NDArray[np.bool_]:
        """Whether its tokens are chosen elsewhere."""
        return self.whole[_PLACE["waits"]] != 0

    @property
    def wants_states(self) -> NDArray[np.bool_]:
        """Whether hidden states are read."""
        return self.whole[_PLACE["wants_states"]] != 0

    @property
    def readers(self) -> NDArray[np.object_]:
        """The readers of the rows."""
        return self.all_readers[self.rows]


class RowSampling:
    """Sampling values by row, and changes of logits by lane."""

    def __init__(self) -> None:
        self.adjustments = Adjustments()
        self._real = np.zeros((len(_REAL), 0), np.float64)
        self._whole = np.zeros((len(_WHOLE), 0), np.int64)
        self._readers = np.zeros(0, np.object_)
        # The rows that `of` was last called for, and its result, unless something was set since.
        self._latest: tuple[bytes, Asked] | None = None

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
        """Let the row serve a sequence of this request; `reader` gets what the request wants to read."""
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
        """Let the row serve a branch of a search; `reader` gets its likeliest next tokens, and chooses."""
        self.set(row, SamplingParams(), seed=0, prompt_len=0, reader=reader)
        self._whole[_PLACE["num_top"], row] = num_top
        self._whole[_PLACE["waits"], row] = True
        self._whole[_PLACE["wants_states"], row] = wants_states

    def of(self, rows: NDArray[np.int64]) -> Asked:
        """Return how these rows are sampled now."""
        key = rows.tobytes()
        # In decodes mostly the same rows come again, unchanged.
        if self._latest is None or self._latest[0] != key:
            self._latest = key, self._of(rows)
        return self._latest[1]

    def _of(self, rows: NDArray[np.int64]) -> Asked:
        whole = self._whole[:, rows]
        return Asked(rows, self._real[:, rows], whole, self._readers, whole.max(1, initial=_LEAST).tolist())

    def choose(self, logits: Tensor, asked: Asked, places: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the next token of each row, int32 [n], whose output has places[i] tokens before it. May change `logits`, [n, vocabulary].
        Raises BadLogits or CannotAdjust."""
        reads = (asked.num_top >= 0).nonzero()[0] if asked.any_reads else np.empty(0, np.int64)
        # The model's own, before anything is done to them.
        read = logits[reads] if len(reads) else None
        if asked.adjusts:
            self.adjustments.apply(logits, asked.lanes, places, asked.numbers)
        tokens = drawn(logits, asked, places)
        self.note(asked, places, tokens)
        if read is not None:
            tells = [reader.read_output for reader in asked.readers[reads]]
            _tell(tells, read, places[reads], tokens[reads], asked.num_top[reads])
        return tokens

    def guess(self, logits: Tensor, asked: Asked, places: NDArray[np.int64]) -> NDArray[np.int32]:
        """Choose by logits of a model that guesses: no reader gets them, no logits processor is called, and no logits are refused."""
        if asked.adjusts:
            self.adjustments.apply(logits, asked.lanes, places, asked.numbers, is_guess=True)
        tokens = drawn(logits.nan_to_num(), asked, places)
        self.note(asked, places, tokens)
        return tokens

    def note(self, asked: Asked, places: NDArray[np.int64], tokens: NDArray[np.int32]) -> None:
        """Note tokens, int32 [n], as outputs at these places, or as drafts there: the next tokens are chosen after them."""
        if asked.adjusts:
            self.adjustments.note(asked.lanes, places, tokens, asked.numbers)


def drawn(logits: Tensor, asked: Asked, places: NDArray[np.int64]) -> NDArray[np.int32]:
    """Choose as `RowSampling.choose`, for rows that want nothing else."""
    temperature, top_p, min_p, typical_p = asked.real
    top_k, seeds = asked.whole[:2]
    return sample(
        logits,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        typical_p=typical_p,
        seeds=seeds.view(np.uint64),
        places=places,
    )


def prompt_places(
    asked: Asked, num_tokens: NDArray[np.int64], positions: NDArray[np.int64]
) -> NDArray[np.bool_] | None:
    """Return which packed tokens, `num_tokens[i]` of row i, are followed by a prompt's token whose log-probability is wanted: bool [tokens];
    None: none is."""
    if not asked.any_reads_prompt:
        return None
    wants = (asked.num_prompt_top >= 0).repeat(num_tokens)
    found: NDArray[np.bool_] = wants & (positions + 1 < asked.prompt_len.repeat(num_tokens))
    return found if found.any() else None


def state_places(asked: Asked, num_tokens: NDArray[np.int64]) -> NDArray[np.bool_] | None:
    """Return of which packed tokens, `num_tokens[i]` of row i, the hidden state is wanted: bool [tokens]; None: of none."""
    return asked.wants_states.repeat(num_tokens) if asked.any_wants_states else None


def tell_states(states: Tensor, asked: Asked, positions: NDArray[np.int64]) -> None:
    """Give each row's reader the hidden state at a position, of [n, hidden size]."""
    for reader, position, state in zip(asked.readers, positions.tolist(), states.cpu(), strict=True):
        reader.read_state(position, state)


def tell_prompts(logits: Tensor, asked: Asked, places: NDArray[np.int64]) -> None:
    """Give each row's reader the log-probability of the prompt's token at a place, by logits [n, vocabulary] after the one before it."""
    tokens = np.array([reader.prompt_ids[place] for reader, place in zip(asked.readers, places, strict=True)], np.int32)
    _tell([reader.read_prompt for reader in asked.readers], logits, places, tokens, asked.num_prompt_top)


def _tell(
    tells: list[Callable[..., None]],
    logits: Tensor,
    places: NDArray[np.int64],
    tokens: NDArray[np.int32],
    num_top: NDArray[np.int64],
) -> None:
    """Give each reader the log-probability of the token at a place, and of so many of the likeliest."""
    found = logprobs(logits, tokens, int(num_top.max()))
    for i, (tell, place, count) in enumerate(zip(tells, places.tolist(), num_top.tolist(), strict=True)):
        tell(place, *_line(found, tokens, i, count))


def _line(found: Logprobs, tokens: NDArray[np.int32], i: int, count: int) -> tuple[list[int], list[float], list[int]]:
    """Return the token at a place and the `count` likeliest, each id once: ids, values, ranks."""
    ids, values = [tokens.item(i)], [found.chosen.item(i)]
    ranks = [found.ranks.item(i)]
    for nth in range(count):
        if found.top_ids.item(i, nth) != ids[0]:
            ids.append(found.top_ids.item(i, nth))
            values.append(found.top.item(i, nth))
            ranks.append(nth + 1)
    return ids, values, ranks
