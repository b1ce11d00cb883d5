"""A cost model from published figures: the seconds of a model's step on devices.

Nothing here was measured. The share of a published rate that a kernel reaches is an assumption, and each assumption is a named parameter.
"""

import sys
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np
from msgspec import Meta

from paged.model.tiling import Tiling
from paged.scheduler import Costs
from paged.study.hardware.device import DTYPES, Link, usual_link
from paged.study.hardware.placement import LOGIT_BYTES, Placement
from paged.study.hardware.step_work import Amount, StepWork
from paged.study.limits import NotNegative, Share, check

_REDUCTIONS_A_LAYER = 2
_STATE_FLOPS = 2
"""Operations for each byte of a state and token: decay, a product with the key, an update, a product with the query, on elements of two or four bytes."""


class Faster(msgspec.Struct, frozen=True):
    """Factors by which a hypothetical device is faster, 1 or more each: with them a planner finds the rate that binds. Raises InvalidConfig.

    arithmetic  on operations/s
    bandwidth   on bytes/s between the device's memory and its arithmetic
    host        divides the host's share of a step; infinite: the host takes no time
    """

    arithmetic: Annotated[float, Meta(ge=1, le=sys.float_info.max)] = 1.0
    bandwidth: Annotated[float, Meta(ge=1, le=sys.float_info.max)] = 1.0
    host: Annotated[float, Meta(ge=1)] = 1.0

    def __post_init__(self) -> None:
        check(self)


class Part(msgspec.Struct, frozen=True, eq=False):
    """Operations of one kind of layer in a step on one device, and bytes between memory and arithmetic."""

    flops: Amount
    bytes: Amount


