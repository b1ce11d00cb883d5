"""One step as arrays: all that a worker needs of it. It can go to a thread, to another process or into a file.

A worker keeps block tables of its own. A step has the changes since the step before, and names the earlier step that samples a token which is
not known yet. Positions and slots follow from that.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from paged.block_manager import Moves
from paged.errors import InvalidStep


class PageChanges(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Changed entries of one group's block tables, in order: of two for one place the later counts.

    rows, columns  int64 [k]
    pages          int32 [k, pages of a block], or [k] where a block is a page and all layers are full; -1: a window or chunk released the block
    """

    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    pages: NDArray[np.int32]


class StepInput(msgspec.Struct, frozen=True, eq=False, kw_only=True, gc=False):
    """One step of n rows and T tokens.

    number        the step's number, counted by its scheduler
    oldest        number of the oldest outstanding step; no later step takes tokens of one before it
    rows          int64 [n]; index of each row into the block tables
    num_tokens    int64 [n]; tokens of each row in this step, drafts included: at least one
    seq_lens      int64 [n]; tokens of each row once the step has run
    num_drafts    int64 [n]; how many of a row's last tokens are drafts
    samples       bool [n]; whether a token is sampled after the row's last one
    token_ids     int32 [T]; -1 where an outstanding step samples the token, and for a draft that the worker guesses
    sources       int64 [k, 3]; for each token that an outstanding step samples: its place of T, that step's number, its place of that step's n
    tables        for each layer group, the changes since the step before
    moves         copies to make first
    reads         int32 [n, pages], for a model with state layers: the pages that each row's state is read from; -1: it has none yet
    written_from  int64 [groups, n]: the first token whose K and V each row writes; earlier ones are in place. None: all are written
    """

    number: int
    oldest: int
    rows: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    seq_lens: NDArray[np.int64]
    num_drafts: NDArray[np.int64]
    samples: NDArray[np.bool_]
    token_ids: NDArray[np.int32]
    sources: NDArray[np.int64]
    tables: tuple[PageChanges, ...]
    moves: Moves
    reads: NDArray[np.int32] | None = None
    written_from: NDArray[np.int64] | None = None

    def encoded(self) -> bytes:
        """Return the step as msgpack: an array is its dtype, its shape and its bytes."""
        return _ENCODER.encode(self)

    @staticmethod
    def decoded(data: bytes) -> StepInput:
        """Return the step that `encoded` made bytes of; its arrays are read-only. Raises InvalidStep for any other bytes."""
        try:
            step = _DECODER.decode(data)
        except (msgspec.MsgspecError, ValueError, TypeError) as error:
            raise InvalidStep(f"these {len(data):,} bytes are no step: {error}") from error
        _check(step)
        return step


def _check(step: StepInput) -> None:
    """Raise InvalidStep for shapes that do not match, and numbers out of range."""
    if not (step.rows.ndim == step.token_ids.ndim == 1 and step.tables):
        raise InvalidStep(f"step {step.number} has rows or tokens that are no list, or no tables.")
    num_rows, num_tokens = len(step.rows), len(step.token_ids)
    for name in ("num_tokens", "seq_lens", "num_drafts", "samples"):
        if getattr(step, name).shape != (num_rows,):
            raise InvalidStep(
                f"{name} of step {step.number} has shape {getattr(step, name).shape}; rows has {num_rows}."
            )
    if step.rows.min(initial=0) < 0:
        raise InvalidStep(f"rows of step {step.number} have {step.rows.min()}.")
    if step.num_tokens.min(initial=1) < 1:
        raise InvalidStep(
            f"num_tokens of step {step.number} has {step.num_tokens.min()}; a row of a step has at least one."
        )
    if step.num_tokens.sum() != num_tokens:
        raise InvalidStep(
            f"num_tokens of step {step.number} add up to {step.num_tokens.sum()}; token_ids has {num_tokens}."
        )
    if not ((step.num_drafts >= 0) & (step.num_drafts < step.num_tokens) & (step.num_tokens <= step.seq_lens)).all():
        raise InvalidStep(f"a row of step {step.number} has more drafts than tokens, or more tokens than it is long.")
    sources = step.sources
    if sources.shape[1:] != (3,) or sources.min(initial=0) < 0 or sources[:, 0].max(initial=-1) >= num_tokens:
        raise InvalidStep(
            f"sources of step {step.number} have shape {sources.shape}, or name a token that it does not have."
        )
    if step.reads is not None and (step.reads.ndim != 2 or len(step.reads) != num_rows):
        raise InvalidStep(f"reads of step {step.number} has shape {step.reads.shape}; rows has {num_rows}.")
    if step.written_from is not None and step.written_from.shape != (shape := (len(step.tables), num_rows)):
        raise InvalidStep(f"written_from of step {step.number} has shape {step.written_from.shape}, not {shape}.")
    for each in step.tables:
        if not (each.rows.ndim == 1 and each.rows.shape == each.columns.shape == each.pages.shape[:1]):
            raise InvalidStep(
                f"tables of step {step.number} have {each.rows.shape}, {each.columns.shape} and {each.pages.shape} entries."
            )
        if min(each.rows.min(initial=0), each.columns.min(initial=0)) < 0:
            raise InvalidStep(f"tables of step {step.number} name a row or column below 0.")


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, np.ascontiguousarray(value).data
    raise NotImplementedError(f"a step holds arrays and numbers; got {type(value).__name__}")


def _array(kind: Any, value: Any) -> NDArray[Any]:
    dtype, shape, data = value
    if dtype not in _DTYPES:
        raise ValueError(f"an array of {dtype!r}; a step has {', '.join(_DTYPES)}")
    array: NDArray[Any] = np.frombuffer(data, np.dtype(dtype)).reshape(shape)
    wanted = kind.__args__[1].__args__[0]
    if array.dtype != wanted:
        raise ValueError(f"an array of {array.dtype} stands where one of {np.dtype(wanted)} belongs")
    return array


_DTYPES = ("<i8", "<i4", "|b1")
_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
_DECODER = msgspec.msgpack.Decoder(StepInput, dec_hook=_array)
