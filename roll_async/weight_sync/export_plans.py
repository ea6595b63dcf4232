"""What the next export of a push sends: as little as the replicas that get it allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Generic, TypeVar

from roll_async.schema import WeightVersion
from roll_async.weight_sync.bucket import Content, UpdatePlan

Replica = TypeVar("Replica")


class ExportPlanner(Generic[Replica]):
    """Knows which replicas hold what. All replicas of an export get the same, so one that holds less decides."""

    def __init__(self, plan: UpdatePlan, *, sparse: bool, adapters: bool) -> None:
        """`plan`: what all exports have in common. `sparse`, `adapters`: see `SyncOptions`."""
        self._plan, self._sparse, self._adapters = plan, sparse, adapters
        self._export = 0
        self._holders: list[Replica] = []
        """They hold what the last export sent."""
        self._frozen: list[Replica] = []
        """They hold the weights below the adapters, which never change."""

    def next(self, version: WeightVersion, receivers: Sequence[Replica]) -> UpdatePlan:
        """The plan of the next export, which goes to `receivers`."""
        plan = replace(self._plan, version=version)
        if self._adapters:
            whole = any(replica not in self._frozen for replica in receivers)
            return replace(plan, content=Content.WHOLE if whole else Content.ADAPTERS)
        if not self._sparse:
            return plan
        base = self._export if all(replica in self._holders for replica in receivers) else None
        self._holders, self._export = [], self._export + 1
        return replace(plan, export=self._export, base=base)

    def transferred(self, receivers: Sequence[Replica], proved: Sequence[Replica]) -> None:
        """The transfer is over; `proved`: those of the receivers that proved what they got."""
        self._holders = list(proved)
        self._drop(receivers, proved)

    def committed(self, receivers: Sequence[Replica], serving: Sequence[Replica]) -> None:
        """The swap is over; `serving`: those of the receivers that serve the version."""
        self._drop(receivers, serving)
        self._holders = [replica for replica in self._holders if replica in serving]
        if self._adapters:
            self._frozen += [replica for replica in serving if replica not in self._frozen]

    def _drop(self, tried: Sequence[Replica], good: Sequence[Replica]) -> None:
        """A replica that failed gets everything the next time."""
        self._frozen = [replica for replica in self._frozen if replica not in tried or replica in good]
