"""Memory accounting for a paged KV cache: blocks, block tables, ref counts, content and tiers. Needs numpy alone."""

from .events import Cleared, Event, Removed, RestartPoint, Stored
from .layout import LayerGroup, Layout
from .manager import Admission, BlockManager
from .memory import Composed, Memory
from .moves import Moves
from .pool import Retained
from .runs import DEVICE, HOST, NO_BLOCKS, Blocks, Node, Run, Span, first_of, num_nodes
from .sharing import Hit
from .side_content import HitEnd, Part
from .views import GroupStats, GroupTables, MemoryStats, RowView, TierView

__all__ = [
    "DEVICE", "HOST", "NO_BLOCKS", "Admission", "BlockManager", "Blocks", "Cleared", "Composed", "Event", "GroupStats",
    "GroupTables", "Hit", "HitEnd", "LayerGroup", "Layout", "Memory", "MemoryStats", "Moves", "Node", "Part",
    "Removed", "RestartPoint", "Retained", "RowView", "Run", "Span", "Stored", "TierView", "first_of", "num_nodes",
]  # fmt: skip
