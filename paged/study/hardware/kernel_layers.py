"""A model's layers, composed of a device's timed kernels: matrix products, attention and all-reduces."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from paged.errors import UnknownKernel
from paged.study.hardware.kernels import KernelTables
from paged.study.hardware.kernels.grid import Multilinear
from paged.study.hardware.kernels.kernel_tables import Heads
from paged.study.hardware.placement import LOGIT_BYTES
from paged.study.hardware.roofline import Roofline

Numbers = NDArray[np.float64]
_SMALL_KERNELS = 4
"""Kernels of a layer beside products and attention: two norms, the rotation of queries and keys, the MLP's activation."""
_SAMPLER_S, _LOGIT_PASSES = 20e-6, 2
"""Seconds of a sampler beside its two passes over the logits, as on the two cards whose sampler was timed; and those passes."""
_AWAITED_S = 5e-6
"""Seconds that an all-reduce in a model waits beyond its time in isolation, since devices do not reach it at one moment. Fitted on closed loops of two
H100s against those of one, and judged by those of four and eight (benchmarks/results/validation.md)."""
_LENGTHS = (1, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


@dataclass(frozen=True)
class KernelLayers:
    """The layers of the roofline's model on its device, by the device's tables; see `Layers`.

    Norms, rotation and activation were not timed: each takes the shortest product's time, and their tensors' bytes over the assumed bandwidth.
    Attention with tokens before a prompt's chunk was not timed: it takes the time of the whole prompt less that of the tokens before. Routed
    experts are by published figures.
    """

    tables: KernelTables
    roofline: Roofline

    skew: ClassVar[float] = 0.0

    @property
    def about(self) -> str:
        versions = "; ".join({version.lower(): version for version in self.tables.versions.values()}.values())
        return f"measured kernels of {self.roofline.device.name} ({versions}): {self.tables.source}"

    @cached_property
    def notes(self) -> tuple[str, ...]:
        model, degree = self.roofline.model, self.roofline.tensor_parallel
        said = []
        for name, n, k, _ in products_of(self.roofline):
            beyond = self.tables.product_coverage(self._dtype, 256, n, k).beyond
            if beyond:
                how = ", ".join(f"{factor:.2g} × beyond in {axis}" for axis, factor in beyond.items())
                said.append(f"{name} ({n:,.0f} × {k:,.0f}) lies outside of the measured products: {how}")
        heads = heads_of(self.roofline)
        for kind in ("prefill", "decode"):
            instead = self.tables.attention_coverage(kind, self._kv_dtype, 1, 1024, **heads).instead
            if instead:
                said.append(
                    f"{kind} attention of {heads['heads']} heads over {heads['kv_heads']} is answered by {instead}"
                )
        if model.experts:
            said.append("the experts' products are by published figures: no table has them")
        if self.roofline.is_lockstep or self.roofline.link is not None:
            said.append(f"what devices send each other is by a link of {self.roofline.reached_link}: it was not timed")
        elif degree > 8:
            said.append(f"all-reduces were measured on up to 8 devices; {degree} are extrapolated")
        said.append("norms, rotation and activation are by bytes and a launch each: they were not measured")
        return tuple(said)

    def is_answered(self) -> bool:
        """Whether the tables have products in the model's dtype, and attention of its head size on K and V in their dtype."""
        try:
            self.tables.product(self._dtype, 1, 64, 64)
            for kind in ("prefill", "decode"):
                self.tables.attention_coverage(kind, self._kv_dtype, 1, 1024, **heads_of(self.roofline))
        except UnknownKernel:
            return False
        return True

    def dense_seconds(self, tokens: Numbers) -> Numbers:
        roofline, model = self.roofline, self.roofline.model
        seconds = np.zeros(len(tokens))
        for name, n, k, times in products_of(self.roofline):
            if name != "LM head":
                seconds += times * self.tables.product(self._dtype, tokens, n, k)
        shortest = self.tables.launch["product"]
        seconds += model.layers * _SMALL_KERNELS * shortest + roofline.traffic_seconds(tokens)
        if roofline.tensor_parallel > 1:
            if roofline.link is None:
                reduce = self.tables.all_reduce(roofline.tensor_parallel, tokens * model.hidden)
                seconds += 2 * model.layers * (_AWAITED_S + reduce)
            else:
                seconds += roofline.reduce_seconds(tokens)
        return np.asarray(seconds + (0.0 if roofline.is_lockstep else roofline.routed(tokens)), np.float64)

    def shared_seconds(self, tokens: Numbers) -> Numbers:
        return np.asarray(self.roofline.shared_seconds(tokens), np.float64)

    def head_seconds(self, rows: Numbers) -> Numbers:
        _, n, k, _ = products_of(self.roofline)[-1]
        logits = self.roofline.read_seconds(_LOGIT_PASSES * LOGIT_BYTES * self.roofline.model.vocab * rows)
        # Checkpoints whose layers are quantised keep this matrix as it was.
        return np.asarray(self.tables.product("bf16", rows, n, k) + _SAMPLER_S + logits, np.float64)

    @cached_property
    def attention(self) -> "_Attention":
        layers, heads, dtype = self.roofline.model.layers, heads_of(self.roofline), self._kv_dtype
        lengths, rows = np.array(_LENGTHS, np.float64), np.array(_ROWS, np.float64)
        whole = layers * self.tables.attention("prefill", dtype, 1, lengths, **heads)
        decode = layers * self.tables.attention("decode", dtype, rows[:, None], lengths, **heads)
        # No sequences take nothing; sequences of no tokens take as long as those of one.
        decode = np.pad(np.pad(decode, ((0, 0), (1, 0)), "edge"), ((1, 0), (0, 0)))
        return _Attention(
            Multilinear([(0, *_LENGTHS)], np.concatenate([[0.0], whole])),
            Multilinear([(0, *_ROWS), (0, *_LENGTHS)], decode),
            float(whole[0]),
        )

    @property
    def _dtype(self) -> str:
        return timed_as(self.roofline.dtype)

    @property
    def _kv_dtype(self) -> str:
        return timed_as(self.roofline.kept_dtype)


def timed_as(dtype: str) -> str:
    """Return the dtype whose kernels answer for `dtype`."""
    return "bf16" if dtype == "fp16" else dtype


def heads_of(roofline: Roofline) -> Heads:
    """Return heads, KV heads and head size on one device."""
    model, degree = roofline.model, roofline.tensor_parallel
    heads, kv_heads = -(-model.heads // degree), -(-model.kv_heads // degree)
    return {"heads": heads, "kv_heads": kv_heads, "head_dim": model.head_dim}


def products_of(roofline: Roofline) -> list[tuple[str, float, float, int]]:
    """Return name, columns, depth and count of the matrices on one device, without routed experts; the LM head's is last."""
    model, degree = roofline.model, roofline.tensor_parallel
    heads = heads_of(roofline)
    width, kv = heads["heads"] * model.head_dim, heads["kv_heads"] * model.head_dim
    found: list[tuple[str, float, float, int]] = [
        ("query, key and value", width + 2 * kv, model.hidden, model.layers),
        ("attention's output", model.hidden, width, model.layers),
    ]
    plain, experts = model.layers - model.moe_layers, model.experts
    for layers, intermediate in (
        (plain, model.intermediate),
        (model.moe_layers, 0 if experts is None else experts.shared * experts.intermediate),
    ):
        if layers and intermediate:
            up = (2 if model.gated_mlp else 1) * intermediate / degree
            found += [("MLP, up", up, model.hidden, layers), ("MLP, down", model.hidden, intermediate / degree, layers)]
    if experts:
        found.append(("router", experts.count, model.hidden, model.moe_layers))
    return [*found, ("LM head", model.vocab / degree, model.hidden, 1)]


@dataclass(frozen=True)
class _Attention:
    """Attention of prompts and of decoding sequences, added up: kernels of both at once were not timed."""

    whole: Multilinear
    decode: Multilinear
    launch: float

    def at(self, chunk: Any, before: Any, rows: Any, length: Any) -> Any:
        """See `Attention`. Without a chunk only the decoding sequences count."""
        decoding = self.decode.at(rows, length)
        if not isinstance(chunk, np.ndarray) and not chunk:
            return decoding
        return decoding + np.maximum(self.whole.at(before + chunk) - self.whole.at(before), self.launch * (chunk > 0))
