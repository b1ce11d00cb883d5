"""One token a row, drawn from logits.

    logits → temperature → weights, likeliest first → top-k → top-p → min-p → typical → a uniform number picks the token
                           |■■■■■■■■|■■■■|■■|■|■|     |■■■■■■■■|■■■■|■■|         |■■■■|■■|

A draw depends on its own row alone, to the last bit. The uniform number is a hash of the row's seed and place. The
weights are integers, whose sum does not depend on the order of additions; a sum of floats does, and a device's order
depends on the shape of the batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paged.errors import BadLogits, InvalidSampling, NoTokenAllowed
from paged.sampling.checks import check_seed
from paged.sampling.weights import column, likeliest, numbers, rows_at_once, rows_of, total_weights, unit_bits, weights

if TYPE_CHECKING:
    from torch import Tensor

# The number of likeliest tokens that are considered first, and the factor to the next number if they are too few. top-k and
# top-p rarely need more, and sorting 150,000 logits takes a hundred times as long as selecting 128 of them.
_NUM_CANDIDATES = 128
_MORE_CANDIDATES = 8

# Multipliers of splitmix64: G. L. Steele, D. Lea, C. H. Flood, "Fast splittable pseudorandom number generators", 2014, as
# published by S. Vigna (https://prng.di.unimi.it/splitmix64.c). Hashing a counter, so that a draw needs no earlier one, is
# from J. K. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)

_DTYPES = {
    "temperature": np.dtype(np.float64),
    "top_k": np.dtype(np.int64),
    "top_p": np.dtype(np.float64),
    "min_p": np.dtype(np.float64),
    "typical_p": np.dtype(np.float64),
    "seeds": np.dtype(np.uint64),
    "places": np.dtype(np.int64),
}


def seed_of(request_id: str, engine_seed: int) -> int:
    """Return the seed, of 64 bits, of a request without one. Raises InvalidSampling for an engine seed of more bits."""
    check_seed("engine_seed", engine_seed)
    name = request_id.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(name, digest_size=8, key=int(engine_seed).to_bytes(8, "little")).digest())


class _Draws(NamedTuple):
    """The parameters of each row's draw, and its uniform number in [0, 1)."""

    temperature: NDArray[np.float64]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]
    typical_p: NDArray[np.float64]
    uniforms: NDArray[np.float64]

    def of(self, rows: NDArray[np.int64]) -> _Draws:
        """Return those of some rows."""
        return _Draws._make(each[rows] for each in self)


def seed_of_sequence(seed: int, sequence: int) -> int:
    """Return the seed of one of a request's sequences; the first one has the request's."""
    if not sequence:
        return seed
    return int(_mixed(np.array([seed], np.uint64) + np.array([sequence], np.uint64) * _GOLDEN)[0])


