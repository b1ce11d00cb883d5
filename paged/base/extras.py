"""The message for a name whose libraries are not installed.

An install without extras has numpy and msgspec, which the memory layer, the scheduler and the simulator need. The
command line, plots and running a model need more.
"""

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from paged.errors import MissingExtra

EXTRAS = {
    "torch": "engine",
    "transformers": "engine",
    "tokenizers": "engine",
    "safetensors": "engine",
    "tqdm": "engine",
    "xformers": "gpu",
    "triton": "gpu",
    "llguidance": "grammar",
    "plotly": "study",
    "pyarrow": "study",
    "typer": "cli",
    "rich": "cli",
    "fastapi": "serve",
    "starlette": "serve",
    "pydantic": "serve",
    "uvicorn": "serve",
    "httptools": "serve",
    "uvloop": "serve",
    "zmq": "serve",
    "prometheus_client": "serve",
    "opentelemetry": "otel",
    "ray": "ray",
}
"""The extra that brings each library."""

DISTRIBUTIONS = {"opentelemetry": "opentelemetry-sdk", "zmq": "pyzmq"}
"""The name to install, for each library that is imported by another name."""


def installed_by(extra: str) -> str:
    """Return the command that installs an extra. No index has this package, so it installs a checkout."""
    return f"`pip install '.[{extra}]'` in a checkout of paged"


def has_extra(extra: str) -> bool:
    """Whether every library of an extra is installed. Loads none."""
    try:
        return all(find_spec(library) for library, brought_by in EXTRAS.items() if brought_by == extra)
    except ModuleNotFoundError:
        # A finder of modules may raise this, as an import does.
        return False


def import_with_extra(module: str, wanted: str) -> ModuleType:
    """Import the module, which offers `wanted`. Raises MissingExtra if a library is missing that an extra brings."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        extra = EXTRAS.get(library)
        if extra is None:
            raise
        raise MissingExtra(
            f"paged.{wanted} needs {library}, which is not installed; {installed_by(extra)} brings it.",
            name=error.name,
        ) from None


def leave_torch_out() -> None:
    """Load transformers without torch, which a server's front, without a model, does not need. Saves 2 s and 300 MB."""
    if "torch" in sys.modules or find_spec("transformers") is None:
        return
    sys.modules["torch"] = None  # type: ignore[assignment]
    advice = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    before = os.environ.setdefault(advice, "")
    os.environ[advice] = "1"
    try:
        import_module("transformers")
    finally:
        os.environ[advice] = before
