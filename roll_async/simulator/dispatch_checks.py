"""Invariant 10: requests that wait beside a free slot, or for a validation. Between two events there are none."""

from __future__ import annotations

from roll_async.rollout.dispatch.engine_pool import EnginePool


def idle_slot_violations(pool: EnginePool) -> list[tuple[str, str]]:
    """(request, replica) pairs where a request waits though the replica has a free slot for it."""
    if pool.paused_for_push or pool.pump_is_due:
        return []
    slots, waiting, sticky = pool._limit.slots, pool._waiting, pool._sticky
    idle = [link for link in pool.links if not (link.suspect or link.leaving)]
    free = {link.name for link in idle if slots(link) > len(link.in_flight) + link.foreign_requests}
    requests = [p for p in waiting if waiting.priority(p) >= pool._floor] if free else []
    requests = [p for p in requests if pool.validation_yields or not sticky.waits(p)]
    return [(p.request.request_id, min(left)) for p in requests if (left := free - set(sticky.avoided(p)))]


def num_displaced(pool: EnginePool) -> int:
    """Requests of training that wait though a validation that yields holds slots."""
    if pool.paused_for_push or pool.pump_is_due or not pool.validation_yields:
        return 0
    holding = [a for link in pool.links for a in link.in_flight.values() if a.request.validation]
    num_stopping = sum(attempt.stop is not None for attempt in holding)
    return max(0, min(len(holding), pool._waiting.num_training) - num_stopping)
