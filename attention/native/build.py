"""A shared library from C sources, compiled at first use by the machine's own compiler and kept for the next process.

A library is found by everything that it came from: the sources, the flags, the compiler's version, the processor's instructions and the
OpenMP library in use, which is torch's own, so that there is one pool of threads and torch's settings hold. One that is kept and cannot
be loaded is made again. Knows files and processes. Does not know what the sources compute.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from paged.attention.errors import BuildFailed

# Where libraries are kept, and the compiler, for who wants others.
CACHE_VARIABLE, COMPILER_VARIABLE = "PAGED_CACHE", "CC"
_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fPIC", "-fno-math-errno", "-ffp-contract=fast")
# Seconds: what takes longer hangs.
_PATIENCE = 120
_LONGEST_MESSAGE = 400


@cache
def library(name: str, sources: tuple[Path, ...], headers: tuple[Path, ...] = ()) -> ctypes.CDLL:
    """The library of these sources. Raises BuildFailed: no compiler, one that fails, a folder that cannot be written."""
    compiler = find_compiler()
    openmp = _openmp()
    flags = [*_FLAGS, *(["-fopenmp"] if openmp else []), *sorted({f"-I{each.parent}" for each in headers})]
    digest = hashlib.sha256()
    for path in (*sources, *headers):
        digest.update(path.read_bytes())
    # Not the folders of an installation: two of them share what is the same.
    digest.update("\0".join([*_FLAGS, str(openmp), _version(compiler), processor()]).encode())
    kept = cache_folder() / f"{name}-{digest.hexdigest()[:20]}.so"
    if kept.exists():
        try:
            return ctypes.CDLL(str(kept))
        except OSError:
            # Truncated, or of a system that this one is not: it is made again in its place.
            pass
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent, prefix=f".{name}-") as folder:
            made = Path(folder) / kept.name
            _compile(compiler, flags, sources, openmp, made)
            made.replace(kept)
    except OSError as error:
        raise BuildFailed(f"{kept.parent}: {error.strerror or error}; name another folder by {CACHE_VARIABLE}.") from error
    try:
        return ctypes.CDLL(str(kept))
    except OSError as error:
        raise BuildFailed(f"{kept} was compiled and cannot be loaded: {error}") from error


def cache_folder() -> Path:
    """Where libraries are kept: $PAGED_CACHE, or `paged` in the user's folder for caches."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paged"


def find_compiler() -> str:
    """The path of $CC, or of the first of cc, gcc and clang that is there. Raises BuildFailed."""
    named = os.environ.get(COMPILER_VARIABLE)
    for name in (named,) if named else _COMPILERS:
        found = shutil.which(name)
        if found:
            return found
    raise BuildFailed(
        f"{COMPILER_VARIABLE} names {named!r}, and there is no such compiler." if named else "there is no C compiler (cc, gcc or clang)."
    )


@cache
def processor() -> str:
    """What instructions there are: a library that uses others ends the process."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    told = [line for line in lines if line.startswith(("flags", "Features", "model name", "CPU part"))]
    return "\n".join([platform.machine(), *dict.fromkeys(told)])


def has_instructions(*names: str) -> bool:
    """Whether the processor says that it has all of these, by the names that Linux gives them."""
    return set(names) <= set(processor().split())


def _version(compiler: str) -> str:
    return _run([compiler, "--version"]).stdout


def _openmp() -> str | None:
    """The file of the OpenMP library that torch has loaded; None where there is none that GCC's calls fit."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    files = [line.split(maxsplit=5)[-1] for line in lines if "libgomp" in line or "libomp" in line or "libiomp" in line]
    return files[0] if files else None


def _compile(compiler: str, flags: Sequence[str], sources: Sequence[Path], openmp: str | None, to: Path) -> None:
    objects = []
    for source in sources:
        made = to.with_name(f"{source.stem}.o")
        _run([compiler, *flags, "-c", str(source), "-o", str(made)])
        objects.append(str(made))
    _run([compiler, "-shared", *objects, *([openmp] if openmp else []), "-lm", "-o", str(to)])


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_PATIENCE, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildFailed(f"{command[0]} did not run: {error}") from error
    if done.returncode:
        words = " ".join((done.stderr or done.stdout).split()) or f"exit status {done.returncode}"
        raise BuildFailed(f"{command[0]} failed: {words[:_LONGEST_MESSAGE]}")
    return done
