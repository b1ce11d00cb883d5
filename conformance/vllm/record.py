"""Write down what `paged.integrations.vllm` uses of the vLLM that is installed: names, fields, and members of enumerations.

    PYTHONPATH=. .venv-vllm/bin/python -m conformance.vllm.record > tests/integrations/vllm_interface.json
    PYTHONPATH=. .venv-vllm33/bin/python -m conformance.vllm.record tests/integrations/vllm_interface.json > tests/integrations/vllm_interface_0.33.json

Given another version's record, only what differs from that. Tests build stand-ins from these, so that the plug-in runs where no vLLM is; a test
with vLLM compares the two. Knows names and fields.
"""

from __future__ import annotations

import json
import sys
from dataclasses import is_dataclass
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any

from paged.integrations.fitting import fields_of
from paged.integrations.vllm.needed import NEEDED, installed


def recorded() -> dict[str, Any]:
    """Version and names, as the file has them."""
    names = {}
    for name, used in NEEDED.items():
        module, _, attribute = name.partition(":")
        names[name] = described(getattr(import_module(module), attribute), used)
    return {"version": installed().partition("+")[0], "names": names}


def described(found: Any, used: tuple[str, ...]) -> dict[str, Any]:
    """What kind of thing it is, and of what it is made. A field that has to be given has no default here. Of a class, what has to be
    defined and what is used."""
    if isinstance(found, type) and issubclass(found, Enum):
        return {"kind": "enum", "members": {member.name: member.value for member in found}}
    fields = {name: "needed" if is_needed else "given" for name, is_needed in fields_of(found).items()}
    if is_dataclass(found):
        others = sorted(name for name in used if isinstance(getattr(found, name, None), property))
        return {"kind": "dataclass", "fields": fields} | ({"methods": others} if others else {})
    if hasattr(found, "__struct_fields__"):
        return {"kind": "struct", "fields": fields}
    if hasattr(found, "_fields"):
        return {"kind": "tuple", "fields": fields}
    if isinstance(found, type):
        methods = {name for name in used if hasattr(found, name)}
        return {
            "kind": "class",
            "methods": sorted(methods),
            "abstract": sorted(getattr(found, "__abstractmethods__", ())),
        }
    return {"kind": "function"}


def differing(found: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """Of what was recorded, the names that another record has not, or not so."""
    names = {name: made for name, made in found["names"].items() if base["names"].get(name) != made}
    return {"version": found["version"], "names": names}


if __name__ == "__main__":
    found = recorded()
    if len(sys.argv) > 1:
        found = differing(found, json.loads(Path(sys.argv[1]).read_text()))
    json.dump(found, sys.stdout, indent=1)
    print()
