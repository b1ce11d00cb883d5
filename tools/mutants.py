"""Random small changes of the memory layer and the scheduler, and which of them no test notices: `make mutants`.

`mutant_sample.py` says what is changed. A mutant runs through the stages below, the fastest first, until a test
fails; a stage that exceeds its time limit counts as a failure.

    python tools/mutants.py                                   # 300 of them, two at once
    python tools/mutants.py --count 20 --only foresight       # of the files whose path has that in it
    python tools/mutants.py --list                            # only show the changes

A survivor that computes the same as the source stands in `tools/equivalent_mutants.toml`, with why, and is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

from mutant_sample import REPOSITORY, ROOMS, Mutant, sampled

COPIED = (*ROOMS, "attention", "paged", "tests", "pyproject.toml")
EQUIVALENT = REPOSITORY / "tools" / "equivalent_mutants.toml"

# The slowest files of the acceptance tests, run after the others.
SLOW = ("test_field_failures.py", "test_p_liveness.py")
EXAMPLES = 120
PROPERTIES = ("every_policy_ends", "expected_hits", "stretches", "scenarios", "state_machines")


@dataclass(frozen=True)
class Stage:
    """Arguments of pytest that are run together, and PAGED_EXAMPLES for them."""

    name: str
    arguments: tuple[str, ...]
    examples: int | None = None


def stages(room: str) -> list[Stage]:
    """What a mutant of this room runs through, in order."""
    files = sorted(
        (REPOSITORY / "tests" / "acceptance").glob("test_*.py"), key=lambda path: (path.name in SLOW, path.name)
    )
    acceptance = tuple(f"tests/acceptance/{path.name}" for path in files)
    properties = tuple(f"tests/properties/test_{name}.py" for name in PROPERTIES)
    # How often the machines reach an event is a question to the kit, not to the mutant.
    seeded = ("--hypothesis-seed=0", "-k", "not machine_reaches")
    return [
        Stage("unit", (f"tests/{room}",)),
        Stage("acceptance", acceptance),
        Stage("properties", (*seeded, *properties), EXAMPLES),
    ]


@contextmanager
def tree() -> Iterator[Path]:
    """A copy of what the stages need."""
    with tempfile.TemporaryDirectory(prefix="paged-mutants-") as name:
        folder = Path(name)
        for part in COPIED:
            if (REPOSITORY / part).is_dir():
                # The links in paged/ stay links, so that a change to a room is one to the package.
                shutil.copytree(
                    REPOSITORY / part,
                    folder / part,
                    symlinks=True,
                    ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"),
                )
            else:
                shutil.copy(REPOSITORY / part, folder / part)
        yield folder


def failure(folder: Path, stage: Stage, limit: float) -> str | None:
    """The first test of the stage that fails in this tree, "time" after `limit` seconds, None if all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", *stage.arguments]
    # With others of these in the environment the kit would run other examples, or save what it finds.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PAGED_")}
    environment |= {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"}
    if stage.examples is not None:
        environment["PAGED_EXAMPLES"] = str(stage.examples)
    with tempfile.TemporaryFile("w+", encoding="utf-8") as out:
        running = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = running.wait(limit)
        except subprocess.TimeoutExpired:
            return "time"
        finally:
            # Its children, too: a test may have started processes of its own.
            if running.poll() is None:
                os.killpg(running.pid, signal.SIGKILL)
                running.wait()
        if not status:
            return None
        out.seek(0)
        said = out.read()
        found = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.M)
        return found[1] if found else (said.strip().splitlines() or [f"status {status}"])[-1]


def baseline(folder: Path) -> dict[tuple[str, str], float]:
    """Seconds of each room's stages on the unchanged source. Exits when one of them fails there."""
    seconds: dict[tuple[str, str], float] = {}
    taken: dict[Stage, float] = {}
    for room in ROOMS:
        for stage in stages(room):
            if stage not in taken:
                begun = time.monotonic()
                if (found := failure(folder, stage, 1800.0)) is not None:
                    sys.exit(f"the unchanged source fails in stage {stage.name}: {found}")
                taken[stage] = time.monotonic() - begun
            seconds[room, stage.name] = taken[stage]
    return seconds


def tried(mutant: Mutant, folder: Path, limits: dict[tuple[str, str], float]) -> dict[str, object]:
    """What became of one mutant: the stage and the test that killed it, or neither."""
    file, begun = folder / mutant.path, time.monotonic()
    room = mutant.path.partition("/")[0]
    original = file.read_bytes()
    file.write_text(mutant.source, encoding="utf-8")
    try:
        stage, by = None, None
        for each in stages(room):
            by = failure(folder, each, limits[room, each.name])
            if by is not None:
                stage = each.name
                break
    finally:
        file.write_bytes(original)
    said = {name: value for name, value in asdict(mutant).items() if name != "source"}
    return said | {"stage": stage, "by": by, "seconds": round(time.monotonic() - begun, 1)}


