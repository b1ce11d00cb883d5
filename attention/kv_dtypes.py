"""How K and V are stored: in the dtype of the model, or in 8 or 4 bits with a scale a token and head; and the bytes that this takes.

Needs no torch: planners and simulators count by it.
"""

from __future__ import annotations

AUTO = "auto"
"""In the dtype of the model."""
CODE_BITS = {"int8": 8, "int4": 4}
"""The KV dtypes that are codes with scales, and the bits of a code."""
KV_DTYPES = (AUTO, *CODE_BITS)
SCALE_BYTES = 2
SKIPPED = {"sliding_window": "window", "chunk": "chunk"}
"""Names of layers whose K and V may stay in the dtype of the model beside others in codes, and their kinds."""


def code_bytes(kv_dtype: str, size: int) -> int:
    """Return the bytes of the codes of one head of this size."""
    return -(-size * CODE_BITS[kv_dtype] // 8)


def head_bytes(kv_dtype: str, size: int, element_bytes: int) -> int:
    """Return the bytes of a token's K or V of one head, its scale included; `element_bytes`: of a number where K and V are `AUTO`."""
    return size * element_bytes if kv_dtype == AUTO else code_bytes(kv_dtype, size) + SCALE_BYTES


def block_bytes(kv_dtype: str, block_size: int, heads: int, size: int, element_bytes: int) -> int:
    """Return the bytes of one layer's K or V in a block. With scales they are even, so that each scale begins at a multiple of its bytes."""
    num_bytes = block_size * heads * head_bytes(kv_dtype, size, element_bytes)
    return num_bytes if kv_dtype == AUTO else num_bytes + num_bytes % SCALE_BYTES
