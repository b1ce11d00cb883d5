"""Servers that many tests ask, since each start takes some seconds."""

from importlib.util import find_spec

import pytest

from .http_client import got  # noqa: TID252
from .serving_process import served  # noqa: TID252

if not all(map(find_spec, ("torch", "fastapi", "uvicorn", "zmq", "prometheus_client"))):
    # The extra `serve` brings them.
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def usual_server():
    with served(max_pinned=20) as found:
        yield found
        assert got(found, "/debug/check").body == []


@pytest.fixture(scope="session")
def impatient_server():
    """One that waits for no slow client, lets pages of one origin ask, and has a policy of the study."""
    options = {
        "header_timeout_s": 1.5, "body_timeout_s": 1.5, "stall_timeout_s": 1.0, "allowed_origin": "https://a.example",
        "policy": "static",
    }  # fmt: skip
    with served(**options) as found:
        yield found


@pytest.fixture(scope="session")
def odd_server():
    """One with keys, with names for its model, and with little memory in which nothing is kept."""
    keys, memory = {"api_key": "sk-right", "admin_key": "sk-admin"}, {"blocks": 80, "prefix_caching": False}
    with served(**keys, **memory, served_model_name=["a", "b"]) as found:
        yield found


TENANTS = """
api_keys = ["right"]
tenants = [{name = "a", keys = ["key-a"]}, {name = "b", keys = ["key-b"]}]
"""


@pytest.fixture(scope="session")
def tenants_server(tmp_path_factory):
    """One with a key of its own and two tenants, with little memory, and without a key of an admin."""
    config = tmp_path_factory.mktemp("tenants") / "serve.toml"
    config.write_text(TENANTS)
    with served(config=config, blocks=80, max_pinned=40) as found:
        yield found


@pytest.fixture
def settings_of(monkeypatch, capsys):
    """The settings of a server with these arguments, which the command takes, without beginning one."""
    from paged.cli import app
    from paged.serving import server as serving

    def call(*arguments):
        found = []
        monkeypatch.setattr(serving, "serve", lambda settings, on_ready: found.append(settings) or True)
        assert app.run(["serve", *map(str, arguments)]) == 0, capsys.readouterr().err
        return found[0]

    return call
