"""One server for all tests that ask something of a usual one, since each start takes some seconds; and programs without some library."""

import pytest

from .serving_process import served  # noqa: TID252

WITHOUT = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name in {names}: raise ModuleNotFoundError(f'No module named {{name!r}}', name=name)
sys.meta_path.insert(0, Finder())
"""


@pytest.fixture(scope="session")
def usual_server():
    with served(max_sequences=8) as found:
        yield found


@pytest.fixture
def run_without(run_python, repository):
    """Run a program as if these modules were not installed."""

    def run(names, program):
        return run_python("-c", WITHOUT.format(names=names) + program, env={"PYTHONPATH": str(repository)})

    return run
