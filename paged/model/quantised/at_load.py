"""Weights that are quantised when a model is loaded: which layers are, and what is refused before a weight is read.

int8   a scale a result
int4   a scale a result and group of 32 inputs

Linear layers are, and the output projection if `quantize_head` is set; embeddings, norms and states stay floats.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from paged.errors import BuildFailed, InvalidConfig, UnsupportedModel
from paged.model.native.coded import coded_library, replace_linears
from paged.model.quantised.names import BITS, GROUPS, HEAD, check_asked
from paged.model.quantised.weights import QuantisedWeight, quantise


def check_quantization(quantization: str | None, where: torch.device, *, with_head: bool = False) -> None:
    """Raise InvalidConfig for one that is not known, UnsupportedModel for one that this device or machine does not do."""
    check_asked(quantization, with_head=with_head)
    if quantization is None:
        return
    if where.type != "cpu":
        raise UnsupportedModel(
            f'quantization="{quantization}" is computed on a CPU; device is "{where}", where weights can stay floats.'
        )
    try:
        coded_library()
    except BuildFailed as error:
        raise UnsupportedModel(f'quantization="{quantization}" is computed by C code, and {error}') from error


def check_layers(module: nn.Module, quantization: str, name: Path) -> None:
    """Raise UnsupportedModel where a module's linear layers, of the meta device or another, cannot be quantised so: groups that do not divide a layer's
    inputs; none at all, as in GPT-2; or experts, whose weights are no linear layers."""
    experts = [path for path, each in module.named_modules() if type(each).__name__.endswith("Experts")]
    if experts:
        raise UnsupportedModel(
            f'{name}: quantization="{quantization}" reads linear layers, and {experts[0]} has experts, which stay floats; leave it out.'
        )
    group, linears = GROUPS[quantization], _linears(module)
    if not linears:
        raise UnsupportedModel(
            f'{name}: quantization="{quantization}" reads linear layers, and {type(module).__name__} has none; leave it out.'
        )
    for path, linear in linears.items():
        if group is not None and linear.in_features % group:
            raise UnsupportedModel(
                f'{name}: quantization="{quantization}" has groups of {group} inputs, which do not divide the {linear.in_features} of '
                f'{path}; "int8" has none.'
            )


def quantise_linears(module: Any, quantization: str, *, with_head: bool = False) -> None:
    """Quantise a decoder's linear layers in place, one by one; `with_head`: its output projection, too, to int8, and an embedding that shares its
    weights. Raises InvalidConfig, which names the layer, for weights that are no finite numbers."""
    found, head = _linears(module), module.get_output_embeddings() if with_head else None

    def make(path: str, linear: nn.Linear) -> QuantisedWeight | None:
        if path not in found and linear is not head:
            return None
        name = HEAD if linear is head else quantization
        try:
            return quantise(linear.weight, bits=BITS[name], group_size=GROUPS[name])
        except InvalidConfig as error:
            raise InvalidConfig(f"{path}: {error}") from None

    replace_linears(module, make)


def widen_others(module: nn.Module, dtype: torch.dtype) -> None:
    """Give all weights but those that will be quantised this dtype: these come from what the checkpoint has, without a copy in floats of 32 bits."""
    kept = {id(each.weight) for each in _linears(module).values()}
    for parameter in module.parameters():
        if id(parameter) not in kept and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def _linears(module: Any) -> dict[str, nn.Linear]:
    head = module.get_output_embeddings()
    return {path: each for path, each in module.named_modules() if type(each) is nn.Linear and each is not head}
