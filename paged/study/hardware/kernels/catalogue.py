"""The kernel tables that ship, by their device's name, and those made from a folder.

A further device is a further file in `data/`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from paged.errors import UnknownDevice
from paged.study.hardware.catalogue import device_named
from paged.study.hardware.kernels.kernel_tables import KernelTables
from paged.study.hardware.kernels.measurements import read_folder

_FOLDER = Path(__file__).parent / "data"
_SOURCE = "ai-dynamo/aiconfigurator, copyright NVIDIA CORPORATION & AFFILIATES; fitted by paged"
_LICENSE = "Apache-2.0"


def kernel_names() -> list[str]:
    """The devices whose tables ship, sorted."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


@cache
def kernels_named(name: str) -> KernelTables:
    """The tables of that device, or those in a file when the name ends in .json.

    Raises UnknownDevice, BadHardwareFile for a file that holds no tables, and OSError for one that cannot be read.
    """
    if name.endswith(".json"):
        return KernelTables.load(name)
    if name not in (known := kernel_names()):
        raise UnknownDevice(name, known)
    return KernelTables.load(_FOLDER / f"{name}.json")


def fit_folder(folder: str | Path, name: str, *, source: str = _SOURCE, license: str = _LICENSE) -> KernelTables:  # noqa: A002
    """Tables of a device that paged knows by name, from a folder of measured kernels in aiconfigurator's format.

    Raises UnknownDevice, BadHardwareFile and BadKernelRow for what the folder lacks or has wrong, and MissingExtra without pyarrow.
    """
    device = device_named(name)
    return KernelTables.fit(read_folder(folder, device), device, Path(name).stem, source=source, license=license)
