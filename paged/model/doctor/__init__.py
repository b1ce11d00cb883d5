"""An examination of this machine and installation, and of their problems: `paged doctor` shows it.

    findings.py      the results, as data
    machine.py       this machine and the installed libraries, without loading them
    native_code.py   the compiler, and the libraries that it makes
    backends.py      which attention backends work on which device, and whether the model that ships answers
    examination.py   the whole examination

It runs without torch, and then reports that torch is missing.
"""

from paged.model.doctor.examination import examine
from paged.model.doctor.findings import (
    Answer,
    BackendFound,
    CudaDevice,
    Engine,
    Findings,
    Machine,
    NativeCode,
    NativeLibrary,
    Problem,
)

__all__ = [
    "Answer",
    "BackendFound",
    "CudaDevice",
    "Engine",
    "Findings",
    "Machine",
    "NativeCode",
    "NativeLibrary",
    "Problem",
    "examine",
]
