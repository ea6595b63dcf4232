"""What one engine replica and its callers exchange, the same for every library.

An `Engine` (`inference/engine.py`) lives in one process and is plain asyncio. `cluster/` puts it into a Ray actor,
`rollout/` talks to many of them through `rollout/protocol.py: Replica`.

Life of a weight update (version v is served only after `commit`):

    begin_update(plan) -> load_bucket(bucket) * n -> finish_update() == digest of the sender
                       -> pause(...) -> commit(v) -> resume()

With a staged transport (`weight_sync/bucket.py: STAGED`) the buckets wait in host memory and the replica goes on
serving the old version until `commit`; an update that is never committed changes nothing. Other transports load into
the served weights: pause before `begin_update`, and the replica refuses to resume until a `commit` has succeeded. A
partial update is never served.

Where trainer and engine share devices, a replica sleeps while the trainer works (`inference/sleeping.py`):

    pause(ABORT) -> sleep(level) -> ... -> wake(["weights"]) -> update as above, up to commit
                 -> wake(["kv_cache"]) -> resume()
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from roll_async.schema import Completion


class PauseMode(str, Enum):
    """What happens to running requests when the engine pauses."""

    ABORT = "abort"  # they end with FinishReason.ABORT and their tokens so far
    KEEP = "keep"  # they stay in place with their KV cache and go on after resume, under the weights then loaded


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineCapabilities:
    """Differences between backends; callers look here, never at a backend's name."""

    keep_in_place: bool
    """`PauseMode.KEEP` works: running requests survive a weight update."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KVCache:
    """The KV cache of a replica, as the engine itself counts it. Counters are since its start."""

    total_tokens: int
    """Its size: blocks times tokens per block."""
    free_tokens: int
    """In blocks that no unfinished request holds; those of cached prefixes are among them."""
    preemptions: int = 0
    """Running requests that had to give up their blocks to older ones, and were computed again later."""
    prefix_asked_tokens: int = 0
    """Tokens that were looked up in the prefix cache."""
    prefix_hit_tokens: int = 0
    """Those of them that were found there."""

    @property
    def used_tokens(self) -> int:
        """In blocks that unfinished requests hold; the last block of each counts as full."""
        return self.total_tokens - self.free_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLoad:
    """Load of a replica."""

    running: int
    waiting: int
    free_kv_fraction: float
    """Share of the KV cache that no unfinished request can claim, 0..1."""
    held: frozenset[str] | None = None
    """Requests that the replica has and whose end it has not handed over; None when nobody looked. A request that was
    acknowledged before and is not among them has ended: its reply is on its way, or was lost.
    """
    kv: KVCache | None = None
    """None where the engine does not tell."""
    peak_bytes: int = 0
    """Largest resident sets that the processes of the replica have had; 0 when nobody looked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineMemory:
    """What a replica holds now, over all of its devices."""

    weights_bytes: int
    kv_cache_bytes: int
    host_weights_bytes: int = 0
    """Weights that wait in host memory (sleep level 1 of a replica on GPUs)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Tokens of a request that goes on: once they are reported they outlive the replica.

    Worked example: a request has sampled 7 tokens, of which 4 were reported before: `start=4`, and a piece of 3.
    """

    start: int
    """Tokens of the request before the first one of the piece."""
    piece: Completion
    """As of an interrupted request (ABORT), with the seconds since its submission. It has no record of experts: who
    goes on from these tokens reads them again, and records them then.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineReport:
    """Events on a replica since the last report."""

    completions: tuple[Completion, ...]
    failures: tuple[tuple[str, str], ...]
    """(request_id, reason): the request failed, the replica still works."""
    load: EngineLoad
    progress: tuple[Progress, ...] = ()
    """Of running requests; every few seconds, not in every report."""


class Follower(Protocol):
    """The ranks of a replica that spans nodes, on a node after its first. The engine on the first one commands them."""

    def start(self) -> None:
        """Load their part of the model; blocks until the ranks of all nodes are there. Raises as `Engine.start`."""

    def wait(self) -> None:
        """Return when one of them has ended, and with it the replica."""
