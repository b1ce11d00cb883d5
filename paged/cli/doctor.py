"""`paged doctor`: what works on this machine and installation, and how to repair the rest, by `paged.model.doctor`."""

from itertools import groupby
from typing import Annotated

import typer

from paged.base.budget import as_bytes
from paged.base.words import counted
from paged.cli import SET_FOR_ITSELF
from paged.cli.options import Json
from paged.cli.show import as_time, at_work, console, print_json, printed, table
from paged.model.doctor import Answer, Engine, Findings, NativeCode, examine

BROKEN = 1
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
_STATES = {
    "found": "loaded",
    "compiled": "compiled",
    "not built": "not compiled yet",
    "failed": "cannot be compiled",
}
_BFLOAT16 = {True: "in units of its own", False: "widened as it is read, since there are no units for it"}
_WORKS = {True: "yes", False: "no", None: "not tried"}

_AGREES = {True: ", all the same", False: ", not all the same", None: ""}


def doctor(no_build: Annotated[bool, typer.Option("--no-build", help="Compile nothing, and try nothing that would be compiled first.")] = False, json: Json = False) -> None:  # fmt: skip
    """Show what works on this machine and installation, which attention backends work, why others do not, and how to repair that.

    Native code is compiled if it is not there yet, and the model that ships answers by every backend. Status 1 if something that should work does not.

    Example: `paged doctor`
    """
    with at_work("looking: some seconds", json):
        found = examine(build=not no_build)
    if json:
        print_json(found)
    else:
        _show(found)
    if not found.is_usable:
        raise typer.Exit(BROKEN)


def _show(found: Findings) -> None:
    table("this machine and installation", ("what", "found"), [*_machine(found), *_engine(found.engine)])
    if found.engine is not None:
        rows = [
            (each.name, each.device, _WORKS[each.works] + (", the default" if each.is_chosen else ""), each.reason)
            for each in found.engine.backends
        ]
        _gap()
        table("attention backends", ("backend", "on", "works", "why not"), rows)
    _gap()
    for problem in found.problems:
        printed(f"{'problem' if problem.is_broken else 'hint'}: {problem.what} {problem.remedy}")
    broken = sum(problem.is_broken for problem in found.problems)
    printed(f"{counted(broken, 'problem')}." if broken else "Everything that should work here works.")


def _gap() -> None:
    """Print an empty line between tables; in a terminal they have one already."""
    if not console().is_terminal:
        printed("")


def _machine(found: Findings) -> list[tuple[str, str]]:
    here = found.machine
    native = None if found.engine is None else found.engine.native
    rows = [("paged", f"{found.paged}, Python {here.python}, {here.system}")]
    for extra, versions in found.libraries.items():
        rows.append((f"extra {extra}" if extra else "always needed", _versions(versions)))
    rows.append(("processor", here.processor))
    if native is not None and native.instructions is not None:
        rows.append(("native code uses", f"{native.instructions}; bfloat16 {_BFLOAT16[bool(native.has_bfloat16)]}"))
    else:
        rows.append(("instructions", here.instructions or "unknown"))
    rows += [
        ("cores", f"{here.cores} usable, {here.free_cores} of them free now"),
        ("memory", "unknown" if here.free_bytes is None else f"{as_bytes(here.free_bytes)} free"),
    ]
    if found.engine is not None and found.engine.copy_bytes_per_s is not None:
        rows.append(("a large copy", f"{found.engine.copy_bytes_per_s / 1e9:,.1f} GB/s, read and written"))
    others = {name: value for name, value in here.environment.items() if name not in _WAITING}
    if others:
        rows.append(("environment", _assigned(others)))
    rows.append(("threads that wait", _waiting(here.environment)))
    return rows


def _versions(versions: dict[str, str | None]) -> str:
    if not any(versions.values()):
        return f"not installed: {', '.join(versions)}"
    return ", ".join(f"{name} {version or 'not installed'}" for name, version in versions.items())


def _waiting(environment: dict[str, str]) -> str:
    given = {name: environment[name] for name in _WAITING if name in environment}
    if not given:
        return "as OpenMP has it"
    if given == SET_FOR_ITSELF:
        return f"{_assigned(given)}, set by this command line for itself; other programs have what OpenMP has"
    return _assigned(given)


def _assigned(environment: dict[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in environment.items())


def _engine(engine: Engine | None) -> list[tuple[str, str]]:
    if engine is None:
        return []
    native = engine.native
    compiler = ": ".join(each for each in (native.compiler, native.compiler_version) if each)
    devices = [
        f"{each.name}, {as_bytes(each.total_bytes)}, compute capability {each.capability}" for each in engine.devices
    ]
    return [
        ("threads of a pass", f"{engine.threads} of torch's {engine.torch_threads}; a small model has 1"),
        ("C compiler", compiler or "none"),
        ("native code", _native(native)),
        ("CUDA devices", "; ".join(devices) or "none"),
        ("the model that ships", _answered(engine)),
    ]


def _native(native: NativeCode) -> str:
    several = ", ".join(
        f"{each.name} {_STATES[each.state]}" + ("" if each.seconds is None else f" in {as_time(each.seconds)}")
        for each in native.libraries
    )
    return several if native.folder is None else f"{several}; kept in {native.folder}"


def _answered(engine: Engine) -> str:
    if engine.load_s is None:
        return "does not load" if engine.was_tried else "not tried"
    parts = [f"loaded in {as_time(engine.load_s)}"]
    for device, answers in groupby(engine.answers, lambda each: each.device):
        several = list(answers)
        times = ", ".join(f"{each.backend} {as_time(each.seconds)}" for each in several)
        parts.append(f"{several[0].tokens} tokens on {device}: {times}{_AGREES[_agree(several)]}")
    return "; ".join(parts)


def _agree(answers: list[Answer]) -> bool | None:
    """Return whether all answers are the same; None if there is only one."""
    return None if len(answers) < 2 else all(each.agrees for each in answers)
