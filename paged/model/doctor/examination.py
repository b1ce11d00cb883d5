"""The examination of this machine and installation: findings, problems and remedies."""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib import import_module

from paged import __version__
from paged.base.extras import installed_by
from paged.model.checkpoint import EMBEDDED
from paged.model.doctor.findings import (
    REPORT,
    Answer,
    BackendFound,
    Engine,
    Findings,
    Machine,
    Problem,
    cause,
)
from paged.model.doctor.machine import libraries, machine, unfit_versions
from paged.model.threads import FreeCores

# Longer than the time between two readings of the cores (`threads.py`).
_WINDOW_S = 0.6
# Free bytes with which a copy is timed.
_COPIED = 2**30


def examine(*, build: bool = True) -> Findings:
    """Examine this machine, for some seconds. Native code that is missing is built; without `build` it is not, and nothing is tried that needs it.
    Errors become problems."""
    free_cores, began = FreeCores(), time.monotonic()
    installed = libraries()
    problems = [*_missing(installed), *unfit_versions()]
    has_torch = not any(installed["engine"][name] is None for name in installed["engine"])
    if has_torch:
        try:
            for name in ("torch", "transformers", "paged.engine.llm"):
                import_module(name)
        except Exception as error:
            has_torch = False
            what = f"What a model needs is installed, and cannot be loaded: {cause(error)}."
            problems.append(Problem(what=what, remedy=f"Install it again: {installed_by('engine')}.", is_broken=True))
    # Measured before anything is compiled here.
    time.sleep(max(0.0, began + _WINDOW_S - time.monotonic()))
    here = machine(free_cores)
    engine = _engine(here, build, installed, problems) if has_torch else None
    return Findings(
        paged=__version__,
        machine=here,
        libraries=installed,
        engine=engine,
        problems=problems,
        is_usable=not any(each.is_broken for each in problems),
    )


def _missing(installed: dict[str, dict[str, str | None]]) -> list[Problem]:
    names = [name for name, version in installed["engine"].items() if version is None]
    if not names:
        return []
    return [
        Problem(
            what=f"No model runs here: {', '.join(names)} {'is' if len(names) == 1 else 'are'} not installed.",
            remedy=f"{installed_by('engine')} brings what is missing; the memory layer, the scheduler and the simulator do without.",
            is_broken=False,
        )
    ]


def _engine(here: Machine, build: bool, installed: dict[str, dict[str, str | None]], problems: list[Problem]) -> Engine:
    """Examine what needs torch. Adds to `problems`."""
    import torch

    from paged.model.doctor.backends import backends, cuda_devices
    from paged.model.doctor.native_code import is_built, native_code
    from paged.model.limits import copy_rate

    native, its_problems = native_code(build)
    devices, their_problems = cuda_devices()
    problems += [*its_problems, *their_problems]
    was_tried = is_built(native) or bool(its_problems)
    found: list[BackendFound] = []
    for device in ("cpu", "cuda") if devices else ("cpu",):
        several, its_problems = backends(device, native_is_built=was_tried)
        found += several
        problems += its_problems
    threads = torch.get_num_threads()
    problems += _could_be_better(here, threads)
    if devices and installed["gpu"]["triton"] is None:
        what = 'The backend "triton", the fastest on a GPU, needs triton.'
        problems.append(Problem(what=what, remedy=f"{installed_by('gpu')} brings it.", is_broken=False))
    load_s, answered = _tested(found, problems) if was_tried else (None, [])
    has_room = here.free_bytes is None or here.free_bytes > _COPIED
    return Engine(
        copy_bytes_per_s=copy_rate() if has_room else None,
        torch_threads=threads,
        threads=min(threads, here.free_cores),
        native=native,
        devices=devices,
        backends=found,
        was_tried=was_tried,
        load_s=load_s,
        answers=answered,
    )


def _could_be_better(here: Machine, threads: int) -> Iterator[Problem]:
    from paged.engine.memory import DEFAULT_KV_BYTES

    wanted, usual = here.environment.get("OMP_NUM_THREADS"), DEFAULT_KV_BYTES / 2**20
    if wanted is not None and threads < here.cores:
        what = f"torch has {threads} of {here.cores} cores, by OMP_NUM_THREADS={wanted}."
        yield Problem(what=what, remedy="Without it a larger model has all that are free.", is_broken=False)
    if here.free_bytes is not None and here.free_bytes < DEFAULT_KV_BYTES:
        what = f"{here.free_bytes / 2**20:,.0f} MiB of memory are free, and KV takes up to {usual:,.0f} MiB by default."
        yield Problem(what=what, remedy="Name fewer blocks: num_blocks, or --blocks.", is_broken=False)


def _tested(found: list[BackendFound], problems: list[Problem]) -> tuple[float | None, list[Answer]]:
    """Return the seconds that loading the model that ships took, and its answers: on the CPU by each backend that works there, on a GPU by the chosen
    one. Adds to `problems`."""
    from paged import load_model
    from paged.model.doctor.backends import answer

    began = time.perf_counter()
    try:
        model = load_model(EMBEDDED)
    except Exception as error:
        problems.append(_failed("The model that ships cannot be loaded", error))
        return None, []
    load_s = time.perf_counter() - began
    tried = [each for each in found if each.works and (each.device == "cpu" or each.is_chosen)]
    answered: list[Answer] = []
    expected: list[int] = []
    for each in tried:
        where = f'by the backend "{each.name}" on {each.device}'
        try:
            tokens, seconds = answer(model if each.device == "cpu" else None, each)
        except Exception as error:
            problems.append(_failed(f"The model that ships does not answer {where}", error))
            continue
        expected = expected or tokens
        agrees = tokens == expected if each.device == "cpu" else None
        answered.append(
            Answer(backend=each.name, device=each.device, seconds=seconds, tokens=len(tokens), agrees=agrees)
        )
        if agrees is False:
            what = f'The model that ships answers otherwise {where} than by "{answered[0].backend}".'
            problems.append(Problem(what=what, remedy=REPORT, is_broken=True))
    return load_s, answered


def _failed(what: str, error: Exception) -> Problem:
    return Problem(what=f"{what}: {cause(error)}.", remedy=REPORT, is_broken=True)
