"""The number of replicas, by the load that they report.

Ray sends this module by value, so it has nothing but the function.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

LOAD = "paged_requests"
"""The name of a replica's report of running and waiting requests."""


def by_load(ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Return the number of replicas with which each has `target_ongoing_requests` requests, within Ray's bounds; the current number before any report."""
    loads = (ctx.aggregated_metrics or {}).get(LOAD)
    if not loads:
        return ctx.current_num_replicas, {}
    wanted = math.ceil(sum(loads.values()) / ctx.config.target_ongoing_requests)
    return max(ctx.capacity_adjusted_min_replicas, min(ctx.capacity_adjusted_max_replicas, wanted)), {}
