"""The memory layer's invariants, recomputed from nothing but the tables, and every violation said in a sentence.

Trusts no counter. The numbers are those of docs/invariants.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from .flights import Flights
from .pool import Pool
from .prefix_index import PrefixIndex
from .runs import Run
from .tables import Tables

if TYPE_CHECKING:
    from .tiers import Tiers


def violations_of(
    tables: Tables,
    flights: Flights,
    device: Pool,
    host: Pool,
    index: PrefixIndex | None,
    tiers: Tiers,
    held: Mapping[int, int],
    held_host: Mapping[int, int],
) -> list[str]:
    """Every violation as a sentence that begins with the invariant's number.

    `held` and `held_host` are references that loads and copies hold beyond what the tables say, by block.
    """
    found: list[str] = []
    found += _free_lists(device) + _free_lists(host)
    found += _references(tables, device, host, tiers, held, held_host)
    found += _table_lengths(tables, tiers)
    found += _shares(tables, flights)
    if index is not None:
        found += _tree(tables, device, host, index)
        found += _paths(tables, tiers, index)
        found += _pending(flights, index)
    return found


def _free_lists(pool: Pool) -> list[str]:
    plain, by_level = pool.free_list.plain(), pool.free_list.cached_by_level()
    cached = np.concatenate(by_level)
    found: list[str] = []
    listed = np.concatenate([plain, cached])
    if len(set(listed.tolist())) != len(listed):
        found.append(f"1: a {pool.tier} block is in the free list twice.")
    for level, blocks in enumerate(by_level):
        kept = np.zeros(len(blocks), np.int8) if pool.level is None else pool.level[blocks]
        if (kept != level).any():
            found.append(f"3: cached {pool.tier} blocks {blocks[kept != level].tolist()} stand at level {level}.")
    if len(cached) != pool.num_cached or pool.num_cached != pool.free_list.num_cached_by_level:
        found.append(f"1: the {pool.tier} free list counts {pool.num_cached} cached blocks and holds {len(cached)}.")
    used = int((pool.ref_count > 0).sum())
    if len(listed) + used != pool.num_blocks:
        found.append(
            f"1: {len(plain)} free + {len(cached)} cached + {used} used {pool.tier} blocks are not {pool.num_blocks}."
        )
    wrong = listed[pool.ref_count[listed] != 0]
    if len(wrong):
        found.append(f"3: {pool.tier} blocks {wrong.tolist()} are in the free list and used.")
    if pool.has_content(plain).any():
        found.append(f"3: a free {pool.tier} block has content.")
    if not pool.has_content(cached).all():
        found.append(f"3: a cached {pool.tier} block has no content.")
    return found


def _references(
    tables: Tables, device: Pool, host: Pool, tiers: Tiers, held: Mapping[int, int], held_host: Mapping[int, int]
) -> list[str]:
    counted = np.zeros(device.num_blocks, np.int64)
    pinned = np.zeros(host.num_blocks, np.int64)
    found: list[str] = []
    for row in tables.live_rows.tolist():
        blocks = tables.blocks[0, row, : tables.num_blocks[row]]
        if len(set(blocks.tolist())) != len(blocks):
            found.append(f"6: row {row} names a block twice: {blocks.tolist()}.")
        np.add.at(counted, blocks, 1)
    for row, tail in tiers.tails.items():
        np.add.at(pinned, tail, 1)
        if not tables.is_swapped[row] or tables.uid[row] == 0:
            found.append(f"6: row {row} has a host tail and is not swapped.")
    for references, holds in ((counted, held), (pinned, held_host)):
        for block, count in holds.items():
            references[block] += count
    for pool, references in ((device, counted), (host, pinned)):
        ref_count = pool.ref_count
        for block in (references != ref_count).nonzero()[0].tolist():
            found.append(
                f"2: {pool.tier} block {block} has ref count {ref_count[block]} and {references[block]} references."
            )
    return found


def _table_lengths(tables: Tables, tiers: Tiers) -> list[str]:
    found: list[str] = []
    size = tables.block_size
    for row in tables.live_rows.tolist():
        num_blocks, end = int(tables.num_blocks[row]), int(tables.num_launched[row])
        have = num_blocks + len(tiers.tails.get(row, ()))
        least = -(-end // size)
        if not least <= have <= max(least, int(tables.reserved[row])):
            found.append(
                f"6: row {row} has {have} blocks for {end} tokens of {size} a block, {tables.reserved[row]} reserved."
            )
        if num_blocks and tables.slot_base[row] != tables.slot_base_of(row):
            found.append(
                f"6: the slots of row {row}'s last block begin at {tables.slot_base_of(row)}, not {tables.slot_base[row]}."
            )
        if tables.last_token[row] != tables.tokens[row, tables.num_tokens[row] - 1]:
            found.append(f"6: the last token of row {row} is not {tables.last_token[row]}.")
        if not tables.num_computed[row] <= min(end, tables.num_tokens[row]):
            found.append(
                f"6: row {row} has {tables.num_computed[row]} tokens computed, {end} launched and {tables.num_tokens[row]} known."
            )
    return found


def _shares(tables: Tables, flights: Flights) -> list[str]:
    """What batches compute of a row follows what is computed of it, oldest batch first, and ends where it is launched to."""
    found: list[str] = []
    numbers = [flight.number for flight in flights.all]
    if numbers != sorted(set(numbers)):
        found.append(f"8: batches {numbers} are out, which is not the order of their numbers.")
    for row in tables.live_rows.tolist():
        end = int(tables.num_computed[row])
        for number, share in flights.shares_of(row):
            if share.start < end:
                found.append(f"8: batch {number} computes row {row} from token {share.start}; {end} come before.")
            end = share.end
        if end > tables.num_launched[row]:
            found.append(f"8: batches compute row {row} to token {end}; {tables.num_launched[row]} are launched.")
    return found


def _pending(flights: Flights, index: PrefixIndex) -> list[str]:
    """Nodes of closed runs wait for batches that are out, in their order."""
    found: list[str] = []
    numbers = {flight.number for flight in flights.all}
    for run in index.runs.values():
        batches, firsts = [batch for batch, _ in run.pending], [first for _, first in run.pending]
        if not numbers.issuperset(batches):
            found.append(f"4: nodes of run {run.id} wait for batches {batches}; {sorted(numbers)} are out.")
        elif not all(run in index.pending.get(batch, ()) for batch in batches):
            found.append(f"4: no end of batches {batches} confirms the nodes of run {run.id}.")
        if batches != sorted(set(batches)) or firsts != sorted(set(firsts)):
            found.append(f"4: the pending nodes of run {run.id} do not rise: {run.pending}.")
    return found


def _tree(tables: Tables, device: Pool, host: Pool, index: PrefixIndex) -> list[str]:
    found: list[str] = []
    children: dict[int, dict[int, int]] = {}
    resident = np.full(device.num_blocks, -1, np.int64)
    on_host = 0
    alive = {id(run) for run in index.runs.values()}
    for key, run in index.runs.items():
        if run.key != key:
            found.append(f"4: run {run.id} is found under another key than its own.")
        if run.parent is not None:
            siblings = children.setdefault(run.parent.id, {})
            siblings[run.at] = siblings.get(run.at, 0) + 1
            if id(run.parent) not in alive:
                found.append(f"5: run {run.id} hangs off run {run.parent.id}, which is gone.")
        if run.row >= 0 and run.row not in index.paths:
            found.append(f"4: run {run.id} is open for row {run.row}, which has no path.")
            return found
        if run.row >= 0 and index.paths[run.row].open is not run:
            found.append(f"4: run {run.id} is open for row {run.row}, which does not extend it.")
        places = np.empty(0, np.int64) if run.host is None else (run.host >= 0).nonzero()[0]
        on_host += len(places)
        if len(places) != run.num_host or (run.num_host and run.host is not None and len(run.host) < run.length):
            found.append(f"4: run {run.id} counts {run.num_host} nodes on the host; {len(places)} of {run.length} are.")
        for offset in places.tolist():
            block = run.host_block(offset)
            if host.run[block] is not run:
                found.append(f"4: host block {block} does not know that it holds node {run.id}:{offset}.")
        if run.row < 0:
            found += _closed_run(device, run, resident) + _levels(device, host, run)
    for pool in (device, host):
        for blocks, nodes in pool.free_list.segments():
            of_nodes = [
                block for run, first, stop in nodes for block in _blocks_of(pool is host, run)[first:stop][::-1]
            ]
            if of_nodes != blocks.tolist():
                found.append(
                    f"4: {pool.tier} blocks {blocks.tolist()} are to be evicted as nodes whose blocks are {of_nodes}."
                )
    for run in index.runs.values():
        if (run.children or {}) != children.get(run.id, {}):
            found.append(f"5: run {run.id} counts children {run.children}; there are {children.get(run.id)}.")
    for pool, expected in ((device, int((resident >= 0).sum())), (host, on_host)):
        carrying = int(pool.has_content(slice(None)).sum())
        if carrying != expected:
            found.append(f"4: {carrying} {pool.tier} blocks carry a node; {expected} nodes say that they reside there.")
    return found


def _blocks_of(is_on_host: bool, run: Run) -> list[int]:
    if is_on_host:
        return [] if run.host is None else run.host.tolist()
    return [] if run.blocks is None else run.blocks[0, : run.num_device].tolist()


def _levels(device: Pool, host: Pool, run: Run) -> list[str]:
    found: list[str] = []
    places = np.empty(0, np.int64) if run.host is None else (run.host >= 0).nonzero()[0]
    assert run.blocks is not None
    for pool, at, blocks in (
        (device, np.arange(run.num_device), run.blocks[0, : run.num_device]),
        (host, places, places if run.host is None else run.host[places]),
    ):
        kept = np.zeros(len(blocks), np.int8) if pool.level is None else pool.level[blocks]
        if kept.tolist() != run.levels_of(at).tolist():
            found.append(
                f"3: {pool.tier} blocks of run {run.id} are kept at levels {kept.tolist()}, not {run.levels_of(at).tolist()}."
            )
    return found


def _closed_run(device: Pool, run: Run, resident: np.ndarray) -> list[str]:
    found: list[str] = []
    last = run.length - 1
    if not 0 <= run.num_device <= run.length or run.length == 0:
        found.append(f"5: run {run.id} has {run.length} nodes, {run.num_device} on the device.")
    elif run.num_device < run.length and run.host_block(last) < 0 and last not in (run.children or {}):
        found.append(f"5: the last node of run {run.id} resides nowhere and has no child.")
    assert run.blocks is not None
    for offset, block in enumerate(run.blocks[0, : run.num_device].tolist()):
        if resident[block] >= 0:
            found.append(f"4: block {block} holds node {run.id}:{offset} and one of run {resident[block]}, too.")
        if device.run[block] is not run:
            found.append(f"4: block {block} does not know that it holds node {run.id}:{offset}.")
        resident[block] = run.id
    parent = run.parent
    if run.num_device and parent is not None and parent.row < 0 and parent.num_device <= run.at:
        found.append(f"5: run {run.id} is on the device and its parent node is not.")
    return found


def _paths(tables: Tables, tiers: Tiers, index: PrefixIndex) -> list[str]:
    found: list[str] = []
    size = tables.block_size
    attentive = sum(not index.is_lazy[row] for row in tables.live_rows.tolist())
    if attentive != index.num_attentive:
        found.append(f"4: {attentive} rows have to look their next block up; {index.num_attentive} are counted.")
    for row in tables.live_rows.tolist():
        path = index.paths.get(row)
        if path is None:
            found.append(f"4: row {row} has no path.")
            continue
        full = tables.content_end(row) // size
        if path.published > full:
            found.append(f"4: row {row} has {path.published} nodes and {full} full blocks launched.")
        if index.is_lazy[row] != ((path.open is not None and path.guard < 0) or not path.writes):
            found.append(
                f"4: row {row} is marked {index.is_lazy[row]} for publishing by itself; its path says otherwise."
            )
        if path.open is not None and index.runs.get(path.open.key) is not path.open:
            found.append(f"4: row {row} extends a run that cannot be found.")
        column, tail = 0, tiers.tails.get(row, np.empty(0, np.int64)).tolist()
        for run, offset, count in path.segments(0):
            theirs = index.run_tokens(run, offset, offset + count)
            if theirs != tables.tokens[row, column * size : (column + count) * size].tobytes():
                found.append(f"4: row {row} stands on nodes of run {run.id} with other tokens than its own.")
            on_device = max(0, min(count, int(tables.num_blocks[row]) - column))
            for i in range(on_device):
                if index.device_block(run, offset + i) != tables.blocks[0, row, column + i]:
                    found.append(f"5: row {row} holds another block at column {column + i} than the node it stands on.")
            pins = tail[max(0, column - int(tables.num_blocks[row])) :]
            for i, pinned in zip(range(on_device, count), pins, strict=False):
                if run.host_block(offset + i) != pinned:
                    found.append(
                        f"5: row {row} holds host block {pinned} at column {column + i}, which is not its node's."
                    )
            column += count
    return found
