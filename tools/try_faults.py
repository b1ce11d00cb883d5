"""Plant each fault of the tables in a copy of the packages, and see whether the test kit finds it: `make faults`.

`faults.py` says what a fault is, and plants it. Last of all the unchanged packages are tried, in which nothing may be found. Each is
tried by `hunt_fault.py` in a process of its own.

    python tools/try_faults.py                          # all of them
    python tools/try_faults.py lost-copy stale-key      # these
    python tools/try_faults.py --apply-only             # only whether they still apply
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import faults as planting
import typer
from faults import Fault, FaultFailed
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent
TABLES = [REPOSITORY / "tests" / "faults" / name for name in ("faults.toml", "layers.toml", "sessions.toml")]
PACKAGES = ("block_manager", "scheduler", "attention", "paged")
CONTROL = Fault("nothing", "Nothing is wrong.", 0, "", "", "")
CONTROL_OF_LAYERS = Fault("nothing in layers", "Nothing is wrong.", 0, "", "", "", layers=True)
CONTROLS = (CONTROL, CONTROL_OF_LAYERS)


@contextmanager
def planted(fault: Fault) -> Iterator[tuple[Path, str]]:
    """A folder with a copy of the packages that has the fault, while the block runs, and the file that was changed, "" if none.
    Raises FaultFailed."""
    with tempfile.TemporaryDirectory(prefix="paged-fault-") as name:
        folder = Path(name)
        for package in PACKAGES:
            # The links in paged/ stay links, so that a change to a room is one to the package.
            shutil.copytree(
                REPOSITORY / package,
                folder / package,
                symlinks=True,
                ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"),
            )
        changed = "" if fault in CONTROLS else planting.plant(fault, folder).relative_to(folder).as_posix()
        yield folder, changed


def tried(fault: Fault, *, examples: int, programs: int, limit: float) -> dict[str, Any]:
    """What became of one fault: the result of its hunt, with its name and sentence, and `problem` if there was no result."""
    result: dict[str, Any] = {
        "fault": fault.name,
        "sentence": fault.says,
        "breaks": fault.breaks,
        "by": None,
    }
    begun = time.monotonic()
    try:
        with planted(fault) as (folder, changed):
            out = folder / "result.json"
            command = [
                sys.executable,
                str(HERE / "hunt_fault.py"),
                str(out),
                f"--examples={examples}",
                f"--programs={programs}",
            ]
            command += ["--no-manager"] if changed.startswith("scheduler/") else []
            command += ["--layers"] if fault.layers else []
            command += ["--sessions"] if fault.sessions else []
            environment = os.environ | {
                "PYTHONPATH": str(folder),
                "PYTHONDONTWRITEBYTECODE": "1",
                "PYTHONHASHSEED": "0",
            }
            # With these in the environment the kit would run other examples, or save what it finds.
            for variable in ("PAGED_EXAMPLES", "PAGED_FAILURES", "PAGED_CHECK"):
                environment.pop(variable, None)
            done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=limit)
            if not out.exists():
                last = done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"]
                return result | {"problem": f"the hunt itself failed: {last[0]}"}
            result |= json.loads(out.read_text())
            where = Path(result.pop("block_manager"))
            if folder.resolve() not in where.resolve().parents:
                return result | {"by": None, "problem": f"the hunt ran on {where}, not on the copy."}
    except FaultFailed as error:
        return result | {"problem": str(error)}
    except subprocess.TimeoutExpired:
        return result | {"problem": f"the hunt did not end within {limit:.0f} s.", "seconds": time.monotonic() - begun}
    return result


def is_as_it_should_be(result: dict[str, Any]) -> bool:
    """A fault was found; where nothing is wrong, nothing was."""
    return "problem" not in result and (result["by"] is None) == _is_control(result)


def _is_control(result: dict[str, Any]) -> bool:
    return result["fault"] in [control.name for control in CONTROLS]


def rows(results: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """The table's lines: fault, rule, found by, examples, calls shrunk, seconds, what was said first."""
    for result in results:
        said = result.get("problem") or (result["found"][0] if result["by"] else "nothing found")
        yield (
            result["fault"],
            str(result["breaks"] or ""),
            result["by"] or "",
            f"{result['examples']:,}" if "examples" in result else "",
            str(result.get("shrunk_calls", "")),
            f"{result['seconds'] + result.get('shrink_seconds', 0):.0f}" if "seconds" in result else "",
            said,
        )


COLUMNS = ("fault", "rule", "found by", "after examples", "calls", "seconds", "what is said of it")


