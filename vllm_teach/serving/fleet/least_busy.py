"""Which replica gets a request: the one that has the fewest, wherever it is."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

from ray.serve.request_router import FIFOMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

# What was sent is counted by its replica, and heard of, some milliseconds later: until then it is counted here.
_MOMENT = 0.1  # seconds


class LeastBusyRouter(FIFOMixin, RequestRouter):
    """What a proxy of Ray asks for each request, as nginx does under `least_conn`.

    Ray's own router goes to other machines only when the replicas of its own are full. An engine is full when it has
    hundreds of requests, so that behind one proxy one machine would do all the work. It also takes a whole burst to
    the replica that was the least busy before it.
    """

    def initialize_state(self, **settings: Any) -> None:
        """Called by Ray, once."""
        self._just_chosen: Counter[ReplicaID] = Counter()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return all, the least busy first; those behind it are for when that one does not take the request."""
        ranked = sorted(random.sample(candidate_replicas, len(candidate_replicas)), key=self._load)
        if ranked:
            chosen = ranked[0].replica_id
            self._just_chosen[chosen] += 1
            asyncio.get_running_loop().call_later(_MOMENT, self._just_chosen.subtract, (chosen,))
        return [[replica] for replica in ranked]

    def _load(self, replica: RunningReplica) -> int:
        known = self.replica_queue_len_cache.get(replica.replica_id) or 0
        return known + self._just_chosen[replica.replica_id]