def sample(
    logits: Tensor,
    *,
    temperature: NDArray[np.float64],
    top_k: NDArray[np.int64],
    top_p: NDArray[np.float64],
    seeds: NDArray[np.uint64],
    places: NDArray[np.int64],
    min_p: NDArray[np.float64] | None = None,
    typical_p: NDArray[np.float64] | None = None,
) -> NDArray[np.int32]:
    """Choose the next token of each row, int32 [n], from logits [n, vocabulary] of any float dtype on any device.

    temperature  [n], 0: the likeliest token, the lowest id of equal ones
    top_k        [n], the vocabulary's size or more: off
    top_p        [n], 1: off; the fewest likeliest tokens whose share of what top_k left reaches it
    seeds        [n]
    places       [n], tokens of the sequence that were sampled before
    min_p        [n], 0: off; of these, tokens with at least this share of the likeliest token's probability
    typical_p    [n], 1: off; of these, the fewest whose share reaches it, nearest to the expected information first (Meister et
                 al., 2022)

    The order is that of transformers' `generate`. Of equally likely tokens the lower id is kept first. A token with logit
    -inf is never drawn, nor one that is less than 2^-45 times as likely as the likeliest (2^-41 in a vocabulary of four
    million). Values are not checked; they have to be such as `SamplingParams.check` accepts. Raises BadLogits for a row
    with NaN or inf; NoTokenAllowed, a BadLogits, for one of -inf alone; InvalidSampling for arrays of another shape or dtype.
    """
    num_rows = len(logits) if logits.ndim else 0
    min_p = np.zeros(num_rows) if min_p is None else min_p
    typical_p = np.ones(num_rows) if typical_p is None else typical_p
    cuts = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "typical_p": typical_p}
    _check_arrays(logits, **cuts, seeds=seeds, places=places)
    # Contiguous, since a device may compute `exp` in another way, and round otherwise, for strided rows.
    logits = logits.detach().contiguous()
    vocabulary_size = logits.shape[1]
    is_drawn = temperature > 0
    if not is_drawn.any():
        highest = logits.max(dim=-1)
        _refuse_bad(highest.values, np.arange(num_rows))
        return highest.indices.cpu().numpy().astype(np.int32)
    is_cut = is_drawn & ((top_k < vocabulary_size) | (top_p < 1) | (min_p > 0) | (typical_p < 1))
    tokens = np.zeros(num_rows, np.int32)
    # Rows that are cut are checked when their likeliest tokens are selected.
    whole = np.flatnonzero(~is_cut)
    if len(whole):
        highest = rows_of(logits, whole).max(dim=-1)
        _refuse_bad(highest.values, whole)
        tokens[whole] = highest.indices.cpu().numpy()
    draws = _Draws(temperature, top_k, top_p, min_p, typical_p, _uniforms(seeds, places))
    for rows in _pieces(is_drawn & ~is_cut, rows_at_once(vocabulary_size)):
        tokens[rows] = _draw_from_all(rows_of(logits, rows), draws.of(rows))
    rows = np.flatnonzero(is_cut)
    if len(rows):
        tokens[rows] = _draw_from_likeliest(rows_of(logits, rows), draws.of(rows), _NUM_CANDIDATES, rows)
    return tokens


def _check_arrays(logits: Tensor, **columns: NDArray[Any]) -> None:
    if logits.ndim != 2 or not logits.is_floating_point() or not logits.shape[1]:
        raise InvalidSampling(f"logits have to be floats [rows, vocabulary]; got {logits.dtype} {list(logits.shape)}.")
    for name, values in columns.items():
        is_array = isinstance(values, np.ndarray)
        if not is_array or values.dtype != _DTYPES[name] or values.shape != (len(logits),):
            got = f"{values.dtype} {list(values.shape)}" if is_array else f"a {type(values).__name__}"
            raise InvalidSampling(
                f"{name} has to be {_DTYPES[name]} [{len(logits)}], one for each row of logits; got {got}."
            )


def _refuse_bad(highest: Tensor, rows: NDArray[np.int64]) -> None:
    # The maximum of a row with NaN is NaN, so this one number shows NaN, inf and -inf alone.
    values = highest.double().cpu().numpy()
    is_bad = ~np.isfinite(values)
    if is_bad.any():
        row = int(is_bad.argmax())
        kind = NoTokenAllowed if values[row] == -np.inf else BadLogits
        raise kind(int(rows[row]), float(values[row]))


