"""Codes in place of the float layers that transformers builds; here, those of a checkpoint in codes.

transformers builds the module without memory, and then reads tensors into it. In between it calls a quantiser of ours, which takes the weights away
from the layers that become codes: transformers neither expects nor allocates them. Codes go there layer by layer when the rest is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import nn

from paged.errors import BrokenCheckpoint, BuildFailed, UnsupportedModel
from paged.model.native.coded import coded_library, replace_linears
from paged.model.quantised.checkpoints import QuantisedCheckpoint, settings_of
from paged.model.quantised.names import BITS, check_stored
from paged.model.quantised.reading import renamed
from paged.model.quantised.stored import FLOATS

_METHOD = "paged"
_OF_LAYER = re.compile(r"\.\d+\.")


class CodesSource:
    """The source of codes for a module's layers, whose weights it takes away while transformers reads all others.

    quantization  that of LoadedModel
    with_head     whether the output projection is quantised at load, too
    """

    def __init__(self, quantization: str, *, with_head: bool) -> None:
        self.quantization, self.with_head = quantization, with_head
        self._taken: list[tuple[str, str]] = []

    def options(self, config: Any) -> dict[str, Any]:
        """Return options for `from_pretrained` by which it loads all but the codes. `config` is among them: without it transformers deep-copies the options."""
        return {"config": config, "quantization_config": _quantiser()(self)}

    def take_weights_away(self, module: Any) -> None:
        """Take away the weights that become codes from a module on the meta device."""
        raise NotImplementedError

    def replace(self, module: Any) -> None:
        """Replace layers of the module by codes."""
        raise NotImplementedError

    def restore(self, module: nn.Module) -> None:
        """Make the weights that were taken away parameters again, on the meta device, with shape and dtype alone."""
        for path, name in self._taken:
            owner = module.get_submodule(path)
            owner.register_parameter(name, nn.Parameter(vars(owner).pop(name), requires_grad=False))

    def _take(self, module: nn.Module, path: str, name: str) -> None:
        """Take a parameter away from a module on the meta device, so that transformers neither expects nor allocates it."""
        emptied: Any = module.get_submodule(path)
        empty = torch.empty_like(emptied.get_parameter(name))
        # Marked as initialised, so that transformers does not fill it at random.
        empty._is_hf_initialized = True  # type: ignore[attr-defined]
        delattr(emptied, name)
        # An attribute and no parameter: code of the module reads its shape.
        vars(emptied)[name] = empty
        emptied._is_hf_initialized = True
        self._taken.append((path, name))


def check_computed(what: str, where: torch.device) -> None:
    """Raise UnsupportedModel for a device or machine that does not compute with codes; `what`: the codes, and "is" follows."""
    if where.type != "cpu":
        raise UnsupportedModel(f'{what} is computed on a CPU; device is "{where}".')
    try:
        coded_library()
    except BuildFailed as error:
        raise UnsupportedModel(f"{what} is computed by C code, and {error}") from error


class Placed(CodesSource):
    """The codes of a checkpoint, and, once transformers has built the module, the name in the files of each linear layer in codes."""

    def __init__(
        self, checkpoint: QuantisedCheckpoint, quantization: str | None, where: torch.device, *, with_head: bool = False
    ) -> None:
        """Raises InvalidConfig if `quantization` has other bits, or for `with_head`, and UnsupportedModel for a device or machine that does not compute with
        codes."""
        folder, found = checkpoint.folder, checkpoint.format
        check_stored(folder, found.codes.title, found.bits, quantization, with_head=with_head)
        check_computed(f"{folder}: stored as {found.codes.title}, which", where)
        # "int8" if some layers have 8 bits, and others 4.
        super().__init__("int8" if BITS["int8"] in found.bits else "int4", with_head=False)
        self.checkpoint = checkpoint
        self._names: dict[str, str] = {}

    def options(self, config: Any) -> dict[str, Any]:
        """Return options as CodesSource does. Deletes the settings of quantisation in `config`."""
        for each in (config, config.get_text_config()):
            if settings_of(each) is not None:
                del each.quantization_config
        return super().options(config)

    def take_weights_away(self, module: Any) -> None:
        """Take away the weights of linear layers that are stored as codes from a module on the meta device. Raises BrokenCheckpoint for a layer of another shape,
        and for layers stored as floats against the configuration; UnsupportedModel for codes of what is no linear layer here."""
        folder, stored = self.checkpoint.folder, self.checkpoint.layers
        headers = self.checkpoint.files.headers
        floats = {
            name.removesuffix(".weight")
            for name in headers
            if name.endswith(".weight") and headers[name].dtype in FLOATS
        }
        paths, linears = paths_of(module, sorted({*stored, *floats})), linears_of(module)
        if any(hasattr(each, "_rescale_layers") for each in module.modules()):
            raise UnsupportedModel(
                f"{folder}: {type(module).__name__} changes weights when it runs, which codes cannot."
            )
        head = module.get_output_embeddings()
        for name, (path, is_part) in paths.items():
            linear = linears.get(path)
            if name not in stored:
                if linear is not None and is_of_layer(path) and not self.checkpoint.format.names_floats(name):
                    raise BrokenCheckpoint(
                        f"{folder}: {name} is stored as floats, and its configuration does not say so: a checkpoint quantised in part is not read."
                    )
                continue
            if is_part:
                raise UnsupportedModel(
                    f"{folder}: {name} is a layer of its own in the files, and part of {path} in transformers, which joins layers at load: codes of "
                    "such layers, as experts are, are not read."
                )
            if linear is None:
                self._check_unused(module, name, path)
                continue
            if linear is head and module.config.get_text_config().tie_word_embeddings:
                raise BrokenCheckpoint(f"{folder}: {name} is stored as codes, and tied to embeddings that are not.")
            found, wanted = stored[name], (linear.out_features, linear.in_features)
            if found != wanted:
                raise BrokenCheckpoint(f"{folder}: {name} has the shape {list(found)}; {list(wanted)} is wanted.")
            self._names[path] = name
        for path in self._names:
            self._take(module, path, "weight")

    def replace(self, module: Any) -> None:
        """Read each layer's codes, and replace its linear layer by them. Raises BrokenCheckpoint."""
        weight_of = self.checkpoint.weight_of
        replace_linears(module, lambda path, linear: weight_of(self._names[path]) if path in self._names else None)

    def _check_unused(self, module: nn.Module, name: str, path: str) -> None:
        """Raise UnsupportedModel if the module has another kind of layer for these codes. If it has none, they are left out, as transformers does with floats."""
        owner = path
        while owner and owner not in dict(module.named_modules()):
            owner = owner.rpartition(".")[0]
        if owner == path:
            kind = type(module.get_submodule(path)).__name__
            raise UnsupportedModel(
                f"{self.checkpoint.folder}: {name} is stored as codes, and is a {kind} in transformers; only linear layers are read so."
            )


