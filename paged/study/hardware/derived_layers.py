"""A model's layers, or one device's part of them, derived from tables of other layers that were timed on the same device.

A matrix product is interpolated between timed ones by its number of weights: on one card seconds a weight differ little between matrices.
Attention and kernels over each token scale with heads and widths. A routed expert takes the time of a large product, for its own weights and
rows. Collectives are priced by the link.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from paged.model.model_shape import ModelShape
from paged.study.hardware.device import DTYPES
from paged.study.hardware.kernel_layers import heads_of, products_of
from paged.study.hardware.kernels.grid import Multilinear
from paged.study.hardware.kernels.layer_tables import LayerTables, Timed
from paged.study.hardware.roofline import Roofline

Numbers = NDArray[np.float64]
_LAUNCH_S = 2e-6
"""Seconds of a product without weights: about those of the shortest kernel of each table."""
_ROUTING_KERNELS = 5
"""Kernels of a layer with routed experts beside products and activation: softmax and choice, sorting tokens by expert, two gathers, a sum."""


@dataclass(frozen=True)
class Timing:
    """Tables, and the shape of the model whose layers they are."""

    tables: LayerTables
    model: ModelShape

    def products(self) -> list[tuple[float, Timed]]:
        """Return weights and timings of a layer's four matrices, of those that were timed."""
        model, dense = self.model, self.tables.dense
        width, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
        up = (2 if model.gated_mlp else 1) * model.intermediate
        sizes = {
            "qkv_proj": (width + 2 * kv) * model.hidden,
            "o_proj": width * model.hidden,
            "gate_up_proj": up * model.hidden,
            "down_proj": model.intermediate * model.hidden,
        }
        return [(size, dense[layer]) for layer, size in sizes.items() if layer in dense]


