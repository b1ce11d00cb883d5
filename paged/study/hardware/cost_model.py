"""What a cost model answers."""

from __future__ import annotations

from typing import Any, Protocol

from paged.model.tiling import Tiling
from paged.scheduler import Costs
from paged.study.hardware.step_work import StepWork


class CostModel(Protocol):
    """Time for a simulator, and prices for its scheduler, so that both go by one clock."""

    @property
    def tiling(self) -> Tiling | None:
        """The tiles that it wants counted in a step's work; None: none."""

    def seconds(self, work: StepWork) -> Any:
        """Duration of a step that does this work; of arrays an array, also where some amounts are numbers. Work of nothing takes none."""

    def costs(self, block_size: int) -> Costs:
        """What the scheduler is to expect of swapping and recomputing."""
