"""All replicas of `actor_infer`: rounds of requests, weight pushes, validation, loss and restart of replicas.

How one request reaches a replica, and how its attempts end, is in `request_dispatch.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING

from roll_async.inference.protocol import PauseMode
from roll_async.rollout.attempts import Attempt
from roll_async.rollout.dispatch.manager_options import ManagerOptions
from roll_async.rollout.dispatch.replica_link import ReplicaLink, ask_all, wait_drained
from roll_async.rollout.dispatch.request_dispatch import REPLY_WITHIN_S, RequestDispatch
from roll_async.rollout.protocol import Replica
from roll_async.schema import Prompt

if TYPE_CHECKING:
    from roll_async.rollout.chat_scheduler import ChatCompletionScheduler
    from roll_async.rollout.rounds import RolloutResult


class AsyncLLMServerManager(RequestDispatch):
    """All replicas of `actor_infer`. `start` before use, `close` at the end; failures of the readers surface in
    `wait_failed`.
    """

    def __init__(self, clients: Sequence[Replica], options: ManagerOptions) -> None:
        super().__init__(clients, options)
        self._scheduler: ChatCompletionScheduler | None = None

    @property
    def num_servers(self) -> int:
        """Replicas alive."""
        return len(self._links)

    @property
    def clients(self) -> list[Replica]:
        """Replicas alive."""
        return [s.client for s in self._links.values()]

    def scheduled_by(self, scheduler: ChatCompletionScheduler) -> None:
        """Set the scheduler that runs the rounds of `generate_sequences`."""
        self._scheduler = scheduler

    async def generate_sequences(
        self, prompts: Sequence[Prompt], num_groups: int, *, validation: bool = False, first_id: int = 0
    ) -> RolloutResult:
        """One rollout round for programs of your own; a run takes its groups through the queue and never calls it. See
        `ChatCompletionScheduler.generate_sequences`, which does the work.
        """
        if self._scheduler is None:
            raise RuntimeError("generate_sequences: no ChatCompletionScheduler was made with this manager")
        return await self._scheduler.generate_sequences(prompts, num_groups, validation=validation, first_id=first_id)

    # Weight pushes and validation

    async def interrupt(self, mode: str, timeout_s: float) -> None:
        """Bring all replicas to a stand-still within `timeout_s`, whatever the length of a sample.

        wait: nothing new starts, running requests finish; what is not finished by half of the time is treated as
        resume.
        resume: running requests stop and keep their tokens. abort: they are discarded. keep: they stay in the engine.
        A replica that does not acknowledge in time is lost; its requests go on elsewhere from their last token.
        Raises ConnectionError when it was the last one and is not restarted.
        """
        # First: a slot that becomes free from now on must not be filled again.
        self._dispatching, self.num_interrupts = False, self.num_interrupts + 1
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        if mode == "wait":
            await wait_drained(self._links.values(), timeout_s / 2)
        self._interrupt_mode = "abort" if mode == "abort" else "resume"
        pause = PauseMode.KEEP if mode == "keep" else PauseMode.ABORT
        if mode != "keep":
            self._recall(self._all_in_flight())  # what no replica has yet must not reach a paused one
        await self._command("pause", lambda link: link.stop(pause), deadline - loop.time(), of_s=timeout_s)
        if mode != "keep":
            # The tokens come with the replies, after the acknowledgement of the pause.
            await wait_drained(self._links.values(), min(REPLY_WITHIN_S, max(0.0, deadline - loop.time())))
            for link in [link for link in self._links.values() if link.in_flight]:
                for attempt in list(link.in_flight.values()):  # the reply with its tokens did not come
                    self._lose(attempt)
                    self._requeue(attempt.request)
                self._liveness.suspect(link, "did not return the tokens of its requests when it was paused")

    async def resume(self) -> None:
        """Let the replicas run again and dispatch waiting requests. One that does not acknowledge in time is lost."""
        timeout_s = self._options.interrupt_timeout_s
        await self._command("resume", ReplicaLink.resume, timeout_s, of_s=timeout_s)
        self._interrupt_mode = None  # until here an abort that a replica reports is that of the push
        self._dispatching = True
        self._pump()

    async def _command(
        self, what: str, call: Callable[[ReplicaLink], Coroutine[object, object, None]], left_s: float, *, of_s: float
    ) -> None:
        """A control call to every replica at once. One that fails it, or has not done it in what is left of the time,
        is lost. Raises ConnectionError when none is left.
        """
        if not self._links:
            return
        for link, error in (await ask_all(self._links.values(), what, call, left_s)).items():
            self.lost(link, f"did not {what}: {error}" if error else f"did not {what} within {of_s:g} s")
        if not self._links and not self._expected:
            await self.wait_failed()  # raises: the loss of the last one has set the failure

    async def pause_training(self, paused: bool) -> None:
        """True: background requests stop, keeping their tokens, and only foreground ones run (validation). False:
        background requests continue.
        """
        self._foreground_only = paused
        if paused:
            self._waiting.foreground_yields = False
            background = [a for a in self._all_in_flight() if not a.request.foreground]
            await self._stop_running(background)
        else:
            self._pump()

    async def _stop_running(self, attempts: Sequence[Attempt]) -> None:
        """They stop where they run; their requests keep the tokens and go on when they may."""
        running = self._preempt(attempts)
        self._pump()  # what was in an outbox has left its slot at once
        await self._end_on_servers(running)

    def yield_foreground(self, yields: bool) -> None:
        """True: foreground requests take only the slots that no background request wants, until `pause_training` calls
        for their end, or False.
        """
        self._waiting.foreground_yields = yields and not self._foreground_only
        self._pump()

    def idle_slot_violations(self) -> list[tuple[str, str]]:
        """(request, replica) pairs where a request waits though the replica has a free slot for it. Between two events
        there are none: invariant 10, which the simulator checks.
        """
        if not self._dispatching or self._pump_soon is not None:
            return []
        slots = self._admission.slots
        free = [
            k for k in self.links if not (k.suspect or k.leaving) and slots(k) > len(k.in_flight) + k.foreign_requests
        ]
        waiting = [p for p in self._waiting if p.foreground or not self._foreground_only] if free else []
        waiting = [p for p in waiting if not self.waits_for_home(p)]
        names = {link.name for link in free}
        return [(p.request.request_id, sorted(left)[0]) for p in waiting if (left := names - set(self._avoided(p)))]

    @property
    def num_displaced(self) -> int:
        """Background requests that wait though a foreground that yields holds slots. Between two events there are none:
        invariant 10, which the simulator checks.
        """
        if self.paused_for_push or not self._waiting.foreground_yields:
            return 0
        foreground = [a for a in self._all_in_flight() if a.request.foreground]
        num_stopping = sum(attempt.stop is not None for attempt in foreground)
        return max(0, min(len(foreground), self._waiting.num_background) - num_stopping)

    # Replicas that come and go

    async def add(self, client: Replica) -> None:
        """A new or restarted replica joins; it must already hold the current weights, and run."""
        assert client.name not in self._links, f"{client.name} joins twice"
        # A bool: a new replica, which was not there before, has not returned.
        self._counts.returned_servers += self._expected.pop(client.name, True)
        link = self._links[client.name] = ReplicaLink(client, self, self._spawn)
        self._begin(link)
        self._pump()

    def supervise(self, returns: Callable[[str, str], bool]) -> None:
        """`returns(name, reason)` is called when a replica is lost. True: `add` is called when it is restarted, or
        `give_up` when that fails. Until then requests wait for it if no other replica is alive.
        """
        self._returns = returns

    def expect(self, name: str) -> None:
        """A new replica is being started: requests wait for it if no other one is there."""
        self._expected.setdefault(name, False)

    def give_up(self, name: str, reason: str) -> None:
        """A lost or new replica will not be started any more."""
        self._expected.pop(name, None)
        self._end_without_engines(name, reason)

    @property
    def expects_return(self) -> bool:
        """Whether a lost or new replica is being started."""
        return bool(self._expected)

    async def remove(self, name: str, reason: str) -> None:
        """Remove a replica; its requests go on elsewhere from their last token."""
        if name in self._links:
            self.lost(self._links[name], reason)

    async def retire(self, name: str) -> None:
        """Drain a replica for scale-down: it gets no more requests, and those it runs move with their tokens. The
        caller ends its process.
        """
        link = self._links.get(name)
        if link is None:
            return
        link.leaving = True
        self._choice.remove(name)
        self._recall(list(link.in_flight.values()))
        self._pump()
        await self._stop_running(list(link.in_flight.values()))
        await wait_drained([link], REPLY_WITHIN_S)
        if self._links.get(name) is link:  # else it was lost meanwhile, and its requests have moved
            for attempt in self._drop(link):
                self._keep_received(attempt)
                self._requeue(attempt.request)
            self._pump()
