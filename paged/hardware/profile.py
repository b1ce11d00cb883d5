"""A cost model from steps that were timed: seconds as a sum of prices, fitted to them.

Knows the work and the duration of steps. Does not know who timed them, nor on what: `about` says it for people.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from paged import Costs, InvalidConfig
from paged.hardware.files import read_described
from paged.hardware.step_work import StepWork

_PRICES = (
    "seconds_per_step",
    "seconds_per_computed_token",
    "seconds_per_sampled_row",
    "seconds_per_context_token",
    "seconds_per_attended_pair",
    "seconds_per_moved_token",
)
HELD_OUT = 4
"""Every so-manieth step is not fitted to, but predicted."""


class ProfileError(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far predicted steps are from timed ones, as shares of the timed: by step (median and 90th percentile), and their total.

    The total is signed: above 0 the prediction is too long.
    """

    steps: int
    median: float
    p90: float
    total: float


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A price for each amount of a step's work, and one for a step that does anything.

        seconds = step + token · computed + row · sampled + context · tokens read + pair · pairs attended to + moved · tokens moved

    `tile`: computed tokens are rounded up to a multiple of it, as a model does that always runs so many places. `steps` is how many it was
    fitted to, `held_out` its error on others. Unlike a roofline it knows no larger of two: with a knee among its steps a sum is off by up to
    a tenth there (a test holds that), and outside the range of its steps nobody knows.
    """

    seconds_per_step: float
    seconds_per_computed_token: float
    seconds_per_sampled_row: float
    seconds_per_context_token: float
    seconds_per_attended_pair: float
    seconds_per_moved_token: float
    tile: int = 1
    steps: int = 0
    held_out: ProfileError | None = None
    about: str = ""

    def __post_init__(self) -> None:
        for name in _PRICES:
            price = getattr(self, name)
            if not (math.isfinite(price) and price >= 0):
                raise InvalidConfig(f"{name} is {price}; it has to be a finite number, 0 or more")
        if self.tile < 1:
            raise InvalidConfig(f"tile is {self.tile}; it has to be at least 1")

    @classmethod
    def fit(cls, work: StepWork, seconds: ArrayLike, *, tile: int = 1, about: str = "") -> Profile:
        """The prices, none below 0, with the least squares of relative errors over timed steps; every fourth step is held out.

        Relative errors, so that short steps count as much as long ones, and one that waited for another program does little harm. An amount
        that no step has gets price 0. Raises InvalidConfig for fewer than 8 steps, a duration that is not above 0, or columns of
        different lengths.
        """
        timed = np.asarray(seconds, np.float64)
        columns = _columns(work, tile)
        if timed.ndim != 1 or columns.shape != (len(timed), len(_PRICES)):
            raise InvalidConfig(f"steps of shape {columns.shape[:-1]} have durations of shape {timed.shape}")
        if len(timed) < 2 * HELD_OUT:
            raise InvalidConfig(f"{len(timed)} timed steps; a profile takes at least {2 * HELD_OUT}")
        if not (np.isfinite(timed).all() and timed.min() > 0 and np.isfinite(columns).all()):
            raise InvalidConfig("a step's duration has to be a finite number above 0, and its amounts finite")
        is_held_out = np.arange(len(timed)) % HELD_OUT == HELD_OUT - 1
        fitted = columns[~is_held_out] / timed[~is_held_out, None]
        prices = _non_negative_least_squares(fitted, np.ones(len(fitted)))
        profile = cls(**dict(zip(_PRICES, prices.tolist())), tile=tile)
        error = _error(columns[is_held_out] @ prices, timed[is_held_out])
        return msgspec.structs.replace(profile, steps=len(fitted), held_out=error, about=about)

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """A saved profile. Raises BadHardwareFile with the field that is wrong, and OSError for a file that cannot be read."""
        return read_described(Path(path), cls)

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")

    def seconds(self, work: StepWork) -> Any:
        """Duration of a step that does this work; of arrays an array. A step that computes and moves nothing takes none."""
        tokens, moved = work.computed_tokens, work.moved_tokens
        return (
            self.seconds_per_step * ((tokens > 0) | (moved > 0))
            + self.seconds_per_computed_token * _rounded_up(tokens, self.tile)
            + self.seconds_per_sampled_row * work.sampled_rows
            + self.seconds_per_context_token * work.context_tokens
            + self.seconds_per_attended_pair * work.attended_pairs
            + self.seconds_per_moved_token * moved
        )

    def error(self, work: StepWork, seconds: ArrayLike) -> ProfileError:
        """How far it is from steps that were timed; columns of at least one step."""
        return _error(np.asarray(self.seconds(work), np.float64), np.asarray(seconds, np.float64))

    def costs(self, block_size: int) -> Costs:
        """What the scheduler is to expect: a block's copy, and a token in a long chunk, where each is computed and read once."""
        token = self.seconds_per_computed_token + self.seconds_per_context_token
        pair = self.seconds_per_attended_pair
        return Costs(
            seconds_per_swapped_block=block_size * self.seconds_per_moved_token,
            seconds_per_token=token,
            attention_knee=token / pair if token and pair else math.inf,
        )


def _rounded_up(tokens: Any, tile: int) -> Any:
    return tokens if tile == 1 else -(-tokens // tile) * tile


def _columns(work: StepWork, tile: int) -> NDArray[np.float64]:
    """What each price is multiplied with, float64 [steps, prices]."""
    amounts = [np.asarray(getattr(work, name), np.float64) for name in work.__struct_fields__]
    computed, sampled, context, pairs, moved = np.broadcast_arrays(*amounts)
    does_anything = ((computed > 0) | (moved > 0)).astype(np.float64)
    return np.stack([does_anything, _rounded_up(computed, tile), sampled, context, pairs, moved], axis=-1)


def _error(predicted: NDArray[np.float64], timed: NDArray[np.float64]) -> ProfileError:
    shares = np.abs(predicted - timed) / timed
    return ProfileError(
        steps=len(timed),
        median=float(np.median(shares)),
        p90=float(np.quantile(shares, 0.9)),
        total=float(predicted.sum() / timed.sum() - 1),
    )


def _non_negative_least_squares(matrix: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """The x ≥ 0 with the least |matrix·x − target|, float64 [columns].

    Lawson and Hanson, Solving Least Squares Problems, 1974, chapter 23: columns enter while one would improve the fit, and leave where their
    price would turn negative. Columns are scaled to length 1 first, since pairs and steps lie many powers of ten apart.
    """
    lengths = np.linalg.norm(matrix, axis=0)
    scale = np.where(lengths > 0, lengths, 1.0)
    scaled = matrix / scale
    prices = np.zeros(matrix.shape[1])
    is_in = np.zeros(matrix.shape[1], bool)
    # Each round adds the column that helps most; with six columns that ends after a few, and rounding must not keep it going.
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
