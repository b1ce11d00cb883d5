"""Least squares whose solution has nothing below 0."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def non_negative_least_squares(matrix: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the x ≥ 0 with the least |matrix·x − target|, float64 [columns].

    Lawson and Hanson, Solving Least Squares Problems, 1974, chapter 23: a column enters if it improves the fit, and leaves if its price would turn
    negative. Columns are scaled to length 1 first, since pairs and steps lie many powers of ten apart.
    """
    lengths = np.linalg.norm(matrix, axis=0)
    scale = np.where(lengths > 0, lengths, 1.0)
    scaled = matrix / scale
    prices = np.zeros(matrix.shape[1])
    is_in = np.zeros(matrix.shape[1], bool)
    # Each round adds the column that helps most. A dozen columns take a few rounds; the bound is against rounding errors.
    for _ in range(10 * matrix.shape[1]):
        gain = scaled.T @ (target - scaled @ prices)
        gain[is_in] = 0
        if gain.max() <= 1e-10 * len(target):
            break
        is_in[gain.argmax()] = True
        while True:
            best = np.zeros_like(prices)
            best[is_in] = np.linalg.lstsq(scaled[:, is_in], target, rcond=None)[0]
            turns_negative = is_in & (best <= 0)
            if not turns_negative.any():
                break
            steps = prices[turns_negative] / (prices[turns_negative] - best[turns_negative])
            prices += steps.min() * (best - prices)
            is_in &= prices > 1e-12
            prices[~is_in] = 0
        prices = best
    return prices / scale
