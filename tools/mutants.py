"""Random small changes of the memory layer and the scheduler, and which of them no test notices: `make mutants`.

`mutant_sample.py` says what is changed. One run under coverage says which tests of the two rooms and which acceptance
tests run each line, and how long each takes. A mutant is tried on those that run its statement, the quickest first, and
then on the properties, until a test fails. A test that hangs counts as one that fails.

    python tools/mutants.py                                   # 300 of them, two at once
    python tools/mutants.py --out NAME --again                # those that lived in NAME.json unlisted; the others are taken over
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
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from coverage import CoverageData
from mutant_sample import REPOSITORY, ROOMS, Mutant, sampled

COPIED = (*ROOMS, "attention", "paged", "tests", "docs", "pyproject.toml")
EQUIVALENT = REPOSITORY / "tools" / "equivalent_mutants.toml"

QUICK = (
    *("tests/block_manager", "tests/scheduler", "tests/acceptance"),
    *("tests/docs/test_policies_page.py", "tests/paged/test_refused_calls.py"),
)
PROPERTIES = tuple(
    f"tests/properties/test_{name}.py"
    for name in (
        *("found_programs", "every_policy_ends", "expected_hits", "scenarios", "stretches", "state_machines"),
        *("naive_layers", "host_of_layers", "layer_groups", "naive_sessions", "wishes"),
    )
)
# How often the machines reach an event is a question to the kit, not to the mutant.
SEEDED = ("--hypothesis-seed=0", "-k", "not machine_reaches")
EXAMPLES = 120
STAGES = {
    "block_manager": "tests of the memory layer",
    "scheduler": "tests of the scheduler",
    "acceptance": "acceptance tests",
    "properties": "properties",
    "time": "a test that hangs",
    "import": "an import that fails",
}
# How pytest ends when it does not find a test, or cannot import tests/conftest.py.
USAGE_ERROR = 4
# The quickest tests of a line are tried before the others: to collect a thousand takes longer than to run a hundred.
FIRST = 100


@dataclass(frozen=True)
class Suite:
    """What the quick tests do on the unchanged source.

    `tests` has all of them, the quickest first; `runs` the tests of a path's line, "" where it is run by an import.
    A quick test that takes longer than `patience` seconds hangs, and a property that takes `long_patience`.
    """

    tests: list[str]
    runs: dict[str, dict[int, set[str]]]
    patience: float
    long_patience: float

    def of(self, mutant: Mutant) -> list[str]:
        """The tests that run the statement which this mutant changes, the quickest first."""
        lines = self.runs.get(mutant.path, {})
        found = set().union(*(lines.get(line, ()) for line in mutant.statement))
        return [test for test in self.tests if test in found or "" in found]


@contextmanager
def tree() -> Iterator[Path]:
    """A copy of what the tests need."""
    with tempfile.TemporaryDirectory(prefix="paged-mutants-") as name:
        folder = Path(name).resolve()
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


def pytest(folder: Path, arguments: Sequence[str], patience: float, examples: int | None = None) -> tuple[int, str]:
    """Run the tests of a tree in a process of their own: its status, and what it said."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist"]
    # The plugin ends the process in the middle of a test that takes longer.
    command += ["-o", f"faulthandler_timeout={patience}", "-o", "faulthandler_exit_on_timeout=true", *arguments]
    # With others of these in the environment the kit would run other examples, or save what it finds.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PAGED_")}
    environment |= {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"}
    if examples is not None:
        environment["PAGED_EXAMPLES"] = str(examples)
    with tempfile.TemporaryFile("w+", encoding="utf-8") as out:
        running = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = running.wait(60 * patience)
        except subprocess.TimeoutExpired:
            status = -1
        finally:
            # Its children, too: a test may have started processes of its own.
            with suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            running.wait()
        out.seek(0)
        return status, out.read()


def failure(folder: Path, arguments: Sequence[str], patience: float, examples: int | None = None) -> str | None:
    """The first of the tests that fails in this tree, "time" if one hangs, None if all pass."""
    status, said = pytest(folder, arguments, patience, examples)
    if status == USAGE_ERROR and any("::" in test for test in arguments):
        # A test that is made from what is changed here has another name: that alone is no failure.
        status, said = pytest(folder, sorted({test.partition("::")[0] for test in arguments}), patience, examples)
    if not status:
        return None
    if status == -1 or re.search(r"Timeout \(\d", said):
        return "time"
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.M)
    return found[1] if found else (said.strip().splitlines() or [f"status {status}"])[-1]


