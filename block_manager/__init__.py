"""Memory accounting for a paged KV cache: blocks, block tables, ref counts, content and tiers. Needs numpy alone."""

from .events import Cleared, Event, Removed, RestartPoint, Stored
from .layout import LayerGroup, Layout
from .manager import Admission, BlockManager
from .memory import Composed, Memory
from .moves import Moves
from .sharing import Hit
from .side_content import HitEnd
from .views import GroupStats, GroupTables, MemoryStats, RowView, TierView

__all__ = [
    "Admission",
    "BlockManager",
    "Cleared",
    "Composed",
    "Event",
    "GroupStats",
    "GroupTables",
    "Hit",
    "HitEnd",
    "LayerGroup",
    "Layout",
    "Memory",
    "MemoryStats",
    "Moves",
    "Removed",
    "RestartPoint",
    "RowView",
    "Stored",
    "TierView",
]
