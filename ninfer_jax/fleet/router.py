"""`policy` as a request router of Ray Serve. Reads what replicas report (`Replica.routing`) and what it has sent since."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from ninfer_jax.fleet.affinity import Affinity
from ninfer_jax.fleet.policy import Replica, ranked


class Router(RequestRouter):
    """Ranks replicas one by one, so that Serve tries them in the policy's order."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Nothing is sent yet."""
        # replica -> (serial of its last report, requests sent since then less those ended since then)
        self._since: dict[ReplicaID, tuple[int, int]] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The candidates in the policy's order; those that have not reported yet come last."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        affinity = next((one for one in (pending_request.args if pending_request else ()) if isinstance(one, Affinity)), Affinity())
        told = {replica.routing_stats["name"]: replica for replica in candidate_replicas if replica.routing_stats}
        views = [self._view(name, replica) for name, replica in told.items()]
        order = [told[name] for name in ranked(affinity.key, affinity.chain, views)]
        return [[replica] for replica in (*order, *(replica for replica in candidate_replicas if replica not in order))]

    def _view(self, name: str, replica: RunningReplica) -> Replica:
        stats = replica.routing_stats
        serial, since = self._since.get(replica.replica_id, (0, 0))
        if stats["serial"] != serial:
            since = 0
            self._since[replica.replica_id] = (stats["serial"], 0)
        return Replica(name, stats["slots"], max(0, stats["requests"] + since), set(stats["prefixes"]))

    def _count(self, replica_id: ReplicaID, change: int) -> None:
        serial, since = self._since.get(replica_id, (0, 0))
        self._since[replica_id] = (serial, since + change)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """A request more there."""
        self._count(replica_id, 1)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """A request less."""
        self._count(replica_id, -1)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """It is forgotten."""
        super().on_replica_actor_died(replica_id)
        self._since.pop(replica_id, None)
