"""What the kit found is a small file, and running it again finds the same; and the pytest plugin, in another folder."""

import json
import random
import shutil
import sys
from pathlib import Path

import msgspec
import pytest

from paged import BlockManager, Hint, Request, Scheduler
from paged.testing import (
    ManagerRig,
    ManagerWorld,
    SchedulerRig,
    Violation,
    machines,
    random_program,
    random_world,
    soak,
)
from paged.testing.machines import ManagerMachine, run_machine
from paged.testing.saved import imported, keep, load, rerun, save
from paged.testing.world import build_scheduler

FIXTURES = Path(__file__).with_name("fixtures")


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """What builds a manager with a fault, in a module of its own that can be imported."""
    shutil.copy(FIXTURES / "theirs.txt", tmp_path / "theirs.py")
    monkeypatch.syspath_prepend(tmp_path)
    yield imported("theirs:build")
    sys.modules.pop("theirs")


@pytest.fixture
def failing(theirs):
    """Calls that show the fault."""

    def fail():
        rig = ManagerRig(ManagerWorld(num_blocks=4, block_size=1), theirs)
        row = rig.add([0, 1, 2], None)
        rig.allocate([row], [3])
        rig.confirm()
        rig.free([row])

    return fail


@pytest.fixture
def failure(theirs, failing, tmp_path):
    """The file of a violation of it."""
    with pytest.raises(Violation) as caught:
        failing()
    return save(caught.value, tmp_path / "failures", theirs)


def broken(program):
    """The violation that this program ends with, as a rig that fails says it."""
    return Violation(["1: something"], program)


def test_a_program_of_a_scheduler_comes_back_as_it_was(tmp_path):
    for seed in range(4):
        rig = random_program(seed, 60)
        saved = load(save(broken(rig.program), tmp_path))
        assert saved.program == rig.program, seed
        assert rerun(saved) is None, seed


@pytest.mark.parametrize("namespace", [None, 1, True, "1", b"\x00\xff", ("a", (1, b"b"), None)])
def test_a_program_of_a_manager_comes_back_as_it_was(namespace, tmp_path):
    rig = ManagerRig(ManagerWorld(num_blocks=4))
    row = rig.add([0, 1, 2], namespace)
    rig.allocate([row], [3])
    rig.misuse("free", [row, 77])
    rig.confirm()
    saved = load(save(broken(rig.program), tmp_path))
    assert saved.program == rig.program
    assert type(saved.program.calls[0][1][1]) is type(namespace)
    assert rerun(saved) is None


def test_every_field_of_a_request_and_of_a_hint_comes_back(tmp_path):
    fields = {"max_tokens": 3, "stop_token_ids": (1,), "priority": -1, "salt": "a", "extra_key": (1, b"x", "y")}
    rig = SchedulerRig(random_world(random.Random(0)))
    rig.calls.append(("add", (Request(id="r0", prompt=[1, 0], **fields),)))
    rig.calls.append(("hint", (Hint(action="pin", tokens=[1, 0], extra_key=("a", 1), lasts=3.0, tenant="t"),)))
    rig.calls.append(("hint", (Hint(action="end", session="s"),)))
    assert load(save(broken(rig.program), tmp_path)).program.calls == tuple(rig.calls)


def test_what_a_machine_finds_is_saved_and_says_how_to_run_it_again(theirs, failing, tmp_path, monkeypatch):
    class TheirMachine(ManagerMachine):
        build = staticmethod(theirs)

    # In the place of Hypothesis, which would look for a failure, and for a shorter one, for half a minute.
    monkeypatch.setattr(machines, "run_state_machine_as_test", lambda machine, settings: failing())
    monkeypatch.setenv("PAGED_FAILURES", str(tmp_path / "failures"))
    with pytest.raises(Violation) as caught:
        run_machine(TheirMachine, few=1)
    (file,) = (tmp_path / "failures").iterdir()
    assert f"paged check replay {file}" in caught.value.__notes__[-1]
    assert load(file).program == caught.value.program


