"""The results of an examination, as data."""

from __future__ import annotations

from typing import Literal

import msgspec

from paged.base.words import short_cause

REPORT = "That is a bug: please report it, with what `paged doctor --json` says."

State = Literal["found", "compiled", "not built", "failed"]
"""State of a native library: built before, compiled now, not built since `build` is false, or impossible to build here."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The processor and memory, and how much of them is free.

    instructions  the widest vectors: "AVX-512", "AVX2", "AVX", "SSE" or "NEON"; "" if not known
    cores         cores that this process may use
    free_cores    cores that no other process uses now
    free_bytes    free bytes of memory; None if not known
    environment   environment variables that are set, and change what is loaded, compiled or run
    """

    system: str
    python: str
    processor: str
    instructions: str
    cores: int
    free_cores: int
    free_bytes: int | None
    environment: dict[str, str]


class NativeLibrary(msgspec.Struct, frozen=True, kw_only=True):
    """One shared library of ours: its state, and the seconds until it was loaded."""

    name: str
    state: State
    seconds: float | None = None


class NativeCode(msgspec.Struct, frozen=True, kw_only=True):
    """The compiler, its version, the folder of libraries, and the libraries. `instructions`: the vectors that the compiled code uses; `has_bfloat16`:
    whether it uses units for bfloat16; None: it is not built."""

    compiler: str | None
    compiler_version: str | None
    folder: str | None
    libraries: list[NativeLibrary]
    instructions: str | None = None
    has_bfloat16: bool | None = None


class BackendFound(msgspec.Struct, frozen=True, kw_only=True):
    """An attention backend on a type of device. `works` None: not tried. `is_chosen`: "auto" chooses it. `reason`: why it does not work."""

    name: str
    device: str
    works: bool | None
    is_chosen: bool
    reason: str = ""


class CudaDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A CUDA device, as torch describes it."""

    name: str
    total_bytes: int
    capability: str


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer of the model that ships, with a backend on a device. `agrees`: it has the tokens of the first answer on the CPU; None on a GPU, where
    rounding may differ."""

    backend: str
    device: str
    seconds: float
    tokens: int
    agrees: bool | None


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """What needs torch.

    copy_bytes_per_s  bytes/s that a large copy reads and writes; None: too little memory for one
    torch_threads     torch's threads
    threads           threads that a forward pass gets now
    was_tried         whether the model that ships was tried
    load_s            seconds to load it; None: it was not loaded
    """

    copy_bytes_per_s: float | None
    torch_threads: int
    threads: int
    native: NativeCode
    devices: list[CudaDevice]
    backends: list[BackendFound]
    was_tried: bool
    load_s: float | None
    answers: list[Answer]


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """A problem and its remedy. `is_broken`: something does not work that should; else something could be better."""

    what: str
    remedy: str
    is_broken: bool


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """All findings. `libraries`: by extra, or "" for libraries that paged always needs, the version of each; None: not installed."""

    paged: str
    machine: Machine
    libraries: dict[str, dict[str, str | None]]
    engine: Engine | None
    problems: list[Problem]
    is_usable: bool


def cause(error: Exception) -> str:
    """Return the error's class and message in one line, without a full stop."""
    return f"{type(error).__name__}: {short_cause(error)}".rstrip(".")
