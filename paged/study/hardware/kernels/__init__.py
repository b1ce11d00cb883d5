"""Timed kernels of a device, as tables small enough to ship: seconds of products, attention and all-reduces by their sizes."""

from paged.study.hardware.kernels.kernel_tables import (
    KernelError,
    KernelTables,
    fit_folder,
    kernel_names,
    kernels_named,
)
from paged.study.hardware.kernels.measurements import Measurements, Timed, read_folder

__all__ = [
    "KernelError",
    "KernelTables",
    "Measurements",
    "Timed",
    "fit_folder",
    "kernel_names",
    "kernels_named",
    "read_folder",
]
