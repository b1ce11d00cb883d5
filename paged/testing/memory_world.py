"""The sizes that the small worlds of all rigs begin with, and our own manager in one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paged.base.arguments import checked_integer
from paged.testing.violation import ShortRepr

if TYPE_CHECKING:
    from paged.block_manager import BlockManager, LayerGroup


@dataclass(frozen=True, repr=False)
class MemoryWorld(ShortRepr):
    """Sizes in blocks and tokens. Raises InvalidConfig for one that is out of range."""

    num_blocks: int = 8
    block_size: int = 2
    host_blocks: int = 0
    prefix_caching: bool = True
    host_caching: bool = False

    def __post_init__(self) -> None:
        for name, least in (("num_blocks", 1), ("block_size", 1), ("host_blocks", 0)):
            checked_integer(name, getattr(self, name), least)

    @property
    def keeps_content_on_host(self) -> bool:
        """Whether content that leaves the device goes to the host: as far as the other sizes allow it."""
        return self.host_caching and self.host_blocks > 0 and self.prefix_caching


def manager_in(world: MemoryWorld, groups: tuple[LayerGroup, ...] = ()) -> BlockManager:
    """Our own manager; without `groups` for layers that are all full, a page a block."""
    from paged import BlockManager

    several: dict[str, Any] = {"groups": groups} if groups else {}
    return BlockManager(
        world.num_blocks,
        world.block_size,
        host_blocks=world.host_blocks,
        prefix_caching=world.prefix_caching,
        host_caching=world.keeps_content_on_host,
        **several,
    )
