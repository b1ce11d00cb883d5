"""What layers of several kinds keep of a sequence, in plain Python: the rules that worlds, shadow and invariants compare with.

A group is anything with `kind`, `reach` and `pages`, such as a `paged.LayerGroup`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Groups = Sequence[Any]


def has_states(groups: Groups) -> bool:
    """Whether any of these layers has a state: such a row stands at its last token or at none."""
    return any(group.kind == "state" for group in groups)


def front(group: Any, num_tokens: int) -> int:
    """The first position that a token behind so many others attends to, in a group that is no state."""
    if group.kind == "full":
        return 0
    return max(0, num_tokens - group.reach + 1) if group.kind == "window" else num_tokens - num_tokens % group.reach


def pages_for(groups: Groups, num_tokens: int, block_size: int) -> int:
    """Pages that a sequence of so many tokens needs at most while its tokens come a block at a time."""
    blocks, pages = -(-num_tokens // block_size), 0
    for group in groups:
        most = blocks
        if group.kind == "state":
            most = min(blocks, 1)
        elif group.kind != "full":
            # A window reaches over so many blocks, one more that it begins in, and the one that is being filled.
            span = group.reach - (group.kind == "window")
            most = min(blocks, -(-span // block_size) + 2)
        pages += most * group.pages
    return pages


def full_pages(groups: Groups) -> int:
    """Pages of a block of the full group; 0 without one."""
    return sum(group.pages for group in groups if group.kind == "full")


def spare_pages(groups: Groups, keeps: bool) -> int:
    """Pages that a sequence needs besides for a while where content is kept: a state that is kept is read, and another one written."""
    return sum(group.pages for group in groups if group.kind == "state") if keeps else 0


def longest_in(groups: Groups, num_pages: int, block_size: int, most: int) -> int:
    """Tokens of the longest sequence that so many pages hold, in whole blocks, up to `most` tokens."""
    blocks = 0
    while blocks * block_size < most and pages_for(groups, (blocks + 1) * block_size, block_size) <= num_pages:
        blocks += 1
    return blocks * block_size
