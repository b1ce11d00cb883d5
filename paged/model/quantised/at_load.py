"""Quantisation of weights when a model is loaded: which layers become codes, and what is refused before a weight is read.

    int8   a scale for each result
    int4   a scale for each result and group of 32 inputs

Linear layers and experts become codes, and the output projection as int8 if `quantize_head` is set; embeddings, norms, routers and states stay floats.
Layers are read one after the other, and each becomes codes before the next one is read.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paged.errors import InvalidConfig, UnsupportedModel
from paged.model.native.coded import replace_linears
from paged.model.native.experts import can_be_coded, code_experts
from paged.model.quantised.files import TensorFiles
from paged.model.quantised.names import BITS, GROUPS, HEAD, check_asked
from paged.model.quantised.placing import CodesSource, check_computed, linears_of
from paged.model.quantised.reading import ModuleFiles
from paged.model.quantised.weights import QuantisedWeight, quantise


def check_quantization(quantization: str | None, where: torch.device, *, with_head: bool = False) -> None:
    """Raise InvalidConfig for a quantization that is not known, UnsupportedModel for a device or machine that does not compute with codes."""
    check_asked(quantization, with_head=with_head)
    if quantization is not None:
        check_computed(f'quantization="{quantization}"', where)


def check_layers(module: nn.Module, quantization: str, name: Path) -> None:
    """Raise UnsupportedModel unless a module's linear layers and experts can be quantised so: groups have to divide inputs, C has to compute its experts, and
    there has to be a linear layer, which GPT-2 has not. The module may lie on the meta device."""
    group, linears, experts = GROUPS[quantization], _linears(module), _experts(module)
    for path, each in experts.items():
        if not can_be_coded(each):
            raise UnsupportedModel(
                f'{name}: quantization="{quantization}" has no place for the experts of {path} ({type(each).__name__}), which C does not compute: '
                "they would stay floats; leave it out."
            )
    if not linears:
        raise UnsupportedModel(
            f'{name}: quantization="{quantization}" reads linear layers, and {type(module).__name__} has none; leave it out.'
        )
    depths = {path: {each.in_features} for path, each in linears.items()}
    for path, each in experts.items():
        depths[path] = {each.get_parameter(its).shape[1 if each.is_transposed else 2] for its in _matrix_names(each)}
    for path, its in depths.items():
        wrong = sorted(depth for depth in its if group is not None and depth % group)
        if wrong:
            raise UnsupportedModel(
                f'{name}: quantization="{quantization}" has groups of {group} inputs, which do not divide the {wrong[0]} of {path}; "int8" has none.'
            )


class AtLoad(CodesSource):
    """Layers that become codes at load. `files` None: their floats are in the module."""

    def __init__(self, quantization: str, *, with_head: bool = False, files: TensorFiles | None = None) -> None:
        super().__init__(quantization, with_head=with_head)
        self._files = files
        self._read: ModuleFiles | None = None

    def take_weights_away(self, module: Any) -> None:
        """Take away the weights that become codes from a module on the meta device, so that transformers does not read them. Weights that it joins or
        changes in a way that is not known here stay, and transformers reads them."""
        if self._files is None or any(hasattr(each, "_rescale_layers") for each in module.modules()):
            return
        self._read = ModuleFiles(module, self._files)
        tied = module.all_tied_weights_keys
        shared = {*tied, *tied.values()}
        head = module.get_output_embeddings() if self.with_head else None
        linears = _linears(module)
        wanted = {path: ["weight"] for path, each in linears_of(module).items() if path in linears or each is head}
        wanted |= {path: _matrix_names(each) for path, each in _experts(module).items()}
        for path, names in wanted.items():
            keys = [f"{path}.{name}" for name in names]
            shapes = [tuple(module.get_parameter(key).shape) for key in keys]
            if not shared & {*keys} and all(map(self._read.has, keys, shapes)):
                for name in names:
                    self._take(module, path, name)

    def replace(self, module: Any) -> None:
        """Replace a module's linear layers and experts by codes, layer after layer. Raises InvalidConfig, with the layer's name, for weights that are not
        finite, BrokenCheckpoint, and UnsupportedModel for experts that C computes differently."""
        found, head = _linears(module), module.get_output_embeddings() if self.with_head else None

        def make(path: str, linear: nn.Linear) -> QuantisedWeight | None:
            if path not in found and linear is not head:
                return None
            weight = self._weight(f"{path}.weight", linear.weight)
            return _quantised(weight, HEAD if linear is head else self.quantization, path)

        replace_linears(module, make)
        for path, experts in _experts(module).items():
            for name in _matrix_names(experts):
                weight = self._weight(f"{path}.{name}", experts.get_parameter(name))
                experts.register_parameter(name, nn.Parameter(weight, requires_grad=False))
            quantised = partial(_quantised, quantization=self.quantization, path=path)
            module.set_submodule(path, code_experts(experts, path, quantised))

    def _weight(self, key: str, there: Tensor) -> Tensor:
        """Return the weight from the files, in their dtype, if it was taken away; else the one that was loaded."""
        return self._read.read(key) if self._read is not None and there.is_meta else there


def _quantised(weight: Tensor, quantization: str, path: str) -> QuantisedWeight:
    try:
        return quantise(weight, bits=BITS[quantization], group_size=GROUPS[quantization])
    except InvalidConfig as error:
        raise InvalidConfig(f"{path}: {error}") from None


def _linears(module: Any) -> dict[str, nn.Linear]:
    head = module.get_output_embeddings()
    return {path: each for path, each in linears_of(module).items() if each is not head}


def _experts(module: nn.Module) -> dict[str, Any]:
    """Return the modules of experts by path, without those that are made of linear layers."""
    named = {path: each for path, each in module.named_modules() if type(each).__name__.endswith("Experts")}
    return {path: each for path, each in named.items() if not _is_of_linears(each)}


def _is_of_linears(module: nn.Module) -> bool:
    return all(type(each) is nn.Linear or not [*each.parameters(recurse=False)] for each in module.modules())


def _matrix_names(experts: nn.Module) -> list[str]:
    return [name for name, each in experts.named_parameters(recurse=False) if each.dim() == 3]
