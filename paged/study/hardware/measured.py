"""The choice of a cost model for a model on a device: measured layers or kernels if there are any, else published figures."""

from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from paged.errors import BadHardwareFile
from paged.study.files import read_described
from paged.study.hardware.catalogue import model_named
from paged.study.hardware.derived_layers import DerivedLayers, Timing
from paged.study.hardware.kernel_layers import KernelLayers, timed_as
from paged.study.hardware.kernels import KernelTables, kernel_names, kernels_named
from paged.study.hardware.kernels.layer_tables import LayerTables
from paged.study.hardware.measured_step import Launching, Layers, MeasuredStep
from paged.study.hardware.roofline import Roofline

BAND = (-0.25, 0.27)
"""The error of steps by published figures against steps by measured kernels: the 10th percentile of decode steps and the 90th of prompts
(benchmarks/results/validation.md)."""
_LAYERS = Path(__file__).parent / "kernels" / "layers"


def measured_layers(roofline: Roofline) -> Layers | None:
    """Return the measured layers of the roofline's model on its device, as they ship; None if there are none.

    Layers of the model itself come first, then layers derived from others on the device, then kernels of the device by size. There are none for
    latents, states, a context split over devices, a dtype that was not timed, and weights in codes.
    """
    published = roofline.as_published()
    if roofline.split_context or roofline.model.latent or roofline.model.mixers or roofline.codes:
        return None
    name, dtype = roofline.device.name, timed_as(roofline.dtype)
    is_one_dtype = dtype == timed_as(roofline.kept_dtype)
    of_device = [
        timing
        for timing in _timings()
        if timing.tables.device == name and timing.tables.dtype == dtype and is_one_dtype
    ]
    own = [timing for timing in of_device if not timing.tables.model.differing(roofline.model)]
    if own and not roofline.is_linked and roofline.dtype == roofline.kept_dtype == own[0].tables.dtype:
        return own[0].tables
    alike = [timing for timing in of_device if timing.model.head_dim == roofline.model.head_dim and timing not in own]
    if own or alike:
        return DerivedLayers((*own, *alike), published)
    if name not in kernel_names():
        return None
    found = KernelLayers(kernels_named(name), published)
    return found if found.is_answered() else None


def layers_in(path: str | Path, roofline: Roofline) -> Layers:
    """Return the layers of the roofline's model by tables that `paged profile --import` wrote.

    Raises BadHardwareFile for weights in codes, for a file without tables, and for tables of another device or model or without the dtype or head
    size; and OSError.
    """
    path = Path(path)
    if roofline.codes is not None:
        raise BadHardwareFile(
            path, None, f"its tables were timed with weights as floats, and these are in {roofline.codes.title}"
        )
    if read_described(path, _Head).dense is not None:
        tables = LayerTables.load(path)
        _must_be_on(roofline, path, "layers", tables.device)
        is_of_dtype = roofline.dtype == roofline.kept_dtype == tables.dtype
        if tables.model.differing(roofline.model) or roofline.tensor_parallel != 1 or not is_of_dtype:
            what = f"{tables.model.name} in {tables.dtype} on one device"
            asked = f"{roofline.model.name} in {roofline.dtype} on {roofline.tensor_parallel}"
            raise BadHardwareFile(path, "model", f"its layers are those of {what}, not of {asked}")
        return tables
    kernels = KernelTables.load(path)
    _must_be_on(roofline, path, "kernels", kernels.device.name)
    found = KernelLayers(kernels, roofline.as_published())
    if not found.is_answered():
        raise BadHardwareFile(path, "grids", f"kernels of {roofline.model.name} in {roofline.dtype} are not in it")
    return found


def _must_be_on(roofline: Roofline, path: Path, what: str, device: str) -> None:
    if device != roofline.device.name:
        raise BadHardwareFile(path, "device", f"its {what} were timed on {device}, not on {roofline.device.name}")


def holds_kernels(path: str | Path) -> bool:
    """Whether a file has tables of kernels or layers, and not a profile of steps. Raises BadHardwareFile for a file that is no JSON, and OSError."""
    head = read_described(Path(path), _Head)
    return head.grids is not None or head.dense is not None


class _Head(msgspec.Struct):
    """The fields that say which tables a file has."""

    grids: Any = None
    dense: Any = None


def step_of(
    roofline: Roofline, *, launching: Launching | None = None, published: bool = False
) -> MeasuredStep | Roofline:
    """Return the cost model of the roofline's model on its device; with `published` the roofline itself.

    `launching`: what an engine adds to a step; by default the host's share that the roofline assumes.
    """
    layers = None if published else measured_layers(roofline)
    return roofline if layers is None else step_from(layers, roofline, launching)


def step_from(layers: Layers, roofline: Roofline, launching: Launching | None = None) -> MeasuredStep:
    """Return the cost model of these layers of the roofline's model."""
    return MeasuredStep(layers, roofline, launching or Launching(host_s=roofline.host_overhead_s))


def timed_by(step: MeasuredStep | Roofline, *, published: bool = False) -> str:
    """Return the source of a step's seconds, in words."""
    if isinstance(step, MeasuredStep):
        return step.layers.about
    why = "they were asked for" if published else unmeasured(step)
    return (
        f"published figures, which elsewhere were mostly {BAND[0]:+.0%} to {BAND[1]:+.0%} off measured kernels: {why}"
    )


def unmeasured(roofline: Roofline) -> str:
    """Return why a step is priced by published figures, in words."""
    name, model = roofline.device.name, roofline.model.name
    if roofline.model.latent and name in kernel_names():
        return f"attention on latents was not measured on {name}"
    if roofline.model.mixers and name in kernel_names():
        return f"layers with a state were not measured on {name}"
    if roofline.codes and name in kernel_names():
        return f"weights in {roofline.codes.title} were not timed on {name}"
    of_device = sorted({timing.model.name for timing in _timings() if timing.tables.device == name})
    if of_device:
        return f"on {name} only {', '.join(of_device)} in bf16 was measured, which says nothing of {model} in {roofline.dtype}"
    if name in kernel_names():
        kept = "" if roofline.kept_dtype == roofline.dtype else f" with K and V in {roofline.kept_dtype}"
        return f"kernels of {model} in {roofline.dtype}{kept} were not measured on {name}"
    return f"no kernels of {name} were measured"


@cache
def _timings() -> tuple[Timing, ...]:
    tables = [LayerTables.load(path) for path in sorted(_LAYERS.glob("*.json"))]
    return tuple(Timing(each, model_named(each.model.name)) for each in tables)
