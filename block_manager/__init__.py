"""Memory accounting for a paged KV cache: blocks, block tables, ref counts, content and tiers.

Needs numpy alone. Knows no requests, no time and no tensors.
"""

from paged.errors import CannotCopy, InvalidConfig, InvalidTokens, PagedError

from .content_calls import Hit
from .errors import (
    DuplicateRow,
    InvalidNamespace,
    MemoryClaimed,
    NothingInFlight,
    OutOfBlocks,
    RowInFlight,
    RowSwapped,
    UnknownContent,
    UnknownRow,
)
from .events import Cleared, Event, Removed, Stored
from .manager import Admission, BlockManager
from .moves import Moves
from .stats import MemoryStats
from .trusted import Composed

__all__ = [
    "Admission",
    "BlockManager",
    "CannotCopy",
    "Cleared",
    "Composed",
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
