"""The protocol of a cost model, and the choice of a token budget for it where none is given."""

from __future__ import annotations

from typing import Any, Protocol

from paged.model.tiling import Tiling
from paged.scheduler import Costs
from paged.study.hardware.step_work import Spans, StepWork

LEAST_BUDGET, MOST_BUDGET = 128, 8192
"""The smallest and the largest budget that is ever chosen, tokens; all are powers of two, rounded up to whole blocks."""
_LEAST_SUITING = 256
_SLOWER = 2
"""From a step so many times as long as one of a single token on, the weights' reading is the smaller part of it."""


class CostModel(Protocol):
    """Time for a simulator, and prices for its scheduler, so that both go by one clock."""

    @property
    def tiling(self) -> Tiling | None:
        """The tiles that it wants counted in a step's work; None: none."""

    @property
    def spans(self) -> Spans:
        """How far the model's layers attend, by which it wants contexts and pairs counted; none: all to all."""

    def seconds(self, work: StepWork) -> Any:
        """Duration of a step that does this work; of arrays an array, also where some amounts are numbers. Work of nothing takes none."""

    def costs(self, block_size: int) -> Costs:
        """What the scheduler is to expect of swapping and recomputing."""


def budgets(block_size: int) -> tuple[int, ...]:
    """What there is to choose from, rising: powers of two in whole blocks, so that a chunk that ends inside one is rare."""
    powers = (1 << bits for bits in range(LEAST_BUDGET.bit_length() - 1, MOST_BUDGET.bit_length()))
    return tuple(dict.fromkeys(-(-power // block_size) * block_size for power in powers))


def suiting_budget(cost_model: CostModel, *, max_sequences: int, block_size: int) -> int:
    """The smallest budget of which a full step of prompts takes twice as long as a step of one token, or the largest there is.

    Up to there tokens ride along with the weights' reading, and a smaller budget computes prompts no sooner. At least 256, and twice
    `max_sequences`, so that half a step is left for prompts while every row decodes.
    """
    choices = budgets(block_size)
    least = max(_LEAST_SUITING, 2 * max_sequences)
    one = _prompt_seconds(cost_model, 1)
    suiting = (budget for budget in choices if budget >= least and _prompt_seconds(cost_model, budget) >= _SLOWER * one)
    return next(suiting, choices[-1])


def _prompt_seconds(cost_model: CostModel, tokens: int) -> float:
    """A step that computes one prompt of so many tokens."""
    return float(cost_model.seconds(StepWork.of_rows([tokens], [tokens], sampled_rows=1, spans=cost_model.spans)))
