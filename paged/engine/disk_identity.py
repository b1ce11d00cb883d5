"""The identity of an engine's KV: a store keeps the blocks of different identities apart.

Names are not enough: two folders may hold one model, and one folder two. So the identity is a digest of the
configuration, all bytes of all weights in memory, the layout of blocks, the processor, the versions of paged, torch and
transformers, and the K and V of a trial: a kernel that rounds otherwise gives others.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from paged import __version__
from paged.attention import StepTokens
from paged.attention.native.build import processor
from paged.block_manager import Layout
from paged.model.runner import Runner

_VOLATILE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")
_THREADS = 8
"""Threads that hash, at most: each copies a tensor that lies on a device or is not contiguous."""


def identity_of(runner: Runner, layout: Layout, *, batch_invariant: bool) -> tuple[bytes, str]:
    """Return the identity, 32 bytes, and a description in words. Writes the first page of the pool and zeroes it again:
    no row may hold it. Costs a SHA-256 of all weights: a second or less for 650 MB.

    Without `batch_invariant` K and V depend on what else is in a batch, so the trial is left out; so it is with layers
    of several kinds."""
    model, pool = runner.model, runner.pool
    config = getattr(model.module, "config", None)
    fields = {} if config is None else config.to_dict()
    kv_dtypes = [str(pool.layer(each.layer).keys.kv_dtype) for each in model.layers]
    said: dict[str, Any] = {
        "config": {name: value for name, value in fields.items() if name not in _VOLATILE},
        "dtype": model.precision,
        "head": model.quantize_head,
        "kv_dtypes": kv_dtypes,
        "block_size": pool.block_size,
        "page_bytes": pool.pages.page_bytes,
        "groups": [*map(str, layout.groups)],
        "backend": runner.backend.name,
        "device": model.device.type,
        "batch_invariant": batch_invariant,
        "processor": _processor(model.device),
        "versions": {"paged": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
    }
    digest = sha256(json.dumps(said, sort_keys=True, default=str).encode())
    tensors = list(_tensors(model.module))
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as threads:
        for (name, tensor), its in zip(tensors, threads.map(_digest, [each for _, each in tensors]), strict=True):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(its)
    if batch_invariant and layout.is_plain:
        digest.update(_trial(runner))
    return (
        digest.digest(),
        f"{fields.get('model_type', 'model')}, {model.precision}, blocks of {pool.block_size} in {pool.pages.page_bytes:,} bytes",
    )


def _tensors(module: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor of a module by name: parameters, buffers, and attributes that are neither."""
    for name, each in module.named_modules():
        for key, value in sorted({**vars(each), **each._parameters, **each._buffers}.items()):
            if isinstance(value, Tensor):
                yield f"{name}.{key}", value
            elif isinstance(value, np.ndarray) and value.dtype != object:
                yield f"{name}.{key}", torch.from_numpy(np.ascontiguousarray(value))


@torch.inference_mode()
def _digest(tensor: Tensor) -> bytes:
    """Return the SHA-256 of all bytes of a tensor."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return sha256(flat.cpu().numpy().data).digest()


def _processor(device: torch.device) -> str:
    """Return the processor with its instructions, and the accelerator's name, if the model is on one."""
    return f"{processor()}\n{torch.cuda.get_device_name(device)}" if device.type == "cuda" else processor()


def _trial(runner: Runner) -> bytes:
    """Compute K and V of one block of trial tokens, and return their digest."""
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
