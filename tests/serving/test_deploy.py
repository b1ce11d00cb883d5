"""What ships a server: its files say what the command and the settings take, and the tools that read them find nothing wrong."""

import json
import re
import shlex
import shutil
import subprocess
import tomllib

import pytest

from paged.serving.settings import read_settings


@pytest.fixture(scope="module")
def deploy(repository):
    return repository / "deploy"


@pytest.fixture(scope="module")
def dockerfile(deploy):
    return (deploy / "Dockerfile").read_text()


@pytest.fixture(scope="module")
def entry(dockerfile):
    """The command with which the image begins."""
    return json.loads(re.search(r"^ENTRYPOINT (\[.*\])$", dockerfile, flags=re.MULTILINE)[1])


def test_the_sample_of_settings_is_read_and_nobody_has_a_key_of_it(deploy):
    settings = read_settings(deploy / "serve.toml", {}, {})
    assert [tenant.name for tenant in settings.tenants] == ["product", "research"]
    assert settings.engine.memory.kv_cache_bytes == 2**30
    assert settings.needs_key
    keys = [*settings.api_keys, *settings.admin_keys, *(key for tenant in settings.tenants for key in tenant.keys)]
    # One digit over and over is the digest of nothing that anybody knows.
    assert keys and all(re.fullmatch(r"sha256:(.)\1{63}", key) for key in keys)


def test_the_image_begins_a_server_that_the_command_knows(dockerfile, entry, settings_of):
    assert entry[:2] == ["paged", "serve"]
    found = settings_of(*entry[2:])
    assert (found.host, found.port) == ("0.0.0.0", 8000)
    assert f"EXPOSE {found.port}" in dockerfile and f"http://127.0.0.1:{found.port}/health" in dockerfile


def test_the_image_runs_as_no_root_and_holds_what_is_there(dockerfile, repository):
    stages = re.split(r"^FROM ", dockerfile, flags=re.MULTILINE)[1:]
    assert (len(stages), re.findall(r"^USER (.*)$", stages[-1], flags=re.MULTILINE)) == (2, ["paged"])
    copied = [line.split()[1:-1] for line in dockerfile.splitlines() if re.match(r"COPY (?!.*--from)", line)]
    assert [path for paths in copied for path in paths if not (repository / path).exists()] == []
    extras = re.search(r"pip install --no-cache-dir '\.\[(.*)\]'", dockerfile)[1].split(",")
    known = tomllib.loads((repository / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras) <= set(known)


def test_the_unit_begins_a_server_and_gives_it_the_time_to_drain(deploy, settings_of):
    unit = dict(re.findall(r"^([A-Z]\w*)=(.*)$", (deploy / "paged.service").read_text(), flags=re.MULTILINE))
    assert unit["LoadCredential"].startswith("serve.toml:")
    line = unit["ExecStart"].replace("${CREDENTIALS_DIRECTORY}/serve.toml", str(deploy / "serve.toml"))
    _, command, *arguments = shlex.split(line)
    assert command == "serve"
    settings = settings_of(*arguments)
    assert unit["KillMode"] == "mixed"
    assert float(unit["TimeoutStopSec"]) >= settings.shutdown_timeout_s + 10
    assert int(unit["LimitNOFILE"]) >= settings.max_connections + 256
    # The status of settings that are wrong.
    assert unit["RestartPreventExitStatus"] == "2"


def ran(*command):
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    return done.returncode, done.stderr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze here")
def test_systemd_finds_nothing_wrong_with_the_unit(deploy, tmp_path):
    path = tmp_path / "paged.service"
    # It looks for the program, too, which is installed where the unit is.
    path.write_text((deploy / "paged.service").read_text().replace("/opt/paged/bin/paged", "/bin/true"))
    assert ran("systemd-analyze", "verify", path) == (0, "")


def yaml_of(path):
    return pytest.importorskip("yaml").safe_load(path.read_text())


@pytest.fixture(scope="module")
def composed(deploy):
    return yaml_of(deploy / "compose.yaml")


def test_the_composed_server_has_its_settings_its_key_and_the_time_to_drain(composed, deploy, entry, settings_of):
    service = composed["services"]["paged"]
    mounted = dict(volume.split(":")[:2][::-1] for volume in service["volumes"])
    arguments = [*entry[2:], *service["command"]]
    settings = settings_of(*(deploy / mounted[each] if each in mounted else each for each in arguments))
    assert settings.tenants and settings.host == "0.0.0.0"
    assert float(service["stop_grace_period"].removesuffix("s")) >= settings.shutdown_timeout_s + 10
    assert service["ulimits"]["nofile"] >= settings.max_connections + 256
    # Without a key of its own nothing begins.
    assert service["environment"]["PAGED_API_KEY"].startswith("${PAGED_API_KEY:?")
    assert all(port.startswith("127.0.0.1:") for each in composed["services"].values() for port in each["ports"])


def test_files_volumes_and_the_server_that_prometheus_reads_are_there(composed, deploy):
    services = composed["services"]
    for service in services.values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert (deploy / source).is_file() if source.startswith("./") else source in composed["volumes"]
    build = services["paged"]["build"]
    assert (deploy / build["context"] / build["dockerfile"]).is_file()
    (job,) = yaml_of(deploy / "prometheus.yml")["scrape_configs"]
    ((target,),) = (each["targets"] for each in job["static_configs"])
    host, port = target.split(":")
    assert any(each.endswith(f":{port}") for each in services[host]["ports"])


def test_compose_finds_nothing_wrong_with_the_composition(deploy, monkeypatch):
    # Its `config` asks no daemon.
    if shutil.which("docker") is None or ran("docker", "compose", "version")[0]:
        pytest.skip("there is no docker compose here")
    monkeypatch.setenv("PAGED_API_KEY", "a-key")
    assert ran("docker", "compose", "-f", deploy / "compose.yaml", "config", "--quiet") == (0, "")
