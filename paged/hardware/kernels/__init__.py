"""Kernels that were timed on a device, as tables small enough to ship: seconds of products, attention and all-reduces by their sizes."""

from paged.hardware.kernels.catalogue import fit_folder, kernel_names, kernels_named
from paged.hardware.kernels.grid import Grid
from paged.hardware.kernels.kernel_file import KernelError
from paged.hardware.kernels.kernel_tables import Coverage, KernelTables
from paged.hardware.kernels.measurements import Measurements, Timed, read_folder

__all__ = [
    "Coverage",
    "Grid",
    "KernelError",
    "KernelTables",
    "Measurements",
    "Timed",
    "fit_folder",
    "kernel_names",
    "kernels_named",
    "read_folder",
]
