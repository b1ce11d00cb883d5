"""This machine and its installed libraries, without loading them."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version

from paged.attention.native import build
from paged.base.extras import DISTRIBUTIONS, EXTRAS
from paged.model.doctor.findings import Machine, Problem
from paged.model.free_memory import free_bytes_of_host
from paged.model.machine import processor_name
from paged.model.threads import FreeCores, usable_cores

_NEEDED = ("numpy", "msgspec")
_ENVIRONMENT = (
    build.COMPILER_VARIABLE,
    build.FLAGS_VARIABLE,
    build.CACHE_VARIABLE,
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "GOMP_SPINCOUNT",
    "CUDA_VISIBLE_DEVICES",
    "TRITON_INTERPRET",
)
# By Linux's flags, the widest first.
_VECTORS = {"avx512f": "AVX-512", "avx2": "AVX2", "avx": "AVX", "sse2": "SSE", "asimd": "NEON"}


def machine(free_cores: FreeCores) -> Machine:
    """Describe this machine. `free_cores` had its first reading at the start of the examination."""
    return Machine(
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        processor=processor_name(),
        instructions=next((name for flag, name in _VECTORS.items() if build.has_instructions(flag)), ""),
        cores=usable_cores(),
        free_cores=free_cores.count(),
        free_bytes=free_bytes_of_host(),
        environment={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
    )


def libraries() -> dict[str, dict[str, str | None]]:
    """Return `Findings.libraries`."""
    found: dict[str, dict[str, str | None]] = {"": {name: _version(name) for name in _NEEDED}}
    for name, extra in EXTRAS.items():
        found.setdefault(extra, {})[name] = _version(DISTRIBUTIONS.get(name, name))
    return found


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def unfit_versions() -> Iterator[Problem]:
    """Yield a problem for each installed library whose version paged was not made for; none without paged's metadata or `packaging`."""
    try:
        from packaging.requirements import Requirement

        wanted = [Requirement(each) for each in requires("paged") or ()]
    except (ImportError, PackageNotFoundError):
        return
    for each in wanted:
        # The others are for tests and development.
        if each.name not in (*_NEEDED, *EXTRAS, *DISTRIBUTIONS.values()):
            continue
        found = _version(each.name)
        if found is not None and not each.specifier.contains(found, prereleases=True):
            yield Problem(
                what=f"{each.name} {found} is installed, and paged was made for {each.name}{each.specifier}.",
                remedy=f"pip install '{each.name}{each.specifier}' brings one.",
                is_broken=False,
            )
