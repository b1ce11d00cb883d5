"""Threads of the tests of attention; without torch there are no such tests."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

if find_spec("torch") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    import torch


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """On two busy cores the threads of a small product wait for each other, for ten times as long as it takes."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