def measured(folder: Path) -> Suite:
    """Run all tests on the unchanged source, the quick ones under coverage. Exits when one of them fails there."""
    # The defaults of coverage: branches, which pyproject.toml asks for, take twice as long.
    covered = [f"--cov={room}" for room in ROOMS] + ["--cov-config=/dev/null", "--cov-context=test", "--cov-report="]
    status, said = pytest(folder, [*covered, "--durations=0", "--durations-min=0", *QUICK], 1800.0)
    if status:
        sys.exit(f"the unchanged source fails:\n{said}")
    seconds: dict[str, float] = defaultdict(float)
    for taken, test in re.findall(r"^([\d.]+)s (?:setup|call|teardown) +(\S.*)$", said, re.M):
        seconds[test] += float(taken)
    data = CoverageData(str(folder / ".coverage"))
    data.read()
    runs = {
        Path(file).relative_to(folder).as_posix(): {
            line: {context.rpartition("|")[0] for context in contexts}
            for line, contexts in data.contexts_by_lineno(file).items()
        }
        for file in data.measured_files()
    }
    begun = time.monotonic()
    if (found := failure(folder, [*SEEDED, *PROPERTIES], 1800.0, EXAMPLES)) is not None:
        sys.exit(f"the unchanged source fails: {found}")
    # Several at once share cores, caches and memory; a loop that never ends is late by any measure.
    patience, long_patience = 20 + 4 * max(seconds.values()), 30 + 2 * (time.monotonic() - begun)
    quickest = sorted(seconds, key=lambda test: (round(seconds[test], 1), test))
    return Suite(quickest, runs, patience, long_patience)


def tried(mutant: Mutant, folder: Path, suite: Suite) -> dict[str, object]:
    """What became of one mutant: the stage and the test that killed it, or neither."""
    file, begun = folder / mutant.path, time.monotonic()
    original = file.read_bytes()
    file.write_text(mutant.source, encoding="utf-8")
    tests = suite.of(mutant)
    try:
        by = None
        for some in (tests[:FIRST], tests[FIRST:]):
            by = by or (failure(folder, some, suite.patience) if some else None)
        by = by or failure(folder, [*SEEDED, *PROPERTIES], suite.long_patience, EXAMPLES)
    finally:
        file.write_bytes(original)
    said = {name: value for name, value in asdict(mutant).items() if name not in ("source", "statement")}
    return said | {"by": by, "tests": len(tests), "seconds": round(time.monotonic() - begun, 1)}


def stage(result: dict[str, object]) -> str:
    """What kind of test killed this mutant: the folder of the test, or that it hung, or that nothing could be imported."""
    by = str(result["by"])
    return by.split("/")[1] if by.startswith("tests/") else by if by == "time" else "import"


def why_the_same(mutant: Mutant) -> str | None:
    """Why this change computes the same, if it is listed: by path, removed and added lines, and `beside`, a line next to them."""
    for each in tomllib.loads(EQUIVALENT.read_text(encoding="utf-8")).get("mutant", []):
        is_this = (each["path"], each["removed"], each["added"]) == (mutant.path, mutant.removed, mutant.added)
        if is_this and each.get("beside", "") in mutant.diff:
            return str(each["why"])
    return None


def score(results: list[dict[str, object]]) -> tuple[int, int, float]:
    """(killed, counted, their ratio): of all that are not equivalent."""
    counted = [result for result in results if "why" not in result]
    killed = sum(result["by"] is not None for result in counted)
    return killed, len(counted), killed / len(counted) if counted else 1.0


