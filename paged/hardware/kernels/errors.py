"""What can be wrong with a folder of measured kernels, or with a question about them.

    PagedError
    ├── BadHardwareFile
    │   └── BadKernelRow      a row of a table that cannot be a measurement
    └── UnknownKernel         a kernel of which nothing was measured

Knows files, rows and names. Does not know what is fitted to them.
"""

from collections.abc import Iterable
from pathlib import Path

from paged import PagedError
from paged.hardware.errors import BadHardwareFile


class BadKernelRow(BadHardwareFile):
    """A row that cannot be a measurement: beside `path`, `field` and `problem` the `row`, counted from 0, and the `value` there."""

    def __init__(self, path: Path, field: str, row: int, value: object, problem: str) -> None:
        super().__init__(path, field, f"row {row:,} has {value}; {problem}")
        self.row = row
        self.value = value


class UnknownKernel(PagedError, ValueError):
    """A kernel of which nothing was measured: `wanted`, and `known`, of which something was."""

    def __init__(self, device: str, wanted: str, known: Iterable[str]) -> None:
        self.wanted = wanted
        self.known = tuple(known)
        super().__init__(f"of {device} there is no {wanted}; measured are {', '.join(self.known) or 'none'}")
