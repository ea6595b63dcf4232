"""Counters of the server manager."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from roll_async.inference.protocol import KVCache
from roll_async.rollout.dispatch.replica_link import ReplicaLink

RequestSpan = tuple[str, float, float]
"""Of a request on a replica: its name, and the loop times at which it was sent and ended."""
_MAX_SPANS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerStats:
    """Counters of the manager since the start."""

    in_flight: int
    queued: int
    dispatched: int
    completed: int
    generated_tokens: int
    """Of ended attempts, and what running ones have reported; it never falls."""
    aborted: int
    """Requests aborted and not continued."""
    aborted_tokens: int
    """Tokens that these had generated."""
    resumed: int
    """Attempts that continued from kept tokens."""
    retried: int
    lost_servers: int
    returned_servers: int
    """Replicas that were lost and came back."""
    late_results: int
    """Replies of attempts that had ended already; they are discarded."""
    busy_s_by_server: Mapping[str, float] = field(default_factory=dict)
    """Seconds during which at least one request ran there, by replica, over all its restarts."""
    spans: tuple[RequestSpan, ...] = ()
    """Of the newest requests that have ended."""
    engines: Mapping[str, float] = field(default_factory=dict)
    """Metrics of KV caches and memory of replicas that tell of them, by key; empty where none does."""


@dataclass(kw_only=True, slots=True)
class ServerCounts:
    """The counters that the manager increments. Names as in ServerStats."""

    in_flight: int = 0
    dispatched: int = 0
    completed: int = 0
    generated_tokens: int = 0
    aborted: int = 0
    aborted_tokens: int = 0
    resumed: int = 0
    retried: int = 0
    lost_servers: int = 0
    returned_servers: int = 0
    late_results: int = 0
    busy_before_by_server: dict[str, float] = field(default_factory=dict)
    """Busy seconds of replicas that were lost or have left."""
    kv_before: list[KVCache] = field(default_factory=list)
    """What these told last of their KV caches."""
    spans: deque[RequestSpan] = field(default_factory=lambda: deque(maxlen=_MAX_SPANS))
    peak_bytes: int = 0
    """Of the replica with the most memory, as of any report that was looked at."""

    def dropped(self, link: ReplicaLink, now_s: float) -> None:
        """A replica was lost or has left; its busy time is kept."""
        before_s = self.busy_before_by_server.get(link.name, 0.0)
        self.busy_before_by_server[link.name] = before_s + link.busy_until_s(now_s)
        if link.load is not None and link.load.kv is not None:
            self.kv_before.append(link.load.kv)  # without them the sums would fall when a process ends

    def ended(self, name: str, sent_s: float, now_s: float) -> None:
        """An attempt on a replica has ended."""
        self.in_flight -= 1
        self.spans.append((name, sent_s, now_s))

    def gave_up(self, num_tokens: int) -> None:
        """A request was aborted and will not be continued."""
        self.aborted += 1
        self.aborted_tokens += num_tokens

    def stats(self, *, queued: int, now_s: float, links: Iterable[ReplicaLink]) -> ServerStats:
        """As of now."""
        busy, links = dict(self.busy_before_by_server), list(links)
        for link in links:
            busy[link.name] = busy.get(link.name, 0) + link.busy_until_s(now_s)
        return ServerStats(
            in_flight=self.in_flight,
            queued=queued,
            dispatched=self.dispatched,
            completed=self.completed,
            generated_tokens=self.generated_tokens,
            aborted=self.aborted,
            aborted_tokens=self.aborted_tokens,
            resumed=self.resumed,
            retried=self.retried,
            lost_servers=self.lost_servers,
            returned_servers=self.returned_servers,
            late_results=self.late_results,
            busy_s_by_server=busy,
            spans=tuple(self.spans),
            engines={
                **self._kv_metrics([k.load.kv for k in links if k.load is not None and k.load.kv is not None]),
                **self._memory_metrics(k.load.peak_bytes for k in links if k.load is not None),
            },
        )

    def _memory_metrics(self, now: Iterable[int]) -> dict[str, float]:
        """Of the largest replica so far; nothing where none tells."""
        self.peak_bytes = max(self.peak_bytes, *now, 0)  # the 0: `max` of a single number raises
        return {"memory/engine_peak_bytes": float(self.peak_bytes)} if self.peak_bytes else {}

    def _kv_metrics(self, now: Sequence[KVCache]) -> dict[str, float]:
        """`now`: of the live replicas that tell, as of their last reports."""
        every = [*self.kv_before, *now]
        metrics: dict[str, float] = {"engine/preemptions": float(sum(kv.preemptions for kv in every))} if every else {}
        if total := sum(kv.total_tokens for kv in now):  # only live caches are in use
            metrics["engine/kv_use"] = sum(kv.used_tokens for kv in now) / total
        if asked := sum(kv.prefix_asked_tokens for kv in every):
            metrics["engine/prefix_hits"] = sum(kv.prefix_hit_tokens for kv in every) / asked
        return metrics
