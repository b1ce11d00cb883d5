"""The memory layer's invariants, recomputed from the tables alone: no counter is trusted."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

from .flights import Flights
from .growth import Growth
from .layout import Layout
from .pool import Pool, Retentions
from .prefix_index import PrefixIndex
from .runs import DEVICE, HOST, NO_BLOCKS, NUM_PLACES, Run
from .tables import Tables
from .tiers import Tiers


def violations_of(
    growth: Growth, flights: Flights, index: PrefixIndex, tiers: Tiers, beside: list[tuple[int, int]]
) -> list[str]:
    """Return every violation, as a sentence that begins with the invariant's number in docs/invariants.md. `beside`:
    (table, block) of each device reference that no row has."""
    tables, layout = growth.tables, growth.layout
    found = [each for pool in dict.fromkeys(index.pools) for each in _free_lists(pool)]
    found += [*_tables(tables, tiers, layout), *_shares(tables, flights)]
    found += _references(growth, tiers, index, beside)
    if growth.num_promised:
        found.append(f"6: {growth.num_promised} blocks are promised to rows and not drawn.")
    return [*found, *_tree(index), *_paths(tables, tiers, index), *_pending(flights, index)]


def _free_lists(pool: Pool) -> Iterator[str]:
    free, refs, has_content = pool.free_pages(), pool.refs(), pool.has_content(slice(None))
    queued = {level: blocks for level, queue in pool.queues.items() if len(blocks := queue.blocks())}
    cached = np.concatenate([NO_BLOCKS, *queued.values()])
    listed = np.concatenate([free, cached])
    if len(set(listed.tolist())) != len(listed):
        yield f"1: a {pool.tier} block is in the free list twice."
    for level, blocks in queued.items():
        if len(wrong := blocks[pool.level[blocks] != level]):
            yield f"3: cached {pool.tier} blocks {wrong.tolist()} stand at level {level}."
    its_pages, queues = pool.all_pages_of(cached), pool.queues.values()
    if not all(queue.is_counted for queue in queues):
        yield f"1: a queue of cached {pool.tier} blocks counts other entries than it has."
    if len(its_pages) != pool.num_cached or len(cached) != sum(queue.num_blocks for queue in queues):
        yield f"1: the {pool.tier} free list counts {pool.num_cached} cached blocks and holds {len(cached)}."
    used = refs.nonzero()[0]
    pages = np.concatenate([free, its_pages, pool.all_pages_of(used)])
    if len(pages) != pool.num_pages or len(set(pages.tolist())) != len(pages):
        yield f"1: {len(free)} free + {len(cached)} cached + {len(used)} used {pool.tier} blocks are not {pool.num_pages}."
    if len(wrong := listed[refs[listed] != 0]):
        yield f"3: {pool.tier} blocks {wrong.tolist()} are in the free list and used."
    if has_content[free].any():
        yield f"3: a free {pool.tier} block has content."
    if not has_content[cached].all():
        yield f"3: a cached {pool.tier} block has no content."


def _references(growth: Growth, tiers: Tiers, index: PrefixIndex, beside: list[tuple[int, int]]) -> Iterator[str]:
    tables, counted = growth.tables, {pool: Counter(pool.kept) for pool in index.pools}

    def count(place: int, table: int, blocks: Any) -> None:
        counted[tiers.pool(place, table)].update(blocks.tolist())

    for row in tables.live_rows.tolist():
        blocks = tables.blocks[0, row, : tables.num_blocks[row]]
        if len(set(blocks.tolist())) != len(blocks):
            yield f"6: row {row} names a block twice: {blocks.tolist()}."
        count(DEVICE, 0, blocks)
        for side in growth.layout.sides:
            stop = min(1, len(blocks)) if side.is_state else len(blocks)
            its = tables.blocks[side.table, row, tables.first[side.table, row] : stop]
            if (its < 0).any():
                yield f"2: row {row} names {its.tolist()} in its {side.kind}; no block is below 0."
            count(DEVICE, side.table, its)
    for row, tails in tiers.tails.items():
        for table, tail in enumerate(tails):
            count(HOST, table, tail)
        if not tables.is_swapped[row] or tables.uid[row] == 0:
            yield f"6: row {row} has a host tail and is not swapped."
    for place, held in growth.copies.held:
        if place % NUM_PLACES == HOST:
            count(HOST, place // NUM_PLACES, held)
    for table, block in beside:
        count(DEVICE, table, np.array([block]))
    for pool, references in counted.items():
        ref_counts, wanted = pool.refs(), np.zeros(pool.num_pages, np.int64)
        wanted[list(references)] = list(references.values())
        for block in (wanted != ref_counts).nonzero()[0].tolist():
            yield f"2: {pool.tier} block {block} has ref count {ref_counts[block]} and {wanted[block]} references."


def _tables(tables: Tables, tiers: Tiers, layout: Layout) -> Iterator[str]:
    size = tables.block_size
    for row in tables.live_rows.tolist():
        num_blocks, end = int(tables.num_blocks[row]), int(tables.num_launched[row])
        have = num_blocks + tiers.num_on_host(row)
        least = -(-end // size)
        if not least <= have <= max(least, int(tables.reserved[row])):
            yield f"6: row {row} has {have} blocks for {end} tokens of {size} a block, {tables.reserved[row]} reserved."
        if num_blocks and tables.slot_base[row] != (base := tables.slot_base_of(row)):
            yield f"6: the slots of row {row}'s last block begin at {base}, not {tables.slot_base[row]}."
        if tables.last_token[row] != tables.tokens[row, tables.num_tokens[row] - 1]:
            yield f"6: the last token of row {row} is not {tables.last_token[row]}."
        if not tables.num_computed[row] <= min(end, tables.num_tokens[row]):
            yield f"6: row {row} has {tables.num_computed[row]} tokens computed, {end} launched and {tables.num_tokens[row]} known."
        for side in layout.bounded:
            first = int(tables.first[side.table, row])
            wanted = min(int(side.first_column(tables.num_computed[row])), have)
            if first != wanted:
                yield f"17: row {row} holds its {side.kind} of {side.reach} tokens from column {first} on, not {wanted}."
            if row in tiers.tails and len(tiers.tails[row][side.table]) != have - max(first, num_blocks):
                yield f"17: row {row} has not all of its {side.kind} of {side.reach} tokens on the host."


def _shares(tables: Tables, flights: Flights) -> Iterator[str]:
    numbers = [flight.number for flight in flights.all]
    if numbers != sorted(set(numbers)):
        yield f"8: batches {numbers} are out, which is not the order of their numbers."
    for row in tables.live_rows.tolist():
        end = int(tables.num_computed[row])
        for number, share in flights.shares_of(row):
            if share.start < end:
                yield f"8: batch {number} computes row {row} from token {share.start}; {end} come before."
            end = share.end
        if end > tables.num_launched[row]:
            yield f"8: batches compute row {row} to token {end}; {tables.num_launched[row]} are launched."


def _pending(flights: Flights, index: PrefixIndex) -> Iterator[str]:
    numbers = {flight.number for flight in flights.all}
    for run in index.runs.values():
        batches, firsts = list(run.pending), list(run.pending.values())
        if not numbers.issuperset(batches):
            yield f"4: nodes of run {run.id} wait for batches {batches}; {sorted(numbers)} are out."
        elif not all(run in index.pending.get(batch, ()) for batch in batches):
            yield f"4: no end of batches {batches} confirms the nodes of run {run.id}."
        if batches != sorted(batches) or firsts != sorted(set(firsts)):
            yield f"4: the pending nodes of run {run.id} do not rise: {run.pending}."


def _tree(index: PrefixIndex) -> Iterator[str]:
    children = defaultdict[Run, dict[int, int]](dict)
    for key, run in [*index.runs.items(), *index.ends.items()]:
        if run.key != key:
            yield f"4: run {run.id} is found under another key than its own."
        if run.parent is not None:
            children[run.parent][run.at] = children[run.parent].get(run.at, 0) + 1
            if index.runs.get(run.parent.key) is not run.parent:
                yield f"5: run {run.id} hangs off run {run.parent.id}, which is gone."
        if run.row >= 0 and run.row not in index.paths:
            yield f"4: run {run.id} is open for row {run.row}, which has no path."
            return
        if run.row >= 0 and index.paths[run.row].open is not run:
            yield f"4: run {run.id} is open for row {run.row}, which does not extend it."
        if not run.is_end and index.run_tokens(run, 0, 1) != run.key[-index.block_bytes :]:
            yield f"4: run {run.id} is found under other tokens than its own."
    all_runs = [*index.runs.values(), *index.ends.values()]
    for run in all_runs:
        if run.children != (there := children[run]):
            yield f"5: run {run.id} counts children {run.children}; there are {there}."
        if run.row < 0:
            yield from _closed_run(run)
    num_nodes = Counter[Pool]()
    for place, pool in enumerate(index.pools):
        its_runs = [run for run in all_runs if len(run.blocks[place])]
        yield from _residence(its_runs, place, pool, index.retentions)
        num_nodes[pool] += sum(int(np.count_nonzero(run.blocks[place] >= 0)) for run in its_runs)
    for pool, num in num_nodes.items():
        if (carrying := np.count_nonzero(pool.has_content(slice(None)))) != num:
            yield f"4: {carrying} {pool.tier} blocks carry a node; {num} nodes say that they reside there."


def _residence(runs: list[Run], place: int, pool: Pool, retentions: Retentions) -> Iterator[str]:
    holder: dict[int, Run] = {}
    for run in runs:
        blocks = run.blocks[place]
        if blocks[-1] < 0:
            yield f"4: the last {pool.tier} block of run {run.id} is none."
        offsets = (blocks >= 0).nonzero()[0]
        for offset, block in zip(offsets.tolist(), blocks[offsets].tolist(), strict=True):
            if block in holder:
                yield f"4: {pool.tier} block {block} holds node {run.id}:{offset} and one of run {holder[block].id}, too."
            if pool.run[block] is not run or (pool.place is not None and pool.place[block] != place):
                yield f"4: {pool.tier} block {block} does not know that it holds node {run.id}:{offset}."
            holder[block] = run
        if run.row < 0 or place >= NUM_PLACES:
            kept, wanted = pool.level[blocks[offsets]].tolist(), retentions.levels_of(place, run, offsets).tolist()
            if kept != wanted:
                yield f"3: {pool.tier} blocks of run {run.id} are kept at levels {kept}, not {wanted}."


def _closed_run(run: Run) -> Iterator[str]:
    blocks, parent = run.blocks[DEVICE], run.parent
    if run.length == 0 or (end := run.end) > run.length:
        yield f"5: run {run.id} has {run.length} nodes, and blocks or children of {run.end}."
    elif end < run.length:
        yield f"5: the last node of run {run.id} resides nowhere and has no child."
    if len(blocks) and (
        (blocks < 0).any() or (parent is not None and parent.row < 0 and parent.block(DEVICE, run.at) < 0)
    ):
        yield f"5: a node of run {run.id} is on the device and its parent node is not."
    if len(run.blocks) > NUM_PLACES:
        there = [{at for at, block in enumerate(its.tolist()) if block >= 0} for its in run.blocks]
        if not set().union(*there[NUM_PLACES:]) <= there[DEVICE] | there[HOST]:
            yield f"5: run {run.id} has content of other groups where the full one has none."


def _paths(tables: Tables, tiers: Tiers, index: PrefixIndex) -> Iterator[str]:
    size = tables.block_size
    num_looking_up = int(tables.looks_up[tables.live_rows].sum())
    if num_looking_up != index.num_looking_up:
        yield f"4: {num_looking_up} rows have to look their next block up; {index.num_looking_up} are counted."
    if closed := index.paths.keys() - set(tables.live_rows.tolist()):
        yield f"4: rows {sorted(closed)} are closed and have paths."
    for row in tables.live_rows.tolist():
        path = index.paths.get(row)
        if path is None:
            yield f"4: row {row} has no path."
            continue
        full = tables.content_end(row) // size
        if path.published > full:
            yield f"4: row {row} has {path.published} nodes and {full} full blocks launched."
        if (path.open is None) != (path.guard == (0 if path.writes else -1)):
            yield f"4: the path of row {row} is {'closed' if path.open is None else 'open'}, with guard {path.guard}."
        if tables.looks_up[row] != (path.guard >= 0):
            yield f"4: row {row} is marked {tables.looks_up[row]} for looking its next block up; its path says otherwise."
        if path.open is not None and index.runs.get(path.open.key) is not path.open:
            yield f"4: row {row} extends a run that cannot be found."
        column, num_blocks = 0, int(tables.num_blocks[row])
        held = [*tables.blocks[0, row, :num_blocks].tolist(), *tiers.tails.get(row, [NO_BLOCKS])[0].tolist()]
        for run, first, stop in path.spans(0):
            theirs = index.run_tokens(run, first, stop)
            if theirs != tables.tokens[row, column * size : (column + stop - first) * size].tobytes():
                yield f"4: row {row} stands on nodes of run {run.id} with other tokens than its own."
            for at in range(first, stop):
                place = DEVICE if column < num_blocks else HOST
                if column < len(held) and index.block(place, run, at) != held[column]:
                    yield f"5: row {row} holds {index.pools[place].tier} block {held[column]} at column {column}, which is not its node's."
                column += 1
