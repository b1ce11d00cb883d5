"""A shared library from C sources, compiled at first use by the machine's own compiler and kept for later processes.

A library's name has a digest of all that it is made from: sources, flags, compiler version, processor instructions and
the OpenMP library, which is torch's own: one pool of threads, with torch's settings. The name ends with a digest of the
library itself: one that is damaged, or does not load, is compiled again.
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
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from paged.errors import BuildFailed

# Environment variables: the folder of libraries, the compiler, and more flags.
CACHE_VARIABLE, COMPILER_VARIABLE, FLAGS_VARIABLE = "PAGED_CACHE", "CC", "PAGED_CFLAGS"
_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fopenmp", "-fPIC", "-fno-math-errno", "-ffp-contract=off")
_PATIENCE = 120  # seconds: a compiler that takes longer hangs
_LONGEST_MESSAGE = 400  # characters
_DIGITS = 20  # characters of a digest in a name


class Recipe(NamedTuple):
    """How to compile a library: compiler, flags and torch's OpenMP library; `stem` begins the library's name."""

    compiler: list[str]
    flags: list[str]
    openmp: str
    stem: str


@cache
def library(name: str, sources: tuple[Path, ...], headers: tuple[Path, ...] = ()) -> ctypes.CDLL:
    """Return the library of these sources. Raises BuildFailed without a compiler that works, or a writable folder."""
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
            # Atomic: another process finds the whole library or none.
            made.replace(kept)
    except OSError as error:
        raise BuildFailed(f"{folder}: {error.strerror or error}; name another folder by {CACHE_VARIABLE}.") from error
    try:
        return ctypes.CDLL(str(kept))
    except OSError as error:
        raise BuildFailed(f"{kept} was compiled and cannot be loaded: {error}") from error


def is_kept(name: str, sources: tuple[Path, ...], headers: tuple[Path, ...] = ()) -> bool:
    """Whether `library` would compile nothing. Raises BuildFailed without a compiler, whose version is in the name."""
    stem = _recipe(name, sources, headers).stem
    return any(map(_is_whole, cache_folder().glob(f"{stem}-*.so")))


def _recipe(name: str, sources: Sequence[Path], headers: Sequence[Path]) -> Recipe:
    compiler, openmp = find_compiler(), _openmp()
    flags = [*_FLAGS, *_words_of(FLAGS_VARIABLE)]
    digest = hashlib.sha256()
    for path in (*sources, *headers):
        digest.update(path.read_bytes())
    # Names without folders, so that two installations share equal libraries.
    digest.update("\0".join([*flags, Path(openmp).name, compiler_version(compiler), processor()]).encode())
    return Recipe(compiler, flags, openmp, f"{name}-{digest.hexdigest()[:_DIGITS]}")


def cache_folder() -> Path:
    """Return where libraries are kept: $PAGED_CACHE, or `paged` in the user's cache. Raises BuildFailed without one."""
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
    named = _words_of(COMPILER_VARIABLE)
    for name, *arguments in [named] if named else [[each] for each in _COMPILERS]:
        found = shutil.which(name)
        if found:
            return [os.path.abspath(found), *arguments]
    raise BuildFailed(
        f"{COMPILER_VARIABLE} names {named[0]!r}, and there is no such compiler."
        if named
        else f"there is no C compiler ({', '.join(_COMPILERS[:-1])} or {_COMPILERS[-1]})."
    )


def _words_of(variable: str) -> list[str]:
    """Return the words of an environment variable, as a shell splits them. Raises BuildFailed for an open quotation."""
    text = os.environ.get(variable, "")
    try:
        return shlex.split(text)
    except ValueError as error:
        raise BuildFailed(f"{variable} is {text!r}: {str(error).lower()}.") from None


@cache
def processor() -> str:
    """Return text that names the processor's instructions: a library that uses others would end the process."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    named = [line for line in lines if line.startswith(("flags", "Features", "model name", "CPU part"))]
    return "\n".join([platform.machine(), *dict.fromkeys(named)])


def has_instructions(*names: str) -> bool:
    """Whether the processor has all of these instructions, by Linux's names."""
    return set(names) <= set(processor().split())


def compiler_version(compiler: Sequence[str]) -> str:
    """Return the compiler's version text, several lines. Raises BuildFailed if it does not run."""
    return _run([*compiler, "--version"]).stdout


def _openmp() -> str:
    """Return torch's OpenMP library, a file. Raises BuildFailed if none is loaded: one thread is slower than torch."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    files = [line.split(maxsplit=5)[-1] for line in lines if "libgomp" in line or "libomp" in line or "libiomp" in line]
    if not files:
        raise BuildFailed("torch has loaded no OpenMP library (libgomp) that compiled code could share its threads by.")
    # Other packages may have loaded theirs.
    return next((each for each in files if "/torch" in each), files[0])


def _loaded(folder: Path, stem: str) -> ctypes.CDLL | None:
    """Load the library that is kept under this name, if it is whole: loading a truncated one would end the process."""
    for kept in filter(_is_whole, sorted(folder.glob(f"{stem}-*.so"))):
        # It may need a library that is gone.
        with suppress(OSError):
            return ctypes.CDLL(str(kept))
    return None


def _is_whole(kept: Path) -> bool:
    """Whether the file can be read, and has the digest in its name."""
    try:
        return kept.stem.endswith(f"-{_digest_of(kept)}")
    except OSError:
        return False


def _digest_of(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:_DIGITS]


def _compiled(compiler: Sequence[str], folders: Sequence[str], sources: Sequence[Path], openmp: str, to: Path) -> Path:
    """Compile the library, in the folder `to`: there the compiler's messages name the same files every time."""
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
