"""A model on devices: what its weights, activations and KV take, and what is left.

Knows a model's shape, a device's memory, a dtype and over how many devices tensors are split. Does not know time, nor who uses a block.
"""

from __future__ import annotations

from functools import cached_property

import msgspec

from paged import BudgetTooSmall, InvalidConfig
from paged.hardware.budget import blocks_within
from paged.hardware.device import DTYPES, Device
from paged.hardware.link import Link
from paged.hardware.model_shape import ModelShape

LOGIT_BYTES = 4


class Placement(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A model in a dtype on `tensor_parallel` devices of one kind, or in `data_parallel` ranks of so many.

    Weights, activations and KV have one dtype, logits four bytes. Weights are split evenly. Heads go to devices whole, so beyond `kv_heads`
    devices each still holds one head's K and V, and a latent is held by every device; `split_context` spreads the tokens of a head or latent
    over the devices that share it (decode context parallelism), so that nothing is held twice. Data-parallel ranks have layers and KV of their
    own; routed experts are split over all devices of all ranks. `link` is the devices' link where somebody says what it reaches. Raises
    InvalidConfig for a dtype without a rate on the device, and for several devices that cannot work together.
    """

    model: ModelShape
    device: Device
    dtype: str = "bf16"
    tensor_parallel: int = 1
    split_context: bool = False
    data_parallel: int = 1
    link: Link | None = None

    def __post_init__(self) -> None:
        self.device.peak(self.dtype)
        degree = self.tensor_parallel
        if isinstance(degree, bool) or not isinstance(degree, int) or degree < 1:
            raise InvalidConfig(f"tensor_parallel is {degree!r}; it has to be a whole number of at least 1")
        ranks = self.data_parallel
        if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
            raise InvalidConfig(f"data_parallel is {ranks!r}; it has to be a whole number of at least 1")
        if self.is_linked and self.link is None and self.device.interconnect is None:
            name, value = ("tensor_parallel", degree) if degree > 1 else ("data_parallel", ranks)
            raise InvalidConfig(
                f"{self.device.name} has no interconnect; {name} has to be 1, and is {value}. --link-gbps says what its link reaches"
            )

        if self.link is not None and not self.is_linked:
            raise InvalidConfig(
                f"a link was named ({self.link}), but nothing goes over it: tensor_parallel is 1, and no ranks share experts"
            )

    @property
    def is_lockstep(self) -> bool:
        """Whether data-parallel ranks share their experts, and so step together."""
        return self.data_parallel > 1 and self.model.experts is not None

    @property
    def is_linked(self) -> bool:
        """Whether devices send each other anything in a step."""
        return self.tensor_parallel > 1 or self.is_lockstep

    @property
    def weight_bytes(self) -> int:
        """All weights, over all devices."""
        return self.model.parameters * DTYPES[self.dtype]

    @property
    def weight_bytes_of_device(self) -> int:
        """Weights on one device."""
        experts = (
            self.model.expert_parameters * self.model.moe_layers * self.model.experts.count if self.model.experts else 0
        )
        rest = (self.model.parameters - experts) * DTYPES[self.dtype]
        return -(
            -(rest * self.data_parallel + experts * DTYPES[self.dtype]) // (self.tensor_parallel * self.data_parallel)
        )

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of a token over all layers, each kept once."""
        return self.model.kv_elements * DTYPES[self.dtype]

    @cached_property
    def kv_bytes_per_token_of_device(self) -> int:
        """K and V of a token on one device (the fullest): heads are held whole and a latent by every device, or split by tokens."""
        if self.split_context:
            return -(-self.kv_bytes_per_token // self.tensor_parallel)
        if self.model.latent:
            return self.kv_bytes_per_token
        heads = -(-self.model.kv_heads // self.tensor_parallel)
        return self.kv_bytes_per_token // self.model.kv_heads * heads

    def activation_bytes(self, tokens: int, sampled_rows: int) -> int:
        """What one device needs beside weights and KV for a step of so many tokens: one layer's tensors, and logits with a copy to sample.

        Split tensors are the queries, keys and values with what attention returns, or the MLP's; they do not live at once.
        """
        model, size = self.model, DTYPES[self.dtype]
        split = max(self.attention_width, self.mlp_tensors * model.mlp_width)
        layer = tokens * (2 * model.hidden + -(-split // self.tensor_parallel)) * size
        return layer + 2 * LOGIT_BYTES * sampled_rows * model.vocab

    def room_for_kv(
        self, *, memory_share: float = 0.9, max_tokens_per_step: int = 2048, max_sequences: int = 256
    ) -> int:
        """Bytes that one device has left for KV, of `memory_share` of its memory, after weights and activations; below 0: as many are missing.

        What is not in the share is the driver's, the allocator's, and a margin. Raises InvalidConfig for a share outside (0, 1].
        """
        if not 0 < memory_share <= 1:
            raise InvalidConfig(f"memory_share is {memory_share}; it has to be above 0 and at most 1")
        weights = self.weight_bytes_of_device
        activations = self.activation_bytes(max_tokens_per_step, max_sequences)
        return int(self.device.memory_bytes * memory_share) - weights - activations

    def num_blocks(
        self,
        block_size: int,
        memory_share: float = 0.9,
        *,
        max_tokens_per_step: int = 2048,
        max_sequences: int = 256,
    ) -> int:
        """Blocks of KV that fit beside the weights; every device holds its part of each. Raises BudgetTooSmall where not one does."""
        limits = {"max_tokens_per_step": max_tokens_per_step, "max_sequences": max_sequences}
        left = self.room_for_kv(memory_share=memory_share, **limits)
        if left < 0:
            given = int(self.device.memory_bytes * memory_share)
            raise BudgetTooSmall(
                f"{self.model.name} in {self.dtype} needs {given - left:,} bytes a device for weights and activations on "
                f"{self.tensor_parallel} × {self.device.name}; {memory_share:.0%} of the memory of one is {given:,}.",
                wanted=given - left,
                given=given,
            )
        return blocks_within(left, block_size * self.kv_bytes_per_token_of_device, block_size)

    @property
    def attention_width(self) -> int:
        """Elements of a token's queries, keys, values and results of attention in one layer, over all devices."""
        model = self.model
        kept = model.kv_elements // model.layers
        return model.heads * (model.key_dim + model.value_dim) + kept

    @property
    def mlp_tensors(self) -> int:
        """Tensors of the MLP's width that a token leaves between matrices: gate, up and their product, or one."""
        return 3 if self.model.gated_mlp else 1
