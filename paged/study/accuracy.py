"""The effect of quantised weights, K and V on a model's answers. The model reads text with the true tokens before each position (teacher forcing)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from paged.errors import InvalidConfig, UnsupportedModel
from paged.model.checkpoint.text import SEQUENCE, documents, split

if TYPE_CHECKING:
    from paged.model.loading import LoadedModel

# Of 16 tokens; more where a piece is longer than half of them.
_NUM_BLOCKS = 512
_MOST_TOKENS = 512
_IS_SURE = 0.5


@dataclass(frozen=True)
class Read:
    """A model's prediction at each position of a text but the first of a piece.

    choices   int64: the most likely token
    sureness  float64: the probability of that token
    truth     float64: the logarithm of the true token's probability
    """

    choices: NDArray[np.int64]
    sureness: NDArray[np.float64]
    truth: NDArray[np.float64]

    @property
    def loss(self) -> float:
        """The mean of −log of the true token's probability."""
        return float(-self.truth.mean())


@dataclass(frozen=True)
class Accuracy:
    """The difference of one way of storing from another one, the base.

    change      of the loss, as a share of the base's
    differing   share of positions with another choice
    differing_where_sure
                the same of positions where the base gives its choice more than half of the probability; these are a share `sure` of all
    mean_error, p99_error
                mean and 99th percentile of the absolute differences in log-probability of the true tokens
    """

    weights: str
    kv_dtype: str
    positions: int
    loss: float
    change: float
    differing: float
    differing_where_sure: float
    sure: float
    mean_error: float
    p99_error: float


def held_out_text() -> list[str]:
    """Return the paragraphs that were held out of the training of the models that ship."""
    return split(documents())[1]


def pieces_of(model: LoadedModel, text: Sequence[str], length: int = SEQUENCE) -> list[list[int]]:
    """Return texts as token ids in pieces of `length` tokens, with the end-of-sequence token, if any, after each text. Raises UnsupportedModel for a
    model without a tokenizer, and InvalidConfig for fewer than two tokens in all or for pieces longer than the model's longest sequence."""
    from paged.model.loading import silenced

    if model.tokenizer is None:
        raise UnsupportedModel(f"{model.path}: it has no tokenizer, so it reads no text.")
    if model.max_length is not None and length > model.max_length:
        raise InvalidConfig(
            f"pieces of {length:,} tokens are longer than a sequence of this model, {model.max_length:,}."
        )
    ids: list[int] = []
    # transformers would warn that each text is longer than a sequence may be.
    with silenced():
        for each in text:
            ids += model.tokenizer.encode(each, add_special_tokens=False)
            ids += model.eos_token_ids[:1]
    pieces = [ids[at : at + length] for at in range(0, len(ids) - 1, length)]
    if not pieces or len(ids) < 2:
        raise InvalidConfig(f"the text has {len(ids)} tokens; at least 2 are needed.")
    return pieces


def read(model: LoadedModel, pieces: list[list[int]], kv_dtype: str) -> Read:
    """Return the model's predictions on pieces of text, with K and V in `kv_dtype`."""
    from paged.engine.llm import LLM
    from paged.sampling import SamplingParams

    num_blocks = max(_NUM_BLOCKS, len(max(pieces, key=len)) // 8)
    llm = LLM(model, kv_cache_dtype=kv_dtype, num_blocks=num_blocks, max_tokens_per_step=_MOST_TOKENS)
    answers = llm.generate(pieces, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1))
    choices, sureness, truth = [], [], []
    for piece, answer in zip(pieces, answers, strict=True):
        assert answer.prompt_logprobs is not None, "they were asked for"
        for token, alternatives in zip(piece[1:], answer.prompt_logprobs[1:], strict=True):
            assert alternatives is not None, "the first alone has none"
            choice = next(each for each, said in alternatives.items() if said.rank == 1)
            choices.append(choice)
            sureness.append(np.exp(alternatives[choice].logprob))
            truth.append(alternatives[token].logprob)
    return Read(np.array(choices), np.array(sureness), np.array(truth))


def compared(base: Read, found: Read, *, weights: str, kv_dtype: str) -> Accuracy:
    """Compare `found`, with weights and K and V stored as named, with `base`; both have read the same text."""
    differs, is_sure = found.choices != base.choices, base.sureness > _IS_SURE
    errors = np.abs(found.truth - base.truth)
    return Accuracy(
        weights=weights,
        kv_dtype=kv_dtype,
        positions=len(differs),
        loss=found.loss,
        change=found.loss / base.loss - 1 if base.loss else 0.0,
        differing=float(differs.mean()),
        differing_where_sure=float(differs[is_sure].mean()) if is_sure.any() else 0.0,
        sure=float(is_sure.mean()),
        mean_error=float(errors.mean()),
        p99_error=float(np.quantile(errors, 0.99)),
    )
