"""What the tests of benchmarks share: their scripts."""

import sys
from importlib import import_module

import pytest


@pytest.fixture(scope="module")
def benchmark_script(repository):
    """benchmark_script(name): the module of benchmarks/ of that name, which is forgotten with all that it loads from there."""
    before = {*sys.modules}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(repository / "benchmarks"))
        yield import_module
    for name in {*sys.modules} - before:
        if getattr(sys.modules[name], "__file__", None) == str(repository / "benchmarks" / f"{name}.py"):
            del sys.modules[name]
