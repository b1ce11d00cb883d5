"""A transformers decoder of Llama's family as one call into C: Llama, Mistral, Qwen 2, Qwen 3, SmolLM, and LFM2 with its short convolutions.

It uses the module's packed weights, so they are held once, and its rotary embedding. A token's results do not depend on the rest of its step, so
batch-invariant mode needs no tiles.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paged.attention import LayeredPool, StepTokens
from paged.attention.native.backend import ELEMENTS, Call, attention_function, plan_of, stored_as
from paged.model.native.coded import PackedCodes, QuantisedLinear
from paged.model.native.large_pages import empty
from paged.model.native.packed import PackedLinear, model_library
from paged.model.native.recurrences import MOST_TAPS, Rows, rows_of
from paged.model.parallel.layers import SplitHead, inner_of
from paged.model.parallel.sums import Sums


class _Names(NamedTuple):
    """A family's names of the parts of a layer: its norms, its attention's output, its gated products."""

    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    head_norms: tuple[str, str] = ("q_norm", "k_norm")
    output: str = "o_proj"
    mlp: str = "mlp"
    gated: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    last_norm: str = "norm"
    epsilon: str = "rms_norm_eps"


_LFM2 = _Names(
    ("operator_norm", "ffn_norm"),
    ("q_layernorm", "k_layernorm"),
    "out_proj",
    "feed_forward",
    ("w1", "w3", "w2"),
    "embedding_norm",
    "norm_eps",
)
_FAMILIES = {
    **dict.fromkeys(("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"), _Names()),
    "Lfm2ForCausalLM": _LFM2,
}
# Rotary embeddings that depend on the position alone.
_ROTARY = ("default", "linear", "llama3", "yarn")
# Cosines and sines are computed for this many positions at a time.
_POSITIONS = 1024
_pointer, _int32, _int64, _float = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float
_SUM = ctypes.CFUNCTYPE(_int32, _pointer, _pointer, _int64)
_WEIGHTS = ("q", "k", "v", "o", "gate", "up", "down")


class _Weights(ctypes.Structure):
    _fields_ = (("packed", _pointer), ("bias", _pointer), ("codes", _pointer))


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _pointer) for name in ("attention_norm", "mlp_norm", "query_norm", "key_norm")),
        *((name, _Weights) for name in _WEIGHTS),
        ("mix", _Weights),
        ("taps", _pointer),
        ("taps_bias", _pointer),
        ("num_taps", _int64),
        ("window", _int64),
    )


class _Place(ctypes.Structure):
    _fields_ = (
        *((name, _pointer) for name in ("keys", "values", "key_scales", "value_scales", "parts", "offsets")),
        *((name, _int64) for name in ("key_part", "value_part", "units")),
    )


class _Decoder(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.POINTER(_Layer)),
        ("embedding", _pointer),
        ("head", _Weights),
        *((name, _pointer) for name in ("norm", "rotary", "attend", "sum")),
        *(
            (name, _int64)
            for name in (
                *("num_layers", "hidden", "intermediate", "heads", "kv_heads", "head_size", "vocabulary"),
                "first_token",
            )
        ),
        ("epsilon", _float),
        ("scale", _float),
        ("element", _int32),
        ("has_packed_embedding", _int32),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        *(
            (name, _pointer)
            for name in ("token_ids", "positions", "slot_mapping", "wanted", "places", "work", "states", "logits")
        ),
        *((name, _int64) for name in ("tokens", "num_wanted", "parts")),
        ("rows", Rows),
        ("attention", Call),
    )


class _SumOverRanks:
    """The function that C calls to add numbers in its memory over ranks."""

    def __init__(self, sums: Sums) -> None:
        self._sums = sums
        self._failure: BaseException | None = None
        self._called = _SUM(self._add)
        self.address = ctypes.cast(self._called, _pointer)

    def raise_failure(self) -> None:
        """Raise what a sum raised in the last pass, which C ended early."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _add(self, part: int, to: int, count: int) -> int:
        try:
            kind = _float * count
            self._sums.add_to(_numbers(kind, to), _numbers(kind, part))
        except BaseException as error:
            # An exception cannot pass through C.
            self._failure = error
            return 1
        return 0


def _numbers(kind: Any, address: int) -> Tensor:
    found: Tensor = torch.frombuffer(kind.from_address(address), dtype=torch.float32)
    return found


