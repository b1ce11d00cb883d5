"""A checkpoint whose linear layers are stored as codes: its format, these layers, and each layer's codes.

    reader_of(config, folder)      None for a checkpoint of floats
        .layers                    {name in the files: (outs, depth)}
        .weight_of(name)           QuantisedWeight, read at the call

Headers and scales of all layers are checked before a weight is read. Besides what the caller keeps, the codes of one layer are in memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from paged.errors import BrokenCheckpoint, UnsupportedModel
from paged.model.quantised.awq import AWQ
from paged.model.quantised.compressed import CompressedTensors
from paged.model.quantised.files import TensorFiles
from paged.model.quantised.gptq import GPTQ
from paged.model.quantised.names import StoredCodes
from paged.model.quantised.stored import FLOATS, Stored
from paged.model.quantised.weights import QuantisedWeight

FORMATS = {"gptq": GPTQ, "awq": AWQ, "compressed-tensors": CompressedTensors}
"""By `quant_method` of a configuration."""
READABLE = (
    "GPTQ and AWQ with 4 bits (GPTQ with 8, too), and compressed-tensors' pack-quantized (4 and 8 bits) and int-quantized (8 bits) are read; "
    "so is any checkpoint of floats, which `paged quantise` makes smaller"
)


class Format(Protocol):
    """A format of stored codes. Its constructor takes the configuration's settings, and raises UnsupportedModel for those that cannot be read."""

    bits: set[int]
    """Bits of its codes."""
    codes: StoredCodes
    """Its name, "GPTQ, 4 bits, groups of 128", and the sizes of its layers, if they are the same for all."""
    marks: tuple[str, ...]
    """Names of tensors that only layers stored as codes have."""

    def names_floats(self, name: str) -> bool:
        """Whether the configuration says that this layer is stored as floats."""
        ...

    def shape_of(self, layer: Stored) -> tuple[int, int]:
        """Check all headers of a layer. Return (outs, depth). Raises BrokenCheckpoint."""
        ...

    def check(self, layer: Stored) -> None:
        """Raise BrokenCheckpoint for invalid scales, or an invalid order of inputs."""
        ...

    def read(self, layer: Stored) -> QuantisedWeight:
        """Read a layer's codes; its headers and scales were checked."""
        ...


class QuantisedCheckpoint:
    """The layers of one folder that are stored as codes, in `format`; `files` has all tensors of the folder. Raises BrokenCheckpoint."""

    def __init__(self, folder: Path, found: Format) -> None:
        self.folder = folder
        self.files = TensorFiles(folder)
        self.format = found
        marked = {name.rpartition(".")[0] for name in self.files if name.rpartition(".")[2] in found.marks}
        if not marked:
            raise BrokenCheckpoint(
                f"{folder}: its configuration says {found.codes.title}; no tensor is called {' or '.join(found.marks)}."
            )
        self.layers = {name: found.shape_of(self._stored(name)) for name in sorted(marked)}
        for name in self.layers:
            found.check(self._stored(name))

    def weight_of(self, name: str) -> QuantisedWeight | None:
        """Read the codes of the layer of this name in the files; None if it is stored as floats. Raises BrokenCheckpoint."""
        return self.format.read(self._stored(name)) if name in self.layers else None

    def _stored(self, name: str) -> Stored:
        return Stored(self.files, name)


def settings_of(config: Any) -> dict[str, Any] | None:
    """Return the settings of quantisation in a transformers configuration; None if weights are floats."""
    for each in (config, config.get_text_config()):
        found = getattr(each, "quantization_config", None)
        if found is not None:
            return found if isinstance(found, dict) else {"quant_method": type(found).__name__}
    return None


def reader_of(config: Any, folder: Path) -> QuantisedCheckpoint | None:
    """Return the layers of a folder that are stored as codes; None for a checkpoint of floats.

    Raises UnsupportedModel for a format that is not read. Raises BrokenCheckpoint for tensors that are missing or have another shape or dtype than the
    format has, for groups that do not divide, for scales that are 0, NaN or infinite, and for weights that are no floats if the configuration has
    no settings of quantisation.
    """
    settings = settings_of(config)
    if settings is None:
        check_floats(TensorFiles(folder))
        return None
    return QuantisedCheckpoint(folder, format_of(settings, folder))


def format_of(settings: dict[str, Any], folder: Path) -> Format:
    """Return the format that a configuration's `settings` of quantisation name. Raises UnsupportedModel for one that is not read, and BrokenCheckpoint for
    invalid settings."""
    method = settings.get("quant_method")
    make: Any = FORMATS.get(str(getattr(method, "value", method)))
    if make is None:
        raise UnsupportedModel(f"{folder}: its weights are quantised ({method}), which is not read. {READABLE}.")
    try:
        found: Format = make(settings)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{folder}: {error} {READABLE}.") from None
    except (TypeError, ValueError, ArithmeticError, AttributeError, KeyError) as error:
        raise BrokenCheckpoint(
            f"{folder}: what its configuration says of quantisation cannot be read: {error!r}."
        ) from error
    return found


def check_floats(files: TensorFiles) -> None:
    """Raise BrokenCheckpoint for a matrix that is no floats, which would be taken for numbers."""
    for name, header in files.headers.items():
        if name.endswith(".weight") and len(header.shape) > 1 and header.dtype not in (*FLOATS, "F64"):
            raise BrokenCheckpoint(
                f"{files.folder}: {name} is {header.dtype}, and the configuration says nothing of quantisation; {', '.join(FLOATS)} or F64 is wanted."
            )
