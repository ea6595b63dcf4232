"""What one engine replica can do, whichever library is behind it.

An `Engine` lives in one process and is plain asyncio. `cluster/` puts it into a Ray actor, `rollout/` talks to many of
them through `rollout/protocol.py: EngineClient`.

Life of a weight update (version v is served only after `commit`):

    pause(...) -> begin_update(plan) -> load_bucket(bucket) * n -> finish_update() == digest of the sender
               -> commit(v) -> resume()

Between `begin_update` and `commit` the replica refuses to generate: a partial update is never served.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from roll_async.schema import Completion, GenerateRequest, WeightVersion
from roll_async.weight_sync.bucket import Bucket, UpdatePlan


class PauseMode(str, Enum):
    """What happens to running requests when the engine pauses."""

    ABORT = "abort"  # they end with FinishReason.ABORT and their tokens so far
    KEEP = "keep"  # they stay in place with their KV cache and go on after resume, under the weights then loaded


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineCapabilities:
    """Differences between backends; callers look here, never at a backend's name."""

    keep_in_place: bool
    """`PauseMode.KEEP` works: running requests survive a weight update."""
    prefix_caching: bool
    """Requests that share a prompt are cheaper on the same replica."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLoad:
    """How busy a replica is."""

    running: int
    waiting: int
    free_kv_fraction: float
    """Share of the KV cache not in use, 0..1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineReport:
    """What happened on a replica since the last report."""

    completions: tuple[Completion, ...]
    failures: tuple[tuple[str, str], ...]
    """(request_id, reason): the replica lives, this request did not work."""
    load: EngineLoad


class Engine(Protocol):
    """One replica."""

    @property
    def capabilities(self) -> EngineCapabilities: ...

    @property
    def version(self) -> WeightVersion | None:
        """Weights it serves; None until the first commit when it started with random weights (`load_format: dummy`)."""

    async def start(self) -> None:
        """Load the model. Raises ValueError for settings a user can fix, RuntimeError when the library fails."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """Run one request to its end, or to an abort. One log-prob and one weight version per token.

        Raises ValueError when the request can not fit (prompt longer than the context).
        """

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests; their `generate` calls have returned (FinishReason.ABORT) before this returns. Unknown
        ids are ignored.
        """

    async def pause(self, mode: PauseMode) -> None:
        """After this returns no token is sampled until `resume`. New `generate` calls wait."""

    async def resume(self) -> None: ...

    async def begin_update(self, plan: UpdatePlan) -> None: ...

    async def load_bucket(self, bucket: Bucket) -> None:
        """Load the tensors of one bucket; returns when the bucket's memory may be reused."""

    async def finish_update(self) -> str:
        """Digest over what was loaded (see `weight_sync/digest.py`); resets the prefix cache. Raises RuntimeError if
        tensors of the plan are missing.
        """

    async def commit(self, version: WeightVersion) -> None:
        """Tokens sampled from now on carry this version."""

    def load(self) -> EngineLoad: ...

    async def close(self) -> None:
        """Release devices and child processes; running requests end with ABORT."""
