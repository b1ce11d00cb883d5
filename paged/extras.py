"""What is said when a name is wanted whose libraries are not installed.

The memory layer does without torch and transformers; what runs a model needs them, and they come with an extra. Knows which extra
brings what.
"""

from importlib import import_module
from types import ModuleType

_ENGINE = ("torch", "transformers", "tokenizers", "safetensors")


class MissingExtra(ImportError):
    """A library that an optional part of paged needs is not installed; the message says what installs it."""


def import_with_extra(module: str, wanted: str) -> ModuleType:
    """Import the module, which offers `wanted`. Raises MissingExtra when the `engine` extra is not installed."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _ENGINE:
            raise
        raise MissingExtra(
            f"paged.{wanted} needs {error.name}, which is not installed; pip install 'paged[engine]' brings it.",
            name=error.name,
        ) from None