def _uniforms(seeds: NDArray[np.uint64], places: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return float64 [n] in [0, 1): 53 bits of each row's splitmix64 stream, which begins at the hash of its seed."""
    streams = _mixed(seeds + _GOLDEN)
    bits = _mixed(streams + places.astype(np.uint64) * _GOLDEN) >> np.uint64(11)
    return np.multiply(bits, 2.0**-53, dtype=np.float64)


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * _FIRST
    values = (values ^ (values >> np.uint64(27))) * _SECOND
    return values ^ (values >> np.uint64(31))


def _pieces(is_wanted: NDArray[np.bool_], num_at_once: int) -> Iterator[NDArray[np.int64]]:
    rows = np.flatnonzero(is_wanted)
    for start in range(0, len(rows), num_at_once):
        yield rows[start : start + num_at_once]


def _draw_from_all(logits: Tensor, draws: _Draws) -> NDArray[np.int64]:
    """Draw tokens, [n], for rows where nothing is cut off; in the order of ids, which needs no sort."""
    top = logits.amax(-1, keepdim=True)
    sums = weights(logits, top, column(logits, draws.temperature)).cumsum(-1)
    return numbers(_picked(sums, sums[:, -1:], column(logits, draws.uniforms)))


def _draw_from_likeliest(
    logits: Tensor, draws: _Draws, num_candidates: int, rows: NDArray[np.int64], of_all: Tensor | None = None
) -> NDArray[np.int64]:
    """Draw tokens, [n], for rows where something is cut off: from `num_candidates` likeliest tokens, and from more for rows where these are too few.

    `rows`, [n]: their places in the batch; `of_all`, [n, 1]: the sum of all weights of each row, if known. The number of candidates does not change a
    token, since no two tokens share a rank, and sums of integers are exact.
    """
    import torch

    vocabulary_size = logits.shape[1]
    num_candidates = min(num_candidates, vocabulary_size)
    ordered, ids = likeliest(logits, num_candidates)
    _refuse_bad(ordered[:, 0], rows)
    top, temperature = ordered[:, :1], column(logits, draws.temperature)
    each = weights(ordered, top, temperature, vocabulary_size)
    sums = each.cumsum(-1)

    kept = column(logits, draws.top_k).clamp(max=vocabulary_size)
    total = sums.gather(-1, kept.clamp(max=num_candidates) - 1)
    keeps_all = kept == vocabulary_size
    if num_candidates < vocabulary_size and (draws.top_k >= vocabulary_size).any():
        if of_all is None:
            of_all = total_weights(logits, top, temperature)
        total = torch.where(keeps_all, of_all, total)

    # By the share that may be left out: so top_p of 1 keeps all, to the last unit.
    missable = ((1 - column(logits, draws.top_p)) * total).long()
    last = torch.searchsorted(sums, total - missable).clamp(max=num_candidates - 1)
    if (draws.min_p > 0).any():
        # The likeliest token always has this share of itself, so one is left.
        least = (column(logits, draws.min_p) * 2.0 ** unit_bits(vocabulary_size)).ceil().long()
        last = torch.minimum(last, (each >= least).sum(-1, keepdim=True) - 1)
    drawn = sums
    if (draws.typical_p < 1).any():
        typical = _typical(each, last, column(logits, draws.typical_p))
        drawn = torch.where(column(logits, draws.typical_p) < 1, typical, sums)
    picked = _picked(drawn, drawn.gather(-1, last), column(logits, draws.uniforms))
    tokens = numbers(ids.gather(-1, picked))
    if num_candidates == vocabulary_size:
        return tokens

    # A token as likely as the last candidate may have been left out, even if its id is lower than that of one in the candidates.
    is_enough = (ordered.gather(-1, last) > ordered[:, -1:]) & (keeps_all | (kept <= num_candidates))
    rest = np.flatnonzero(numbers(is_enough) == 0)
    if len(rest):
        tokens[rest] = _draw_from_likeliest(
            rows_of(logits, rest),
            draws.of(rest),
            num_candidates * _MORE_CANDIDATES,
            rows[rest],
            None if of_all is None else rows_of(of_all, rest),
        )
    return tokens


def _typical(each: Tensor, last: Tensor, share: Tensor) -> Tensor:
    """Return running sums, [n, candidates], of the weights of tokens up to `last` whose information is nearest to the expected one; of equally near ones all
    are kept."""
    import torch

    places = torch.arange(each.shape[1], device=each.device)
    each = torch.where(places <= last, each, 0)
    total = each.sum(-1, keepdim=True)
    shares = each.double() / total.double()
    information = -shares.log()
    expected = _sum_of(torch.where(each > 0, shares * information, 0.0))
    nearness = torch.where(each > 0, (information - expected).abs(), torch.inf)
    nearest = nearness.sort(dim=-1, stable=True)
    reached = each.gather(-1, nearest.indices).cumsum(-1)
    enough = torch.searchsorted(reached, (share * total).ceil().long()).clamp(max=each.shape[1] - 1)
    return torch.where(nearness <= nearest.values.gather(-1, enough), each, 0).cumsum(-1)


def _sum_of(values: Tensor) -> Tensor:
    """Return sums of float64 below 64 along the last dimension, [n, 1], which do not depend on the order of additions."""
    unit = 2.0**52
    return (values * unit).round().long().sum(-1, keepdim=True) / unit


def _picked(sums: Tensor, kept: Tensor, uniforms: Tensor) -> Tensor:
    """Return the place in the running sums, [n, vocabulary], where the uniform share of `kept` falls, [n, 1]."""
    import torch

    # The share is at most 1 - 2^-53, so the product is below `kept` in float64, too, however `kept` was rounded.
    return torch.searchsorted(sums, (uniforms * kept).long(), right=True)
