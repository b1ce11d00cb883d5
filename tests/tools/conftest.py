"""What the tests of tools share: the tool, which each file names in TOOL."""

from importlib import import_module

import pytest


@pytest.fixture(scope="module")
def tool(request, repository):
    """The module of tools/ that the file tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(repository / "tools")
        yield import_module(request.module.TOOL)
