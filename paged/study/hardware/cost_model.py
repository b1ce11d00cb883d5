"""The protocol of a cost model, and the choice of a token budget by it."""

from __future__ import annotations

from typing import Any, Protocol

from paged.model.tiling import Tiling
from paged.scheduler import Costs
from paged.study.hardware.step_work import Spans, StepWork

LEAST_BUDGET, MOST_BUDGET = 128, 8192
"""The smallest and the largest budget to choose, in tokens; all are powers of two, rounded up to whole blocks."""
_LEAST_SUITING = 256
_SLOWER = 2
"""In a step that takes so many times as long as one of a single token, reading the weights is the smaller part."""


class CostModel(Protocol):
    """Time for a simulator, and prices for its scheduler, so that both go by one clock."""

    @property
    def tiling(self) -> Tiling | None:
        """The tiles to count in a step's work; None: no tiles."""

    @property
    def spans(self) -> Spans:
        """How far the model's layers attend, by which contexts and pairs are counted; empty: all layers to all of the context."""

    def seconds(self, work: StepWork) -> Any:
        """Return the seconds of a step with this work; an array if any amount is one. A step without work takes none."""

    def costs(self, block_size: int) -> Costs:
        """Return the costs by which the scheduler weighs swapping against recomputing."""


def budgets(block_size: int) -> tuple[int, ...]:
    """Return the budgets to choose from, rising: powers of two in whole blocks, so that few chunks end inside a block."""
    powers = (1 << bits for bits in range(LEAST_BUDGET.bit_length() - 1, MOST_BUDGET.bit_length()))
    return tuple(dict.fromkeys(-(-power // block_size) * block_size for power in powers))


def suiting_budget(cost_model: CostModel, *, max_sequences: int, block_size: int) -> int:
    """Return the smallest budget whose full step of prompts takes twice as long as a step of one token, or the largest of `budgets`.

    In smaller steps, reading the weights takes most of the time, so a smaller budget computes prompts no sooner. The budget is at least 256, and
    at least twice `max_sequences`, so that half a step is left for prompts while every row decodes.
    """
    choices = budgets(block_size)
    least = max(_LEAST_SUITING, 2 * max_sequences)
    one = _prompt_seconds(cost_model, 1)
    suiting = (budget for budget in choices if budget >= least and _prompt_seconds(cost_model, budget) >= _SLOWER * one)
    return next(suiting, choices[-1])


def _prompt_seconds(cost_model: CostModel, tokens: int) -> float:
    """Return the seconds of a step that computes one prompt of so many tokens."""
    return float(cost_model.seconds(StepWork.of_rows([tokens], [tokens], sampled_rows=1, spans=cost_model.spans)))
