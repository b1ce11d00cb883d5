"""Ray's request router, which calls ours.

Ray sends this module by value, so it has nothing but the class.
"""

from __future__ import annotations

import logging
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from paged.integrations.ray.routing import Routing


class PrefixRouter(RequestRouter):
    """Sends a request to the replica where it should begin first, by cached content and waiting requests."""

    def initialize_state(self, num_untold: int = 0) -> None:
        """Begin without replicas. `num_untold` other routers send to the same ones."""
        self._routing = Routing(num_untold=num_untold)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas, the best first."""
        if pending_request is None:
            return [candidate_replicas]
        by_name = {each.replica_id.unique_id: each for each in candidate_replicas}
        stats = {name: each.routing_stats for name, each in by_name.items()}
        asked = pending_request.args[0] if pending_request.args else None
        try:
            names = self._routing.ranked(pending_request.metadata.internal_request_id, asked, stats)
            return [[by_name[name]] for name in names]
        except Exception:
            # Else Ray would let the request wait for ever. A replica of another version may send a report that does not decode.
            logging.getLogger("ray.serve").exception("replicas could not be ranked")
            return [[each] for each in candidate_replicas]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Note that a replica took the request."""
        asked = pending_request.args[0] if pending_request.args else None
        self._routing.routed(pending_request.metadata.internal_request_id, asked, replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Note that the request has ended, or its replica has."""
        self._routing.completed(internal_request_id)
