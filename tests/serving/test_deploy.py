"""What ships a server: its files say what the command and the settings take, and the tools that read them find nothing wrong."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess

import pytest

from paged.cli import app
from paged.serving import settings as of_server
from paged.serving.settings import read_settings


@pytest.fixture(scope="module")
def deploy(repository):
    return repository / "deploy"


def entry_of(dockerfile):
    """The command with which an image begins."""
    return json.loads(re.search(r"^ENTRYPOINT (\[.*\])$", dockerfile, flags=re.MULTILINE)[1])


def unit_of(text):
    """The assignments of a unit, by name."""
    return dict(line.split("=", 1) for line in text.splitlines() if re.match(r"[A-Z]\w*=", line))


def taken(monkeypatch, capsys, arguments):
    """The settings of a server with these arguments, which the command takes."""
    pytest.importorskip("uvicorn")
    serving = pytest.importorskip("paged.serving.server")
    begun = []
    monkeypatch.setattr(serving, "serve", lambda settings, on_ready: begun.append(settings) or True)
    assert app.run(arguments) == 0, capsys.readouterr().err
    return begun[0]


def test_the_sample_of_settings_is_read_and_has_tenants(deploy):
    settings = read_settings(deploy / "serve.toml", {}, {})
    assert [tenant.name for tenant in settings.tenants] == ["product", "research"]
    assert settings.engine.memory.kv_cache_bytes == 2**30
    assert settings.needs_key


def test_nobody_has_a_key_of_the_sample(deploy):
    settings = read_settings(deploy / "serve.toml", {}, {})
    keys = [*settings.api_keys, *settings.admin_keys, *(key for tenant in settings.tenants for key in tenant.keys)]
    assert keys
    for key in keys:
        # One digit over and over is the digest of nothing that anybody knows.
        assert key.startswith("sha256:") and len(set(of_server.digest_of(key).hex())) == 1


def test_the_image_begins_a_server_that_the_command_knows(deploy, monkeypatch, capsys):
    text = (deploy / "Dockerfile").read_text()
    program, *arguments = entry_of(text)
    assert program == "paged"
    found = taken(monkeypatch, capsys, arguments)
    assert (found.host, found.port) == ("0.0.0.0", 8000)
    assert f"EXPOSE {found.port}" in text and f"http://127.0.0.1:{found.port}/health" in text


def test_the_image_runs_as_no_root_and_holds_what_is_there(deploy, repository):
    text = (deploy / "Dockerfile").read_text()
    stages = re.split(r"^FROM ", text, flags=re.MULTILINE)[1:]
    assert len(stages) == 2
    assert re.findall(r"^USER (.*)$", stages[-1], flags=re.MULTILINE) == ["paged"]
    assert "has never been built" in text.partition("\nARG")[0]
    copied = [line.split()[1:-1] for line in text.splitlines() if line.startswith("COPY ") and "--from" not in line]
    assert [path for paths in copied for path in paths if not (repository / path).exists()] == []
    extras = re.search(r"pip install --no-cache-dir '\.\[(.*)\]'", text)[1].split(",")
    known = (repository / "pyproject.toml").read_text()
    assert [extra for extra in extras if not re.search(rf"^{extra} = ", known, flags=re.MULTILINE)] == []


def test_the_unit_begins_a_server_and_gives_it_the_time_to_drain(deploy, monkeypatch, capsys):
    unit = unit_of((deploy / "paged.service").read_text())
    sample = deploy / "serve.toml"
    line = unit["ExecStart"].replace("${CREDENTIALS_DIRECTORY}/serve.toml", str(sample))
    assert unit["LoadCredential"].startswith("serve.toml:")
    settings = taken(monkeypatch, capsys, shlex.split(line)[1:])
    assert unit["KillMode"] == "mixed"
    assert float(unit["TimeoutStopSec"]) >= settings.shutdown_timeout_s + 10
    assert int(unit["LimitNOFILE"]) >= settings.max_connections + 256
    # The status of settings that are wrong.
    assert unit["RestartPreventExitStatus"] == "2"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze here")
def test_systemd_finds_nothing_wrong_with_the_unit(deploy, tmp_path):
    path = tmp_path / "paged.service"
    # It looks for the program, too, which is installed where the unit is.
    path.write_text((deploy / "paged.service").read_text().replace("/opt/paged/bin/paged", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True, check=False, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture(scope="module")
def composed(deploy):
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((deploy / "compose.yaml").read_text())


def test_the_composed_server_has_its_settings_its_key_and_the_time_to_drain(composed, deploy, monkeypatch, capsys):
    service = composed["services"]["paged"]
    mounted = dict(volume.split(":")[:2][::-1] for volume in service["volumes"])
    command = [
        str(deploy / mounted[each]) if each in mounted else each
        for each in [*entry_of((deploy / "Dockerfile").read_text())[1:], *service["command"]]
    ]
    settings = taken(monkeypatch, capsys, command)
    assert settings.tenants and settings.host == "0.0.0.0"
    assert float(service["stop_grace_period"].removesuffix("s")) >= settings.shutdown_timeout_s + 10
    assert service["ulimits"]["nofile"] >= settings.max_connections + 256
    # Without a key of its own nothing begins.
    assert service["environment"]["PAGED_API_KEY"].startswith("${PAGED_API_KEY:?")
    assert all(port.startswith("127.0.0.1:") for each in composed["services"].values() for port in each["ports"])


def test_files_and_volumes_of_the_composition_are_there(composed, deploy):
    for service in composed["services"].values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert (deploy / source).is_file() if source.startswith("./") else source in composed["volumes"]
    build = composed["services"]["paged"]["build"]
    assert (deploy / build["context"] / build["dockerfile"]).is_file()


def test_prometheus_reads_the_composed_server(composed, deploy):
    yaml = pytest.importorskip("yaml")
    (job,) = yaml.safe_load((deploy / "prometheus.yml").read_text())["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    host, port = target.split(":")
    assert host in composed["services"]
    assert any(each.endswith(f":{port}") for each in composed["services"][host]["ports"])


def has_compose():
    """Whether `docker compose` is there; its `config` asks no daemon."""
    docker = shutil.which("docker")
    return (
        bool(docker) and not subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode
    )


@pytest.mark.skipif(not has_compose(), reason="there is no docker compose here")
def test_compose_finds_nothing_wrong_with_the_composition(deploy, monkeypatch):
    monkeypatch.setenv("PAGED_API_KEY", "a-key")
    command = ["docker", "compose", "-f", deploy / "compose.yaml", "config", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
