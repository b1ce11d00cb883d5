"""The pytest plugin, as somebody who has paged installed meets it: in a folder of their own, with their own tests."""

import json

import pytest

LOSES = '''
from paged import BlockManager


class Loses(BlockManager):
    """Gives nothing back."""

    def free(self, rows):
        del rows


def build(world):
    return Loses(world.num_blocks, world.block_size, host_blocks=world.host_blocks, prefix_caching=world.prefix_caching)
'''


@pytest.fixture
def tested(run_python, tmp_path):
    """tested(source, *options): exit status and output of pytest on a file with these tests."""

    def call(source, *options):
        (tmp_path / "test_theirs.py").write_text(source)
        result = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", *options, timeout=600)
        return result.returncode, result.stdout + result.stderr

    return call


def test_rigs_are_drained_what_is_watched_is_checked_what_shows_at_the_end_is_an_error_and_its_program_is_saved(
    tested, tmp_path
):
    (tmp_path / "theirs.py").write_text(LOSES)
    status, out = tested(
        """
import os

import theirs
from paged import BlockManager, Request
from paged.testing import EngineRequest, StandInEngine
from paged.testing.machines import ManagerMachine, num_examples, run_machine


def use(rig):
    rig.allocate([rig.add([0, 1, 2], None)], [3])
    rig.confirm()


def watch(manager):
    manager.allocate([manager.add([0, 1, 2])], [3])


class Theirs(theirs.BlockManager):
    def check(self):
        return [*super().check(), "2: a block too many"]


def test_rigs(paged_scheduler_rig, paged_manager_rig, paged_engine_rig):
    rig = paged_scheduler_rig()
    rig.add(Request(id="a", prompt=[1, 0, 1], max_tokens=2))
    rig.schedule()
    use(paged_manager_rig())
    paged_engine_rig(build=StandInEngine).add(EngineRequest(id="a", prompt=[1, 0]))


def test_watched(paged_checked):
    watch(paged_checked(BlockManager(4, 2)))


def test_examples():
    assert num_examples(250) == 7
    assert os.environ["PAGED_EXAMPLES"] == "7"
    run_machine(ManagerMachine, few=250, steps=5)


def test_broken_rig(paged_manager_rig):
    use(paged_manager_rig(build=theirs.build))


def test_broken_watched(paged_checked):
    watch(paged_checked(Theirs(4, 2)))
""",
        "--paged-examples",
        "7",
        "--paged-failures",
        "found",
    )
    assert status == 1
    assert "5 passed, 2 errors" in out, out
    assert "rig = ManagerRig(ManagerWorld(" in out
    assert "paged check replay found" in out
    assert "Theirs: 2: a block too many" in out
    (file,) = (tmp_path / "found").iterdir()
    assert json.loads(file.read_bytes())["build"] == "theirs:build"


def test_a_number_of_examples_that_is_no_number_is_refused(tested):
    status, out = tested("def test_theirs(): pass", "--paged-examples", "none")
    assert status == 4
    assert "'none' is no number of examples; at least 1 is needed" in out
