"""Write down what `paged.integrations.vllm` uses of the vLLM that is installed: names, fields, and members of enumerations.

    PYTHONPATH=. .venv-vllm/bin/python -m conformance.vllm.record > tests/integrations/vllm_interface.json

Tests build stand-ins from it, so that the plug-in runs where no vLLM is; a test with vLLM compares the two. Knows names and fields.
"""

from __future__ import annotations

import json
import sys
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from importlib import import_module
from typing import Any

from paged.integrations.vllm.needed import NEEDED, installed


def recorded() -> dict[str, Any]:
    """Version and names, as the file has them."""
    names = {}
    for name in NEEDED:
        module, _, attribute = name.partition(":")
        names[name] = described(getattr(import_module(module), attribute))
    return {"version": installed(), "names": names}


def described(found: Any) -> dict[str, Any]:
    """What kind of thing it is, and of what it is made. A field that has to be given has no default here."""
    if isinstance(found, type) and issubclass(found, Enum):
        return {"kind": "enum", "members": {member.name: member.value for member in found}}
    if is_dataclass(found):
        return {"kind": "dataclass", "fields": {field.name: _default(field) for field in fields(found) if field.init}}
    if hasattr(found, "__struct_fields__"):
        num_needed = len(found.__struct_fields__) - len(found.__struct_defaults__)
        return {
            "kind": "struct",
            "fields": {
                field: "needed" if place < num_needed else "given"
                for place, field in enumerate(found.__struct_fields__)
            },
        }
    if hasattr(found, "_fields"):
        return {"kind": "tuple", "fields": dict.fromkeys(found._fields, "needed")}
    if isinstance(found, type):
        return {"kind": "class", "abstract": sorted(getattr(found, "__abstractmethods__", ()))}
    return {"kind": "function"}


def _default(field: Any) -> str:
    is_needed = field.default is MISSING and field.default_factory is MISSING
    return "needed" if is_needed else "given"


if __name__ == "__main__":
    json.dump(recorded(), sys.stdout, indent=1)
    print()
