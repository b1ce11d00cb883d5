"""Whose blocks are whose, bit by bit: the identity of an engine's KV, by which a store keeps others' apart.

Names say little: two folders may hold one model, and one folder two. So it is made of the configuration, of all weights
as they are in memory, of how blocks are laid out, and of the K and V that a trial gives: another processor, kernel or
library that rounds otherwise gives others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paged.attention import StepTokens
from paged.model.runner import Runner

_VOLATILE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")
_SAMPLED = 4096
"""Bytes of a tensor that are hashed, beside the sum of all its words."""


def identity_of(runner: Runner, *, batch_invariant: bool) -> tuple[bytes, str]:
    """32 bytes, and what they stand for in words. Writes the first page of the pool, and zeroes it again: nobody may
    hold it.

    Where answers depend on what else is in a batch, so does K and V, and the trial's is left out."""
    model, pool = runner.model, runner.pool
    config = getattr(model.module, "config", None)
    fields = {} if config is None else config.to_dict()
    kv_dtypes = [str(pool.layer(layer).keys.kv_dtype) for layer in range(model.num_layers)]
    said: dict[str, Any] = {
        "config": {name: value for name, value in fields.items() if name not in _VOLATILE},
        "dtype": model.precision,
        "head": model.quantize_head,
        "kv_dtypes": kv_dtypes,
        "block_size": pool.block_size,
        "page_bytes": pool.pages.page_bytes,
        "backend": runner.backend.name,
        "device": model.device.type,
        "batch_invariant": batch_invariant,
    }
    digest = sha256(json.dumps(said, sort_keys=True, default=str).encode())
    for name, tensor in _tensors(model.module):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(_fingerprint(tensor))
    if batch_invariant:
        digest.update(_trial(runner))
    return (
        digest.digest(),
        f"{fields.get('model_type', 'model')}, {model.precision}, blocks of {pool.block_size} in {pool.pages.page_bytes:,} bytes",
    )


def _tensors(module: Any) -> Iterator[tuple[str, Tensor]]:
    """Each tensor that a module has, those of its own that are neither parameters nor buffers, too."""
    for name, each in module.named_modules():
        for key, value in sorted({**vars(each), **each._parameters, **each._buffers}.items()):
            if isinstance(value, Tensor):
                yield f"{name}.{key}", value
            elif isinstance(value, np.ndarray) and value.dtype != object:
                yield f"{name}.{key}", torch.from_numpy(np.ascontiguousarray(value))


@torch.inference_mode()
def _fingerprint(tensor: Tensor) -> bytes:
    """The sum of all words, which any change of one shows, and some bytes as they are, which show an exchange of
    several."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if not len(flat):
        return b""
    word = next(each for each in (torch.int32, torch.int16, torch.uint8) if len(flat) % each.itemsize == 0)
    total = int(flat.view(word).sum(dtype=torch.int64))
    sample = flat[:: max(1, len(flat) // _SAMPLED)].cpu().numpy().tobytes()
    return total.to_bytes(8, "little", signed=True) + sha256(sample).digest()


def _trial(runner: Runner) -> bytes:
    """What one block of tokens leaves in the pool."""
    pool, model = runner.pool, runner.model
    length = min(pool.block_size, model.max_length or pool.block_size)
    positions, lengths = np.arange(length), np.array([length])
    table = np.zeros((1, 1), np.int32)
    ids = ((positions * 7919 + 1) % model.vocabulary_size).astype(np.int32)
    step = StepTokens(positions, positions, np.array([0, length]), lengths, table, pool.block_size)
    page = torch.zeros(1, dtype=torch.int64)
    runner.forward(step, ids, np.ones(length, np.bool_))
    found = pool.pages.read(page)
    pool.pages.write(page, torch.zeros_like(found))
    return sha256(found.numpy().data).digest()
