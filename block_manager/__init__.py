"""Memory accounting for a paged KV cache: blocks, block tables, ref counts, content and tiers.

Needs numpy alone. Knows no requests, no time and no tensors.
"""

from paged.block_manager.arguments import checked_flag, checked_integer, is_integer, is_real
from paged.block_manager.content_calls import Hit
from paged.block_manager.content_key import root_prefix
from paged.block_manager.copying import Uncopyable
from paged.block_manager.errors import (
    CannotCopy,
    DuplicateRow,
    InvalidConfig,
    InvalidNamespace,
    InvalidTokens,
    NothingInFlight,
    OutOfBlocks,
    RowInFlight,
    RowSwapped,
    UnknownContent,
    UnknownPin,
    UnknownRow,
)
from paged.block_manager.events import Cleared, Event, Removed, Stored
from paged.block_manager.flights import Flight
from paged.block_manager.growing import GrowingView, rising, rising_from
from paged.block_manager.growth import NO_CHANGES, TableChanges
from paged.block_manager.manager import Admission, BlockManager
from paged.block_manager.moves import NO_MOVES, Moves, joined
from paged.block_manager.retention import Pin, level_checked
from paged.block_manager.stats import MemoryStats
from paged.block_manager.tables import has_negative, token_array
from paged.block_manager.trusted import Composed
from paged.errors import PagedError

__all__ = [
    "NO_CHANGES",
    "NO_MOVES",
    "Admission",
    "BlockManager",
    "CannotCopy",
    "Cleared",
    "Composed",
    "DuplicateRow",
    "Event",
    "Flight",
    "GrowingView",
    "Hit",
    "InvalidConfig",
    "InvalidNamespace",
    "InvalidTokens",
    "MemoryStats",
    "Moves",
    "NothingInFlight",
    "OutOfBlocks",
    "PagedError",
    "Pin",
    "Removed",
    "RowInFlight",
    "RowSwapped",
    "Stored",
    "TableChanges",
    "Uncopyable",
    "UnknownContent",
    "UnknownPin",
    "UnknownRow",
    "checked_flag",
    "checked_integer",
    "has_negative",
    "is_integer",
    "is_real",
    "joined",
    "level_checked",
    "rising",
    "rising_from",
    "root_prefix",
    "token_array",
]
