"""compressed-tensors, as llm-compressor writes it: pack-quantized and int-quantized.

    pack-quantized    weight_packed int32 [outs, depth × bits / 32], the last word padded; weight_shape int64 [2];
                      weight_zero_point int32 [outs × bits / 32, groups] where it is not symmetric, or int8 [outs, groups]
    int-quantized     weight int8 [outs, depth]; weight_zero_point int8 [outs, groups] where it is not symmetric
    both              weight_scale float [outs, groups]; weight_g_idx int32 [depth], the group of each input, if they are not in order

Numbers are signed. Packed numbers, and our codes, are higher by half the range.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paged.errors import UnsupportedModel
from paged.model.quantised.names import StoredCodes, names_of
from paged.model.quantised.stored import FLOATS, Stored, group_size_of, groups_in_words, unpacked
from paged.model.quantised.weights import QuantisedWeight

METHOD, PACKED, PLAIN = "compressed-tensors", "pack-quantized", "int-quantized"


@dataclass(frozen=True)
class _Scheme:
    """How the layers in `targets` are stored; `group_size` None: a scale for each result."""

    targets: list[str]
    bits: int
    group_size: int | None
    is_symmetric: bool
    is_packed: bool

    @property
    def title(self) -> str:
        return f"{self.bits} bits, {groups_in_words(self.group_size)}"

    def codes(self, title: str) -> StoredCodes:
        zero_bits = 0 if self.is_symmetric else self.bits
        return StoredCodes(title=title, bits=self.bits, group_size=self.group_size, zero_bits=zero_bits)


class CompressedTensors:
    """compressed-tensors with the settings of a configuration."""

    marks = ("weight_packed", "weight_scale")

    def __init__(self, settings: dict[str, Any]) -> None:
        for name in ("kv_cache_scheme", "sparsity_config", "transform_config"):
            found = settings.get(name)
            is_dense = name == "sparsity_config" and found and found["format"] == "dense"
            if found and not is_dense:
                raise UnsupportedModel(f"it has a {name}, which is not read.")
        status = settings.get("quantization_status")
        # "frozen" may be compressed as well; the names of tensors tell.
        if status not in (None, "frozen", "compressed"):
            raise UnsupportedModel(f"its weights are {status}, not compressed; such a checkpoint is not read.")
        self._schemes = [_scheme(each, settings.get("format")) for each in settings["config_groups"].values()]
        self._floats = names_of(settings.get("ignore"))
        self.bits = {each.bits for each in self._schemes}
        title = f"{METHOD}, {'; '.join(dict.fromkeys(each.title for each in self._schemes))}"
        found = {each.codes(title) for each in self._schemes}
        self.codes = found.pop() if len(found) == 1 else StoredCodes(title=title)

    def names_floats(self, name: str) -> bool:
        return any(_names(each, name) for each in self._floats) or self._find(name) is None

    def shape_of(self, layer: Stored) -> tuple[int, int]:
        scheme = self._scheme(layer)
        if "weight" in layer and "weight_packed" in layer:
            raise layer.broken("it has both weight and weight_packed")
        if scheme.is_symmetric and "weight_zero_point" in layer:
            raise layer.broken("it has a weight_zero_point, and its configuration says symmetric")
        if scheme.is_packed:
            outs, words = layer.header("weight_packed", ("I32",), 2).shape
            layer.expect("weight_shape", (2,), ("I64", "I32"))
            stored = layer.read("weight_shape").tolist()
            depth = stored[1]
            if stored[0] != outs or -(-depth * scheme.bits // 32) != words:
                raise layer.broken(f"weight_packed has the shape {[outs, words]}, which does not hold {stored}")
        else:
            outs, depth = layer.header("weight", ("I8",), 2).shape
        groups = depth // layer.group_size(depth, scheme.group_size)
        layer.expect("weight_scale", (outs, groups), FLOATS)
        if not scheme.is_symmetric:
            found = layer.header("weight_zero_point", ("I8", "I32"), 2)
            is_packed = found.dtype == "I32"
            layer.expect(
                "weight_zero_point", (-(-outs * scheme.bits // 32) if is_packed else outs, groups), (found.dtype,)
            )
        if "weight_g_idx" in layer:
            layer.expect("weight_g_idx", (depth,), ("I32", "I64"))
        return outs, depth

    def check(self, layer: Stored) -> None:
        layer.scales("weight_scale")
        layer.order("weight_g_idx", self._scheme(layer).group_size or self.shape_of(layer)[1])

    def read(self, layer: Stored) -> QuantisedWeight:
        scheme, (outs, depth) = self._scheme(layer), self.shape_of(layer)
        half = 2 ** (scheme.bits - 1)
        if scheme.is_packed:
            codes = unpacked(layer.read("weight_packed"), scheme.bits)[:, :depth]
        else:
            codes = _raised(layer.read("weight"), half)
        scales = layer.scales("weight_scale")
        zeros = torch.full_like(scales, half, dtype=torch.uint8)
        if not scheme.is_symmetric:
            stored = layer.read("weight_zero_point")
            is_packed = stored.dtype == torch.int32
            zeros = unpacked(stored.t(), scheme.bits)[:, :outs].t() if is_packed else _raised(stored, half)
        size = scheme.group_size or depth
        order = layer.order("weight_g_idx", size)
        return QuantisedWeight(
            codes=(codes if order is None else codes[:, order]).contiguous(),
            scales=scales,
            zeros=zeros.contiguous(),
            bits=scheme.bits,
            group_size=size,
            order=order,
        )

    def _find(self, name: str) -> _Scheme | None:
        """Return the scheme of the layer of this name: one that names it, else one for all linear layers, else None."""
        named = (each for each in self._schemes if any(_names(target, name) for target in each.targets))
        return next(named, next((each for each in self._schemes if "Linear" in each.targets), None))

    def _scheme(self, layer: Stored) -> _Scheme:
        found = self._find(layer.name)
        if found is None:
            raise layer.broken("it is stored in codes, and no group of the configuration names it")
        return found


def _scheme(group: dict[str, Any], usual: str | None) -> _Scheme:
    """Read one group of the settings; `usual`: the format if the group has none. Raises UnsupportedModel for what is not read."""
    how, weights = group.get("format") or usual, group["weights"]
    if how not in (PACKED, PLAIN):
        raise UnsupportedModel(f"its weights are quantised ({METHOD}, {how}), which is not read.")
    bits, strategy = weights["num_bits"], weights.get("strategy")
    is_read = weights.get("type", "int") == "int" and strategy in ("group", "channel")
    is_read = is_read and bits in ((4, 8) if how == PACKED else (8,))
    if not is_read or weights.get("dynamic"):
        raise UnsupportedModel(
            f"its weights are quantised ({METHOD}, {how}) as {weights.get('type', 'int')} of {bits} bits with a scale a {strategy}"
            f"{', dynamically' if weights.get('dynamic') else ''}, which is not read."
        )
    inputs = group.get("input_activations")
    if inputs and not (
        inputs["num_bits"] == 8
        and inputs.get("type", "int") == "int"
        and inputs.get("dynamic") is True
        and inputs.get("strategy") == "token"
    ):
        raise UnsupportedModel(
            f"its activations are to be {inputs.get('type', 'int')} of {inputs['num_bits']} bits with a "
            f"{'dynamic' if inputs.get('dynamic') else 'fixed'} scale a {inputs.get('strategy')}, which is not done; int of 8 bits with a dynamic "
            "scale a token is."
        )
    if group.get("output_activations"):
        raise UnsupportedModel("its layers' results are to be quantised, too, which is not done.")
    return _Scheme(
        targets=names_of(group["targets"]),
        bits=bits,
        group_size=group_size_of(weights["group_size"]) if strategy == "group" else None,
        is_symmetric=weights.get("symmetric", True),
        is_packed=how == PACKED,
    )


def _names(target: str, name: str) -> bool:
    """Whether a target, which is a name or "re:" and a pattern, names this layer."""
    return bool(re.match(target[3:], name)) if target.startswith("re:") else target == name


def _raised(numbers: Tensor, half: int) -> Tensor:
    return (numbers.to(torch.int16) + half).to(torch.uint8)
