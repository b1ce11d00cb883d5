"""A cost model from published figures: how long a step of a model takes on devices.

Nothing in it was measured: what a kernel reaches of a published rate is an assumption, and each assumption is a
parameter with a name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

import msgspec
import numpy as np

from paged.errors import InvalidConfig
from paged.model.tiling import Tiling
from paged.scheduler import Costs
from paged.study.hardware.device import DTYPES, Link, usual_link
from paged.study.hardware.placement import LOGIT_BYTES, Placement
from paged.study.hardware.step_work import Amount, StepWork

_REDUCTIONS_A_LAYER = 2
_STATE_FLOPS = 2
"""Of a byte of a state, for each token: decay, a product with the key, an update, a product with the query, on elements of two or four bytes."""


class Faster(msgspec.Struct, frozen=True):
    """A device that is faster than it is: by how much rates are multiplied, 1 or more each. Raises InvalidConfig for another factor.

    By it a planner finds out which rate of a cost model binds.

    arithmetic  operations/s
    bandwidth   bytes/s between the device's memory and its arithmetic
    host        what the host's share of a step is divided by; infinite: it has none
    """

    arithmetic: float = 1.0
    bandwidth: float = 1.0
    host: float = 1.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            factor = getattr(self, name)
            if not (factor >= 1 and (math.isfinite(factor) or name == "host")):
                finite = "" if name == "host" else "finite and "
                raise InvalidConfig(f"faster {name} is {factor}; it has to be {finite}at least 1")


class Part(msgspec.Struct, frozen=True, eq=False):
    """What one kind of layer does in a step on one device: operations, and bytes between memory and arithmetic."""

    flops: Amount
    bytes: Amount


class Roofline(Placement, frozen=True, kw_only=True):
    """Seconds of a step from a model's shape and a device's published figures.

        seconds = Σ over parts max(operations ÷ reached operations/s, bytes ÷ reached bytes/s)
                  + all-reduces + KV over the host link + host overhead

    The parts are the dense layers, the routed experts, states, attention, and the output projection. The larger of the two is taken for each
    part and not for the step as a whole, because kernels run one after another: while attention reads KV, the matrix units that have
    finished the MLP do not help it. Within a part the overlap is taken as perfect. KV is copied before the forward pass, so the link's
    time is added, too.

    Assumptions, each a parameter:

    compute_efficiency    share of the device's peak that matrix products reach
    memory_efficiency     share of its bandwidth that reads reach
    link_efficiency       share of the host link and of the interconnect
    host_overhead_s       seconds of each step in which the device waits for the host
    all_reduce_latency_s  seconds of each all-reduce over NVLink (two a layer) beside its bytes

    `faster` multiplies the device's rates and divides the host's overhead: what if.

    What lies on which device is said in `Placement`. Over PCIe, and where a link is named, all-reduces take what `Link` says. Of data-parallel
    ranks that share experts, `seconds` is of a step in which all do the same, `together` of one in which each does its own. Experts are drawn evenly, so n tokens touch
    count · (1 − (1 − per_token ÷ count)ⁿ) of them, and each that is touched is read whole. A model with latents attends in the cheaper of
    two ways, by the step: on latents (more operations a pair), or on K and V expanded from every latent of the context (DeepSeek-V2,
    arXiv:2405.04434, section 2.1). Of a row that a step computes, each state is read and written once; its operations are assumed to be two a
    byte and token.
    """

    compute_efficiency: float = 0.6
    memory_efficiency: float = 0.8
    link_efficiency: float = 0.8
    host_overhead_s: float = 0.5e-3
    all_reduce_latency_s: float = 10e-6
    faster: Faster = Faster()

    tiling: ClassVar[Tiling | None] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("compute_efficiency", "memory_efficiency", "link_efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise InvalidConfig(f"{name} is {getattr(self, name)}; it has to be above 0 and at most 1")
        for name in ("host_overhead_s", "all_reduce_latency_s"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise InvalidConfig(f"{name} is {getattr(self, name)}; it has to be a finite number, 0 or more")

    def seconds(self, work: StepWork) -> Any:
        """Duration of a step that does this work; of arrays an array. A step that computes and moves nothing takes none.

        It rises, or stays, with every amount.
        """
        seconds = self._waiting(work) + self.exchange_seconds(work.computed_tokens * self.data_parallel)
        for part in self.parts(work):
            seconds = seconds + self.part_seconds(part)
        return seconds

    def together(self, works: Sequence[StepWork]) -> float:
        """Duration of a step of data-parallel ranks that share experts, each with its own work: all wait for the slowest, twice a layer."""
        own = (
            float(self._waiting(work) + sum(self.part_seconds(part) for part in (dense, *rest)))
            for work in works
            for dense, _, *rest in [self.parts(work)]
        )
        return max(own) + float(self.shared_seconds(sum(float(work.computed_tokens) for work in works)))

    def shared_seconds(self, tokens: Amount) -> Any:
        """Of what data-parallel ranks do together in a step of so many tokens over all of them: the routed experts, and to exchange tokens."""
        return self.part_seconds(self._routed(tokens)) + self.exchange_seconds(tokens)

    def part_seconds(self, part: Part) -> Any:
        """The larger of what its operations and its bytes take."""
        return _larger(part.flops / self._rate, part.bytes / self._bandwidth)

    def moved_seconds(self, tokens: Amount) -> Any:
        """In which KV of so many tokens crosses the link to the host."""
        return self.kv_bytes_per_token_of_device * tokens / self._host_link

    def routed(self, tokens: Amount) -> Any:
        """Seconds of the routed experts of a step of so many tokens; 0 where there are none."""
        return self.part_seconds(self._routed(tokens)) if self.model.experts else 0.0

    def reduce_seconds(self, tokens: Amount) -> Any:
        """Seconds of a step's all-reduces of so many tokens, two a layer."""
        if self.tensor_parallel == 1 or self.reached_link is None:
            return 0.0
        num_bytes = self.model.hidden * DTYPES[self.dtype] * tokens
        return _REDUCTIONS_A_LAYER * self.model.layers * self.reached_link.all_reduce(self.tensor_parallel, num_bytes)

    def exchange_seconds(self, tokens: Amount) -> Any:
        """Seconds in which data-parallel ranks that share experts gather each other's tokens and scatter what comes out, in each such layer."""
        if not self.is_lockstep or self.reached_link is None:
            return 0.0
        num_bytes = self.model.hidden * DTYPES[self.dtype] * tokens
        return (tokens > 0) * 2 * self.model.moe_layers * self.reached_link.all_gather(self.data_parallel, num_bytes)

    @cached_property
    def reached_link(self) -> Link | None:
        """The link that was named, else what is usual for the device; None: it has none."""
        return self.link or usual_link(self.device, share=self.link_efficiency, latency_s=self.all_reduce_latency_s / 2)

    def traffic_seconds(self, tokens: Amount) -> Any:
        """In which the tensors between the layers' kernels are read and written."""
        _, _, traffic = self._dense
        return traffic * tokens / self._bandwidth

    def read_seconds(self, num_bytes: Amount) -> Any:
        """In which so many bytes are read from the device's memory."""
        return num_bytes / self._bandwidth

    def as_published(self) -> Roofline:
        """The same without `faster`."""
        return msgspec.structs.replace(self, faster=Faster())

    def flops(self, work: StepWork) -> Any:
        """Operations of a step, on one device."""
        return sum(part.flops for part in self.parts(work))

    def bytes_read(self, work: StepWork) -> Any:
        """Bytes that a step carries between memory and arithmetic, on one device."""
        return sum(part.bytes for part in self.parts(work))

    def kept_bytes(self, work: StepWork) -> Any:
        """Of `bytes_read`, weights, K and V alone: activations and logits may stay in a cache."""
        _, _, traffic = self._dense
        _, _, logits = self._head
        return self.bytes_read(work) - traffic * work.computed_tokens - logits * work.sampled_rows

    def parts(self, work: StepWork) -> tuple[Part, ...]:
        """The step on one device by kind of layer: dense layers, routed experts and states where there are any, attention, output projection."""
        tokens = work.computed_tokens
        runs = tokens > 0
        flops, weights, traffic = self._dense
        dense = Part(flops * tokens, weights * runs + traffic * tokens)
        head_flops, head_weights, logits = self._head
        rows = work.sampled_rows
        head = Part(head_flops * rows, head_weights * (rows > 0) + logits * rows)
        routed = () if self.model.experts is None else (self._routed(tokens * self.data_parallel),)
        states = self.state_bytes_of_device
        mixing = (Part(_STATE_FLOPS * states * tokens, 2 * states * work.rows),) if states else ()
        return dense, *routed, *mixing, self._attention(work), head

    def costs(self, block_size: int) -> Costs:
        """What the scheduler is to expect of swapping and recomputing, so that it decides by the clock that it is timed by.

        A token is priced as in a step full of them: what arithmetic takes, not the weights' reading.
        """
        flops, _, _ = self._dense
        if self.model.experts:
            flops += self._experts[0] * self.model.experts.per_token * self.data_parallel
        linear = (
            flops + 2 * self.model.expand_parameters * self.model.attention_layers / self.tensor_parallel
        ) / self._rate
        linear += self.reduce_seconds(1.0) - self.reduce_seconds(0.0)
        return Costs(
            seconds_per_swapped_block=block_size * self.kv_bytes_per_token_of_device / self._host_link,
            seconds_per_token=linear,
            attention_knee=linear * self._rate / self._pair_flops,
        )

    @property
    def knee_tokens(self) -> float:
        """The token budget at the roofline's knee: peak FLOP/s × weight bytes ÷ (bandwidth × 2 × parameters).

        Computed tokens beyond it cost arithmetic, up to it they ride along with the weights' reading. Published rates, not reached ones:
        with these defaults the reached knee lies at 3/4 of it before KV is read, and KV's reading shifts it up again. A mixture of experts
        reads all weights and multiplies by the active ones alone. Independent of tensor parallelism.
        """
        active = 2 * self.model.active_parameters
        ridge = self.device.ridge(self.dtype) * self.faster.arithmetic / self.faster.bandwidth
        return ridge * self.weight_bytes / active

    @cached_property
    def _rate(self) -> float:
        return self.device.peak(self.dtype) * self.compute_efficiency * self.faster.arithmetic

    @cached_property
    def _bandwidth(self) -> float:
        return self.device.bandwidth * self.memory_efficiency * self.faster.bandwidth

    @cached_property
    def _host_link(self) -> float:
        return self.device.host_link * self.link_efficiency

    @cached_property
    def _dense(self) -> tuple[float, float, float]:
        """Of the dense layers on one device: operations a token, bytes of weights, bytes of activations a token.

        Activations: each layer's linears and norms read and write the residual width eight times, each split tensor is written and read.
        A latent's expansion is multiplied in attention, and its weights are read here.
        """
        model, degree, size = self.model, self.tensor_parallel, DTYPES[self.dtype]
        multiplied = model.layer_parameters - model.expand_parameters * model.attention_layers
        split = 2 * (self.attention_width + self.mlp_tensors * model.mlp_width)
        traffic = model.layers * (8 * model.hidden + split / degree) * size
        return 2 * multiplied / degree, self.layer_bytes / degree, traffic

    @cached_property
    def _experts(self) -> tuple[float, float]:
        """Of one routed expert, over all layers, on one device: operations a token, bytes of weights."""
        parameters = self.model.expert_parameters * self.model.moe_layers / (self.tensor_parallel * self.data_parallel)
        return 2 * parameters, parameters * self.expert_parameter_bytes

    @cached_property
    def _head(self) -> tuple[float, float, float]:
        """Of the output projection on one device: operations a row, bytes of weights, bytes of logits a row."""
        parameters = self.model.head_parameters / self.tensor_parallel
        logits = LOGIT_BYTES * self.model.vocab / self.tensor_parallel
        return 2 * parameters, self.head_bytes / self.tensor_parallel, logits

    @cached_property
    def _attention_share(self) -> float:
        """The share of attention that the fullest device has: its heads, or an even part of their contexts."""
        if self.split_context:
            return 1 / self.tensor_parallel
        return -(-self.model.heads // self.tensor_parallel) / self.model.heads

    @cached_property
    def _pair_flops(self) -> float:
        """Operations of attention for one pair of positions, all layers, on one device: a product with the key, one with the value."""
        model = self.model
        return 2.0 * model.attention_layers * model.heads * self._attention_share * (model.key_dim + model.value_dim)

    def _attention(self, work: StepWork) -> Part:
        kv_bytes = self.kv_bytes_per_token_of_device * (work.context_tokens + work.computed_tokens)
        flops = self._pair_flops * work.attended_pairs
        if (latent := self.model.latent) is None:
            return Part(flops, kv_bytes)
        layers, share = self.model.attention_layers, self._attention_share
        expand = 2 * layers * self.model.expand_parameters * share
        on_latents = 2.0 * layers * self.model.heads * share * (2 * latent.kv_rank + latent.rope_dim)
        expanded = flops + expand * work.context_tokens
        absorbed = on_latents * work.attended_pairs + expand * work.computed_tokens
        return Part(_smaller(expanded, absorbed), kv_bytes)

    def _routed(self, tokens: Amount) -> Part:
        """The routed experts on one device, of a step of so many tokens over all data-parallel ranks."""
        experts = self.model.experts
        assert experts is not None, "a model with experts"
        missed = (1 - experts.per_token / experts.count) ** tokens
        flops, num_bytes = self._experts
        return Part(flops * experts.per_token * tokens, num_bytes * experts.count * (1 - missed))

    def _waiting(self, work: StepWork) -> Any:
        """Seconds of a step in which the device neither multiplies nor reads its memory."""
        tokens, moved = work.computed_tokens, work.moved_tokens
        host = self.host_overhead_s / self.faster.host
        overhead = host * ((tokens > 0) | (moved > 0))
        return overhead + self.reduce_seconds(tokens) * (tokens > 0) + self.moved_seconds(moved)


def _larger(left: Amount, right: Amount) -> Any:
    """The larger of two; on numbers Python's, which costs a tenth of numpy's."""
    is_array = isinstance(left, np.ndarray) or isinstance(right, np.ndarray)
    return np.maximum(left, right) if is_array else max(left, right)


def _smaller(left: Amount, right: Amount) -> Any:
    is_array = isinstance(left, np.ndarray) or isinstance(right, np.ndarray)
    return np.minimum(left, right) if is_array else min(left, right)
