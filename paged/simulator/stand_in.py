"""What stands in for the model in a simulation: tokens that nobody sampled, but that are always the same ones.

Knows request numbers and positions. Does not know what a token means.
"""

import numpy as np
from numpy.typing import NDArray

STOP = 2**31 - 1
"""The token by which a request ends that may write more than it does."""


def stand_in_tokens(requests: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int32]:
    """The token of each request at each position, int32 of their common shape, below 2³⁰.

    A function of the two numbers alone, so that a sequence which is preempted and computed again says the same, and two requests with
    one prompt go different ways after it.
    """
    mixed = requests.astype(np.uint32) * np.uint32(0x9E3779B1) + positions.astype(np.uint32) * np.uint32(0x85EBCA77)
    mixed ^= mixed >> np.uint32(13)
    mixed *= np.uint32(0xC2B2AE35)
    return (mixed >> np.uint32(2)).astype(np.int32)