class Roofline(Placement, frozen=True, kw_only=True):
    """Seconds of a step from a model's shape and a device's published figures.

        seconds = Σ over parts max(operations ÷ reached operations/s, bytes ÷ reached bytes/s)
                  + all-reduces + KV over the host link + host overhead

    The parts are the dense layers, the routed experts, states, attention, and the output projection. The larger term is taken for each part, not for
    the whole step, because kernels run one after another: while attention reads KV, the matrix units have nothing to do. Within a part, arithmetic
    and reads overlap perfectly. KV is copied before the forward pass, so the link's time is added.

    Assumptions, each a parameter:

    compute_efficiency    share of the device's peak that matrix products reach
    memory_efficiency     share of its bandwidth that reads reach
    link_efficiency       share of the host link and of NVLink
    host_overhead_s       seconds of each step in which the device waits for the host
    all_reduce_latency_s  seconds of each all-reduce over NVLink (two a layer) beside its bytes

    `faster` multiplies the device's rates and divides the host's overhead. `Placement` says what lies on which device. Over PCIe, and if a link is
    named, all-reduces take what `Link` says. For data-parallel ranks that share experts, `seconds` is of a step in which all ranks have the same
    work, and `together` of one in which each has its own. Experts are drawn evenly: n tokens touch count · (1 − (1 − per_token ÷ count)ⁿ) of them,
    and each of these is read whole. A model with latents attends in the cheaper of two ways in each step: on latents (more operations a pair), or on
    K and V expanded from every latent of the context (DeepSeek-V2, arXiv:2405.04434, section 2.1). Each state of a row in a step is read and written
    once; its operations are assumed to be two a byte and token.
    """

    compute_efficiency: Share = 0.6
    memory_efficiency: Share = 0.8
    link_efficiency: Share = 0.8
    host_overhead_s: NotNegative = 0.5e-3
    all_reduce_latency_s: NotNegative = 10e-6
    faster: Faster = Faster()

    tiling: ClassVar[Tiling | None] = None

    def seconds(self, work: StepWork) -> Any:
        """Return the seconds of a step with this work; arrays give an array. A step that computes and moves nothing takes none. More of any amount
        never takes less time."""
        seconds = self._waiting(work) + self.exchange_seconds(work.computed_tokens * self.data_parallel)
        for part in self.parts(work):
            seconds = seconds + self.part_seconds(part)
        return seconds

    def together(self, works: Sequence[StepWork]) -> float:
        """Return the seconds of a step of data-parallel ranks that share experts, each with its own work: all wait for the slowest, twice a layer."""
        own = (
            float(self._waiting(work) + sum(self.part_seconds(part) for part in (dense, *rest)))
            for work in works
            for dense, _, *rest in [self.parts(work)]
        )
        return max(own) + float(self.shared_seconds(sum(float(work.computed_tokens) for work in works)))

    def shared_seconds(self, tokens: Amount) -> Any:
        """Return the seconds of what data-parallel ranks do together in a step of so many tokens over all ranks: routed experts, and exchange."""
        return self.part_seconds(self._routed(tokens)) + self.exchange_seconds(tokens)

    def part_seconds(self, part: Part) -> Any:
        """Return the larger of the seconds of its operations and of its bytes."""
        return _larger(part.flops / self._rate, part.bytes / self._bandwidth)

    def moved_seconds(self, tokens: Amount) -> Any:
        """Return the seconds for KV of so many tokens over the link to the host."""
        return self.kv_bytes_per_token_of_device * tokens / self._host_link

    def routed(self, tokens: Amount) -> Any:
        """Return the seconds of the routed experts in a step of so many tokens; 0 if there are none."""
        return self.part_seconds(self._routed(tokens)) if self.model.experts else 0.0

    def reduce_seconds(self, tokens: Amount) -> Any:
        """Return the seconds of a step's all-reduces of so many tokens, two a layer."""
        if self.tensor_parallel == 1 or self.reached_link is None:
            return 0.0
        num_bytes = self.model.hidden * DTYPES[self.dtype] * tokens
        return _REDUCTIONS_A_LAYER * self.model.layers * self.reached_link.all_reduce(self.tensor_parallel, num_bytes)

    def exchange_seconds(self, tokens: Amount) -> Any:
        """Return the seconds in which data-parallel ranks that share experts gather all tokens and scatter the results, in each layer with experts."""
        if not self.is_lockstep or self.reached_link is None:
            return 0.0
        num_bytes = self.model.hidden * DTYPES[self.dtype] * tokens
        return (tokens > 0) * 2 * self.model.moe_layers * self.reached_link.all_gather(self.data_parallel, num_bytes)

    @cached_property
    def reached_link(self) -> Link | None:
        """The named link, else the device's usual one; None if it has none."""
        return self.link or usual_link(self.device, share=self.link_efficiency, latency_s=self.all_reduce_latency_s / 2)

    def traffic_seconds(self, tokens: Amount) -> Any:
        """Return the seconds to read and write the tensors between kernels."""
        _, _, traffic = self._dense
        return traffic * tokens / self._bandwidth

    def read_seconds(self, num_bytes: Amount) -> Any:
        """Return the seconds to read so many bytes from the device's memory."""
        return num_bytes / self._bandwidth

    def as_published(self) -> "Roofline":
        """Return the roofline without `faster`."""
        return msgspec.structs.replace(self, faster=Faster())

    def flops(self, work: StepWork) -> Any:
        """Return the operations of a step on one device."""
        return sum(part.flops for part in self.parts(work))

    def bytes_read(self, work: StepWork) -> Any:
        """Return the bytes that a step carries between memory and arithmetic on one device."""
        return sum(part.bytes for part in self.parts(work))

    def kept_bytes(self, work: StepWork) -> Any:
        """Return the part of `bytes_read` that is weights, K and V: activations and logits may stay in a cache."""
        _, _, traffic = self._dense
        _, _, logits = self._head
        return self.bytes_read(work) - traffic * work.computed_tokens - logits * work.sampled_rows

    def parts(self, work: StepWork) -> tuple[Part, ...]:
        """Return the step on one device by kind of layer: dense layers, routed experts and states if there are any, attention, output projection."""
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
        """Return the costs by which the scheduler weighs swapping against recomputing. A token is priced as in a full step: by its arithmetic, without
        the reading of weights."""
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

        Below it, reading the weights takes longer than the arithmetic of the tokens. The rates are published ones: with the default efficiencies
        the reached knee lies at 3/4 of it, and reading KV shifts it up again. A mixture of experts reads all weights and multiplies by the active
        ones alone. Tensor parallelism does not change it.
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
        """The dense layers on one device: operations a token, bytes of weights, bytes of activations a token.

        Each layer's linears and norms read and write the residual width eight times, and write and read each split tensor once. A latent's expansion
        is multiplied in attention, but its weights are read here.
        """
        model, degree, size = self.model, self.tensor_parallel, DTYPES[self.dtype]
        multiplied = model.layer_parameters - model.expand_parameters * model.attention_layers
        split = 2 * (self.attention_width + self.mlp_tensors * model.mlp_width)
        traffic = model.layers * (8 * model.hidden + split / degree) * size
        return 2 * multiplied / degree, self.layer_bytes / degree, traffic

    @cached_property
    def _experts(self) -> tuple[float, float]:
        """One routed expert of all layers on one device: operations a token, bytes of weights."""
        parameters = self.model.expert_parameters * self.model.moe_layers / (self.tensor_parallel * self.data_parallel)
        return 2 * parameters, parameters * self.expert_parameter_bytes

    @cached_property
    def _head(self) -> tuple[float, float, float]:
        """The output projection on one device: operations a row, bytes of weights, bytes of logits a row."""
        parameters = self.model.head_parameters / self.tensor_parallel
        logits = LOGIT_BYTES * self.model.vocab / self.tensor_parallel
        return 2 * parameters, self.head_bytes / self.tensor_parallel, logits

    @cached_property
    def _attention_share(self) -> float:
        """The fullest device's share of attention: its heads, or an even part of their contexts."""
        if self.split_context:
            return 1 / self.tensor_parallel
        return -(-self.model.heads // self.tensor_parallel) / self.model.heads

    @cached_property
    def _pair_flops(self) -> float:
        """Operations of attention for a pair of positions in all layers on one device: a product with the key, one with the value."""
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
        """Return the routed experts' part of a step of so many tokens over all data-parallel ranks, on one device."""
        experts = self.model.experts
        assert experts is not None, "a model with experts"
        missed = (1 - experts.per_token / experts.count) ** tokens
        flops, num_bytes = self._experts
        return Part(flops * experts.per_token * tokens, num_bytes * experts.count * (1 - missed))

    def _waiting(self, work: StepWork) -> Any:
        """Return the seconds of a step in which the device neither multiplies nor reads its memory."""
        tokens, moved = work.computed_tokens, work.moved_tokens
        host = self.host_overhead_s / self.faster.host
        overhead = host * ((tokens > 0) | (moved > 0))
        return overhead + self.reduce_seconds(tokens) * (tokens > 0) + self.moved_seconds(moved)


def _larger(left: Amount, right: Amount) -> Any:
    """Return the larger of two; for numbers by Python's max, which takes a tenth of numpy's time."""
    is_array = isinstance(left, np.ndarray) or isinstance(right, np.ndarray)
    return np.maximum(left, right) if is_array else max(left, right)


def _smaller(left: Amount, right: Amount) -> Any:
    is_array = isinstance(left, np.ndarray) or isinstance(right, np.ndarray)
    return np.minimum(left, right) if is_array else min(left, right)