class FusedDecoder:
    """The forward pass of such a module, or of a rank's part of it, on paged memory. Not for two threads at a time."""

    def __init__(self, module: Any) -> None:
        config, body, head = module.config, module.model, inner_of(module.lm_head)
        self._names = names = _FAMILIES[type(module).__name__]
        attention = _attention_of(body)
        self._functions = model_library()
        self._rotary_of = body.rotary_emb
        self._rotary = torch.empty(0, attention.head_dim)
        self._work = torch.empty(0, dtype=torch.uint8)
        # Tensors and codes that C reads by address.
        self._held: list[Tensor] = []
        self._coded: list[PackedCodes] = []
        # The last pool, and its `_placed_in`.
        self._placed: tuple[LayeredPool | None, int, int, Any] = (None, 0, 0, None)
        self._layers = (_Layer * len(body.layers))(*(self._layer(each, config) for each in body.layers))
        embedding, last_norm = inner_of(body.embed_tokens), getattr(body, names.last_norm).weight
        # Of a rank's part.
        self._split = module.lm_head if isinstance(module.lm_head, SplitHead) else None
        self._sum = None if self._split is None else _SumOverRanks(self._split.sums)
        is_packed = not isinstance(embedding, nn.Embedding)
        head_weights = self._weights(head)
        self._decoder = _Decoder(
            layers=self._layers,
            embedding=head_weights.packed if is_packed else self._address(embedding.weight),
            head=head_weights,
            norm=self._floats(last_norm),
            attend=ctypes.cast(attention_function(), _pointer),
            sum=None if self._sum is None else self._sum.address,
            num_layers=len(body.layers),
            hidden=config.hidden_size,
            intermediate=getattr(getattr(body.layers[0], names.mlp), names.gated[0]).out_features,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_size=attention.head_dim,
            vocabulary=head.out_features,
            first_token=getattr(body.embed_tokens, "first", 0),
            epsilon=getattr(config, names.epsilon),
            scale=attention.scaling,
            element=ELEMENTS[last_norm.dtype],
            has_packed_embedding=is_packed,
        )

    def forward(
        self, step: StepTokens, pool: LayeredPool, token_ids: NDArray[np.int32], wanted: NDArray[np.int64]
    ) -> tuple[Tensor, Tensor]:
        """Run the step. Return, for the k tokens `wanted`, in rising order, hidden states after the last norm, float32 [k, hidden], and logits, float32
        [k, vocabulary]. What layers keep of its tokens is in the pool, which has to `fit`. On ranks from 1 on, logits are of the rank's part."""
        decoder, (group, stored, places) = self._decoder, self._placed_in(pool)
        step = step.of_group(group)
        self._reach(int(step.positions.max(initial=0)))
        states, logits = torch.empty(len(wanted), decoder.hidden), torch.empty(len(wanted), decoder.vocabulary)
        ids, positions, slots, wanted = (
            np.ascontiguousarray(each, np.int64) for each in (token_ids, step.positions, step.slot_mapping, wanted)
        )
        call = _Step(
            token_ids=ids.ctypes.data,
            positions=positions.ctypes.data,
            slot_mapping=slots.ctypes.data,
            wanted=wanted.ctypes.data,
            places=ctypes.cast(places, _pointer),
            work=self._room(len(ids)),
            states=states.data_ptr(),
            logits=logits.data_ptr(),
            tokens=len(ids),
            num_wanted=len(wanted),
            parts=slots.size // len(ids),
        )
        pool.written(torch.from_numpy(slots))
        plan = plan_of(step)
        plan.write(call.attention)
        call.attention.page_bytes = pool.pages.page_bytes
        call.attention.stored = stored
        if step.states is not None:
            rows = rows_of(pool.pages, *step.states, plan.query_start)
            call.rows = rows
        self._functions.paged_decoder_forward(ctypes.byref(decoder), ctypes.byref(call))
        if self._split is None or self._sum is None:
            return states, logits
        self._sum.raise_failure()
        return states, self._split.sums.joined_at_first(logits, self._split.sizes)

    def fits(self, pool: LayeredPool) -> bool:
        """Whether C can read the layers' memory in a pool: attention layers in one group, stored alike, each with K and V of its own, in the weights' dtype."""
        attention = [number for number, each in enumerate(self._layers) if not each.mix.packed]
        kinds = {(pool.layer(number).group, stored_as(pool, pool.layer(number).keys)) for number in attention}
        has_own = not any(pool.layer(number).is_shared for number in attention)
        of_dtype = [each for each in pool.states if len(each) == 1 and each[0].dtype == pool.dtype]
        is_there = len(of_dtype) == len(self._layers) - len(attention)
        return len(kinds) == 1 and has_own and is_there and ELEMENTS.get(pool.dtype) == self._decoder.element

    def _placed_in(self, pool: LayeredPool) -> tuple[int, int, Any]:
        """Return the group of its attention layers, how K and V are stored, and the place of each layer's memory."""
        if self._placed[0] is not pool:
            places, group, stored, states = (_Place * len(self._layers))(), 0, 0, iter(pool.states)
            for number, (layer, place) in enumerate(zip(self._layers, places, strict=True)):
                if layer.mix.packed:
                    (state,) = next(states)
                    place.parts, place.offsets = state.parts.ctypes.data, state.offsets.ctypes.data
                    place.units = len(state.parts)
                    continue
                own = pool.layer(number)
                *key_scales, keys = own.keys.stored
                *value_scales, values = own.values.stored
                place.keys, place.values = keys.blocks.data_ptr(), values.blocks.data_ptr()
                if key_scales:
                    place.key_scales = key_scales[0].blocks.data_ptr()
                    place.value_scales = value_scales[0].blocks.data_ptr()
                place.key_part, place.value_part, group = own.keys.part, own.values.part, own.group
                stored = stored_as(pool, own.keys)
            self._placed = pool, group, stored, places
        return self._placed[1:]

    def _layer(self, layer: Any, config: Any) -> _Layer:
        names = self._names
        first, second = (self._floats(getattr(layer, name).weight) for name in names.norms)
        gated = (getattr(getattr(layer, names.mlp), name) for name in names.gated)
        found = _Layer(attention_norm=first, mlp_norm=second)
        found.gate, found.up, found.down = map(self._weights, gated)
        attention = getattr(layer, "self_attn", None)
        if attention is None:
            convolution = layer.conv
            found.mix, found.o = map(self._weights, (convolution.in_proj, convolution.out_proj))
            found.taps = self._floats(convolution.conv.weight.squeeze(1).t())
            found.num_taps = convolution.conv.weight.shape[-1]
            if convolution.conv.bias is not None:
                found.taps_bias = self._floats(convolution.conv.bias)
            return found
        found.q, found.k, found.v, found.o = (
            self._weights(getattr(attention, name)) for name in ("q_proj", "k_proj", "v_proj", names.output)
        )
        if hasattr(attention, names.head_norms[0]):
            found.query_norm, found.key_norm = (
                self._floats(getattr(attention, each).weight) for each in names.head_norms
            )
        found.window = _window(attention, config) or 0
        return found

    def _weights(self, layer: Any) -> _Weights:
        linear: PackedLinear | QuantisedLinear = inner_of(layer)
        bias = None if linear.bias is None else self._address(linear.bias)
        if isinstance(linear, PackedLinear):
            return _Weights(self._address(linear.packed), bias)
        packed = linear.packed
        self._coded.append(packed)
        return _Weights(self._address(packed.codes), bias, ctypes.addressof(packed.c))

    def _floats(self, weight: Tensor) -> int:
        return self._address(weight.detach().float().contiguous())

    def _address(self, tensor: Tensor) -> int:
        self._held.append(tensor)
        return tensor.data_ptr()

    def _room(self, rows: int) -> int:
        needed = self._functions.paged_decoder_room(ctypes.byref(self._decoder), _int64(rows))
        if len(self._work) < needed:
            # Not an inference tensor, so that it can be used outside inference mode, too.
            with torch.inference_mode(False):
                self._work = empty(needed + needed // 4)
        return self._work.data_ptr()

    def _reach(self, position: int) -> None:
        """Compute cosines and sines up to this position, in parts of one shape, so that bits are the same."""
        known, size = self._rotary.shape
        if position < known:
            return
        parts = [self._rotary]
        for first in range(known, position + 1, _POSITIONS):
            cosines, sines = self._rotary_of(torch.empty(0), torch.arange(first, first + _POSITIONS)[None])
            parts.append(torch.cat([cosines[0, :, : size // 2], sines[0, :, : size // 2]], 1))
        self._rotary = torch.cat(parts).contiguous()
        self._decoder.rotary = self._rotary.data_ptr()


def fused_decoder(module: Any) -> FusedDecoder | None:
    """Return the module as one call; None if it is not of the family, or has linear layers that are neither packed nor codes."""
    if type(module).__name__ not in _FAMILIES or getattr(module.config, "hidden_act", "silu") != "silu":
        return None
    body = module.model
    attention = _attention_of(body)
    if attention is None or body.rotary_emb.rope_type not in _ROTARY or attention.head_dim % 2:
        return None
    if any(layer.conv.conv.weight.shape[-1] > MOST_TAPS for layer in body.layers if hasattr(layer, "conv")):
        return None
    cosines, _ = body.rotary_emb(torch.empty(0), torch.zeros(1, 1, dtype=torch.int64))
    if cosines.shape[-1] != attention.head_dim:
        return None
    dtype = getattr(body, _FAMILIES[type(module).__name__].last_norm).weight.dtype
    if dtype not in ELEMENTS or any(isinstance(each, nn.Linear) for each in module.modules()):
        return None
    return FusedDecoder(module)


def _attention_of(body: Any) -> Any:
    """Return the first attention layer, which stands for all; None if there is none."""
    return next((layer.self_attn for layer in body.layers if hasattr(layer, "self_attn")), None)


def _window(attention: Any, config: Any) -> int | None:
    if type(attention).__name__.startswith("Qwen"):
        window: int | None = attention.sliding_window
        return window
    return getattr(config, "sliding_window", None)
