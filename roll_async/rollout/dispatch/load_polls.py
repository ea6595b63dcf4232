"""Polls the load of replicas that also serve other clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from roll_async.rollout.dispatch.manager_options import ManagerOptions
from roll_async.rollout.dispatch.replica_link import LOSSES, ReplicaLink, Spawn

_SHORTEST_POLL_S = 0.1
"""Interval at which a replica that runs requests of other clients is asked for its load."""


class LoadPolls:
    """Of the replicas of one manager. Whether a replica that does not answer works at all is found out by the
    heartbeat.
    """

    def __init__(self, options: ManagerOptions, spawn: Spawn, is_live: Callable[[ReplicaLink], bool]) -> None:
        self._options, self._spawn, self._is_live = options, spawn, is_live
        self._followed: set[ReplicaLink] = set()

    def ask_once(self, link: ReplicaLink) -> None:
        """A replica has joined."""
        self._spawn(self._ask_once(link), f"first load of {link.name}")

    async def _ask_once(self, link: ReplicaLink) -> None:
        with suppress(*LOSSES):  # the heartbeat finds it out, too
            async with asyncio.timeout(self._options.interrupt_timeout_s):
                await link.ask_load()

    def follow(self, link: ReplicaLink) -> None:
        """While other clients run requests there its free slots change without a report: poll it."""
        if link.foreign_requests and link not in self._followed:
            self._followed.add(link)
            self._spawn(self._follow(link), f"load of {link.name}")

    async def _follow(self, link: ReplicaLink) -> None:
        try:
            while link.foreign_requests and self._is_live(link):
                await asyncio.sleep(max(self._options.batch_creation_interval_s, _SHORTEST_POLL_S))
                async with asyncio.timeout(self._options.interrupt_timeout_s):
                    await link.ask_load()
        except LOSSES:  # as above; until then it counts as without requests of others
            link.foreign_requests = 0
        finally:
            self._followed.discard(link)
