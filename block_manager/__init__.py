"""Memory accounting for a paged KV cache: blocks, block tables, ref counts, content and tiers.

Needs numpy alone. Knows no requests, no time and no tensors.
"""

from block_manager.arguments import checked_flag, checked_integer, is_integer, is_real
from block_manager.content_calls import Hit
from block_manager.content_key import root_prefix
from block_manager.copying import Uncopyable
from block_manager.errors import (
    CannotCopy,
    DuplicateRow,
    InvalidConfig,
    InvalidNamespace,
    InvalidTokens,
    NothingInFlight,
    OutOfBlocks,
    PagedError,
    RowInFlight,
    RowSwapped,
    UnknownContent,
    UnknownPin,
    UnknownRow,
)
from block_manager.events import Cleared, Event, Removed, Stored
from block_manager.flights import Flight
from block_manager.growing import GrowingView
from block_manager.growth import NO_CHANGES, TableChanges
from block_manager.manager import Admission, BlockManager
from block_manager.moves import NO_MOVES, Moves, joined
from block_manager.retention import Pin, level_checked
from block_manager.stats import MemoryStats
from block_manager.tables import has_negative, token_array
from block_manager.trusted import Composed

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
    "root_prefix",
    "token_array",
]
