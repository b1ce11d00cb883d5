"""What stands in for the device: how long a step takes.

Knows what a step asks of a device. Does not know requests. `Roofline` (paged.hardware) is one, from published figures, `StepTime` another.
"""

from typing import Any, Protocol

from paged import Costs
from paged.hardware import StepWork


class CostModel(Protocol):
    """A step's duration, and the same prices for the scheduler's own choices."""

    def seconds(self, work: StepWork) -> Any:
        """Duration of a step; of amounts that are arrays float64 [n], each element as if it were asked alone."""
        ...

    def costs(self, block_size: int) -> Costs:
        """What the scheduler is to expect of swapping and of recomputing."""
        ...