def page(document: dict[str, Any]) -> str:
    """The results as Markdown: how many were killed, by which kind of test, and every survivor."""
    results = document["results"]
    killed, counted, share = score(results)
    stages = Counter(stage(result) for result in results if result["by"] is not None)
    same = [result for result in results if "why" in result]
    survivors = [result for result in results if result["by"] is None and "why" not in result]
    lines = [
        "# Mutants",
        "",
        f"{killed} of {counted} mutants killed ({share:.1%}), {len(same)} more compute the same as the source.",
        f"Seed {document['seed']} on commit {document['commit']}; Python {document['python']}; "
        f"{os.cpu_count()} cores; {document['seconds'] / 60:.0f} minutes. "
        f"{document['taken_over']} of those killed or equivalent are of an earlier run.",
        "",
        "```",
        document["command"],
        "```",
        "",
        "What is changed, and how: [mutant_sample.py](../../tools/mutant_sample.py).",
        "",
        "| killed by | mutants |",
        "|---|--:|",
        *(f"| {STAGES[name]} | {stages[name]} |" for name in STAGES),
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


def about(seed: int) -> dict[str, Any]:
    """What the results are of."""
    described = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    return {
        "command": " ".join(["python tools/mutants.py", *sys.argv[1:]]),
        "seed": seed,
        "commit": subprocess.run(described, cwd=REPOSITORY, capture_output=True, text=True).stdout.strip(),
        "python": platform.python_version(),
    }


def write(out: Path, document: dict[str, Any]) -> None:
    """The results so far as `out`.md and `out`.json."""
    out.with_suffix(".md").write_text(page(document), encoding="utf-8")
    out.with_suffix(".json").write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def settled_before(out: Path) -> dict[str, dict[str, object]]:
    """The results of mutants that were killed in an earlier run, or listed as equivalent, by what they change."""
    results = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))["results"]
    return {result["diff"]: result for result in results if result["by"] is not None or "why" in result}


def hunt(mutants: list[Mutant], jobs: int, report: Callable[[list[dict[str, object]]], None]) -> None:
    """Try them all, so many at once; after each one, report all results so far."""
    results: list[dict[str, object]] = []
    guard = threading.Lock()
    free: SimpleQueue[Path] = SimpleQueue()

    def one(mutant: Mutant) -> None:
        why, folder = why_the_same(mutant), free.get()
        try:
            result = tried(mutant, folder, suite)
        finally:
            free.put(folder)
        if why is not None and result["by"] is None:
            result["why"] = why
        with guard:
            results.append(result)
            if result["by"] is None and why is None:
                print(f"SURVIVED\n{mutant.diff}\n", flush=True)
            report(results)

    with ExitStack() as trees:
        folders = [trees.enter_context(tree()) for _ in range(jobs)]
        suite = measured(folders[0])
        print(f"the unchanged source passes {len(suite.tests)} tests and the properties", flush=True)
        for folder in folders:
            free.put(folder)
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(one, mutants))


def main() -> None:
    """Sample, try, say how many were killed; exit with 1 below the goal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=300, help="mutants (300)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (0)")
    parser.add_argument("--jobs", type=int, default=2, help="tried at once (2)")
    parser.add_argument("--only", default="", help="of files whose path has this in it")
    parser.add_argument("--goal", type=float, default=0.95, help="the share that has to be killed (0.95)")
    parser.add_argument("--out", type=Path, default=None, help="write NAME.md and NAME.json of the results")
    parser.add_argument(
        "--again", action="store_true", help="try only those that lived in NAME.json and were not listed as equivalent"
    )
    parser.add_argument("--list", action="store_true", help="only print the changes")
    asked = parser.parse_args()
    mutants = sampled(asked.count, asked.seed, asked.only)
    if asked.list:
        print("\n\n".join(mutant.diff for mutant in mutants))
        return
    # Now: what is written may be a file of the repository.
    begun, of = time.monotonic(), about(asked.seed)
    before = settled_before(asked.out) if asked.again else {}
    taken_over = [before[mutant.diff] for mutant in mutants if mutant.diff in before]
    so_far: list[dict[str, object]] = taken_over

    def report(results: list[dict[str, object]]) -> None:
        nonlocal so_far
        so_far = taken_over + results
        killed, counted, _ = score(so_far)
        print(f"{len(so_far)} of {len(mutants)} tried, {killed} of {counted} killed", flush=True)
        if asked.out is not None:
            # After each one: what was found so far outlives an interruption.
            document = {**of, "seconds": time.monotonic() - begun, "taken_over": len(taken_over), "results": so_far}
            write(asked.out, document)

    hunt([mutant for mutant in mutants if mutant.diff not in before], asked.jobs, report)
    killed, counted, share = score(so_far)
    print(f"{killed} of {counted} mutants killed ({share:.1%}).")
    sys.exit(share < asked.goal)


if __name__ == "__main__":
    main()
