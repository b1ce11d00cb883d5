"""The least seconds that a kernel could take by a device's published rates.

    seconds = max(operations ÷ peak, bytes ÷ bandwidth)

A fit divides measured seconds by these. The quotient varies little over sizes that differ by powers of ten, so it needs few points.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paged.study.hardware.device import DTYPES, Device

_ACTIVATION_BYTES = 2


def product_seconds(device: Device, dtype: str, m: Any, n: Any, k: Any) -> Any:
    """Return the least seconds of an m × k matrix times a k × n one, both of `dtype`; the result has two bytes an element."""
    size = DTYPES[dtype]
    carried = size * (m * k + n * k) + _ACTIVATION_BYTES * m * n
    return np.maximum(2 * m * n * k / device.peak(dtype), carried / device.bandwidth)


def prefill_seconds(
    device: Device, dtype: str, head_dim: Any, window: Any, batch: Any, heads: Any, kv_heads: Any, tokens: Any
) -> Any:
    """Return those of causal attention of `batch` prompts of `tokens` each, with K and V of `dtype`; window 0: none."""
    reach = _reach(tokens, window)
    pairs = reach * (tokens - (reach - 1) / 2)
    carried = batch * tokens * head_dim * 2 * (_ACTIVATION_BYTES * heads + DTYPES[dtype] * kv_heads)
    operations = 4 * batch * heads * head_dim * pairs
    return np.maximum(operations / device.peak(dtype), carried / device.bandwidth)


def decode_seconds(
    device: Device, dtype: str, head_dim: Any, window: Any, batch: Any, heads: Any, kv_heads: Any, tokens: Any
) -> Any:
    """Return those of attention of one new token in each of `batch` sequences of `tokens`, the new one included."""
    reach = _reach(tokens, window)
    carried = batch * head_dim * 2 * (DTYPES[dtype] * kv_heads * reach + _ACTIVATION_BYTES * heads)
    operations = 4 * batch * heads * head_dim * reach
    return np.maximum(operations / device.peak(dtype), carried / device.bandwidth)


def all_reduce_seconds(device: Device, num_gpus: Any, elements: Any) -> Any:
    """Return those of a ring over the published link, with elements of two bytes."""
    link = device.interconnect or device.host_link
    return 2 * (num_gpus - 1) / num_gpus * _ACTIVATION_BYTES * elements / link


def _reach(tokens: Any, window: Any) -> Any:
    """Return how many of `tokens` the last one attends to."""
    return np.where(np.asarray(window) > 0, np.minimum(tokens, window), tokens)
