"""What all tests share: how many examples Hypothesis tries, and an environment that another shell cannot bend.

`make test` draws the same few examples every time, so that a red run is red again; `make campaign` sets PAGED_EXAMPLES
and draws new ones. A test that names its own `max_examples` keeps it; state machines name none, so that both reach them.
"""

import gc
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

import paged.study  # noqa: F401  (tests name its policies)

# As the command line has it: a thread of torch's that waits beside other work is not to spin. It counts before torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
if "PYTEST_XDIST_WORKER" in os.environ:
    # Every core has a worker. What depends on the number of threads sets it.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Two slow cores must not turn a deadline or the time to draw an example into a failure.
settings.register_profile(
    "test", max_examples=50, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "campaign",
    max_examples=int(os.environ.get("PAGED_EXAMPLES", "20000")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile("campaign" if "PAGED_EXAMPLES" in os.environ else "test")
if "PAGED_EXAMPLES" not in os.environ:
    # Hypothesis draws numbers that it finds in the sources that are loaded: any change of ours, and which tests run in the same process,
    # would change every test's examples. There is no setting for it; campaigns keep it.
    assert hasattr(providers, "_get_local_constants"), "Hypothesis has another name for it by now"
    providers._get_local_constants = providers.Constants

# The collector would look at all that is imported and collected again and again, and find nothing.
gc.disable()


def pytest_collection_finish() -> None:
    """Collect from now on, but not among what is there already."""
    gc.freeze()
    gc.enable()


REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: many tests wait for a program that they started."""
    return (os.cpu_count() or 1) + 1


SHARED = ("tests/serving/", "tests/model/parallel/")
LONG = """properties/test_state_machines properties/test_layer_groups properties/test_wishes faults/ storage/test_faults_of_disks paged/test_cli
attention/test_on_gpus docs/test_pages examples/ paged/test_doctor"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the run end evenly. With `--dist worksteal` each worker gets an equal part of the list, and one that has no test left takes the later
    half of another's. What shares servers or ranks begins the first part, for another worker would begin its own; the files of LONG, in which
    single tests take a quarter of a minute or more, begin the others: one that begins last leaves all other workers idle."""
    places = {f"tests/{name}": place for place, name in enumerate(LONG.split())}
    parts: list[list[pytest.Item]] = [[] for _ in range(max(2, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "2"))))]
    rest: list[pytest.Item] = []
    for item in items:
        place = next((place for name, place in places.items() if item.nodeid.startswith(name)), None)
        is_shared = item.nodeid.startswith(SHARED)
        (parts[0] if is_shared else rest if place is None else parts[1 + place % (len(parts) - 1)]).append(item)
    for number, part in enumerate(parts):
        num = max(0, (len(items) + number) // len(parts) - len(part))
        part += rest[:num]
        rest = rest[num:]
    items[:] = sum(parts, []) + rest  # noqa: RUF017


RunPython = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def repository() -> Path:
    """The folder that holds pyproject.toml."""
    return REPOSITORY


@pytest.fixture(scope="session")
def text_of(repository):
    """text_of("README.md"): a page, by its path in the repository."""
    return lambda path: (repository / path).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(request, text_of):
    """The page that the file tests, which is named in its PAGE."""
    return text_of(request.module.PAGE)


@pytest.fixture(scope="module")
def tool(request, repository):
    """The module of tools/ that the file names in its TOOL."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(repository / "tools")
        yield import_module(request.module.TOOL)


@pytest.fixture(scope="session")
def fences():
    """fences(page, language): the blocks of that language, of none where it is empty."""
    every = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
    return lambda page, language: [text for name, text in every.findall(page) if name == language]


@pytest.fixture
def handled_by_python():
    """Python's own handler of Ctrl-C, which a shell's background job does not have."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def run_python(tmp_path: Path) -> RunPython:
    """Run `python *arguments` in a fresh interpreter and an empty folder, warnings being errors there, too.

    `cwd` and `env` (added to a clean environment) may be given. The exit status is the caller's to judge.
    """

    def run(
        *arguments: str, cwd: Path = tmp_path, env: dict[str, str] | None = None, timeout: float = 600
    ) -> "subprocess.CompletedProcess[str]":
        # PYTHONPATH stays: it says which checkout is under test.
        clean = {
            key: value
            for key, value in os.environ.items()
            if key == "PYTHONPATH" or not key.startswith(("PYTHON", "COV_", "PAGED_"))
        }
        return subprocess.run(
            [sys.executable, "-W", "error", *arguments],
            cwd=cwd,
            env={**clean, **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    return run


WITHOUT = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name in {names}: raise ModuleNotFoundError(f'No module named {{name!r}}', name=name)
sys.meta_path.insert(0, Finder())
"""


@pytest.fixture
def run_without(run_python, repository):
    """Run a program as if these modules were not installed."""

    def run(names, program):
        # A program of one thread may fork.
        env = {"PYTHONPATH": str(repository), "OPENBLAS_NUM_THREADS": "1"}
        return run_python("-c", WITHOUT.format(names=names) + program, env=env)

    return run
