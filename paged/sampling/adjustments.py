"""Changes of logits before a token is drawn from them.

    logits → bias → repetition → presence, frequency → n-grams → bad words → least length → allowed ones → the user's own → a form → a draw

Order and effects are those of transformers' `generate`; presence and frequency are OpenAI's, as in
vLLM. A sequence that needs a change has a lane, with its tokens so far: the changes of a step are looked up for all
rows at once, and only the logits that change are touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from paged.base.growing import rising_from
from paged.errors import GrammarFailed, ProcessorFailed
from paged.sampling.lines import NOTHING, Lines
from paged.sampling.params import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

    from paged.sampling.grammars import Grammar

Places = NDArray[np.int64]
LogitsProcessor = Callable[[Any, Any], Any]
"""As transformers': token ids, int64 [1, tokens], and logits, float32 [1, vocabulary], to logits of that shape."""

NO_LANE = -1
_NO_LIMIT = 2**62


class Adjustments:
    """The changes of logits for the sequences in lanes."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._num_opened = 0
        # By lane: tokens, prompt and output, as far as they have been noted, and numbers.
        self._tokens: NDArray[np.int32] = np.zeros((0, 0), np.int32)
        self._prompt_len = np.zeros(0, np.int64)
        self._repetition = np.ones(0, np.float32)
        self._presence = np.zeros(0, np.float32)
        self._frequency = np.zeros(0, np.float32)
        self._ngram = np.zeros(0, np.int64)
        self._least = np.zeros(0, np.int64)
        # The number of the sequence that has it, which no other had or will have; 0: none.
        self._number = np.zeros(0, np.int64)
        self._bias, self._allowed, self._bad, self._stops = Lines(), Lines(), Lines(), Lines()
        self._processors: dict[int, tuple[LogitsProcessor, ...]] = {}
        self._grammars: dict[int, Grammar] = {}

    def open(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        *,
        stops: Sequence[int] = (),
        bad_words: Sequence[Sequence[int]] = (),
        grammar: Grammar | None = None,
    ) -> int:
        """Open a lane for a sequence that begins with `prompt`, and return it; NO_LANE if its logits are not changed. The sequence ends with
        one of `stops`, never has one of `bad_words`, as token ids, and follows `grammar`."""
        if not params.adjusts:
            return NO_LANE
        lane = self._new_lane()
        self._num_opened += 1
        self._number[lane] = self._num_opened
        self._prompt_len[lane] = len(prompt)
        self._note(np.full(len(prompt), lane), np.arange(len(prompt)), np.asarray(prompt, np.int32))
        self._repetition[lane] = params.repetition_penalty
        self._presence[lane] = params.presence_penalty
        self._frequency[lane] = params.frequency_penalty
        self._ngram[lane] = params.no_repeat_ngram_size
        self._least[lane] = min(params.min_tokens, _NO_LIMIT)
        bias = params.logit_bias or {}
        self._bias.set(lane, np.array(list(bias), np.int64), np.array(list(bias.values()), np.float32))
        if params.allowed_token_ids is not None:
            self._allowed.set(lane, np.array(sorted({int(token) for token in params.allowed_token_ids}), np.int64))
        if params.min_tokens:
            self._stops.set(lane, np.array(sorted({int(token) for token in stops}), np.int64))
        self._bad.set(lane, *_last_and_before(bad_words))
        if params.logits_processors:
            self._processors[lane] = tuple(params.logits_processors)
        if grammar is not None:
            self._grammars[lane] = grammar
        return lane

    def close(self, lane: int) -> None:
        """Note that the sequence in the lane, if any, has ended."""
        if lane == NO_LANE:
            return
        for lines in (self._bias, self._allowed, self._bad, self._stops):
            lines.drop(lane)
        self._processors.pop(lane, None)
        self._grammars.pop(lane, None)
        self._number[lane] = 0
        self._free.append(lane)

    def number_of(self, lane: int) -> int:
        """Return the number of the sequence in a lane, which no other had or will have; 0 for NO_LANE."""
        return 0 if lane == NO_LANE else int(self._number[lane])

    def note(self, lanes: Places, places: Places, tokens: NDArray[np.int32], numbers: Places) -> None:
        """Note output tokens of sequences, each at its place among the outputs, instead of what stood there. Lanes may be NO_LANE;
        nothing is noted of a sequence that has ended."""
        at = self._held(lanes, numbers)
        its = lanes[at]
        self._note(its, self._prompt_len[its] + places[at], tokens[at])

    def apply(self, logits: Tensor, lanes: Places, places: Places, numbers: Places, *, is_guess: bool = False) -> None:
        """Change logits [n, vocabulary] in place, as the sequence in lanes[i] wants for the token after its first places[i] outputs. Rows
        with NO_LANE, and those of a sequence that has ended, stay as they are. Raises ProcessorFailed or GrammarFailed; of a guess neither:
        it calls no processors, and a grammar that gives up forbids nothing."""
        at = self._held(lanes, numbers)
        if not len(at):
            return
        import torch

        with torch.inference_mode():
            _Step(self, logits, at, lanes[at], places[at]).run(is_guess)

    def _held(self, lanes: Places, numbers: Places) -> Places:
        """Return the places among `lanes` of those that the sequences of these numbers still have."""
        has_one = lanes >= 0
        return (has_one & (self._number[np.where(has_one, lanes, 0)] == numbers)).nonzero()[0]

    def _note(self, lanes: Places, at: Places, tokens: NDArray[np.int32]) -> None:
        longest = int(at.max(initial=-1)) + 1
        if longest > self._tokens.shape[1]:
            self._tokens = np.pad(self._tokens, ((0, 0), (0, 2 * longest - self._tokens.shape[1])))
        self._tokens[lanes, at] = tokens

    def _new_lane(self) -> int:
        if not self._free:
            num = len(self._prompt_len)
            more = max(8, num)
            for name in ("_prompt_len", "_repetition", "_presence", "_frequency", "_ngram", "_least", "_number"):
                column = getattr(self, name)
                setattr(self, name, np.concatenate([column, np.zeros(more, column.dtype)]))
            self._tokens = np.pad(self._tokens, ((0, more), (0, 0)))
            self._free = list(range(num + more - 1, num - 1, -1))
        return self._free.pop()


class _Step:
    """One batch's logits, [n, vocabulary], and the m rows of it, `at`, that want something; their lanes and output lengths."""

    def __init__(self, all_of: Adjustments, logits: Tensor, at: Places, lanes: Places, places: Places) -> None:
        self.all, self.logits, self.at, self.lanes, self.places = all_of, logits, at, lanes, places
        self.width = logits.shape[1]
        self.flat = logits.view(-1)
        self.ends: Places = all_of._prompt_len[lanes] + places

    def run(self, is_guess: bool) -> None:
        self._add_bias()
        self._penalise_repetition()
        self._penalise_outputs()
        self._ban_ngrams()
        self._ban_bad_words()
        self._ban_stops()
        self._keep_allowed()
        if not is_guess:
            self._ask_processors()
        self._keep_forms(is_guess)

    def _index(self, owners: Places, tokens: NDArray[Any]) -> Tensor:
        """Return where the logits of tokens stand; `owners` are places among `at`."""
        return self._on_device(self.at[owners] * self.width + tokens)

    def _on_device(self, values: NDArray[Any]) -> Tensor:
        import torch

        return torch.from_numpy(values).to(self.logits.device)

    def _ban(self, owners: Places, tokens: NDArray[Any]) -> None:
        if len(owners):
            self.flat[self._index(owners, tokens)] = -float("inf")

    def _tokens_of(self, owners: Places, first: Places) -> tuple[Places, NDArray[np.int32]]:
        """Return the tokens of these places among `at`, from `first` on, packed: the place of each, and the tokens."""
        counts = self.ends[owners] - first
        each = owners.repeat(counts)
        return each, self.all._tokens[self.lanes[each], rising_from(first, counts)]

    def _add_bias(self) -> None:
        found = self.all._bias.pick(self.lanes)
        if found is not None:
            owners, (tokens, bias) = found
            self.flat[self._index(owners, tokens)] += self._on_device(bias)

    def _penalise_repetition(self) -> None:
        import torch

        wants = (self.all._repetition[self.lanes] != 1).nonzero()[0]
        if len(wants):
            owners, tokens = self._tokens_of(wants, np.zeros(len(wants), np.int64))
            index = self._index(owners, tokens)
            factor = self._on_device(self.all._repetition[self.lanes[owners]])
            # A token that came twice is written twice, with the same.
            before = self.flat[index]
            self.flat[index] = torch.where(before < 0, before * factor, before / factor)

    def _penalise_outputs(self) -> None:
        frequency, presence = self.all._frequency[self.lanes], self.all._presence[self.lanes]
        wants = ((frequency != 0) | (presence != 0)).nonzero()[0]
        if len(wants):
            owners, tokens = self._tokens_of(wants, self.all._prompt_len[self.lanes[wants]])
            keys, counts = np.unique(owners * self.width + tokens, return_counts=True)
            owners = keys // self.width
            index = self._index(owners, keys % self.width)
            self.flat[index] -= self._on_device(frequency[owners] * counts.astype(np.float32))
            self.flat[index] -= self._on_device(presence[owners])

    def _ban_ngrams(self) -> None:
        sizes, tokens = self.all._ngram[self.lanes], self.all._tokens
        wants = ((sizes > 0) & (self.ends >= sizes)).nonzero()[0]
        if not len(wants):
            return
        # A token is banned if those before it are the last ones, too.
        counts = self.ends[wants] - sizes[wants] + 1
        owners, at = wants.repeat(counts), rising_from(sizes[wants] - 1, counts)
        for back in range(1, int(sizes[wants].max())):
            its = self.lanes[owners]
            # A shorter n-gram has been compared whole.
            same = tokens[its, np.maximum(at - back, 0)] == tokens[its, np.maximum(self.ends[owners] - back, 0)]
            same |= back >= sizes[owners]
            owners, at = owners[same], at[same]
        self._ban(owners, tokens[self.lanes[owners], at])

    def _ban_bad_words(self) -> None:
        found = self.all._bad.pick(self.lanes)
        if found is None:
            return
        owners, (last, before) = found
        is_said = np.ones(len(owners), np.bool_)
        for back in range(before.shape[1]):
            at = self.ends[owners] - 1 - back
            said = self.all._tokens[self.lanes[owners], np.maximum(at, 0)]
            is_said &= (before[:, back] == NOTHING) | ((at >= 0) & (said == before[:, back]))
        self._ban(owners[is_said], last[is_said])

    def _ban_stops(self) -> None:
        found = self.all._stops.pick(self.lanes)
        if found is not None:
            owners, (tokens,) = found
            is_early = self.places[owners] < self.all._least[self.lanes[owners]]
            self._ban(owners[is_early], tokens[is_early])

    def _keep_allowed(self) -> None:
        found = self.all._allowed.pick(self.lanes)
        if found is not None:
            owners, (tokens,) = found
            index = self._index(owners, tokens)
            kept = self.flat[index]
            self.logits[self._on_device(self.at[np.unique(owners)])] = -float("inf")
            self.flat[index] = kept

    def _ask_processors(self) -> None:
        if not self.all._processors:
            return
        for row, lane, end in zip(self.at.tolist(), self.lanes.tolist(), self.ends.tolist(), strict=True):
            processors = self.all._processors.get(lane)
            if processors is not None:
                known = self._on_device(self.all._tokens[lane, :end].astype(np.int64))[None]
                self.logits[row] = _processed(row, processors, known, self.logits[row : row + 1])[0]

    def _keep_forms(self, is_guess: bool) -> None:
        """Ban what grammars do not allow. A sequence with drafts has several rows: they go one after the other, beside those of others."""
        if not self.all._grammars:
            return
        asking = [place for place, lane in enumerate(self.lanes.tolist()) if lane in self.all._grammars]
        while asking:
            at_once: dict[int, int] = {}
            for place in asking:
                at_once.setdefault(int(self.lanes[place]), place)
            asking = [place for place in asking if at_once[int(self.lanes[place])] != place]
            self._keep_forms_of(list(at_once.values()), is_guess)

    def _keep_forms_of(self, places: list[int], is_guess: bool) -> None:
        """Do so for rows of different sequences."""
        from paged.sampling.grammars import allowed_tokens

        rows, grammars = [], []
        for place in places:
            lane = int(self.lanes[place])
            grammar = self.all._grammars[lane]
            is_possible = grammar.follow(self.all._tokens[lane, self.all._prompt_len[lane] : self.ends[place]])
            if not is_guess:
                _must_go_on(int(self.at[place]), grammar)
            # Behind a draft that it forbids nothing can come true.
            if is_possible and not grammar.matcher.is_error():
                rows.append(int(self.at[place]))
                grammars.append(grammar)
        if not rows:
            return
        allowed = allowed_tokens(grammars, self.width)
        if not is_guess:
            for row, grammar in zip(rows, grammars, strict=True):
                _must_go_on(row, grammar)
        index = self._on_device(np.array(rows, np.int64))
        self.logits[index] = self.logits[index].masked_fill(~self._on_device(allowed), -float("inf"))


def _must_go_on(row: int, grammar: Grammar) -> None:
    """Raise GrammarFailed if it has given up."""
    if grammar.matcher.is_error():
        # Behind it stands the state of the parser.
        raise GrammarFailed(row, " ".join(grammar.matcher.get_error().split("<state>")[0].split()))


def _processed(row: int, processors: tuple[LogitsProcessor, ...], known: Tensor, logits: Tensor) -> Tensor:
    import torch

    found: Any = logits.clone()
    for processor in processors:
        try:
            found = processor(known, found)
        except Exception as error:
            raise ProcessorFailed(row, f"{type(error).__name__}: {error}") from error
        if not isinstance(found, torch.Tensor) or found.shape != logits.shape:
            got = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            raise ProcessorFailed(row, f"it has to return logits {list(logits.shape)}; got {got}.")
    changed: Tensor = found
    return changed


def _last_and_before(words: Sequence[Sequence[int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return each word's last token, [k], and those before it, the nearest first, [k, most]."""
    most = max((len(word) for word in words), default=1) - 1
    before = np.full((len(words), most), NOTHING, np.int64)
    for number, word in enumerate(words):
        before[number, : len(word) - 1] = list(word)[-2::-1]
    return np.array([word[-1] for word in words], np.int64), before
