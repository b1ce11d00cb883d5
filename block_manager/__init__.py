"""Memory accounting for a paged KV cache: blocks, block tables, ref counts, content and tiers.

Needs numpy alone. Knows no requests, no time and no tensors.
"""

from block_manager.content_calls import Hit
from block_manager.content_key import root_prefix
from block_manager.errors import (
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

__all__ = [
    "NO_CHANGES",
    "NO_MOVES",
    "Admission",
    "BlockManager",
    "Cleared",
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
    "UnknownContent",
    "UnknownPin",
    "UnknownRow",
    "has_negative",
    "joined",
    "level_checked",
    "root_prefix",
    "token_array",
]
