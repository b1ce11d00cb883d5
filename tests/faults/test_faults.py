"""The table of planted faults stays alive: each has its place in the sources, and some are found each time (`make faults`: all)."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "tools"))

import faults  # noqa: E402

TABLE = faults.read(REPOSITORY / "tests" / "faults" / "faults.toml")
OF_LAYERS = faults.read(REPOSITORY / "tests" / "faults" / "layers.toml")
OF_SESSIONS = faults.read(REPOSITORY / "tests" / "faults" / "sessions.toml")
# Each is found, and its program shrunk, within a few seconds: by the manager's machine, random programs and the layers'
# machine. `make faults` tries them all.
FOUND_SOON = ["switch-releases-the-wrong-block", "preempted-token-lost", "tail-of-windows-kept"]


def try_faults(*arguments):
    command = [sys.executable, str(REPOSITORY / "tools" / "try_faults.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def functions():
    return faults.functions_of(REPOSITORY)


@pytest.fixture
def room(tmp_path):
    """A copy of the sources with one file, and a fault that is tried on it."""
    source = tmp_path / "scheduler" / "some.py"
    source.parent.mkdir()
    source.write_text("class A:\n    def go(self):\n        self.give(1, 2)\n        return f(x + 1, *y)\n")

    def plant(find, put, function="go"):
        faults.plant(faults.Fault("ours", "It is wrong.", 1, function, find, put), tmp_path)
        return ast.unparse(ast.parse(source.read_text())).splitlines()[-2:]

    return plant


@pytest.mark.parametrize(
    "fault", [*TABLE.values(), *OF_LAYERS.values(), *OF_SESSIONS.values()], ids=lambda fault: fault.name
)
def test_every_fault_has_one_place_in_the_sources_of_today(functions, fault):
    assert faults.place_of(fault, functions)[0].file.is_file()


@pytest.mark.parametrize(
    ("table", "most", "rules", "mark"),
    [(OF_LAYERS, 50, range(1, 19), "layers"), (OF_SESSIONS, 20, (5, 9, 12, 18), "sessions")],
)
def test_faults_of_layers_and_of_sessions_are_other_ones_and_each_breaks_a_rule(table, most, rules, mark):
    assert (
        most // 4 < len(table) <= most and table.keys().isdisjoint(TABLE) and OF_LAYERS.keys().isdisjoint(OF_SESSIONS)
    )
    assert {fault.breaks for fault in table.values()} <= {*rules}
    assert all(getattr(fault, mark) for fault in table.values()) and not any(getattr(f, mark) for f in TABLE.values())


def test_the_table_has_faults_of_both_rooms_and_each_breaks_a_rule(functions):
    rooms = [faults.place_of(fault, functions)[0].file.parent.name for fault in TABLE.values()]
    assert len(TABLE) <= 45 and min(rooms.count(room) for room in faults.ROOMS) >= 12
    assert {fault.breaks for fault in TABLE.values()} <= set(range(1, 16))


@pytest.mark.parametrize(
    ("find", "put", "becomes"),
    [
        ("x + 1", "x", ["        self.give(1, 2)", "        return f(x, *y)"]),
        ("A.give(...)", "pass", ["        pass", "        return f(x + 1, *y)"]),
        ("self.give(A, B)", "self.give(B, A)", ["        self.give(2, 1)", "        return f(x + 1, *y)"]),
        ("return f(A, ...)", "return f(not A, ...)", ["        self.give(1, 2)", "        return f(not x + 1, *y)"]),
    ],
)
def test_a_fault_changes_what_its_pattern_fits(room, find, put, becomes):
    assert room(find, put) == becomes


@pytest.mark.parametrize(
    ("find", "function", "why"),
    [
        ("self.give(1)", "go", "in 0 places of 1 function"),
        ("x + 1", "gone", "in 0 places of 0 functions"),
        ("A + A", "go", "in 0 places"),
        ("A(...)", "go", "in 2 places"),
    ],
)
def test_a_place_that_is_gone_or_there_twice_is_an_error(room, find, function, why):
    with pytest.raises(faults.FaultFailed, match=why):
        room(find, "x", function)


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ('[a]\nsays = "No."\n', "a fault has"),
        ('[a]\nsays = "No"\nbreaks = 1\nin = "f"\nfind = "x"\nput = "y"\n', "no sentence"),
        ('[a]\nsays = "No."\nbreaks = 1\nin = "f"\nfind = "x +"\nput = "y"\n', "no Python"),
    ],
)
def test_an_entry_that_describes_no_fault_is_refused(tmp_path, entry, why):
    (tmp_path / "ours.toml").write_text(entry)
    with pytest.raises(faults.FaultFailed, match=why):
        faults.read(tmp_path / "ours.toml")


def test_faults_are_found_and_their_programs_are_short(tmp_path):
    done = try_faults(*FOUND_SOON, "--no-control", "--programs", 500, "--jobs", 1, "--out", tmp_path / "faults")
    assert done.returncode == 0, done.stdout
    results = json.loads((tmp_path / "faults.json").read_text())["results"]
    assert [result["fault"] for result in results] == FOUND_SOON
    assert all(result["by"] and result["shrunk_calls"] <= 12 for result in results)


def test_a_fault_that_nobody_finds_ends_with_status_1(tmp_path):
    # By its table's name only the machine of layers is run.
    table = tmp_path / "layers.toml"
    table.write_text('[ours]\nsays = "No."\nbreaks = 1\nin = "filled"\nfind = "left <= 0"\nput = "left + 0 <= 0"\n')
    done = try_faults("--table", table, "--no-control", "--examples", 1)
    assert done.returncode == 1
    assert "0 of 1 faults found." in done.stdout, done.stdout
