"""How K and V are stored: in the model's dtype, or in 8 or 4 bits with a scale a token and head; and in how many bytes.

Imports no torch, because planners and simulators use it.
"""

from __future__ import annotations

AUTO = "auto"
"""Stored in the model's dtype."""
CODE_BITS = {"int8": 8, "int4": 4}
"""Bits of a code, for each KV dtype that has codes with scales."""
KV_DTYPES = (AUTO, *CODE_BITS)
SCALE_BYTES = 2
SKIPPED = {"sliding_window": "window", "chunk": "chunk"}
"""Names (vLLM's) of layers that may keep the model's dtype while others have codes, and the kind of their group."""


def code_bytes(kv_dtype: str, size: int) -> int:
    """Return the bytes of the codes of one head of this size."""
    return -(-size * CODE_BITS[kv_dtype] // 8)


def head_bytes(kv_dtype: str, size: int, element_bytes: int) -> int:
    """Return the bytes of a token's K or V of one head, with its scale; `element_bytes` are those of a number in
    AUTO."""
    return size * element_bytes if kv_dtype == AUTO else code_bytes(kv_dtype, size) + SCALE_BYTES


def block_bytes(kv_dtype: str, block_size: int, heads: int, size: int, element_bytes: int) -> int:
    """Return the bytes of one layer's K or V in a block. With scales they are even, so that every scale is aligned."""
    num_bytes = block_size * heads * head_bytes(kv_dtype, size, element_bytes)
    return num_bytes if kv_dtype == AUTO else num_bytes + num_bytes % SCALE_BYTES
