"""The compiler, and the libraries that it makes of our C code."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from typing import Any

import msgspec

from paged.attention.native.backend import ATTENTION_LIBRARY
from paged.attention.native.build import cache_folder, compiler_version, find_compiler, is_kept, library
from paged.errors import BuildFailed
from paged.model.doctor.findings import NativeCode, NativeLibrary, Problem, State
from paged.model.native.packed import MODEL_LIBRARY, model_library

# Columns of a panel in products.c, by the vectors that it was compiled for.
_COLUMNS_OF_AVX512, _COLUMNS_OF_AVX = 64, 16


def native_code(build: bool) -> tuple[NativeCode, list[Problem]]:
    """Examine the native code, and build what is missing if `build`. Return it, and the problems."""
    compiler = version = folder = None
    problems: list[Problem] = []
    try:
        command = find_compiler()
        compiler = " ".join(command)
        version = next(iter(compiler_version(command).splitlines()), "")
        folder = str(cache_folder())
        libraries = [
            _had("attention", ATTENTION_LIBRARY, lambda: library(*ATTENTION_LIBRARY), build),
            _had("model", MODEL_LIBRARY, model_library, build),
        ]
    except BuildFailed as error:
        libraries = [NativeLibrary(name=name, state="failed") for name in ("attention", "model")]
        remedy = "Until it can be compiled models run in torch, several times slower."
        if compiler is None:
            remedy = f"Install gcc or clang, or name a compiler by CC. {remedy}"
        elif not isinstance(error.__cause__, OSError):
            remedy = f"CC names another compiler. {remedy}"
        problems.append(Problem(what=str(error), remedy=remedy, is_broken=True))
    code = NativeCode(compiler=compiler, compiler_version=version, folder=folder, libraries=libraries)
    return (_described(code) if is_built(code) else code), problems


def is_built(code: NativeCode) -> bool:
    """Whether all libraries are built."""
    return all(each.state in ("found", "compiled") for each in code.libraries)


def _had(name: str, recipe: Any, get: Callable[[], object], build: bool) -> NativeLibrary:
    kept = is_kept(*recipe)
    if not (kept or build):
        return NativeLibrary(name=name, state="not built")
    began = time.perf_counter()
    get()
    state: State = "found" if kept else "compiled"
    return NativeLibrary(name=name, state=state, seconds=time.perf_counter() - began)


def _described(code: NativeCode) -> NativeCode:
    functions = model_library()
    if platform.machine() in ("aarch64", "arm64"):
        vectors = "NEON"
    else:
        vectors = {_COLUMNS_OF_AVX512: "AVX-512", _COLUMNS_OF_AVX: "AVX2"}.get(functions.paged_columns(), "SSE")
    return msgspec.structs.replace(
        code,
        instructions=f"{vectors}, AMX" if functions.paged_has_tiles() else vectors,
        has_bfloat16=bool(functions.paged_has_bfloat16()),
    )
