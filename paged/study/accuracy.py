"""The effect of quantised weights, K and V on a model's answers: it reads text, and at each position the true tokens before it are given."""

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
    """What a model says of text, at each position but the first of a piece.

    choices   int64: the most likely token
    sureness  float64: its probability
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
    """How far one way of storing is from another one, the base.

    change      of the loss, a share of the base's
    differing   share of positions with another choice
    differing_where_sure
                the same of positions where the base's choice has more than half of the probability, a share `sure` of all
    mean_error, p99_error
                of log-probabilities of true tokens, absolute differences: their mean and 99th percentile
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
    """Paragraphs that the models that ship have not read."""
    return split(documents())[1]


def pieces_of(model: LoadedModel, text: Sequence[str], length: int = SEQUENCE) -> list[list[int]]:
    """Texts as token ids in pieces of `length` tokens, each text followed by the token that ends one, if there is one. Raises UnsupportedModel for a
    model without a tokenizer, InvalidConfig for a text of less than two tokens, or pieces that are longer than a sequence may be."""
    from paged.model.loading import silenced

    if model.tokenizer is None:
        raise UnsupportedModel(f"{model.path}: it has no tokenizer, so it reads no text.")
    if model.max_length is not None and length > model.max_length:
        raise InvalidConfig(
            f"pieces of {length:,} tokens are longer than a sequence of this model, {model.max_length:,}."
        )
    ids: list[int] = []
    # A text is longer than a sequence may be, which transformers says of each.
    with silenced():
        for each in text:
            ids += model.tokenizer.encode(each, add_special_tokens=False)
            ids += model.eos_token_ids[:1]
    pieces = [ids[at : at + length] for at in range(0, len(ids) - 1, length)]
    if not pieces or len(ids) < 2:
        raise InvalidConfig(f"the text has {len(ids)} tokens; at least 2 are needed.")
    return pieces


def read(model: LoadedModel, pieces: list[list[int]], kv_dtype: str) -> Read:
    """What the model says of pieces of text with K and V stored like this."""
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
    """How far `found`, with weights and K and V stored like this, is from `base`; both have read the same text."""
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
