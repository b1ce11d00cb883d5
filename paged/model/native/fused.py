"""A transformers decoder of Llama's family as one call into C: Llama, Mistral, Qwen 2, Qwen 3 and SmolLM.

Takes over the module's own packed weights, so that they are held once, and its rotary embedding's numbers. What a
token gets does not depend on the rest of its step, so batch-invariance needs no tiles.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paged.attention import LayeredPool, StepTokens
from paged.attention.native.backend import ELEMENTS, Call, attention_function, plan_of, stored_as
from paged.model.native.packed import PackedEmbedding, PackedLinear, model_library

_FAMILY = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
# Rotary embeddings whose numbers depend on nothing but the position.
_ROTARY = ("default", "linear", "llama3", "yarn")
# Positions whose cosines are computed at a time.
_POSITIONS = 1024
_pointer, _int32, _int64, _float = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float
_WEIGHTS = ("q", "k", "v", "o", "gate", "up", "down")


class _Weights(ctypes.Structure):
    _fields_ = (("packed", _pointer), ("bias", _pointer))


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _pointer) for name in ("attention_norm", "mlp_norm", "query_norm", "key_norm")),
        *((name, _Weights) for name in _WEIGHTS),
        ("window", _int64),
    )


class _Decoder(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.POINTER(_Layer)),
        *((name, _pointer) for name in ("embedding", "head", "norm", "rotary", "attend")),
        *(
            (name, _int64)
            for name in ("num_layers", "hidden", "intermediate", "heads", "kv_heads", "head_size", "vocabulary")
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
            for name in ("token_ids", "positions", "slot_mapping", "wanted", "pool", "work", "states", "logits")
        ),
        *((name, _int64) for name in ("tokens", "num_wanted", "unit_bytes")),
        ("attention", Call),
    )


class FusedDecoder:
    """One forward pass of such a module on paged memory. Not for two threads at a time."""

    def __init__(self, module: Any) -> None:
        config, body = module.config, module.model
        attention, head = body.layers[0].self_attn, module.lm_head
        self._functions = model_library()
        self._rotary_of = body.rotary_emb
        self._rotary = torch.empty(0, attention.head_dim)
        self._work = torch.empty(0, dtype=torch.uint8)
        # Everything that C reads by address.
        self._held: list[Tensor] = []
        self._layers = (_Layer * len(body.layers))(*(self._layer(each, config) for each in body.layers))
        is_packed = isinstance(body.embed_tokens, PackedEmbedding)
        self._decoder = _Decoder(
            layers=self._layers,
            embedding=self._address(body.embed_tokens.packed if is_packed else body.embed_tokens.weight),
            head=self._address(head.packed),
            norm=self._floats(body.norm.weight),
            attend=ctypes.cast(attention_function(), _pointer),
            num_layers=len(body.layers),
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_size=attention.head_dim,
            vocabulary=head.out_features,
            epsilon=config.rms_norm_eps,
            scale=attention.scaling,
            element=ELEMENTS[head.packed.dtype],
            has_packed_embedding=is_packed,
        )

    def forward(
        self, step: StepTokens, pool: LayeredPool, token_ids: NDArray[np.int32], wanted: NDArray[np.int64]
    ) -> tuple[Tensor, Tensor]:
        """On a pool whose layers lie side by side. Hidden states behind the last norm, float32 [k, hidden], and logits, float32 [k, vocabulary], of the k wanted tokens of the
        step, which rise. K and V of all its tokens are in the pool then."""
        decoder = self._decoder
        self._reach(int(step.positions.max(initial=0)))
        states, logits = torch.empty(len(wanted), decoder.hidden), torch.empty(len(wanted), decoder.vocabulary)
        ids, positions, slots, wanted = (
            np.ascontiguousarray(each, np.int64)
            for each in (token_ids, step.positions, step.slot_mapping.reshape(-1), wanted)
        )
        call = _Step(
            token_ids=ids.ctypes.data,
            positions=positions.ctypes.data,
            slot_mapping=slots.ctypes.data,
            wanted=wanted.ctypes.data,
            pool=pool.pages.on_device.data_ptr(),
            work=self._room(len(ids)),
            states=states.data_ptr(),
            logits=logits.data_ptr(),
            tokens=len(ids),
            num_wanted=len(wanted),
            unit_bytes=pool.pages.page_bytes // (2 * decoder.num_layers),
        )
        pool.written(torch.from_numpy(slots))
        plan = plan_of(step)
        plan.write(call.attention)
        call.attention.page_bytes = pool.pages.page_bytes
        call.attention.stored = stored_as(pool, pool.layer(0).keys)
        self._functions.paged_decoder_forward(ctypes.byref(decoder), ctypes.byref(call))
        return states, logits

    def _layer(self, layer: Any, config: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        linears = (
            attention.q_proj,
            attention.k_proj,
            attention.v_proj,
            attention.o_proj,
            mlp.gate_proj,
            mlp.up_proj,
            mlp.down_proj,
        )
        norms = {
            "attention_norm": layer.input_layernorm,
            "mlp_norm": layer.post_attention_layernorm,
            "query_norm": getattr(attention, "q_norm", None),
            "key_norm": getattr(attention, "k_norm", None),
        }
        return _Layer(
            **{name: None if norm is None else self._floats(norm.weight) for name, norm in norms.items()},
            **{name: self._weights(linear) for name, linear in zip(_WEIGHTS, linears, strict=True)},
            window=_window(attention, config) or 0,
        )

    def _weights(self, linear: PackedLinear) -> _Weights:
        return _Weights(self._address(linear.packed), None if linear.bias is None else self._address(linear.bias))

    def _floats(self, weight: Tensor) -> int:
        return self._address(weight.detach().float().contiguous())

    def _address(self, tensor: Tensor) -> int:
        self._held.append(tensor)
        return tensor.data_ptr()

    def _room(self, rows: int) -> int:
        needed = self._functions.paged_decoder_room(ctypes.byref(self._decoder), _int64(rows))
        if len(self._work) < needed:
            # On a line of the cache, and of use outside inference mode, too.
            with torch.inference_mode(False):
                self._work = torch.empty(needed + needed // 4 + 64, dtype=torch.uint8)
        return -(-self._work.data_ptr() // 64) * 64

    def _reach(self, position: int) -> None:
        """Cosines and sines up to this position, computed in parts of one shape."""
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
    """The module as one call; None where it is not of the family, or not all of its linear layers are packed."""
    if type(module).__name__ not in _FAMILY or module.config.hidden_act != "silu":
        return None
    body = module.model
    if body.rotary_emb.rope_type not in _ROTARY or body.layers[0].self_attn.head_dim % 2:
        return None
    cosines, _ = body.rotary_emb(torch.empty(0), torch.zeros(1, 1, dtype=torch.int64))
    if cosines.shape[-1] != body.layers[0].self_attn.head_dim:
        return None
    if any(isinstance(each, nn.Linear) for each in module.modules()):
        return None
    return FusedDecoder(module)


def _window(attention: Any, config: Any) -> int | None:
    if type(attention).__name__.startswith("Qwen"):
        window: int | None = attention.sliding_window
        return window
    return getattr(config, "sliding_window", None)
