"""A cost model from timed steps: seconds as a sum of prices, fitted to the steps by least squares without a price below 0."""

import math
from typing import Any, ClassVar

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from paged.errors import InvalidConfig
from paged.model.model_shape import ModelShape
from paged.model.tiling import Tiling
from paged.scheduler import Costs
from paged.study.files import Saved
from paged.study.hardware.step_work import Spans, StepWork
from paged.study.limits import NotNegative, check

_AMOUNTS = {
    "seconds_per_computed_token": "computed_tokens",
    "seconds_per_sampled_row": "sampled_rows",
    "seconds_per_context_token": "context_tokens",
    "seconds_per_attended_pair": "attended_pairs",
    "seconds_per_moved_token": "moved_tokens",
    "seconds_per_tile": "tiles",
    "seconds_per_sampling_tile": "sampling_tiles",
    "seconds_per_tile_position": "tile_context",
}
"""By price, the amount of a step's work that it is multiplied with."""
_PRICES = ("seconds_per_step", *_AMOUNTS)
HELD_OUT = 4
"""By default one step in so many is held out of the fit, and predicted."""


class ProfileError(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The error of predicted steps as a share of timed ones: by step, the median and 90th percentile; and of their total, above 0 if the prediction
    is too long.
    """

    steps: int
    median: float
    p90: float
    total: float


class ProfiledModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model of the timed steps: a name for people, and the sizes that identify it."""

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @classmethod
    def of(cls, shape: ModelShape) -> "ProfiledModel":
        """Return the identity of a shape."""
        return cls(**{name: getattr(shape, name) for name in cls.__struct_fields__})

    def differing(self, shape: ModelShape) -> list[str]:
        """Return the sizes in which a shape differs, in words; the name does not count."""
        sizes = ((name, getattr(self, name), getattr(shape, name)) for name in self.__struct_fields__[1:])
        return [f"{name} {own:,}, not {other:,}" for name, own, other in sizes if own != other]


class Profile(Saved, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A price for each amount of a step's work, and one for each step with work.

        seconds = step + token · computed + row · sampled + context · tokens read + pair · pairs attended to + moved · tokens moved
                  + tile · tiles + sampling tile · tiles that sample + tile position · longest contexts of the tiles

    The last three prices are those of an engine that computes in tiles (`tiling`): its time is a staircase in tokens and in contexts. `steps` is the
    number of fitted steps, `held_out` the error on other steps, and `by_kind` the same by kind of step. A sum has no knee, as a roofline has: near a
    knee among its steps it is off by up to a tenth (a test holds that). Its error outside the range of its steps is not known.
    """

    seconds_per_step: NotNegative
    seconds_per_computed_token: NotNegative
    seconds_per_sampled_row: NotNegative
    seconds_per_context_token: NotNegative
    seconds_per_attended_pair: NotNegative
    seconds_per_moved_token: NotNegative
    seconds_per_tile: NotNegative = 0.0
    seconds_per_sampling_tile: NotNegative = 0.0
    seconds_per_tile_position: NotNegative = 0.0
    tiling: Tiling | None = None
    steps: int = 0
    held_out: ProfileError | None = None
    by_kind: dict[str, ProfileError] = msgspec.field(default_factory=dict)
    model: ProfiledModel | None = None
    about: str = ""
    spans: ClassVar[Spans] = ()
    what: ClassVar[str] = "a profile"
    hint: ClassVar[str] = ". `paged profile` makes one"
    indent: ClassVar[int] = 2

    def __post_init__(self) -> None:
        check(self)

    @classmethod
    def fit(
        cls,
        work: StepWork,
        seconds: ArrayLike,
        *,
        tiling: Tiling | None = None,
        held_out: ArrayLike | None = None,
        about: str = "",
    ) -> "Profile":
        """Fit prices, none below 0, by least squares of relative errors over the steps that are not held out.

        `held_out` is bool [steps]; None: every fourth step. With relative errors short steps count as much as long ones, and a step that waited
        for another program does little harm. An amount that no step has gets price 0. Raises InvalidConfig for fewer than 8 steps, for all or none
        held out, for a duration that is not above 0, and for columns of different lengths.
        """
        timed = np.asarray(seconds, np.float64)
        columns = _columns(work)
        if timed.ndim != 1 or columns.shape != (len(timed), len(_PRICES)):
            raise InvalidConfig(f"steps of shape {columns.shape[:-1]} have durations of shape {timed.shape}")
        if len(timed) < 2 * HELD_OUT:
            raise InvalidConfig(f"{len(timed)} timed steps; a profile takes at least {2 * HELD_OUT}")
        if not (np.isfinite(timed).all() and timed.min() > 0 and np.isfinite(columns).all()):
            raise InvalidConfig("a step's duration has to be a finite number above 0, and its amounts finite")
        if held_out is None:
            held_out = np.arange(len(timed)) % HELD_OUT == HELD_OUT - 1
        is_held_out = np.asarray(held_out, np.bool_)
        if is_held_out.shape != timed.shape or is_held_out.all() or not is_held_out.any():
            raise InvalidConfig(
                f"held_out of shape {is_held_out.shape} holds out {int(is_held_out.sum())} of {len(timed)} steps; some have to "
                f"be, and some not"
            )
        fitted = columns[~is_held_out] / timed[~is_held_out, None]
        prices = non_negative_least_squares(fitted, np.ones(len(fitted)))
        profile = cls(**dict(zip(_PRICES, prices.tolist())), tiling=tiling)
        error = _error(columns[is_held_out] @ prices, timed[is_held_out])
        return msgspec.structs.replace(profile, steps=len(fitted), held_out=error, about=about)

    def seconds(self, work: StepWork) -> Any:
        """Return the seconds of a step with this work; arrays give an array. A step that computes and moves nothing takes none."""
        total = self.seconds_per_step * ((work.computed_tokens > 0) | (work.moved_tokens > 0))
        for price, amount in _AMOUNTS.items():
            total = total + getattr(self, price) * getattr(work, amount)
        return total

    def error(self, work: StepWork, seconds: ArrayLike) -> ProfileError:
        """Return the error against timed steps; columns of at least one step."""
        return _error(np.asarray(self.seconds(work), np.float64), np.asarray(seconds, np.float64))

    def costs(self, block_size: int) -> Costs:
        """Return the scheduler's costs: a block's copy, and a token of a long chunk, which is computed and read once in full tiles."""
        places = self.tiling.places if self.tiling else 1
        token = self.seconds_per_computed_token + self.seconds_per_context_token + self.seconds_per_tile / places
        pair = self.seconds_per_attended_pair + self.seconds_per_tile_position / places
        return Costs(
            seconds_per_swapped_block=block_size * self.seconds_per_moved_token,
            seconds_per_token=token,
            attention_knee=token / pair if token and pair else math.inf,
        )

    def must_be_of(self, shape: ModelShape) -> None:
        """Raise InvalidConfig, with the sizes that differ, if the steps were those of another model. A profile without a model passes."""
        if self.model is not None and (differing := self.model.differing(shape)):
            raise InvalidConfig(
                f"the profile was taken of {self.model.name}, which is no {shape.name}: {', '.join(differing)}"
            )


def _columns(work: StepWork) -> NDArray[np.float64]:
    """Return the factor of each price, float64 [steps, prices]."""
    amounts = np.broadcast_arrays(*(np.asarray(getattr(work, name), np.float64) for name in _AMOUNTS.values()))
    does_anything = (np.asarray(work.computed_tokens) > 0) | (np.asarray(work.moved_tokens) > 0)
    return np.stack([np.broadcast_to(does_anything, amounts[0].shape).astype(np.float64), *amounts], axis=-1)


def _error(predicted: NDArray[np.float64], timed: NDArray[np.float64]) -> ProfileError:
    shares = np.abs(predicted - timed) / timed
    return ProfileError(
        steps=len(timed),
        median=float(np.median(shares)),
        p90=float(np.quantile(shares, 0.9)),
        total=float(predicted.sum() / timed.sum() - 1),
    )


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