def summary(results: list[dict[str, Any]]) -> str:
    """How many were found, and the median of the shrunk programs' lengths."""
    faults = [result for result in results if not _is_control(result)]
    lengths = [result["shrunk_calls"] for result in faults if result["by"]]
    median = (
        f"; the shrunk programs have {statistics.median(lengths):g} calls in the median, {max(lengths)} at most"
        if lengths
        else ""
    )
    return f"{len(lengths)} of {len(faults)} faults found{median}."


def page(results: list[dict[str, Any]], command: str, seconds: float) -> str:
    """The results as Markdown."""
    lines = [
        "# Planted faults",
        "",
        f"{summary(results)} Python {platform.python_version()}, Hypothesis {version('hypothesis')}, numpy {version('numpy')}; "
        f"{os.cpu_count()} cores; {seconds / 60:.0f} minutes.",
        "",
        "```",
        command,
        "```",
        "",
        "Each stands in [faults.toml](../../tests/faults/faults.toml), or [layers.toml](../../tests/faults/layers.toml) if it shows only with",
        "layers of several kinds, and there it says what is wrong; its rule is one of",
        "[invariants.md](../../docs/invariants.md). Examples are counted until the first that failed; calls are those of the program",
        "that was left when it had been made short; seconds are those of both. `nothing` is the unchanged source, `nothing in layers` too.",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|---|--:|---|--:|--:|--:|---|",
    ]
    lines += [
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ")[:160] for cell in row) + " |"
        for row in rows(results)
    ]
    return "\n".join([*lines, ""])


def write(out: Path, results: list[dict[str, Any]], seconds: float) -> None:
    """The results so far as `out`.md and `out`.json."""
    command = " ".join(["python tools/try_faults.py", *sys.argv[1:]])
    out.with_suffix(".md").write_text(page(results, command, seconds), encoding="utf-8")
    document = {"command": command, "python": platform.python_version(), "seconds": seconds, "results": results}
    out.with_suffix(".json").write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def version(name: str) -> str:
    """The version of an installed distribution."""
    from importlib.metadata import version as of

    return of(name)


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Faults to try, by name; all, if none is named.")] = None,
    table: Annotated[
        list[Path] | None,
        typer.Option(help="Where the faults are described; may be given again.", exists=True, dir_okay=False),
    ] = None,
    examples: Annotated[int, typer.Option(help="Examples of each state machine before it gives up.", min=1)] = 300,
    programs: Annotated[int, typer.Option(help="Programs that may be run to make one short.", min=0)] = 5000,
    limit: Annotated[float, typer.Option(help="Seconds that one fault may take in all.", min=1)] = 900.0,
    jobs: Annotated[int, typer.Option(help="Faults that are tried at once.", min=1)] = os.cpu_count() or 1,
    control: Annotated[bool, typer.Option(help="Try the unchanged packages, too.")] = True,
    apply_only: Annotated[
        bool, typer.Option("--apply-only", help="Only see whether each has its place in the sources.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Write NAME.md and NAME.json of the results.", metavar="NAME")
    ] = None,
) -> None:
    """Plant each fault in a copy of the packages, and see whether the test kit finds it."""
    # Not a terminal: as wide as the longest sentence, for a reader of a log.
    console = Console(width=None if sys.stdout.isatty() else 200)
    try:
        tables = table or TABLES
        known = {name: fault for each in tables for name, fault in planting.read(each).items()}
        if unknown := sorted(set(names or ()) - known.keys()):
            raise typer.BadParameter(f"no such fault in {', '.join(map(str, tables))}: {', '.join(unknown)}.")
        faults = [known[name] for name in names or known]
        functions = planting.functions_of(REPOSITORY)
        for fault in faults:
            planting.place_of(fault, functions)
    except FaultFailed as error:
        console.print(str(error), style="red", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    if apply_only:
        console.print(f"{len(faults)} faults apply.")
        return
    if control:
        faults += [each for each in CONTROLS if any(fault.layers == each.layers for fault in faults)]
    begun = time.monotonic()
    results = []
    with ThreadPoolExecutor(jobs) as pool, Progress(console=console, transient=True) as progress:
        bar = progress.add_task(f"{len(faults)} faults", total=len(faults))

        def one(fault: Fault) -> dict[str, Any]:
            return tried(fault, examples=examples, programs=programs, limit=limit)

        for result in pool.map(one, faults):
            results.append(result)
            progress.update(bar, advance=1, description=result["fault"])
            if not is_as_it_should_be(result):
                progress.console.print(
                    f"NOT AS IT SHOULD BE: {' '.join(next(rows([result])))}", style="red", highlight=False
                )
            if out is not None:
                # After each one: what was found so far is not lost when it is stopped.
                write(out, results, time.monotonic() - begun)
    shown = Table(*COLUMNS, title="Planted faults")
    for row in rows(results):
        shown.add_row(*row)
    console.print(shown)
    console.print(summary(results), highlight=False)
    if not all(is_as_it_should_be(result) for result in results):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
