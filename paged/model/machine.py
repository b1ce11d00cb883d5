"""A description of this machine, for measurements."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from paged import __version__


def processor_name() -> str:
    """Return the processor's name, or its architecture if it has none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def machine() -> dict[str, str]:
    """Return hardware and versions, by name."""
    found = {
        "processor": processor_name(),
        "cores": str(os.cpu_count() or 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "paged": __version__,
    }
    for name in ("numpy", "torch", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
