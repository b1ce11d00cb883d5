"""A replica's report to its routers: its scheduler's forecast in seconds, for real and simulated replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from paged.engine.forecast import forecast
from paged.engine.pace import Pace
from paged.engine.routing import ReplicaLoad
from paged.scheduler import Outlook

REPORT_S = 0.25
"""Seconds between two reports while steps are made."""


def load_of(outlook: Outlook, pace: Pace, *, received: Mapping[str, int] | None = None) -> ReplicaLoad:
    """Return the present load; the caller adds `is_fair` and `is_full`. `received` as in `ReplicaLoad`. Takes 2 µs a
    sequence, and less if one more request can begin at once."""
    held, limits = outlook.held, outlook.limits
    num, most = int(outlook.num_sequences.sum()), limits.max_tokens_per_step
    usual = max(1, min(int(held.mean()) if len(held) else 1, outlook.max_total - 1))
    can_join = outlook.joins or not num
    has_room = (
        can_join and num < limits.max_sequences and int(held.sum()) + usual + num * outlook.block_size < outlook.slots
    )
    queued: Counter[str] = Counter()
    for tenant, todo in zip(
        outlook.tenants, outlook.todo[outlook.num_running + outlook.num_suspended :].tolist(), strict=True
    ):
        queued[tenant] += todo
    begin_s = 0.0
    if queued or not has_room or int(outlook.todo.sum()) >= most:
        entered = forecast(outlook, more=1, prompt_len=usual)
        begin_s = pace.seconds(int(entered.steps[-1]), int(entered.tokens[-1]))
    return ReplicaLoad(
        begin_s=begin_s,
        token_s=pace.seconds(1, most) / most,
        num_running=outlook.num_running,
        queued=dict(queued),
        received=received,
        cache_tokens=outlook.slots,
    )
