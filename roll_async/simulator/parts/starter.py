"""Starts and stops the replicas of a simulated run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from roll_async.simulator.parts.models import EngineFaults, uniform
from roll_async.simulator.parts.replica import SimReplica
from roll_async.simulator.scenario import Scenario


class ReplicaReports(Protocol):
    """Receives findings about broken invariants."""

    def wanted(self, replica: SimReplica) -> list[str]:
        """Requests on a serving replica that have a waiting caller."""
        ...

    def report(self, invariant: int, message: str) -> None: ...


class SimStarter:
    """`rollout/dispatch/engine_supervisor.py: Starter`. Those that are started during the run have no faults."""

    def __init__(
        self,
        scenario: Scenario,
        watch: ReplicaReports,
        new: Callable[[str, EngineFaults], SimReplica],
        replicas: list[SimReplica],
    ) -> None:
        """`replicas`: all replicas since the start; new ones are added."""
        self._scenario, self._watch, self._new, self._replicas = scenario, watch, new, replicas
        self._placed: set[str] = set()
        """Replicas with devices."""

    def first(self, faults: EngineFaults) -> SimReplica:
        """The next one of the start."""
        name = f"engine-{len(self._placed)}"
        self._placed.add(name)
        return self._add(name, faults)

    def name(self, index: int) -> str:
        """Of the replica of this number; those of validation come after the others of the start."""
        own = len(self._scenario.validation_engines)
        return f"engine-{index if index < len(self._scenario.engines) else index + own}"

    async def reserve(self, name: str) -> None:
        """A replica that is started again keeps its devices."""
        if name not in self._placed:
            await asyncio.sleep(self._scenario.devices_after_s * uniform("devices", self._scenario.seed, name))
            self._placed.add(name)

    async def start(self, name: str, number: int) -> SimReplica:
        """A new process, after the old one has been ended."""
        self._end(name)
        return self._add(name, EngineFaults())

    async def stop(self, name: str) -> None:
        """Invariant 21: its requests must have continued on other replicas before. Requests without a waiting caller
        are invariant 11.
        """
        for replica in self._of(name):
            left = self._watch.wanted(replica)
            if left and replica.alive and not replica.ignores_calls:
                self._watch.report(21, f"{name} leaves while it runs {left}")
        self._end(name)
        self._placed.discard(name)

    def _add(self, name: str, faults: EngineFaults) -> SimReplica:
        self._replicas.append(self._new(name, faults))
        return self._replicas[-1]

    def _of(self, name: str) -> list[SimReplica]:
        return [replica for replica in self._replicas if replica.name == name]

    def _end(self, name: str) -> None:
        for replica in self._of(name):
            replica.crash("killed")
