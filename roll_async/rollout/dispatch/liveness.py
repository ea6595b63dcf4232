"""Finds replicas that fail without an error: frozen processes, hung cores, lost replies, requests that never end.

    heartbeat    every few seconds each replica is asked for its load; one that does not answer in time is lost
    lost reply   an acknowledged attempt that its replica does not hold any more, and whose reply did not come, goes
                 on on another replica
    progress     a replica that runs requests and reports no token for `silence_s` is suspect: its requests count as
                 failed there, and it gets one request as a probe; the second time in a row it is lost
    time-out     a request that takes longer than `generation_timeout_s` is aborted and goes on on another replica
    load         a replica that runs requests of other clients, too, is asked often: its free slots change unreported

A replica that is paused by a weight push is not checked: the push has deadlines of its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from roll_async.inference.protocol import EngineLoad
from roll_async.rollout.attempts import Attempt, AttemptState, Stop
from roll_async.rollout.dispatch.manager_options import ManagerOptions
from roll_async.rollout.dispatch.replica_link import LOSSES, ReplicaLink, Spawn, ask_all

if TYPE_CHECKING:
    from roll_async.rollout.dispatch.engine_pool import EnginePool

logger = logging.getLogger(__name__)

_HEARTBEAT_S = 5.0
_HEARTBEAT_SLICES = 10
_CHECKS_PER_SILENCE = 10
"""Checks without a token until a replica is suspect. A check counts once, however long this process was suspended
before it.
"""
_SHORTEST_POLL_S = 0.1
"""Interval at which a replica that runs requests of other clients is asked for its load."""
_SWEEPS_PER_TIMEOUT = 10
_MAX_SUSPICIONS = 2
_UNKNOWN = 2
"""Heartbeats in a row in which a replica does not list an attempt before its reply counts as lost; until then the reply
may be on its way.
"""


class Liveness:
    """The checks of one manager, each a loop in a task of the manager."""

    def __init__(self, pool: EnginePool, options: ManagerOptions, spawn: Spawn) -> None:
        self._pool, self._options, self._spawn = pool, options, spawn
        self._followed: set[ReplicaLink] = set()

    def start(self) -> None:
        """Start the checks."""
        self._spawn(self._heartbeat(), "heartbeat of the engines")
        self._spawn(self._watch_tokens(), "progress of the engines")
        self._spawn(self._sweep(), "request deadlines")

    # Heartbeat and lost replies

    async def _heartbeat(self) -> None:
        limit_s, pool = self._options.interrupt_timeout_s, self._pool
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            if pool.paused_for_push:
                continue
            before = pool.num_interrupts
            failed = await ask_all(pool.links, "heartbeat of", self._ask, limit_s, slices=_HEARTBEAT_SLICES)
            # Nothing follows from a question across a push, which has deadlines of its own.
            for link, error in failed.items() if before == pool.num_interrupts else ():
                pool.lost(
                    link, f"asked for its load: {error}" if error else f"no answer to a heartbeat for {limit_s:g} s"
                )

    async def _ask(self, link: ReplicaLink) -> None:
        asked_s, before = asyncio.get_running_loop().time(), self._pool.num_interrupts
        load = await link.ask_load()
        # Across a push attempts end by its abort, not because a reply is lost.
        if before == self._pool.num_interrupts and not self._pool.paused_for_push:
            self._compare(link, load, asked_s)

    def _compare(self, link: ReplicaLink, load: EngineLoad, asked_s: float) -> None:
        """Attempts that were acknowledged before the load was asked for and that the replica no longer holds have
        ended; their replies may be lost.
        """
        if load.held is None:
            return
        gone = []
        for attempt in link.in_flight.values():
            if attempt.state is not AttemptState.RUNNING or attempt.acknowledged_s >= asked_s:
                continue
            attempt.unknown = 0 if attempt.wire_id in load.held else attempt.unknown + 1
            if attempt.unknown >= _UNKNOWN:
                gone.append(attempt)
        if gone:
            logger.warning(
                "%d replies of engine %s were lost; their requests are dispatched to other replicas",
                len(gone),
                link.name,
            )
            self._pool.redispatch(gone, "its reply was lost")
            self.suspect(link, "lost its replies")

    # Load

    def ask_load_once(self, link: ReplicaLink) -> None:
        """A replica has joined, whose limit is not known before its load."""
        self._spawn(self._ask_load_once(link), f"first load of {link.name}")

    async def _ask_load_once(self, link: ReplicaLink) -> None:
        with suppress(*LOSSES):  # the heartbeat finds it out, too
            async with asyncio.timeout(self._options.interrupt_timeout_s):
                await link.ask_load()

    def follow_load(self, link: ReplicaLink) -> None:
        """While other clients run requests there its free slots change without a report: poll it."""
        if link.foreign_requests and link not in self._followed:
            self._followed.add(link)
            self._spawn(self._follow_load(link), f"load of {link.name}")

    async def _follow_load(self, link: ReplicaLink) -> None:
        try:
            while link.foreign_requests and link in self._pool.links:
                await asyncio.sleep(max(self._options.batch_creation_interval_s, _SHORTEST_POLL_S))
                async with asyncio.timeout(self._options.interrupt_timeout_s):
                    await link.ask_load()
        except LOSSES:  # as above; until then it counts as without requests of others
            link.foreign_requests = 0
        finally:
            self._followed.discard(link)

    # Progress

    async def _watch_tokens(self) -> None:
        while True:
            await asyncio.sleep(self._options.silence_s / _CHECKS_PER_SILENCE)
            for link in list(self._pool.links):  # a copy: a loss removes the link
                running = any(a.state is AttemptState.RUNNING for a in link.in_flight.values())
                if self._pool.paused_for_push or not running:
                    continue
                link.checks_without_token += 1
                if link.checks_without_token > _CHECKS_PER_SILENCE:  # >: the first check may follow its request at once
                    self._suspect_silent(link)

    def _suspect_silent(self, link: ReplicaLink) -> None:
        link.checks_without_token = 0  # its probe has the whole time again
        why = f"reported no token for {self._options.silence_s:g} s while it ran requests"
        if self.suspect(link, why):
            return
        attempts = list(link.in_flight.values())  # a copy: each leaves it when it is redispatched
        logger.warning("engine %s %s; its %d requests are dispatched to other replicas", link.name, why, len(attempts))
        self._pool.redispatch(attempts, why)
        self._spawn(self.end_on_replica(link, attempts), f"abort on {link.name}")

    def suspect(self, link: ReplicaLink, why: str) -> bool:
        """Suspect a replica; the second time without a token in between it is lost (True)."""
        link.num_suspicions += 1
        if link.num_suspicions >= _MAX_SUSPICIONS:
            self._pool.lost(link, f"{why}, twice")
        return link.num_suspicions >= _MAX_SUSPICIONS

    async def end_on_replica(self, link: ReplicaLink, attempts: Sequence[Attempt]) -> None:
        """Abort attempts without a caller on the replica. One that does not acknowledge in time is lost."""
        limit_s = self._options.interrupt_timeout_s
        failed = await ask_all([link], "abort on", lambda link: link.abort(attempts), limit_s, slices=_HEARTBEAT_SLICES)
        for late in failed:
            self._pool.lost(late, f"did not end {len(attempts)} requests within {limit_s:g} s")

    # Time-outs

    async def _sweep(self) -> None:
        timeout, loop, pool = self._options.generation_timeout_s, asyncio.get_running_loop(), self._pool
        while True:
            await asyncio.sleep(timeout / _SWEEPS_PER_TIMEOUT)
            if pool.paused_for_push:
                continue
            limit = loop.time() - timeout
            for link in list(pool.links):
                late = [a for a in link.in_flight.values() if a.dispatched_s < limit]
                again = [a for a in late if a.stop is Stop.TIMEOUT]
                if again:  # aborted in the last sweep, and the reply did not come
                    pool.redispatch(again, f"did not end within {timeout:g} s")
                for attempt in late:
                    if attempt.stop is None:  # one that was put aside or aborted keeps that reason
                        attempt.stop = Stop.TIMEOUT
                        logger.warning("request %s did not end within %g s on %s", attempt.wire_id, timeout, link.name)
                if late:
                    self._spawn(self.end_on_replica(link, late), f"abort on {link.name}")
