"""The numbered invariants of memory and scheduling, recomputed from public attributes alone.

Each function looks at one subject at rest between two calls, trusts none of its counters, and returns what is wrong as
sentences that begin with the invariant's number. What only an observer over time can see (4, 7, 8, 10, 11, 13) is
checked where that observer stands: in `manager_rig`, `batch_oracles` and `life_oracles`; `INVARIANTS` says where each
one is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged.testing.naive_layers import Groups, front

Tables = Mapping[int, NDArray[np.integer]]
"""The device blocks of each live row."""

INVARIANTS: dict[int, tuple[str, str]] = {
    1: ("free + used + cached = all blocks, in each tier", "invariants.tiers_add_up"),
    2: ("ref count = table entries + loads + releases that wait", "invariants.references"),
    3: ("a block is free or cached exactly when its ref count is 0", "invariants.used_means_referenced"),
    4: ("a node's block holds the node's tokens", "manager_rig and shadow_kv"),
    5: (
        "a hit is a contiguous prefix; a used child means a used parent",
        "invariants.parents_of_contents, naive_model",
    ),
    6: ("tables are as long as their tokens need; no shared block is written", "invariants.table_lengths, shadow_kv"),
    7: ("a failed operation changes nothing", "manager_rig"),
    8: ("a batch stays within its limits, runs, and keeps what it was given", "batch_oracles"),
    9: ("each request is in one state; counts are conserved; legal transitions only", "life_oracles"),
    10: ("work-conserving", "batch_oracles"),
    11: ("no request is overtaken; a waiting request preempts none", "batch_oracles"),
    12: ("at the end nothing is held", "invariants.memory_at_rest, life_oracles"),
    13: ("same program, same decisions", "SchedulerRig.decisions, replay"),
    15: ("events replayed from empty are the contents of each tier", "event_reader"),
    16: ("what a share reads is there in each group, and a state has seen what is before it", "shadow_groups"),
    17: ("a window's or chunk's front goes back by computed tokens, and by nothing else", "invariants.fronts"),
    18: (
        "hints are answered as they are carried out; what is pinned stays; requests cannot have what may be pinned",
        "naive_hints",
    ),
}
"""Number → the statement, and the place that checks it."""


def memory_violations(
    manager: Any,
    *,
    may_hold: bool = False,
    groups: Groups = (),
    held: Sequence[int] = (),
    tables: Tables | None = None,
    contents: Set[tuple[bytes, ...]] | None = None,
) -> list[str]:
    """Invariants 1, 2, 3, 5 and 6 of a manager, with layers of several kinds 17, too. `may_hold`: loads and copies may
    have references beyond the tables. `held`: blocks that have one for each time they are listed. `tables`, of each
    live row, and `contents`, of the device: where they are known already."""
    if tables is None:
        tables = {row: manager.table(row) for row in manager.rows.live.tolist()}
    found = tiers_add_up(manager) + table_lengths(manager, tables)
    if groups:
        return found + fronts(manager, groups) + page_references(manager, groups, may_hold=may_hold)
    found += references(manager, tables, may_hold=may_hold, held=held) + used_means_referenced(manager)
    return found + parents_of_contents(manager.cached_contents() if contents is None else contents)


def tiers_add_up(manager: Any) -> list[str]:
    """1, for both tiers."""
    found = []
    for tier, total in (("device", manager.num_blocks), ("host", manager.num_host_blocks)):
        parts = figures(manager, tier)
        if sum(parts) != total or min(parts) < 0:
            found.append(f"1: {tier} free, cached, used {parts} do not make {total} blocks")
    return found


def figures(manager: Any, tier: str) -> tuple[int, int, int]:
    """How many blocks of a tier are free, cached and used."""
    blocks = getattr(manager, tier)
    return int(blocks.num_free), int(blocks.num_cached), int(blocks.num_used)


def references(manager: Any, tables: Tables, *, may_hold: bool = False, held: Sequence[int] = ()) -> list[str]:
    """2, on the device: blocks are referenced as often as tables name them; more if loads or copies `may_hold`."""
    named = np.zeros(manager.num_blocks, np.int64)
    found = []
    for row, table in tables.items():
        if len(set(table.tolist())) < len(table):
            found.append(f"6: row {row} names a block twice: {table.tolist()}")
        inside = table[(table >= 0) & (table < len(named))]
        if len(inside) < len(table):
            found.append(f"6: row {row} names blocks {table.tolist()}, of {len(named)}")
        np.add.at(named, inside, 1)
    np.add.at(named, np.array(held, np.int64), 1)
    return found + _counts(manager, named, may_hold)


def _counts(manager: Any, named: NDArray[np.int64], may_hold: bool) -> list[str]:
    """2, for tables that name each block so many times."""
    ref_counts = manager.device.ref_counts
    beyond = ref_counts - named
    if not (beyond < 0).any() and (may_hold or not beyond.any()):
        return []
    wrong = (beyond != 0).nonzero()[0].tolist()
    return [
        f"2: blocks {wrong} have ref counts {ref_counts[wrong].tolist()}, tables name them {named[wrong].tolist()} times"
    ]


def used_means_referenced(manager: Any) -> list[str]:
    """3: as many blocks have references as are counted as used, in both tiers."""
    found = []
    for tier in ("device", "host"):
        counts, used = getattr(manager, tier).ref_counts, getattr(manager, tier).num_used
        if int((counts > 0).sum()) != used or (counts < 0).any():
            found.append(f"3: {tier} ref counts {counts.tolist()}, and {used} blocks count as used")
    return found


def page_references(manager: Any, groups: Groups, *, may_hold: bool = False) -> list[str]:
    """1, 2 and 3 where blocks have several pages: no page is in two blocks, pages in tables are the used ones, and are
    referenced as often as tables name them."""
    named, found = np.zeros(manager.num_blocks, np.int64), []
    # By first page, so that a block which several tables name counts once.
    blocks: dict[int, list[int]] = {}
    for row in manager.rows.live.tolist():
        for number in range(len(groups)):
            its_pages = manager.group_pages(number, row)
            np.add.at(named, its_pages[its_pages >= 0], 1)
            blocks |= {block[0]: block for block in its_pages.tolist() if block[0] >= 0}
    pages = [page for block in blocks.values() for page in block]
    if len(set(pages)) < len(pages):
        found.append(f"1: a page is in two blocks: {sorted(pages)}")
    if len(pages) > manager.device.num_used or (not may_hold and len(pages) < manager.device.num_used):
        found.append(f"1: tables name {len(pages)} pages, and {manager.device.num_used} count as used")
    return found + _counts(manager, named, may_hold)


def fronts(manager: Any, groups: Groups) -> list[str]:
    """17: in each row's tables of windows and chunks the blocks behind the first position that a token behind the
    computed ones attends to, and none before it; of full groups all. Where content is kept, a row can begin again at
    the end of its last full block, and keeps what is attended to from there. A state is there from a row's first block
    on."""
    found, size = [], manager.block_size
    for row in manager.rows.live.tolist():
        computed, blocks = int(manager.rows.num_computed[row]), len(manager.table(row))
        for number, group in enumerate(groups):
            is_there = (manager.group_pages(number, row) >= 0).all(axis=1).tolist()
            if group.kind == "state":
                wanted = [blocks > 0]
            else:
                first = min(
                    front(group, computed // size * size if manager.prefix_caching else computed) // size, blocks
                )
                wanted = [False] * first + [True] * (blocks - first)
            if is_there != wanted:
                found.append(
                    f"17: row {row} with {computed} tokens computed has blocks {is_there} of {group}, not {wanted}"
                )
    return found


def table_lengths(manager: Any, tables: Tables) -> list[str]:
    """6: a row's blocks cover all that is computed or in flight; what is computed is known."""
    rows, found = manager.rows, []
    tokens, computed, scheduled = rows.num_tokens, rows.num_computed, rows.num_scheduled
    for row, table in tables.items():
        end = int(computed[row] + scheduled[row])
        needed = -(-end // manager.block_size)
        held = len(table) + rows.num_on_host(row)
        if held < needed:
            found.append(f"6: row {row} has {held} blocks for {needed} blocks of tokens")
        if computed[row] > tokens[row] or scheduled[row] < 0:
            found.append(
                f"6: row {row} has {computed[row]} tokens computed, {end} launched and {tokens[row]} known, in that order"
            )
    return found


def parents_of_contents(contents: Set[tuple[bytes, ...]]) -> list[str]:
    """5: content on the device hangs together, every node's parent is there, too."""
    orphans = [path for path in contents if len(path) > 2 and path[:-1] not in contents]
    return [f"5: content {path} is there, its parent is not" for path in orphans]


def memory_at_rest(manager: Any) -> list[str]:
    """12: no row, no reference, every block free or cached in both tiers."""
    found = tiers_add_up(manager)
    if manager.device.num_used or manager.host.num_used:
        found.append(f"12: {manager.device.num_used} device and {manager.host.num_used} host blocks are still used")
    if manager.device.ref_counts.any() or manager.host.ref_counts.any():
        found.append(
            f"12: ref counts are left: {manager.device.ref_counts.tolist()}, {manager.host.ref_counts.tolist()}"
        )
    if len(manager.rows.live):
        found.append(f"12: rows {manager.rows.live.tolist()} still have tables")
    return found
