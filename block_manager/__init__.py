"""Memory accounting for a paged KV cache: blocks, block tables, ref counts, content and tiers.

Needs numpy alone. Knows no requests, no time and no tensors.
"""

from paged.block_manager.content_calls import Hit
from paged.block_manager.errors import (
    CannotCopy,
    DuplicateRow,
    InvalidConfig,
    InvalidNamespace,
    InvalidTokens,
    MemoryClaimed,
    NothingInFlight,
    OutOfBlocks,
    RowInFlight,
    RowSwapped,
    UnknownContent,
    UnknownRow,
)
from paged.block_manager.events import Cleared, Event, Removed, Stored
from paged.block_manager.manager import Admission, BlockManager
from paged.block_manager.moves import Moves
from paged.block_manager.stats import MemoryStats
from paged.errors import PagedError

__all__ = [
    "Admission",
    "BlockManager",
    "CannotCopy",
    "Cleared",
    "DuplicateRow",
    "Event",
    "Hit",
    "InvalidConfig",
    "InvalidNamespace",
    "InvalidTokens",
    "MemoryClaimed",
    "MemoryStats",
    "Moves",
    "NothingInFlight",
    "OutOfBlocks",
    "PagedError",
    "Removed",
    "RowInFlight",
    "RowSwapped",
    "Stored",
    "UnknownContent",
    "UnknownRow",
]
