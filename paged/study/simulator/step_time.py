"""The seconds of a step by a formula."""

import math
from typing import Any, ClassVar

import msgspec
import numpy as np

from paged import Costs
from paged.errors import InvalidConfig
from paged.study.hardware import Spans, StepWork, Tiling
from paged.study.limits import NotNegative, check


class StepTime(msgspec.Struct, frozen=True):
    """A plain roofline:

        seconds = max(weights + context · attended tokens, token · computed tokens) + swap · moved tokens

    The first term is memory traffic (the weights once a step, the KV of every token attended to), the second arithmetic, the third the
    link to the host. The defaults are a model of 8 billion parameters in bf16 (16 GB of weights, 128 KiB of KV a token) on one H100:
    3.35 TB/s, 500 TFLOP/s of arithmetic reached, 25 GB/s to the host. All are published figures or round numbers, none was measured. Raises InvalidConfig.
    """

    weights_ms: NotNegative = 4.8
    context_us: NotNegative = 0.039
    token_us: NotNegative = 32.0
    swap_us: NotNegative = 5.2

    tiling: ClassVar[Tiling | None] = None
    spans: ClassVar[Spans] = ()

    def __post_init__(self) -> None:
        check(self)
        if self.weights_ms == 0 and self.token_us == 0:
            raise InvalidConfig("weights_ms and token_us are both 0; a step that computes must take time")

    def seconds(self, work: StepWork) -> Any:
        """Return the seconds of a step; arrays give an array, float64 [n]."""
        computed = work.computed_tokens
        memory = (self.weights_ms * 1e-3 + self.context_us * 1e-6 * work.context_tokens) * (computed > 0)
        arithmetic = self.token_us * 1e-6 * computed
        larger = np.maximum(memory, arithmetic) if isinstance(memory, np.ndarray) else max(memory, arithmetic)
        return larger + self.swap_us * 1e-6 * work.moved_tokens

    def costs(self, block_size: int) -> Costs:
        """Return the costs by which the scheduler weighs swapping against recomputing."""
        return Costs(
            seconds_per_swapped_block=self.swap_us * 1e-6 * block_size,
            seconds_per_token=self.token_us * 1e-6,
            attention_knee=math.inf,
        )
