"""An examination of this machine and installation, and of their problems: `paged doctor` shows it.

    findings.py      what is found, as data
    machine.py       this machine and the libraries that are installed, without loading them
    native_code.py   the compiler, and the libraries that it makes
    backends.py      which attention backends work on which device, and whether the model that ships answers
    examination.py   all of it, and what there is to do

Nothing here needs torch to be installed, and everything says so where it is not.
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
