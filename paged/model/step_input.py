"""What a worker needs of one step, as arrays alone, so that a step can be sent: to a thread, to another process, into a file.

A worker keeps block tables of its own. It gets what changed in them since the step before, and where a token that was not known
when the step was made is sampled; positions, slots and the copies' order follow from that.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from paged.block_manager import Moves
from paged.errors import InvalidStep


class PageChanges(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Entries of one group's block tables, in order: of two for one place the later holds.

    rows, columns  int64 [k]
    pages          int32 [k, pages of a block], or [k] where a block is a page and all layers are full; -1: a window or chunk gave it back
    """

    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    pages: NDArray[np.int32]


class StepInput(msgspec.Struct, frozen=True, eq=False, kw_only=True, gc=False):
    """One step of n rows and T tokens. The same step is made of it wherever it is read.

    number      counts the steps of a scheduler
    oldest      the oldest step that is out: none goes on from one before it any more
    rows        int64 [n]; index of each into the block tables
    num_tokens  int64 [n]; tokens of each in this step, drafts included: at least one
    seq_lens    int64 [n]; tokens of each after it
    num_drafts  int64 [n]; how many of its last tokens are drafts
    samples     bool [n]; whether a token is sampled after the row's last one
    token_ids   int32 [T]; -1 where a step that is out samples the token, and for a draft that the worker guesses
    sources     int64 [k, 3]; of each token that a step samples which is out: its place of T, that step's number, its place of that step's n
    tables      one a layer group: what changed since the step before
    reads       int32 [n, pages], of a model with state layers: where each row's state is read from; -1: it has none yet
    moves       copies to make first
    written_from  int64 [groups, n]: the first token whose K and V each row writes; those before are there already. None: all are written
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
        """It as msgpack: an array is its dtype, its shape and its bytes."""
        return _ENCODER.encode(self)

    @staticmethod
    def decoded(data: bytes) -> StepInput:
        """What `encoded` gave, with read-only arrays. Raises InvalidStep for anything else."""
        try:
            step = _DECODER.decode(data)
        except (msgspec.MsgspecError, ValueError, TypeError) as error:
            raise InvalidStep(f"these {len(data):,} bytes are no step: {error}") from error
        _check(step)
        return step


def _check(step: StepInput) -> None:
    """Raise InvalidStep where shapes do not go together, or a number points at nothing."""
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
