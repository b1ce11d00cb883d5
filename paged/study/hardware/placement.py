"""A model on devices: the bytes of its weights, activations and KV, and the room that is left."""

from collections.abc import Iterator, Sequence
from functools import cache, cached_property

import msgspec

from paged.attention.kv_dtypes import CODE_BITS, SKIPPED
from paged.base.budget import as_bytes, blocks_within
from paged.base.fields import AtLeast1, converted
from paged.errors import BudgetTooSmall, InvalidConfig
from paged.model.layer_plan import LayerPlan, Layers, Part, plan_layers
from paged.model.model_shape import BF16, ModelShape
from paged.model.quantised.names import AT_LOAD, HEAD, StoredCodes, check_asked, check_stored
from paged.study.hardware.device import DTYPES, KV_DTYPES, Device, Link, kv_bytes
from paged.study.hardware.step_work import Span, Spans
from paged.study.limits import Share, check

LOGIT_BYTES = 4
MOST_DEVICES = 1 << 16


class Placement(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A model in a dtype on `tensor_parallel` devices of one kind, or in `data_parallel` ranks of so many devices.

    dtype          of weights and activations, but of routed experts that are published in fewer bits; logits have four bytes
    kv_dtype       of K and V; None: `dtype`, or bf16 if that has 8 bits. Layers in `kv_dtype_skip_layers` keep that default beside int8 or int4
    split_context  spreads the tokens of a head or latent over the devices that share it (decode context parallelism), so nothing is held twice
    link           the devices' link if its rate is known; None: as assumed for the device
    quantization   linear layers are codes with scales, as an engine makes them at load; None: as the model is published
    quantize_head  so are the output projection and an embedding that shares its weights

    Weights and states are split evenly. Heads go to devices whole: beyond `kv_heads` devices each still holds one head's K and V, and every device
    holds a latent. Data-parallel ranks have their own layers and KV; routed experts are split over all devices of all ranks. Operations go at the
    dtype's rate. Raises InvalidConfig for an unknown quantization or one that contradicts the published model, a dtype without a rate on the device,
    an unknown `kv_dtype`, devices without a link, and heads or MLPs that so many devices cannot share evenly.
    """

    model: ModelShape
    device: Device
    dtype: str = "bf16"
    kv_dtype: str | None = None
    kv_dtype_skip_layers: tuple[str, ...] = ()
    tensor_parallel: AtLeast1 = 1
    split_context: bool = False
    data_parallel: AtLeast1 = 1
    link: Link | None = None
    quantization: str | None = None
    quantize_head: bool = False

    def __post_init__(self) -> None:
        check(self)
        self.device.peak(self.dtype)
        self._check_quantization()
        degree, ranks = self.tensor_parallel, self.data_parallel
        if self.is_linked and self.link is None and self.device.interconnect is None:
            name, value = ("tensor_parallel", degree) if degree > 1 else ("data_parallel", ranks)
            raise InvalidConfig(
                f"{self.device.name} has no interconnect; {name} has to be 1, and is {value}. --link-gbps says what its link reaches"
            )
        if self.link is not None and not self.is_linked:
            raise InvalidConfig(
                f"a link was named ({self.link}), but nothing goes over it: tensor_parallel is 1, and no ranks share experts"
            )
        if self.kv_dtype is not None and self.kv_dtype not in KV_DTYPES:
            raise InvalidConfig(f'kv_dtype is "{self.kv_dtype}"; known are {", ".join(KV_DTYPES)}')
        if self.model.latent and self.kept_dtype in CODE_BITS:
            raise InvalidConfig(
                f'kv_dtype is "{self.kept_dtype}"; {self.model.name} keeps latents, which have no scale a head: it can be '
                f"{', '.join(each for each in KV_DTYPES if each not in CODE_BITS)}"
            )
        check_skipped(self.model.name, self.model.kept, self.kept_dtype, self.kv_dtype_skip_layers)
        if not _is_shared_evenly(self.model, degree, self.split_context):
            few = [each for each in self.degrees() if each <= max(self.model.heads, 2 * degree)]
            heads = f"{self.model.heads} heads" + ("" if self.model.latent else f", {self.model.kv_heads} KV heads")
            widths = " and ".join(f"{each:,}" for each in sorted(_widths(self.model)))
            raise InvalidConfig(
                f"{self.model.name} cannot be split over {degree:,} devices: its {heads} and MLPs of {widths} do not come out even; "
                f"tensor_parallel can be {', '.join(f'{each:,}' for each in few)}"
            )

    def _check_quantization(self) -> None:
        check_asked(self.quantization)
        stored = self.model.codes or (StoredCodes(title=self.model.dtype) if self.model.dtype else None)
        if stored is not None:
            bits = () if stored.bits is None else (stored.bits,)
            check_stored(self.model.name, stored.title, bits, self.quantization, with_head=self.quantize_head)
        check_asked(self.quantization, with_head=self.quantize_head)
        if self.quantization is None:
            return
        kinds = {"experts": self.model.experts, "latents": self.model.latent, "layers with a state": self.model.mixers}
        for kind, has in kinds.items():
            if has:
                raise InvalidConfig(
                    f'quantization is "{self.quantization}"; what it makes of {kind}, as {self.model.name} has, is not counted'
                )

    @property
    def is_lockstep(self) -> bool:
        """Whether data-parallel ranks share experts, and so step together."""
        return self.data_parallel > 1 and self.model.experts is not None

    @property
    def is_linked(self) -> bool:
        """Whether devices send each other anything in a step."""
        return self.tensor_parallel > 1 or self.is_lockstep

    def degrees(self) -> Iterator[int]:
        """Return the numbers of devices over which the model can be split, rising."""
        most = MOST_DEVICES if self.split_context else self.model.heads
        return (each for each in range(1, most + 1) if _is_shared_evenly(self.model, each, self.split_context))

    @property
    def kept_dtype(self) -> str:
        """The dtype of K and V."""
        return self.kv_dtype or kept_as(self.dtype)

    @property
    def expert_parameter_bytes(self) -> float:
        """Bytes of a routed expert's parameter, as published or in the dtype."""
        bits = self.model.experts.bits if self.model.experts else None
        return DTYPES[self.dtype] if bits is None else bits / 8

    @property
    def layer_bytes(self) -> int:
        """Weights of all layers but the routed experts, over all devices, with the scales of codes."""
        model, size = self.model, DTYPES[self.dtype]
        if self.codes is None:
            return model.layer_parameters * size
        queries, kept = model.heads * model.head_dim * (1 + model.gated_attention), 2 * model.kv_heads * model.head_dim
        wide = 2 if model.gated_mlp else 1
        numbers = model.hidden * (queries + kept + model.heads * model.head_dim + (wide + 1) * model.intermediate)
        results = queries + kept + wide * model.intermediate + 2 * model.hidden
        inputs = (3 + wide) * model.hidden + model.heads * model.head_dim + model.intermediate
        of_layer = self.codes.num_bytes(numbers, results, inputs)
        return model.layers * of_layer + (model.layer_parameters - model.layers * numbers) * size

    @cached_property
    def codes(self) -> StoredCodes | None:
        """The format of linear layers in codes, as published or as an engine makes them at load; None: they are floats."""
        published = self.model.codes
        if published is not None and published.bits is not None:
            return published
        return AT_LOAD.get(self.quantization or "")

    @property
    def head_bytes(self) -> int:
        """The output projection, over all devices."""
        numbers = self.model.head_parameters
        if self.quantize_head:
            return AT_LOAD[HEAD].num_bytes(numbers, self.model.vocab, self.model.hidden)
        return numbers * DTYPES[self.dtype]

    @property
    def weight_bytes(self) -> int:
        """All weights, over all devices."""
        model, routed = self.model, self.model.routed_parameters
        rest = (model.parameters - routed - model.layer_parameters - model.head_parameters) * DTYPES[self.dtype]
        return rest + self.head_bytes + self.layer_bytes + int(routed * self.expert_parameter_bytes)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the figures should know of the dtypes, a sentence each."""
        model, said = self.model, []
        if model.experts and model.experts.bits is not None:
            said.append(
                f"routed experts have {model.experts.bits:g} bits a parameter, as published, all else {self.dtype}"
            )
        if model.dtype is not None and model.dtype != self.dtype:
            said.append(f"{model.name} is published in {model.dtype}; its weights are counted in {self.dtype}")
        if self.codes is not None:
            head = f", the output projection {HEAD}" if self.quantize_head else ""
            said.append(
                f"linear layers are codes in {self.codes.title} with scales{head}, all else {self.dtype}, at whose rate operations are counted"
            )
        if self.quantize_head and model.tied_embeddings:
            said.append("The embedding shares the head's codes. An embedding that scales its weights stays in floats.")
        if self.kept_dtype != self.dtype or self.kept_dtype in ("fp8", *CODE_BITS):
            said.append(f"K and V are kept in {self.kept_dtype}" + ("" if self.kv_dtype else " (--kv-dtype)"))
        if self.kv_dtype_skip_layers:
            said.append(
                f"K and V of {' and '.join(self.kv_dtype_skip_layers)} layers are kept in {kept_as(self.dtype)}"
            )
        if not self.split_context and not model.latent and self.tensor_parallel > model.kv_heads:
            times = self.tensor_parallel // model.kv_heads
            said.append(
                f"each of the {model.kv_heads} KV heads is kept {times} times: there are {self.tensor_parallel} devices"
            )
        return tuple(said)

    @property
    def weight_bytes_of_device(self) -> int:
        """Weights on one device: its part of its rank's weights, and of the routed experts that all ranks share."""
        routed = int(self.model.routed_parameters * self.expert_parameter_bytes)
        rest = (self.weight_bytes - routed) * self.data_parallel
        return -(-(rest + routed) // (self.tensor_parallel * self.data_parallel))

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of a token's K and V over all layers, each kept once."""
        if not self.kv_dtype_skip_layers:
            return self.kv_bytes_of(self.model.kv_elements)
        layers = [each for each in self.model.kept if each.kind != "state"]
        return sum(self.kv_bytes_of(each.count * sum(each.entry) // (BF16 * each.stride), each.kind) for each in layers)

    def kv_bytes_of(self, elements: int, kind: str = "full") -> int:
        """Return the bytes of so many elements of K and V in layers of this kind, with scales."""
        is_skipped = kind in (SKIPPED[name] for name in self.kv_dtype_skip_layers)
        return kv_bytes(kept_as(self.dtype) if is_skipped else self.kept_dtype, elements, self.model.head_dim)

    @cached_property
    def kv_bytes_per_token_of_device(self) -> int:
        """Bytes of a token's K and V on the fullest device, over all layers."""
        if self.kept_of_device:
            return sum(each.count * sum(each.entry) // each.stride for each in self.kept_of_device)
        if self.split_context:
            return -(-self.kv_bytes_per_token // self.tensor_parallel)
        if self.model.latent:
            return self.kv_bytes_per_token
        heads = -(-self.model.kv_heads // self.tensor_parallel)
        return self.kv_bytes_per_token // self.model.kv_heads * heads

    @cached_property
    def kept_of_device(self) -> tuple[Layers, ...]:
        """What layers of several kinds keep on the fullest device; empty if all layers keep K and V of all tokens."""
        model, degree = self.model, self.tensor_parallel
        times, of = (1, degree) if self.split_context else (-(-model.kv_heads // degree), model.kv_heads)
        if model.latent and not self.split_context:
            times = of = 1
        return tuple(
            msgspec.structs.replace(
                each,
                entry=tuple(-(-self.kv_bytes_of(piece // BF16, each.kind) * times // of) for piece in each.entry),
                parts=tuple(_split(part, degree) for part in each.parts),
            )
            for each in model.kept
        )

    @cached_property
    def state_bytes_of_device(self) -> int:
        """All states of a sequence on one device."""
        return sum(each.count * each.state_bytes for each in self.kept_of_device)

    @cached_property
    def spans(self) -> Spans:
        """How far the layers attend; empty if all attend to all of the context."""
        layers = [each for each in self.kept_of_device if each.kind != "state"]
        if all(each.kind == "full" for each in layers):
            return ()
        weights = [each.count * sum(each.entry) / each.stride for each in layers]
        count = sum(each.count for each in layers)
        return tuple(
            Span(each.kind, each.reach, weight / sum(weights), each.count / count)
            for each, weight in zip(layers, weights)
        )

    def plan(self, block_size: int | None) -> LayerPlan | None:
        """Return groups and pages of one device, with blocks of so many tokens or as `plan_layers` chooses; None if a page is a block of all layers."""
        return _plan(self.kept_of_device, block_size) if self.kept_of_device else None

    def kept_by(self, length: int) -> int:
        """Return the bytes that the layers keep of a sequence of so many tokens, each counted once over all devices."""
        if not self.model.kept:
            return self.kv_bytes_per_token * length
        return sum(
            each.kept_bytes(length)
            if each.kind == "state"
            else self.kv_bytes_of(each.kept_bytes(length) // BF16, each.kind)
            for each in self.model.kept
        )

    def held_bytes(self, length: int, block_size: int) -> int:
        """Return the bytes of one device that a sequence of so many tokens holds, in whole blocks."""
        plan = self.plan(block_size)
        return plan.held_bytes(length) if plan else -(-length // block_size) * self.page_bytes(block_size)

    def page_bytes(self, block_size: int) -> int:
        """Return the bytes of a page of one device, or of a block if all layers are alike."""
        plan = self.plan(block_size)
        return plan.page_bytes if plan else block_size * self.kv_bytes_per_token_of_device

    def activation_bytes(self, tokens: int, sampled_rows: int) -> int:
        """Return the bytes of one device beside weights and KV for a step of so many tokens: one layer's tensors, and logits with a copy to sample.

        The tensors that are split are attention's or the MLP's, which do not live at once.
        """
        model, size = self.model, DTYPES[self.dtype]
        split = max(self.attention_width, self.mlp_tensors * model.mlp_width)
        layer = tokens * (2 * model.hidden + -(-split // self.tensor_parallel)) * size
        return layer + 2 * LOGIT_BYTES * sampled_rows * model.vocab

    def room_for_kv(
        self, *, memory_share: float = 0.9, max_tokens_per_step: int = 2048, max_sequences: int = 256
    ) -> int:
        """Return the bytes that are left for KV of `memory_share` of one device's memory, after weights and activations; below 0: so many are missing.

        The rest of the memory is for the driver, the allocator and a margin. Raises InvalidConfig for a share outside (0, 1].
        """
        converted("memory_share", memory_share, Share)
        weights = self.weight_bytes_of_device
        activations = self.activation_bytes(max_tokens_per_step, max_sequences)
        return int(self.device.memory_bytes * memory_share) - weights - activations

    def num_blocks(
        self, block_size: int, memory_share: float = 0.9, *, max_tokens_per_step: int = 2048, max_sequences: int = 256
    ) -> int:
        """Return the blocks of KV that fit beside the weights, or pages of layers of several kinds; every device holds its part of each. Raises
        BudgetTooSmall if not even one block fits with its state."""
        limits = {"max_tokens_per_step": max_tokens_per_step, "max_sequences": max_sequences}
        left = self.room_for_kv(memory_share=memory_share, **limits)
        if left < 0:
            given = int(self.device.memory_bytes * memory_share)
            raise BudgetTooSmall(
                f"{self.model.name} in {self.dtype} needs {as_bytes(given - left)} a device for weights and activations on "
                f"{self.tensor_parallel} × {self.device.name}; {memory_share:.0%} of the memory of one is {as_bytes(given)}.",
                wanted=given - left,
                given=given,
            )
        page_bytes = self.page_bytes(block_size)
        blocks_within(left, self.held_bytes(1, block_size), block_size)
        return left // page_bytes

    @property
    def attention_width(self) -> int:
        """Elements of a token's queries, keys, values and attention results in one layer, over all devices."""
        model = self.model
        kept = model.kv_elements // model.attention_layers
        return model.heads * (model.key_dim + model.value_dim) + kept

    @property
    def mlp_tensors(self) -> int:
        """Tensors of the MLP's width between its matrices: gate, up and their product, or one."""
        return 3 if self.model.gated_mlp else 1


@cache
def _plan(kept: tuple[Layers, ...], block_size: int | None) -> LayerPlan:
    return plan_layers(kept, block_size=block_size)


def _split(part: Part, degree: int) -> Part:
    """Return one device's share of a part of a state: whole units if they divide evenly."""
    if part.units % degree == 0:
        return Part(units=part.units // degree, unit_bytes=part.unit_bytes)
    return Part(units=part.units, unit_bytes=-(-part.unit_bytes // degree))


def usual_dtype(model: ModelShape, device: Device) -> str:
    """Return the default dtype: the model's own if the device has a rate for it, else the device's usual one."""
    return model.dtype if model.dtype in device.peak_flops else device.usual_dtype


def check_skipped(name: str, kept: Sequence[Layers], kv_dtype: str, kv_dtype_skip_layers: Sequence[str]) -> None:
    """Raise InvalidConfig if `kv_dtype_skip_layers` names layers that the model does not have or leaves no layer in codes, or if K and V are in no
    codes."""
    kinds = {each.kind for each in kept} - {"state"}
    for each in kv_dtype_skip_layers:
        if SKIPPED.get(each) not in kinds:
            known = ", ".join(known for known, kind in SKIPPED.items() if kind in kinds) or "none"
            raise InvalidConfig(f'kv_dtype_skip_layers has "{each}"; of what can be named so {name} has {known}')
    if kv_dtype_skip_layers and kv_dtype not in CODE_BITS:
        raise InvalidConfig(f'kv_dtype_skip_layers goes with a kv_dtype of "int8" or "int4"; K and V are in {kv_dtype}')
    if kv_dtype_skip_layers and not kinds - {SKIPPED[each] for each in kv_dtype_skip_layers}:
        raise InvalidConfig(
            f"kv_dtype_skip_layers={','.join(kv_dtype_skip_layers)} leaves no layer of {name} whose K and V could be in {kv_dtype}"
        )


def kept_as(dtype: str) -> str:
    """Return the default dtype of K and V beside weights in `dtype`."""
    return "bf16" if DTYPES[dtype] == 1 else dtype


def _is_shared_evenly(model: ModelShape, degree: int, split_context: bool) -> bool:
    """Whether so many devices share heads and MLPs evenly: query heads divide, and KV heads divide or are repeated equally often on each device.

    With `split_context` there may be more devices than heads; they share a head's context then.
    """
    if any(width % degree for width in _widths(model)):
        return False
    heads_divide = not model.heads % degree or (split_context and not degree % model.heads)
    return heads_divide and bool(model.latent or not model.kv_heads % degree or not degree % model.kv_heads)


def _widths(model: ModelShape) -> set[int]:
    """Return the widths of the model's MLPs, plain ones and experts."""
    plain = {model.intermediate} if model.moe_layers < model.layers else set()
    return plain | ({model.experts.intermediate} if model.experts else set())
