"""The number of blocks that fit into a number of bytes, and numbers of bytes as text."""

from paged.errors import BudgetTooSmall


def as_bytes(number: float) -> str:
    """Return bytes in decimal units with three figures: 138 GB, 42.9 GB, 2.62 MB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{short(number / size)} {unit}"
    return f"{number:,.0f} bytes"


def short(value: float) -> str:
    """Return three figures of a number below 1,000, and all figures before the point of larger ones."""
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def blocks_within(num_bytes: int, bytes_per_block: int, block_size: int, longest: int = 1) -> int:
    """Return how many blocks fit into `num_bytes`. Raises BudgetTooSmall if a sequence of `longest` tokens does not."""
    num_blocks, needed = num_bytes // bytes_per_block, -(-longest // block_size)
    if num_blocks >= needed:
        return num_blocks
    wanted = needed * bytes_per_block
    if needed == 1:
        message = f"{_exact(num_bytes)} do not hold one block of {block_size} tokens; that takes {_exact(wanted, '')}."
    else:
        held = num_blocks * block_size
        message = f"{_exact(num_bytes)} hold {held:,} tokens; one sequence of {longest:,} takes {_exact(wanted, '')}."
    raise BudgetTooSmall(message, wanted=wanted, given=num_bytes)


def _exact(number: int, unit: str = " bytes") -> str:
    """Return small numbers to the byte, so that a message shows a pool that is one byte short."""
    return f"{number:,}{unit}" if number < 1e6 else as_bytes(number)