def equivalents() -> dict[tuple[str, str, str], str]:
    """Why a change computes the same, by path, removed and added lines."""
    listed = tomllib.loads(EQUIVALENT.read_text(encoding="utf-8")).get("mutant", [])
    return {(each["path"], each["removed"], each["added"]): each["why"] for each in listed}


def score(results: list[dict[str, object]]) -> tuple[int, int, float]:
    """(killed, counted, their ratio): of all that are not equivalent."""
    counted = [result for result in results if "why" not in result]
    killed = sum(result["by"] is not None for result in counted)
    return killed, len(counted), killed / len(counted) if counted else 1.0


def page(results: list[dict[str, object]], command: str, seconds: float) -> str:
    """The results as Markdown: how many were killed, at which stage, and every survivor."""
    killed, counted, share = score(results)
    of_stage = {
        name: sum(result["stage"] == name for result in results) for name in (stage.name for stage in stages(ROOMS[0]))
    }
    same = [result for result in results if "why" in result]
    survivors = [result for result in results if result["by"] is None and "why" not in result]
    lines = [
        "# Mutants",
        "",
        f"{killed} of {counted} mutants killed ({share:.1%}), {len(same)} more compute the same as the source.",
        f"Python {platform.python_version()}; {os.cpu_count()} cores; {seconds / 60:.0f} minutes.",
        "",
        "```",
        command,
        "```",
        "",
        "What is changed, and how: [mutant_sample.py](../../tools/mutant_sample.py).",
        "",
        "| stage | killed there |",
        "|---|--:|",
        *(f"| {name} | {number} |" for name, number in of_stage.items()),
    ]
    for heading, listed in (("Survivors", survivors), ("Equivalent", same)):
        lines += ["", f"## {heading}", *([] if listed else ["", "None."])]
        for result in listed:
            lines += [
                "",
                f"`{result['path']}`, line {result['line']}" + (f": {result['why']}" if "why" in result else ""),
            ]
            lines += ["", "```diff", *str(result["diff"]).splitlines()[3:], "```"]
    return "\n".join([*lines, ""])


def write(out: Path, results: list[dict[str, object]], seconds: float) -> None:
    """The results so far as `out`.md and `out`.json."""
    command = " ".join(["python tools/mutants.py", *sys.argv[1:]])
    out.with_suffix(".md").write_text(page(results, command, seconds), encoding="utf-8")
    document = {"command": command, "python": platform.python_version(), "seconds": seconds, "results": results}
    out.with_suffix(".json").write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def hunt(mutants: list[Mutant], jobs: int, out: Path | None) -> list[dict[str, object]]:
    """Try them all, so many at once, and print each that survives."""
    begun, results, known = time.monotonic(), [], equivalents()
    guard = threading.Lock()
    free: SimpleQueue[Path] = SimpleQueue()

    def one(mutant: Mutant) -> None:
        why = known.get((mutant.path, mutant.removed, mutant.added))
        folder = free.get()
        try:
            result = tried(mutant, folder, limits) | ({} if why is None else {"why": why})
        finally:
            free.put(folder)
        with guard:
            results.append(result)
            if result["by"] is None and why is None:
                print(f"SURVIVED\n{mutant.diff}\n", flush=True)
            if len(results) % 10 == 0:
                killed, counted, _ = score(results)
                print(f"{len(results)} tried, {killed} of {counted} killed", flush=True)
            if out is not None:
                # After each one: what was found so far outlives an interruption.
                write(out, results, time.monotonic() - begun)

    with ExitStack() as trees:
        folders = [trees.enter_context(tree()) for _ in range(jobs)]
        # Several at once share cores, caches and memory; a loop that never ends is late by any measure.
        limits = {key: 30 + 4 * seconds for key, seconds in baseline(folders[0]).items()}
        print(
            f"the unchanged source passes; limits {', '.join(f'{limit:.0f}' for limit in limits.values())} s",
            flush=True,
        )
        for folder in folders:
            free.put(folder)
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(one, mutants))
    return results


def main() -> None:
    """Sample, try, say how many were killed; exit with 1 below the goal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=300, help="mutants (300)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (0)")
    parser.add_argument("--jobs", type=int, default=2, help="tried at once (2)")
    parser.add_argument("--only", default="", help="of files whose path has this in it")
    parser.add_argument("--goal", type=float, default=0.95, help="the share that has to be killed (0.95)")
    parser.add_argument("--out", type=Path, default=None, help="write NAME.md and NAME.json of the results")
    parser.add_argument("--list", action="store_true", help="only print the changes")
    asked = parser.parse_args()
    mutants = sampled(asked.count, asked.seed, asked.only)
    if asked.list:
        print("\n\n".join(mutant.diff for mutant in mutants))
        return
    killed, counted, share = score(hunt(mutants, asked.jobs, asked.out))
    print(f"{killed} of {counted} mutants killed ({share:.1%}).")
    sys.exit(share < asked.goal)


if __name__ == "__main__":
    main()