def test_what_was_found_is_found_again_and_not_in_another_manager(failure):
    saved = load(failure)
    assert saved.build == "theirs:build"
    again = rerun(saved)
    assert again is not None
    assert (again.found, again.program) == (saved.found, saved.program)
    assert rerun(saved, build=lambda world: BlockManager(world.num_blocks, world.block_size)) is None


def test_a_soak_saves_what_it_finds(tmp_path, monkeypatch):
    class Losing(Scheduler):
        def abort(self, request_id):
            return None

    monkeypatch.setenv("PAGED_FAILURES", str(tmp_path))
    with pytest.raises(Violation) as caught:
        soak(500, build=lambda world: build_scheduler(world, Losing))
    (file,) = tmp_path.iterdir()
    assert load(file).program == caught.value.program


def test_the_command_says_whether_it_still_fails(failure, paged, tmp_path):
    status, out, err = paged("check", "replay", failure)
    assert (status, err) == (1, "")
    assert out.splitlines()[0] == load(failure).found[0]
    assert "rig = ManagerRig(ManagerWorld(" in out
    status, out, err = paged("check", "replay", failure, "--json")
    document = json.loads(out)
    assert (status, err, document["found_now"]) == (1, "", document["found_then"])
    mended = msgspec.json.decode(failure.read_bytes()) | {"build": None}
    failure.write_bytes(msgspec.json.encode(mended))
    status, out, err = paged("check", "replay", failure)
    assert (status, err) == (0, "")
    assert "nothing violated any more" in out
    assert paged("check", "replay", failure, "--build", "theirs:build")[0] == 1


class Factory:
    def build(self, world):
        return None


@pytest.mark.parametrize("build", [lambda world: None, Factory().build], ids=["a lambda", "a method"])
def test_a_subject_that_no_name_finds_again_has_to_be_named(build, tmp_path, paged, monkeypatch):
    rig = ManagerRig(ManagerWorld())
    rig.add([0, 1], None)
    file = save(broken(rig.program), tmp_path, build=build)
    status, out, err = paged("check", "replay", file)
    assert (status, out) == (2, "")
    assert "say what builds it with --build MODULE:NAME" in err
    assert paged("check", "replay", file, "--build", "paged.testing.manager_rig:build_manager")[0] == 0
    violation = broken(rig.program)
    monkeypatch.setenv("PAGED_FAILURES", str(tmp_path))
    keep(violation, build)
    assert violation.__notes__[-1].endswith(" --build MODULE:NAME")


@pytest.mark.parametrize(
    ("argument", "folder", "why"),
    [({1, 2}, ".", "{1, 2} of type set cannot be saved"), ("\udc80", ".", ""), (1, "file/folder", "")],
    ids=["a set", "half a pair", "no folder"],
)
def test_what_cannot_be_saved_or_written_does_not_hide_what_was_found(argument, folder, why, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    rig = ManagerRig(ManagerWorld())
    rig.calls.append(("add", (argument,)))
    violation = broken(rig.program)
    monkeypatch.setenv("PAGED_FAILURES", str(tmp_path / folder))
    keep(violation)
    assert violation.__notes__[-1].startswith("Not saved: ") and why in violation.__notes__[-1]


def test_rigs_are_drained_what_is_watched_is_checked_what_shows_at_the_end_is_an_error_and_its_program_is_saved(
    run_python, tmp_path
):
    for name, text in (("theirs", "theirs"), ("test_theirs", "their_tests")):
        shutil.copy(FIXTURES / f"{text}.txt", tmp_path / f"{name}.py")
    options = ("--paged-examples", "7", "--paged-failures", "found")
    result = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", *options)
    out = result.stdout + result.stderr
    assert result.returncode == 1
    assert "5 passed, 2 errors" in out, out
    assert "rig = ManagerRig(ManagerWorld(" in out
    assert "paged check replay found" in out
    assert "Theirs: 2: a block too many" in out
    (file,) = (tmp_path / "found").iterdir()
    assert json.loads(file.read_bytes())["build"] == "theirs:build"


def test_a_number_of_examples_that_is_no_number_is_refused(pytestconfig):
    with pytest.raises(pytest.UsageError, match="'none' is no number of examples; at least 1 is needed"):
        pytestconfig._parser.parse(["--paged-examples", "none"])
