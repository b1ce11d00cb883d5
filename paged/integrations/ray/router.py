"""Ray's request router, which asks ours.

Ray sends this module by value: it has nothing but the class.
"""

from __future__ import annotations

import logging
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from paged.integrations.ray.routing import Routing


class PrefixRouter(RequestRouter):
    """Sends a request to where it is expected to begin first, with what is cached there and who waits there."""

    def initialize_state(self, num_untold: int = 0) -> None:
        """Begin with no replica. `num_untold` is how many other routers send to the same ones."""
        self._routing = Routing(num_untold=num_untold)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Replicas, the best first."""
        if pending_request is None:
            return [candidate_replicas]
        by_name = {each.replica_id.unique_id: each for each in candidate_replicas}
        stats = {name: each.routing_stats for name, each in by_name.items()}
        asked = pending_request.args[0] if pending_request.args else None
        try:
            names = self._routing.ranked(pending_request.metadata.internal_request_id, asked, stats)
            return [[by_name[name]] for name in names]
        except Exception:
            # Ray would let the request wait for ever: a replica of another version may report what is not understood.
            logging.getLogger("ray.serve").exception("replicas could not be ranked")
            return [[each] for each in candidate_replicas]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """A replica took it."""
        asked = pending_request.args[0] if pending_request.args else None
        self._routing.routed(pending_request.metadata.internal_request_id, asked, replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """It has ended, or its replica has."""
        self._routing.completed(internal_request_id)
