"""Many numbers as one short word of text: logarithms in whole steps, two bytes each, compressed."""

from __future__ import annotations

import base64
import zlib

import numpy as np
from numpy.typing import NDArray


def packed(octets: bytes) -> str:
    """Compressed, as text."""
    return base64.b85encode(zlib.compress(octets, 9)).decode()


def unpacked(text: str) -> bytes:
    """Raises ValueError for what was not packed here."""
    try:
        return zlib.decompress(base64.b85decode(text))
    except zlib.error as error:
        raise ValueError(f"packed numbers are damaged: {error}") from None


def packed_numbers(numbers: NDArray[np.int16]) -> str:
    """Whole numbers in a row."""
    # All low bytes, then all high ones, which are nearly all alike.
    return packed(np.ascontiguousarray(numbers, "<i2").view(np.uint8).reshape(-1, 2).T.tobytes())


def unpacked_numbers(text: str) -> NDArray[np.int16]:
    """What `packed_numbers` packed, int16 [as many]. Raises ValueError for what was not packed here."""
    octets = np.frombuffer(unpacked(text), np.uint8)
    numbers: NDArray[np.int16] = np.ascontiguousarray(octets.reshape(2, -1).T).view("<i2").ravel()
    return numbers


def packed_steps(values: NDArray[np.float64], step: float) -> str:
    """Numbers as multiples of `step`, the difference to the one before along the first axis."""
    steps = np.round(values / step).clip(-32768, 32767).astype(np.int16)
    deltas = np.diff(steps, axis=0, prepend=np.int16(0))
    return packed_numbers(deltas)


def unpacked_steps(text: str, shape: tuple[int, ...], step: float) -> NDArray[np.float64]:
    """What `packed_steps` packed. Raises ValueError for another number of them."""
    if len(octets := unpacked(text)) != 2 * int(np.prod(shape)):
        raise ValueError(f"values has {len(octets):,} bytes unpacked; its axes want {2 * int(np.prod(shape)):,}")
    deltas = unpacked_numbers(text).reshape(shape)
    values: NDArray[np.float64] = np.cumsum(deltas, axis=0, dtype=np.int16) * np.float64(step)
    return values
