"""How weights can be quantised at load, by name; without torch, for settings and planning."""

from __future__ import annotations

BITS = {"int8": 8, "int4": 4}
"""Bits of a code."""
GROUPS: dict[str, int | None] = {"int8": None, "int4": 32}
"""Inputs that share a scale; None: all of a result."""
QUANTIZATIONS = tuple(BITS)
HEAD = "int8"
"""What an output projection is quantised to, whatever the layers are."""
