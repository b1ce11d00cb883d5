"""The states of a request, and the reasons for which it ends.

waiting → running ⇄ paused / swapped / waiting → finished
        ↘ loading ↗                            ↘ aborted, rejected
"""

from __future__ import annotations

from enum import StrEnum


class Status(StrEnum):
    """Exactly one of these at any time."""

    WAITING = "waiting"  # no row, no blocks
    LOADING = "loading"  # a row, its reservation whole, and tokens from elsewhere that it waits for
    RUNNING = "running"  # a row; gets tokens when memory and limits allow (a follower: 0 for now)
    PAUSED = "paused"  # gave back the tail of its blocks and kept the rest
    SWAPPED = "swapped"  # keeps no block on the device
    FINISHED = "finished"
    REJECTED = "rejected"
    ABORTED = "aborted"


_ENDED = {Status.FINISHED, Status.REJECTED, Status.ABORTED}
# The statuses that may follow each.
NEXT = {
    Status.WAITING: {Status.WAITING, Status.RUNNING, Status.LOADING, *_ENDED},
    Status.LOADING: {Status.RUNNING, Status.WAITING, *_ENDED},
    Status.RUNNING: {Status.PAUSED, Status.SWAPPED, Status.WAITING, *_ENDED},
    Status.PAUSED: {Status.PAUSED, Status.SWAPPED, Status.RUNNING, Status.WAITING, *_ENDED},
    Status.SWAPPED: {Status.RUNNING, Status.WAITING, *_ENDED},
}

# Codes in Outputs.finish; the index is the code.
FINISH_REASONS: tuple[str | None, ...] = (None, "stop", "length", "abort", "rejected")
NOT_FINISHED, STOP, LENGTH, ABORT, REJECTED = range(5)
