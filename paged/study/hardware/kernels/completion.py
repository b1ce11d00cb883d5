"""Holes of a grid of numbers, filled from their neighbours.

    interpolated along one axis:   L(i, j) from L(i − 1, j) and L(i + 1, j)
    along one and then another:    L(i, j) from L(i ± 1, j ± 1)

An estimate of a cell does not use the cell itself, so the weights of estimates can be learned from the known cells. A table
that is a sum of a row's and a column's effect is met exactly by (along rows) + (along columns) − (along both).
"""

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Cells = NDArray[np.float64]
_RIDGE = 0.002
"""How strongly weights are drawn to the plain mean of the estimates, as a share of the estimates' spread."""


def completed(values: Cells, places: tuple[Cells, ...]) -> Cells:
    """Return the grid with its NaN filled in; known cells stay. `places` are the coordinates along each axis, ascending."""
    is_known = ~np.isnan(values)
    if is_known.all():
        return values
    estimates = _estimates(values, places)
    with np.errstate(invalid="ignore"):
        mean = np.nanmean(estimates, axis=0)
    mean = np.where(np.isnan(mean), np.nanmean(values), mean)
    deviations = np.where(np.isnan(estimates), 0.0, estimates - mean)
    weights = _weights(deviations[:, is_known].T, (values - mean)[is_known])
    return np.where(is_known, values, mean + np.tensordot(weights, deviations, axes=1))


def _weights(deviations: Cells, wanted: Cells) -> Cells:
    """Return the columns' weights by least squares. Outliers count less: two rounds reweight by the error of the round before."""
    importance = np.ones(len(wanted))
    weights: Cells = np.zeros(deviations.shape[1])
    for _ in range(3):
        scaled = deviations * importance[:, None]
        spread = scaled.T @ deviations
        spread += np.eye(len(spread)) * (np.trace(spread) * _RIDGE / len(spread) + 1e-12)
        weights = np.asarray(np.linalg.solve(spread, scaled.T @ wanted), np.float64)
        errors = np.abs(wanted - deviations @ weights)
        importance = 1 / np.maximum(errors, np.median(errors) + 1e-9)
    return weights


def _estimates(values: Cells, places: tuple[Cells, ...]) -> Cells:
    """Return the estimates of every cell, float64 [estimates, *shape]; NaN without a known neighbour."""
    axes = [axis for axis, size in enumerate(values.shape) if size > 1]
    along = {axis: _along(values, places[axis], axis) for axis in axes}
    both = [_along(along[second], places[first], first) for first, second in combinations(axes, 2)]
    return np.stack([*along.values(), *both]) if axes else np.full((1, *values.shape), np.nan)


def _along(values: Cells, places: Cells, axis: int) -> Cells:
    """Estimate each cell from the nearest known ones before and after it on this axis, or from one of them."""
    lines = np.moveaxis(values, axis, -1)
    before = _last_known(lines)
    after = lines.shape[-1] - 1 - _last_known(lines[..., ::-1])[..., ::-1]
    has_before, has_after = before >= 0, after < lines.shape[-1]
    before = np.where(has_before, before, np.minimum(after, lines.shape[-1] - 1))
    after = np.where(has_after, after, before)
    low = np.take_along_axis(lines, before, -1)
    high = np.take_along_axis(lines, after, -1)
    width = places[after] - places[before]
    share = np.where(width > 0, (places - places[before]) / np.where(width > 0, width, 1), 0.0)
    found = np.where(has_before | has_after, low + share * (high - low), np.nan)
    return np.moveaxis(found, -1, axis)


def _last_known(lines: Cells) -> NDArray[np.intp]:
    """Return the position of the nearest known cell strictly before each, −1 for none."""
    positions = np.where(np.isnan(lines), -1, np.arange(lines.shape[-1]))
    newest = np.maximum.accumulate(positions, axis=-1)
    return np.concatenate([np.full_like(newest[..., :1], -1), newest[..., :-1]], axis=-1)
