"""vLLM's own scheduler tests on its scheduler and on ours, against the list of what happens: `python -m conformance.vllm.scheduler_tests`.

Counts the tests that vLLM's scheduler passes here, by what ours does: pass, refused (by name, at the start or for one request), private
(reads or writes what only vLLM's own class has), differs (on purpose). Ends with 1 where scheduler_tests.toml says otherwise; `--write`
makes it anew, keeping the reasons that were written by hand. The tests come with install.py; nothing of them is kept here but names.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from conformance.vllm.install import TESTS, VERSION

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_suffix(".toml")
OUTCOMES = ("pass", "refused", "private", "differs")
HEAD = f"""\
# What paged's scheduler does in the tests of vLLM {VERSION}'s tests/v1/core/test_scheduler.py that vLLM's own scheduler passes without a
# download, with an adapter that lends names to be read (lent.py). `make vllm` fails where this is not so.
"""
UNTOUCHED = "makes no scheduler of ours"
Verdict = tuple[str, str]


def run(file: Path, *plugin: str) -> subprocess.Popen[bytes]:
    """Start the tests; the results come to the file."""
    given = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(ROOT)]),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    command = [sys.executable, "-m", "pytest", "-c", "pytest.ini", "-q", *plugin, f"--junitxml={file}"]
    return subprocess.Popen([*command, "tests/v1/core/test_scheduler.py"], cwd=TESTS, env=given, stdout=subprocess.PIPE)


def results(file: Path) -> dict[str, str | None]:
    """The first line of what ended each test, None for one that passed; tests that were skipped are left out."""
    found: dict[str, str | None] = {}
    for case in ElementTree.parse(file).iter("testcase"):
        problems = [case.find(kind) for kind in ("failure", "error")]
        texts = [each.get("message") or "?" for each in problems if each is not None]
        made_none = case.find("properties/property[@name='made'][@value='0']") is not None
        if case.find("skipped") is None:
            found[str(case.get("name"))] = texts[0].split("\n")[0] if texts else UNTOUCHED if made_none else None
    return found


def verdict_of(problem: str | None) -> Verdict | None:
    """What the problem says of itself; None where only a reader of the test can tell."""
    if problem in (None, UNTOUCHED):
        return "pass", problem or ""
    if "RefusedByPaged" in problem:
        return "refused", "; ".join(re.findall(r"(?:carry: |\); )([\w -]+?) \(", problem))
    absent = re.search(r"AttributeError: .*Lent\w+.* has no (?:attribute '(\w+)'|setter)", problem)
    return ("private", absent[1] or "a property is written to") if absent else None


def read() -> dict[str, Verdict]:
    """The list: test → outcome and why."""
    groups = tomllib.loads(LIST.read_text())["group"] if LIST.exists() else []
    return {name: (group["outcome"], group["why"]) for group in groups for name in group["tests"]}


def write(verdicts: dict[str, Verdict]) -> None:
    """The list, by outcome and reason."""
    text = HEAD
    for outcome, why in sorted(set(verdicts.values()), key=lambda each: (OUTCOMES.index(each[0]), each[1])):
        names = sorted(name for name, verdict in verdicts.items() if verdict == (outcome, why))
        lines = "".join(f'    "{name}",\n' for name in names)
        text += f'\n[[group]]\noutcome = "{outcome}"\nwhy = "{why}"\ntests = [\n{lines}]\n'
    LIST.write_text(text)


def run_both() -> dict[str, str | None]:
    """What ended ours in each test that theirs passes."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, "theirs.xml"), Path(folder, "ours.xml")]
        for process in [run(files[0]), run(files[1], "-p", "conformance.vllm.lent")]:
            said, _ = process.communicate()
            if process.returncode not in (0, 1):
                sys.exit(f"vLLM's tests did not run:\n{said.decode()}")
        theirs, ours = map(results, files)
    return {name: ours.get(name, "did not run") for name, problem in theirs.items() if problem is None}


def main() -> int:
    """Run both, compare, count."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="make the list anew")
    asked = parser.parse_args()
    problems, listed = run_both(), read()
    verdicts = {}
    for name, problem in problems.items():
        by_hand = listed.get(name, ("differs", ""))
        verdicts[name] = verdict_of(problem) or (by_hand if by_hand[0] != "pass" else ("differs", ""))
    if asked.write:
        write(verdicts)
    wrong = [
        f"{name}: has no reason yet: {problems[name]}" for name, each in verdicts.items() if each == ("differs", "")
    ]
    if not asked.write:
        wrong += [
            f"{name}: the list says {listed.get(name)}, and what happened is {verdicts.get(name)}: {problems.get(name)}"
            for name in sorted(listed.keys() | verdicts.keys())
            if listed.get(name) != verdicts.get(name)
        ]
    counts = Counter(outcome for outcome, _ in verdicts.values())
    print(f"of {len(verdicts)} tests that vLLM {VERSION}'s scheduler passes, ours:", dict(counts.most_common()))
    print(*wrong, sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
