"""How many blocks a number of bytes holds.

Knows bytes and tokens. Does not know models: what a block takes is the caller's, from a loaded model or from a published shape.
"""

from paged import BudgetTooSmall


def blocks_within(num_bytes: int, bytes_per_block: int, block_size: int, longest: int = 1) -> int:
    """Blocks that fit in `num_bytes`. Raises BudgetTooSmall when they do not hold one sequence of `longest` tokens."""
    num_blocks, needed = num_bytes // bytes_per_block, -(-longest // block_size)
    if num_blocks >= needed:
        return num_blocks
    wanted = needed * bytes_per_block
    if needed == 1:
        message = f"{num_bytes:,} bytes do not hold one block of {block_size} tokens; that takes {wanted:,}."
    else:
        held = num_blocks * block_size
        message = f"{num_bytes:,} bytes hold {held:,} tokens; one sequence of {longest:,} takes {wanted:,}."
    raise BudgetTooSmall(message, wanted=wanted, given=num_bytes)
