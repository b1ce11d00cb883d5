"""One server for all tests that ask something of a usual one: each start takes some seconds."""

import pytest

from .serving_process import served  # noqa: TID252


@pytest.fixture(scope="session")
def usual_server():
    with served(max_sequences=8) as found:
        yield found
