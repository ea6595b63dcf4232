"""Protocols of what the rollout uses: replicas that generate, scorers, sources of prompts. All plain asyncio.

Traffic to a replica is batched both ways (`submit`, `collect`): one remote call carries many requests, so that they
share its cost.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from roll_async.inference.protocol import EngineCapabilities, EngineLoad, EngineReport, PauseMode
from roll_async.schema import GenerateRequest, Prompt, Reward, Sample
from roll_async.weight_sync.protocol import UpdatedReplica


class RequestTraffic(Protocol):
    """Requests to a replica and its reports."""

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Hand over requests; returns as soon as the replica has them."""

    async def collect(self) -> EngineReport:
        """Wait for at least one completion or failure. At most one `collect` is outstanding per replica."""
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """When this returns none of them runs any more; what they generated comes with `collect` (FinishReason.ABORT).
        Unknown ids are ignored.
        """

    async def pause(self, mode: PauseMode) -> None:
        """When this returns the replica samples no token until `resume`."""

    async def resume(self) -> None: ...

    async def load(self) -> EngineLoad: ...


class Replica(RequestTraffic, UpdatedReplica, Protocol):
    """One engine replica: it generates for the scheduler, and takes weights from the synchronizer (`UpdatedReplica`).
    A dead replica raises ConnectionError from any call.
    """

    capabilities: EngineCapabilities


class Scorer(Protocol):
    """Scores one finished sample. Raises ConnectionError for an outage (retried with backoff), never returns one as a
    score.
    """

    async def score(self, prompt: Prompt, sample: Sample) -> Reward: ...


class PromptSource(Protocol):
    """A deterministic stream of prompts, addressed by position: the ledger accounts by position, so a restart needs no
    cursor file.
    """

    def at(self, index: int) -> Prompt | None:
        """The prompt at this position of the shuffled, domain-mixed stream; None from the end of the data on."""
        ...


class PromptPool(PromptSource, Protocol):
    """A source that chooses prompts by the results of earlier groups (`prompts/pool.py`). Its choices are saved with
    the position.
    """

    @property
    def metric(self) -> str:
        """Number of a sample, in [0, 1], that says whether it is solved."""
        ...

    def record(self, index: int, values: Sequence[float]) -> None:
        """The metric of every sample of the group of this position, once it is generated."""

    def state(self, open_indexes: Collection[int]) -> dict[str, object]:
        """Plain JSON. `open_indexes`: positions whose prompt may be requested again."""
        ...

    def restore(self, state: Mapping[str, object]) -> None: ...

    def metrics(self) -> Mapping[str, float]: ...


class ValidationMeasure(Protocol):
    """`pipelines/validation.py`, or its client in another process."""

    async def prepare(self, step: int) -> bool:
        """With mode replicas, before the push of a step that is due: its replicas get the weights of the step, too.
        False: there is none.
        """
        ...

    async def __call__(self, step: int) -> Mapping[str, float]:
        """The metrics of the validation after a training step; nothing where its own replicas are lost."""
        ...