@dataclass(frozen=True)
class DerivedLayers:
    """See `Layers`. `timings`, at least one, are of the roofline's device and dtype, with heads of the model's size; if the model itself was timed on
    one device, its timing comes first."""

    timings: Sequence[Timing]
    roofline: Roofline

    @property
    def about(self) -> str:
        names = " and ".join(timing.tables.name for timing in self.timings)
        return f"layers derived from the measured ones of {names}: {self.timings[0].tables.source}"

    @property
    def skew(self) -> float:
        """The skew of the model whose attention is taken."""
        return self._nearest.tables.skew

    @property
    def notes(self) -> tuple[str, ...]:
        roofline, nearest = self.roofline, self._nearest
        split = f", split over {roofline.tensor_parallel} devices" if roofline.tensor_parallel > 1 else ""
        said = [
            f"layers of {roofline.model.name}{split} were not timed: products go by their weights, from others on the same device",
            f"attention is that of {nearest.model.name}, scaled by heads",
        ]
        if roofline.is_linked:
            said.append(f"what devices send each other is by a link of {roofline.reached_link}: it was not timed")
        if roofline.model.experts:
            said += [
                "routed experts were not timed: each takes a large product's seconds for its weights and rows",
                "experts are drawn evenly: how unevenly a real router draws them is not known",
            ]
            if roofline.model.experts.bits is not None:
                said.append(
                    f"experts of {roofline.model.experts.bits:g} bits are timed as if in {self.timings[0].tables.dtype}"
                )
        return tuple(said)

    def dense_seconds(self, tokens: Numbers) -> Numbers:
        roofline, model = self.roofline, self.roofline.model
        seconds = np.zeros(len(tokens))
        for name, columns, depth, times in products_of(roofline):
            if name != "LM head":
                timed = [(size, each.seconds(tokens)) for size, each in self._matrices]
                seconds += times * _by_size(columns * depth, timed)
        heads = heads_of(roofline)["heads"]
        plain, width = model.layers - model.moe_layers, model.intermediate / roofline.tensor_parallel
        for layer, times, size, of in (
            ("embedding", 1, model.hidden, "hidden"),
            ("final_layernorm", 1, model.hidden, "hidden"),
            ("layernorm", 2 * model.layers, model.hidden, "hidden"),
            ("rotary_emb", model.layers, heads, "heads"),
            ("qk_norm", model.layers * model.qk_norm, heads, "heads"),
            ("act_fn", plain, width, "intermediate"),
        ):
            if times:
                seconds += times * self._small(layer, size, of, tokens)
        seconds += roofline.reduce_seconds(tokens)
        return seconds if roofline.is_lockstep or not model.experts else seconds + self._experts(tokens)

    def shared_seconds(self, tokens: Numbers) -> Numbers:
        return np.asarray(self._experts(tokens) + self.roofline.exchange_seconds(tokens), np.float64)

    def head_seconds(self, rows: Numbers) -> Numbers:
        """Return the seconds of LM head and sampler. Each device computes its part of the vocabulary, and gathers all logits before it samples."""
        roofline, model = self.roofline, self.roofline.model
        _, columns, depth, _ = products_of(roofline)[-1]
        weights = columns * depth
        heads = [
            (timing.model.vocab * timing.model.hidden, timing.tables.head["lm_head"].seconds(rows))
            for timing in self.timings
        ]
        seconds = _by_size(weights, sorted(heads, key=lambda head: head[0]))
        sampler = self._nearest.tables.head["sampler"].seconds(rows) * model.vocab / self._nearest.model.vocab
        if roofline.tensor_parallel > 1 and roofline.reached_link is not None:
            logits = DTYPES[roofline.dtype] * model.vocab * rows
            seconds = seconds + roofline.reached_link.all_gather(roofline.tensor_parallel, logits)
        return np.asarray(seconds + sampler, np.float64)

    @cached_property
    def attention(self) -> Multilinear:
        """Attention of all layers. Beyond a launch, steps that only decode scale with KV heads, and steps with a prompt's chunk with heads: there a KV
        head is read again for each of its heads."""
        nearest, heads = self._nearest, heads_of(self.roofline)
        layer = nearest.tables.layer_attention
        launch = float(layer.table[layer.table > 0].min())
        share = np.full(layer.table.shape, heads["heads"] / nearest.model.heads)
        share[0] = heads["kv_heads"] / nearest.model.kv_heads
        table = np.where(layer.table > 0, launch + (layer.table - launch) * share, 0.0)
        return Multilinear(layer.axes, table * self.roofline.model.layers)

    @cached_property
    def _nearest(self) -> Timing:
        """The timing whose attention is taken: that with the nearest number of heads to a KV head, the first of several."""
        heads = heads_of(self.roofline)
        group = heads["heads"] / heads["kv_heads"]
        return min(self.timings, key=lambda timing: abs(np.log(timing.model.heads / timing.model.kv_heads / group)))

    @cached_property
    def _matrices(self) -> list[tuple[float, Timed]]:
        return sorted((each for timing in self.timings for each in timing.products()), key=lambda each: each[0])

    def _small(self, layer: str, size: float, of: str, tokens: Numbers) -> Numbers:
        """Return the seconds of a kernel over each token's tensors: that of one token, and the time of further tokens scaled by their width."""
        for timing in (self._nearest, *self.timings):
            if layer in timing.tables.dense:
                timed = timing.tables.dense[layer]
                least = timed.seconds(np.ones(1))
                return least + np.maximum(timed.seconds(tokens) - least, 0) * size / getattr(timing.model, of)
        return np.full(len(tokens), _LAUNCH_S)

    def _experts(self, tokens: Numbers) -> Numbers:
        """Return the seconds of the routed experts on one device, for so many tokens over all ranks."""
        roofline, experts = self.roofline, self.roofline.model.experts
        assert experts is not None, "a model with experts"
        devices = roofline.tensor_parallel * roofline.data_parallel
        touched = experts.count * (1 - (1 - experts.per_token / experts.count) ** tokens)
        rows = np.maximum(experts.per_token * tokens / np.maximum(touched, 1e-9), 1)
        size, large = self._matrices[-1]
        each = (large.seconds(rows) - _LAUNCH_S) / size
        layer = 2 * _LAUNCH_S + touched * roofline.model.expert_parameters / devices * each
        routed = experts.per_token * experts.intermediate / devices
        layer = layer + self._small("act_fn", routed, "intermediate", tokens) + _ROUTING_KERNELS * _LAUNCH_S
        return np.asarray(np.where(tokens > 0, roofline.model.moe_layers * layer, 0.0), np.float64)


def _by_size(weights: float, timed: Sequence[tuple[float, Numbers]]) -> Numbers:
    """Return the seconds of a product of so many weights: interpolated between `timed`, ascending, and beyond the last in proportion to it."""
    sizes = [0.0, *(size for size, _ in timed)]
    seconds = [np.full(len(timed[0][1]), _LAUNCH_S), *(each for _, each in timed)]
    if weights >= sizes[-1]:
        return _LAUNCH_S + (seconds[-1] - _LAUNCH_S) * weights / sizes[-1]
    high = int(np.searchsorted(sizes, weights, "right"))
    share = (weights - sizes[high - 1]) / (sizes[high] - sizes[high - 1])
    return (1 - share) * seconds[high - 1] + share * seconds[high]
