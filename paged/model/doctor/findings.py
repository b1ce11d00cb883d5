"""The results of an examination, as data: plain names, counts, bytes and seconds; and words that several of them share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

REPORT = "That is a bug: please report it, with what `paged doctor --json` says."
# Of a library's message: it may be pages.
_LONGEST_CAUSE = 300

State = Literal["found", "compiled", "not built", "failed"]
"""Of a native library: kept from before, made now, left alone, or impossible here."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The processor and what others leave of it.

    instructions  the widest vectors that it has: "AVX-512", "AVX2", "AVX", "SSE" or "NEON"; "" where it is not known
    free_cores    cores that no other process uses now
    free_bytes    of memory; None where it is not known
    environment   variables that are set, and change what is loaded, compiled or run
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
    """One shared library of ours: what became of it, in so many seconds."""

    name: str
    state: State
    seconds: float | None = None


class NativeCode(msgspec.Struct, frozen=True, kw_only=True):
    """The compiler, by path and by what it says of itself, the folder where libraries are kept, and the libraries; as compiled, its vectors and
    whether bfloat16 has units of its own, None where nothing is."""

    compiler: str | None
    compiler_version: str | None
    folder: str | None
    libraries: list[NativeLibrary]
    instructions: str | None = None
    has_bfloat16: bool | None = None


class BackendFound(msgspec.Struct, frozen=True, kw_only=True):
    """An attention backend on a type of device. `works` None: it was not tried. `is_chosen`: by "auto". `reason`: why it does not work."""

    name: str
    device: str
    works: bool | None
    is_chosen: bool
    reason: str = ""


class CudaDevice(msgspec.Struct, frozen=True, kw_only=True):
    """As torch sees it."""

    name: str
    total_bytes: int
    capability: str


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What the model that ships answered on a device by a backend; `agrees`: the same tokens as the backend `reference`, None on a GPU,
    where it may round otherwise."""

    backend: str
    device: str
    seconds: float
    tokens: int
    agrees: bool | None


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """What needs torch. `copy_bytes_per_s`: what a large copy reads and writes; None where there is no memory for one. `threads`: what a forward pass gets now of torch's own. `was_tried`: whether the model that ships was; `load_s`: until it was
    loaded, None where it was not."""

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
    """A problem, and its remedy. `is_broken`: it should work here, and does not; else it could be better."""

    what: str
    remedy: str
    is_broken: bool


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """All of it. `libraries`: by extra, "" for what paged cannot do without, the version of each, None where it is not installed."""

    paged: str
    machine: Machine
    libraries: dict[str, dict[str, str | None]]
    engine: Engine | None
    problems: list[Problem]
    is_usable: bool


def cause(error: Exception) -> str:
    """The error's class and what it says, in a line and without a full stop."""
    words = f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(".: ")
    return words if len(words) <= _LONGEST_CAUSE else f"{words[:_LONGEST_CAUSE]} …"


def listed(names: Sequence[str]) -> str:
    """One, or several with "and" before the last."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last
