"""A shared library from C sources, compiled at first use by the machine's own compiler and kept for the next process.

A library is found by everything that it came from: the sources, the flags, the compiler's version, the processor's
instructions and the OpenMP library in use, which is torch's own, so that there is one pool of threads and torch's
settings hold. Its name ends with a digest of its contents: one that is damaged, or cannot be loaded, is made again.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from paged.errors import BuildFailed

# Where libraries are kept, the compiler, and flags beside ours, for who wants others.
CACHE_VARIABLE, COMPILER_VARIABLE, FLAGS_VARIABLE = "PAGED_CACHE", "CC", "PAGED_CFLAGS"
_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fopenmp", "-fPIC", "-fno-math-errno", "-ffp-contract=off")
# Seconds: what takes longer hangs.
_PATIENCE = 120
_LONGEST_MESSAGE = 400
# Characters of a digest in a name.
_DIGITS = 20


class Recipe(NamedTuple):
    """The compiler and flags of a library, and the name under which it is kept."""

    compiler: list[str]
    flags: list[str]
    openmp: str
    stem: str


@cache
def library(name: str, sources: tuple[Path, ...], headers: tuple[Path, ...] = ()) -> ctypes.CDLL:
    """The library of these sources. Raises BuildFailed: no compiler, one that fails, a folder that cannot be written."""
    recipe, folder = _recipe(name, sources, headers), cache_folder()
    found = _loaded(folder, recipe.stem)
    if found is not None:
        return found
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=f".{name}-") as workshop:
            folders = sorted({f"-I{each.parent}" for each in headers})
            made = _compiled([*recipe.compiler, *recipe.flags], folders, sources, recipe.openmp, Path(workshop))
            kept = folder / f"{recipe.stem}-{_digest_of(made)}.so"
            # In one go: another process that does the same finds all of it, or nothing.
            made.replace(kept)
    except OSError as error:
        raise BuildFailed(f"{folder}: {error.strerror or error}; name another folder by {CACHE_VARIABLE}.") from error
    try:
        return ctypes.CDLL(str(kept))
    except OSError as error:
        raise BuildFailed(f"{kept} was compiled and cannot be loaded: {error}") from error


def is_kept(name: str, sources: tuple[Path, ...], headers: tuple[Path, ...] = ()) -> bool:
    """Whether `library` would find it, and compile nothing. Raises BuildFailed where there is no compiler, whose version is in its name."""
    stem = _recipe(name, sources, headers).stem
    return any(map(_is_whole, cache_folder().glob(f"{stem}-*.so")))


def _recipe(name: str, sources: Sequence[Path], headers: Sequence[Path]) -> Recipe:
    compiler, openmp = find_compiler(), _openmp()
    flags = [*_FLAGS, *shlex.split(os.environ.get(FLAGS_VARIABLE, ""))]
    digest = hashlib.sha256()
    for path in (*sources, *headers):
        digest.update(path.read_bytes())
    # Names without folders: two installations share what is the same.
    digest.update("\0".join([*flags, Path(openmp).name, compiler_version(compiler), processor()]).encode())
    return Recipe(compiler, flags, openmp, f"{name}-{digest.hexdigest()[:_DIGITS]}")


def cache_folder() -> Path:
    """Where libraries are kept: $PAGED_CACHE, or `paged` in the user's folder for caches. Raises BuildFailed where there is no such user."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named).absolute()
    caches = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(caches or Path.home() / ".cache").absolute() / "paged"
    except RuntimeError as error:
        raise BuildFailed(f"{error} Name a folder by {CACHE_VARIABLE}.") from error


def find_compiler() -> list[str]:
    """Return the compiler: $CC with its arguments, or the first of cc, gcc and clang that is there. Raises BuildFailed."""
    named = shlex.split(os.environ.get(COMPILER_VARIABLE, ""))
    for name, *arguments in [named] if named else [[each] for each in _COMPILERS]:
        found = shutil.which(name)
        if found:
            return [os.path.abspath(found), *arguments]
    raise BuildFailed(
        f"{COMPILER_VARIABLE} names {named[0]!r}, and there is no such compiler."
        if named
        else f"there is no C compiler ({', '.join(_COMPILERS[:-1])} or {_COMPILERS[-1]})."
    )


@cache
def processor() -> str:
    """What instructions there are: a library that uses others ends the process."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    named = [line for line in lines if line.startswith(("flags", "Features", "model name", "CPU part"))]
    return "\n".join([platform.machine(), *dict.fromkeys(named)])


def has_instructions(*names: str) -> bool:
    """Whether the processor says that it has all of these, by the names that Linux gives them."""
    return set(names) <= set(processor().split())


def compiler_version(compiler: Sequence[str]) -> str:
    """Return the compiler's version text, several lines. Raises BuildFailed if it does not run."""
    return _run([*compiler, "--version"]).stdout


def _openmp() -> str:
    """The file of the OpenMP library that torch has loaded. Raises BuildFailed where there is none: on one thread torch would be faster."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    files = [line.split(maxsplit=5)[-1] for line in lines if "libgomp" in line or "libomp" in line or "libiomp" in line]
    if not files:
        raise BuildFailed("torch has loaded no OpenMP library (libgomp) that compiled code could share its threads by.")
    # Other packages may have brought theirs.
    return next((each for each in files if "/torch" in each), files[0])


def _loaded(folder: Path, stem: str) -> ctypes.CDLL | None:
    """The library that is kept under this name, if it is whole: to load one that was cut short ends the process."""
    for kept in sorted(folder.glob(f"{stem}-*.so")):
        try:
            if _is_whole(kept):
                return ctypes.CDLL(str(kept))
        except OSError:
            # It may be unreadable, or need a library that is gone.
            continue
    return None


def _is_whole(kept: Path) -> bool:
    return kept.stem.endswith(f"-{_digest_of(kept)}")


def _digest_of(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:_DIGITS]


def _compiled(compiler: Sequence[str], folders: Sequence[str], sources: Sequence[Path], openmp: str, to: Path) -> Path:
    """The library, in the folder `to`, where the compiler runs: what it complains of has the same name every time."""
    for source in sources:
        _run([*compiler, *folders, "-c", str(source)], to)
    objects = [f"{source.stem}.o" for source in sources]
    _run([*compiler, "-shared", *objects, openmp, "-lm", "-o", "library.so"], to)
    return to / "library.so"


def _run(command: Sequence[str], folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, errors="replace", timeout=_PATIENCE, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildFailed(f"{command[0]} did not run: {error}") from error
    if done.returncode:
        words = " ".join((done.stderr or done.stdout).split()) or f"exit status {done.returncode}"
        raise BuildFailed(f"{command[0]} failed: {words[:_LONGEST_MESSAGE]}")
    return done
