"""Which nodes reside in which host blocks: an array by run.

On the device the nodes of a run go last one first, so how many are left says it all; on the host they come and go as swap and
eviction take them.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from .free_list import Blocks, Stretch, Taken
from .pool import Pool
from .runs import Run

if TYPE_CHECKING:
    from .events import EventLog


class HostResidence:
    """Finds, notes and forgets the host blocks of nodes."""

    def __init__(self, host: Pool, trim: Callable[[Run], None]) -> None:
        self._host = host
        # Told which nodes come and go, once events are read.
        self.log: EventLog | None = None
        # Called with a run that lost nodes here, which may have been their last residence.
        self._trim = trim
        host.forget = self._forget

    def draw_for(self, nodes: list[Stretch], count: int) -> Blocks:
        """These `count` nodes, which have no host block, get one each, int64 [count], stretch by stretch and the last node of each first;
        there is room."""
        host = self._host
        blocks = host.draw_for_nodes(count)
        end = 0
        for run, first, stop in nodes:
            start, end = end, end + stop - first
            mine = blocks[start:end]
            host.run[mine] = run
            if stop - first == run.length:
                run.host = mine[::-1].copy()
            else:
                run.host_places(max(run.length, stop))[first:stop] = mine[::-1]
            run.num_host += stop - first
            if run.retained:
                host.set_levels(mine, run.levels_of(np.arange(first, stop))[::-1])
        if self.log is not None:
            self.log.came(nodes, "host")
        return blocks

    def offsets(self, blocks: Blocks) -> list[int]:
        """The place of each host block's node in its run, -1 where it carries none."""
        places: dict[Run, dict[int, int]] = {}
        found: list[int] = []
        runs, is_node = self._host.run[blocks].tolist(), self._host.has_content(blocks).tolist()
        for block, run, has_run in zip(blocks.tolist(), runs, is_node, strict=True):
            if has_run and run not in places:
                places[run] = {there: at for at, there in enumerate(run.host.tolist())}
            found.append(places[run][block] if has_run else -1)
        return found

    def give_up(self, run: Run, length: int) -> None:
        """What was to be the run's nodes from `length` on is no content: their host blocks carry nothing."""
        if not run.num_host or run.host is None or length >= len(run.host):
            return
        places = run.host[length:]
        blocks = places[places >= 0]
        if len(blocks):
            run.num_host -= len(blocks)
            self._host.forget_content(blocks)
        run.host = run.host[:length].copy() if run.num_host else None

    def clear(self) -> None:
        """No host block carries a node; the caller has seen that none is used."""
        self._host.forget_all()

    def _forget(self, blocks: Blocks, taken: list[Taken]) -> None:
        """These blocks, evicted oldest first, hold their nodes no more."""
        for part, nodes, _ in taken:
            lost = self._nodes_in(part) if nodes is None else nodes
            if self.log is not None:
                self.log.left(lost, "host")
            for run, first, stop in lost:
                run.num_host -= stop - first
                if run.num_host:
                    run.host[first:stop] = -1  # type: ignore[index] # it had host blocks
                else:
                    run.host = None
                if run.row < 0:
                    self._trim(run)
        if self.log is not None:
            self._host.run[blocks] = None

    def _nodes_in(self, blocks: Blocks) -> list[Stretch]:
        """The nodes in these blocks, in their order."""
        found: list[Stretch] = []
        start = 0
        for run, same in groupby(self._host.run[blocks].tolist()):
            mine = blocks[start : start + len(list(same))]
            start += len(mine)
            stop = int((run.host == mine[0]).argmax()) + 1
            first = stop - len(mine)
            if first >= 0 and run.host[first:stop].tobytes() == mine[::-1].tobytes():
                found.append((run, first, stop))
            else:
                places = [int((run.host == block).argmax()) for block in mine.tolist()]
                found += [(run, at, at + 1) for at in places]
        return found