def paths_of(module: nn.Module, names: Iterable[str]) -> dict[str, tuple[str, bool]]:
    """Return {name of a layer in the files: (path in the module, whether it is one of several parts of that)}, as transformers renames and joins weights at
    load."""
    found = renamed(module, [f"{name}.weight" for name in names])
    return {
        name.removesuffix(".weight"): (key.removesuffix(".weight"), pattern is not None)
        for name, key, pattern, _ in found
    }


def linears_of(module: nn.Module) -> dict[str, nn.Linear]:
    """Return all linear layers by path; a router of a class of its own is none."""
    return {path: each for path, each in module.named_modules() if type(each) is nn.Linear}


def is_of_layer(path: str) -> bool:
    """Whether a path lies in one of a decoder's numbered layers, unlike its head and embeddings."""
    return bool(_OF_LAYER.search(path))


@cache
def _quantiser() -> Any:
    """Return the class of `quantization_config` by which transformers calls a CodesSource; registered once transformers is imported."""
    from transformers.quantizers.auto import register_quantization_config, register_quantizer
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    @register_quantization_config(_METHOD)
    class Config(QuantizationConfigMixin):
        def __init__(self, codes: CodesSource) -> None:
            self.quant_method: Any = _METHOD
            self.codes = codes

    @register_quantizer(_METHOD)
    class Quantiser(HfQuantizer):
        def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
            config: Any = self.quantization_config
            config.codes.take_weights_away(model)
            return model

        def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
            config: Any = self.quantization_config
            config.codes.restore(model)
            self.remove_quantization_config(model)
            return model

        def is_serializable(self) -> bool:
            return False

        @property
        def is_trainable(self) -> bool:
            return False

    return Config
