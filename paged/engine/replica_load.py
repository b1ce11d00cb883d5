"""The report of a replica to its routers: its scheduler's forecast in seconds. Real replicas and simulated ones make it here."""

from __future__ import annotations

from collections.abc import Mapping

from paged.engine.forecast import forecast
from paged.engine.pace import Pace
from paged.engine.routing import ReplicaLoad
from paged.scheduler import Outlook

REPORT_S = 0.25
"""Seconds between two reports while steps are made."""
_AHEAD = 16
"""Places of the queue over which its speed is measured."""


def load_of(outlook: Outlook, pace: Pace, *, received: Mapping[str, int] | None = None) -> ReplicaLoad:
    """The load of now; who queues, and what is refused, is known elsewhere. `received` as in `ReplicaLoad`. Takes 2 µs for each
    sequence, and less where `_AHEAD` more can begin at once."""
    held, limits = outlook.held, outlook.limits
    num, most = int(outlook.num_sequences.sum()), limits.max_tokens_per_step
    usual = max(1, min(int(held.mean()) if len(held) else 1, outlook.max_total - 1))
    has_room = int(held.sum()) + usual + num * outlook.block_size < outlook.slots
    does_wait = len(outlook.todo) > outlook.num_running + outlook.num_suspended
    num_free = limits.max_sequences - num if has_room and not does_wait else 0
    begins_now = num_free > 0 and int(outlook.todo.sum()) < most
    token_s, begin_s, turn_s = pace.seconds(1, most) / most, 0.0, 0.0
    if num_free < _AHEAD or not begins_now:
        entered = forecast(outlook, more=1 + _AHEAD, prompt_len=usual)
        first, last = (pace.seconds(int(entered.steps[at]), int(entered.tokens[at])) for at in (-1 - _AHEAD, -1))
        begin_s = 0.0 if begins_now else first
        # What their prompts take is counted by tokens.
        turn_s = max(0.0, (last - first) / _AHEAD - usual * token_s)
    return ReplicaLoad(
        begin_s=begin_s,
        token_s=token_s,
        num_running=outlook.num_running,
        num_free=num_free,
        turn_s=turn_s,
        received=received,
        cache_tokens=outlook.slots,
    )
