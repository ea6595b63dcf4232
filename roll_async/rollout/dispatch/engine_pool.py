"""All replicas of a role behind one queue: requests, weight pushes, validations, loss and return of replicas.

    generate --> waiting --pump--> outbox of a replica with free slots --submit--> replica
                   ^                                                                  |
                   +------ the next attempt, with its tokens <---- reader <---collect--+

Dispatch is event-driven: every freed slot is refilled at once, and no slot is free while a request may run there.
Calls to a replica carry batches. No lock is held across a wait. `attempts.py` holds the state of an attempt,
`liveness.py` finds replicas that do not work, `sticky_routing.py` chooses the replica, `admission.py` its limit. A
replica that does not answer a control call in time is lost like one that died.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from roll_async.buffer.errors import Defect
from roll_async.inference.protocol import EngineReport, PauseMode
from roll_async.rollout.attempts import Attempt, AttemptState, Stop
from roll_async.rollout.dispatch.admission import LIMITS
from roll_async.rollout.dispatch.liveness import Liveness
from roll_async.rollout.dispatch.load_index import ReplicaChoice
from roll_async.rollout.dispatch.manager_options import ManagerOptions
from roll_async.rollout.dispatch.replica_link import ReplicaLink, ask_all, wait_drained
from roll_async.rollout.dispatch.requests import GenerationFailed, Interrupted, PendingRequest
from roll_async.rollout.dispatch.returning import ReturningReplicas
from roll_async.rollout.dispatch.server_counts import ServerCounts, ServerStats
from roll_async.rollout.dispatch.sticky_routing import StickyRouting
from roll_async.rollout.dispatch.waiting import VALIDATION_FIRST, VALIDATION_LAST, WaitingRequests
from roll_async.rollout.protocol import Replica
from roll_async.schema import Completion, FinishReason, GenerateRequest, Prompt, SamplingParams

if TYPE_CHECKING:
    from roll_async.rollout.chat_scheduler import ChatCompletionScheduler
    from roll_async.rollout.rounds import RolloutResult

logger = logging.getLogger(__name__)

REPLY_WITHIN_S = 5.0
"""How long the reply of an attempt may take to arrive after its end was acknowledged."""


@lru_cache(maxsize=64)
def _ended(sampling: SamplingParams, end_ids: tuple[int, ...]) -> SamplingParams:
    return replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *end_ids))


class EnginePool:
    """`start` before use, `close` at the end; failures of the readers surface in `wait_failed`."""

    def __init__(self, clients: Sequence[Replica], options: ManagerOptions) -> None:
        self._options = options
        self._links = {c.name: ReplicaLink(c, self, self._spawn) for c in clients}
        self._liveness = Liveness(self, options, self._spawn)
        self.returning = ReturningReplicas(self, options)
        self._choice = ReplicaChoice()
        self._limit = LIMITS[options.admission](options)
        self._sticky = StickyRouting(self._choice, self._links, self._pump_soon, strict=self._limit.strict)
        self._waiting = WaitingRequests()
        self._counts = ServerCounts()
        self._scheduler: ChatCompletionScheduler | None = None
        self._dispatching, self._floor = True, VALIDATION_LAST
        self.num_interrupts = 0
        self._interrupt_mode: str | None = None
        self._pump_handle: asyncio.Handle | None = None
        self._changed: dict[ReplicaLink, None] = {}
        """Replicas whose free slots the next pump counts; in order, of which nothing is random."""
        self._round_began_s = float("-inf")
        self._num_requests = 0
        self._preemptible: set[Attempt] = set()
        """Attempts of a validation that were dispatched while it comes after training; some have ended."""
        self._failure: asyncio.Future[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Begin to read replies."""
        self._failure = asyncio.get_running_loop().create_future()
        for link in self._links.values():
            self._begin(link)
        self._liveness.start()

    def _begin(self, link: ReplicaLink) -> None:
        self._touch(link)
        link.open()
        if self._limit.strict:  # a limit of one until its load is known
            self._liveness.ask_load_once(link)

    async def close(self) -> None:
        """Stop reading; requests that still wait are cancelled."""
        if self._pump_handle is not None:
            self._pump_handle.cancel()
        self._sticky.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for pending in [*self._waiting, *(attempt.request for attempt in self._all_in_flight())]:
            pending.result.cancel()  # no reader is left that could set it
        self._waiting.clear()

    async def wait_failed(self) -> None:
        """Never returns; raises the error that ended the last replica, or the Defect that ends the run."""
        assert self._failure is not None, "start() first"
        await asyncio.shield(self._failure)  # a waiter that is cancelled must not cancel it for the others

    @property
    def links(self) -> Collection[ReplicaLink]:
        """Live replicas, with the attempts in flight there."""
        return self._links.values()

    @property
    def num_servers(self) -> int:
        """Replicas alive."""
        return len(self._links)

    @property
    def clients(self) -> list[Replica]:
        """Replicas alive."""
        return [s.client for s in self._links.values()]

    @property
    def expects_return(self) -> bool:
        """Whether a lost or new replica is being started: requests wait for it if no other one is there."""
        return bool(self.returning.expected)

    @property
    def paused_for_push(self) -> bool:
        """A weight push has paused the replicas."""
        return not self._dispatching

    def stats(self) -> ServerStats:
        """Counters since the start."""
        now_s = asyncio.get_running_loop().time()
        return self._counts.stats(queued=len(self._waiting), now_s=now_s, links=self._links.values())

    # Requests

    async def generate(
        self,
        request: GenerateRequest,
        *,
        affinity: str | None = None,
        conversation: str | None = None,
        validation: bool = False,
    ) -> Completion:
        """Run a request to its end, over as many replicas and weight versions as it takes.

        `affinity`: requests with the same key go to one replica while it lives and has room. `conversation`: later
        requests with this key go to the replica of the first one while it lives, at once and also when it is full: its
        cache holds their prefix. `validation`: of a validation, whose priority `pause_training` and `yield_validation`
        change.
        Raises Interrupted (mode abort), GenerationFailed, ConnectionError when no replica is left, Defect.
        """
        loop = asyncio.get_running_loop()
        if ends := self._options.end_ids:
            request = replace(request, sampling=_ended(request.sampling, ends))
        later = conversation is not None and self._choice.is_settled(conversation)
        self._num_requests += 1
        pending = PendingRequest(
            request, loop.create_future(), affinity, validation, self._num_requests, conversation, later, loop.time()
        )
        self._waiting.add(pending)
        self._pump_soon()
        try:
            return await pending.result
        except asyncio.CancelledError:
            self._forget(pending)
            raise
        finally:
            # The two refer to each other. A cycle per request costs collections of garbage, a quarter of all time here.
            del pending.attempt

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

    async def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests; their `generate` calls have returned (FinishReason.ABORT) when this returns. The time is
        bounded wherever they are: a request that was not sent ends at once, one on the wire once it has arrived, a
        running one once its replica acknowledges. A replica that does not within `interrupt_timeout_s` is lost.
        """
        wanted = set(request_ids)
        for pending in [p for p in self._waiting if p.request.request_id in wanted]:
            self._waiting.discard(pending)
            pending.attempt.to(AttemptState.ABORTED)
            self._finish_aborted(pending)
        attempts = [a for a in self._all_in_flight() if a.request.request.request_id in wanted]
        for attempt in attempts:
            attempt.request.abort_wanted, attempt.stop = True, Stop.CALLER
        await self._end_on_servers(attempts)
        # Acknowledged is not answered: the tokens come with the next report of the replica.
        left = [a.request.result for a in attempts if not a.ended]
        if left:
            await asyncio.wait(left, timeout=min(REPLY_WITHIN_S, self._options.interrupt_timeout_s))
        for attempt in attempts:
            if not attempt.ended:  # the abort was acknowledged, the reply did not come: reported tokens are kept
                self._lose(attempt)
                self._finish_aborted(attempt.request)

    async def abort_all(self) -> None:
        """End every request, queued or running."""
        running = (attempt.request for attempt in self._all_in_flight())
        await self.abort([p.request.request_id for p in [*self._waiting, *running]])

    def forget_affinity(self, key: str) -> None:
        """No further request will come with this affinity or conversation key."""
        self._choice.forget(key)

    # Dispatch

    def _touch(self, link: ReplicaLink) -> None:
        """Its free slots have changed."""
        self._changed[link] = None
        self._pump_soon()

    def _pump_soon(self) -> None:
        """One pump for all events of a turn of the loop: what is made in it leaves in one call per replica."""
        if self._pump_handle is None:
            self._pump_handle = asyncio.get_running_loop().call_soon(self._pump_now)

    def _pump_now(self) -> None:
        self._pump_handle = None
        try:
            self._pump()
        except Exception as error:  # the loop would only log it, and callers would wait for ever
            self.fail(error)
            raise

    def _pump(self) -> None:
        """Give waiting requests, oldest first, to replicas with free slots. A request that may not run on any of them
        keeps its place and does not block others. Later turns of conversations go to their replica, full or not.
        """
        for link in self._changed:
            self._set_free(link)
        self._changed.clear()
        if not self._dispatching or not self._waiting:
            return
        for link in self._limit.begun(self._waiting):
            self._set_free(link)
        now = asyncio.get_running_loop().time()
        if now - self._round_began_s >= self._options.batch_creation_interval_s:
            self._round_began_s = now
            self._choice.begin_round()
        for pending in self._waiting.later_turns(self._floor) if self._waiting.any_later_turn else ():
            if (own := self._sticky.sticky_replica(pending)) is not None:
                self._dispatch(pending, own, now)
                self._waiting.discard(pending)
        passed: list[PendingRequest] = []
        try:
            while self._choice.any_free and (pending := self._waiting.pop(self._floor)) is not None:
                passed.append(pending)
                if (link := self._sticky.choose(pending, patient=not self.validation_yields)) is not None:
                    self._dispatch(pending, link, now)
                    passed.pop()
        finally:  # also after an error, of which `fail` tells those that wait
            for pending in passed:  # their order is by age: each has its old place again
                self._waiting.add(pending)
        if self.validation_yields:  # any slot must do for it: nothing waits for its own replica
            self._make_room()
        else:
            self._sticky.end_in_time(passed)

    def _make_room(self) -> None:
        """As many requests of a validation that yields as others wait stop, keeping their tokens."""
        self._preemptible = {attempt for attempt in self._preemptible if not attempt.ended}
        if not self._preemptible:
            return
        running = [attempt for attempt in self._preemptible if attempt.stop is None]
        num_wanted = self._waiting.num_training - (len(self._preemptible) - len(running))
        # The youngest have the fewest tokens to read again.
        chosen = sorted(running, key=lambda attempt: -attempt.request.order)[: max(0, num_wanted)]
        if chosen:
            self._spawn(self._end_on_servers(self._preempt(chosen)), "requests that are preempted")

    def _preempt(self, attempts: Sequence[Attempt]) -> list[Attempt]:
        """The requests of these attempts keep their tokens and go on later. Returns the attempts that a replica has."""
        self._recall(attempts)
        running = [attempt for attempt in attempts if not attempt.ended]
        for attempt in running:
            attempt.stop = attempt.stop or Stop.ASIDE  # the first reason decides: its caller may have aborted it
        return running

    def _dispatch(self, pending: PendingRequest, link: ReplicaLink, now_s: float) -> None:
        if pending.num_generated >= pending.request.sampling.max_new_tokens:  # stopped at its very last token
            pending.attempt.to(AttemptState.ANSWERED)
            self._finish(pending, Completion.empty(pending.request.request_id, FinishReason.LENGTH))
            return
        link.send(pending.attempt, now_s)
        self._limit.sent(link, pending)
        if pending.validation and self.validation_yields:
            self._preemptible.add(pending.attempt)
        self._counts.dispatched += 1
        self._counts.resumed += bool(pending.pieces)
        self._counts.in_flight += 1
        self._set_free(link)

    def _set_free(self, link: ReplicaLink) -> None:
        """Update the free slots of a replica: its limit less the requests that run there, this manager's and those of
        other clients. A suspect replica gets one request as a probe, one that leaves gets none. The load of other
        clients is asked for again before it is older than `batch_creation_interval_s`.
        """
        if link.leaving or self._links.get(link.name) is not link:  # removed from the choice: `set` would bring it back
            return
        running = len(link.in_flight)
        free = self._limit.slots(link) - running - link.foreign_requests
        if link.suspect:
            free = min(free, 1 - running)
        self._choice.set(link.name, free, 1.0 if link.load is None else link.load.free_kv_fraction)
        self._liveness.follow_load(link)

    def load_reported(self, link: ReplicaLink) -> None:
        """A replica reported its load on request: other clients may have taken or freed slots."""
        if self._links.get(link.name) is link:
            self._limit.reported(link, self._waiting)
            self._touch(link)

    # Ends of attempts

    def reported(self, link: ReplicaLink, report: EngineReport) -> None:
        """Process a report of a replica."""
        for progress in report.progress:
            attempt = link.in_flight.get(progress.piece.request_id)
            if attempt is not None and attempt.receive(progress):  # None: the attempt has ended
                self._generated(link, len(progress.piece.token_ids))
        for completion in report.completions:
            self._reply(link, completion)
        for wire_id, reason in report.failures:
            attempt = self._ended(link, wire_id, AttemptState.ANSWERED)
            if attempt is not None:
                self._keep_received(attempt)
                self._retry(attempt.request, link, reason)
        link.record_load(report.load)  # after the replies: what its load has beyond those in flight is foreign
        self._limit.reported(link, self._waiting)
        self._touch(link)

    def _generated(self, link: ReplicaLink, num_new_tokens: int) -> None:
        """Tokens came from the replica: it is not suspect any more."""
        link.checks_without_token = link.num_suspicions = 0
        self._counts.generated_tokens += num_new_tokens

    def _reply(self, link: ReplicaLink, completion: Completion) -> None:
        aborted = completion.finish_reason is FinishReason.ABORT
        attempt = self._ended(link, completion.request_id, AttemptState.ABORTED if aborted else AttemptState.ANSWERED)
        if attempt is None:
            return
        pending, tokens = attempt.request, len(completion.token_ids)
        if tokens:
            self._generated(link, tokens - attempt.num_received)  # a completion has the tokens of its progress, too
        if not aborted:
            # Not for aborted ones: their lengths would make all answers look short.
            self._limit.ended(link, pending.num_generated + tokens)
        if not aborted or pending.abort_wanted:
            self._finish(pending, completion, link.name)
        elif attempt.stop is Stop.TIMEOUT:
            pending.keep(completion)
            self._retry(pending, link, f"did not end within {self._options.generation_timeout_s:g} s")
        elif self._interrupt_mode == "abort":
            self._counts.gave_up(pending.num_generated + tokens)
            if not pending.result.done():
                pending.result.set_exception(Interrupted(pending.request.request_id))
        elif self._interrupt_mode is not None or attempt.stop is Stop.ASIDE:
            pending.keep(completion)
            self._requeue(pending)
        else:
            pending.keep(completion)
            self._retry(pending, link, "aborted it unasked")

    def _ended(self, link: ReplicaLink, wire_id: str, state: AttemptState) -> Attempt | None:
        """The attempt whose end a replica reports; None, counted as a late reply, if it had ended before."""
        attempt = link.in_flight.get(wire_id)
        if attempt is None:
            self._counts.late_results += 1
            return None
        self._end(attempt, state)
        return attempt

    def _end(self, attempt: Attempt, state: AttemptState) -> None:
        """End an attempt for which a replica was chosen."""
        assert attempt.link is not None
        attempt.link.end(attempt, state)
        self._counts.ended(attempt.link.name, attempt.dispatched_s, asyncio.get_running_loop().time())
        self._touch(attempt.link)

    def _lose(self, attempt: Attempt) -> None:
        """End an attempt as LOST; its reported tokens are kept."""
        self._end(attempt, AttemptState.LOST)
        self._keep_received(attempt)

    def _recall(self, attempts: Iterable[Attempt]) -> None:
        """Return attempts that are still in an outbox to the queue, at their old place."""
        for attempt in attempts:
            if attempt.state is AttemptState.OUTBOX:
                self._end(attempt, AttemptState.ABORTED)
                self._requeue(attempt.request)

    def redispatch(self, attempts: Sequence[Attempt], reason: str) -> None:
        """These attempts failed on their replica: they continue on another one from their last reported token."""
        for attempt in attempts:
            if not attempt.ended:
                assert attempt.link is not None
                self._lose(attempt)
                self._retry(attempt.request, attempt.link, reason)

    def _retry(self, pending: PendingRequest, link: ReplicaLink, reason: str) -> None:
        """A replica failed this request. The next attempt avoids it while there is another one."""
        pending.failures += 1
        pending.failed_on.add(link)
        # An aborted request does not fail: its caller wants the tokens so far.
        if pending.failures > self._options.request_retries and not pending.abort_wanted:
            if not pending.result.done():
                whole = f"request {pending.request.request_id} failed {pending.failures} times"
                pending.result.set_exception(GenerationFailed(f"{whole}; last: {link.name}: {reason}"))
            return
        self._counts.retried += 1
        self._requeue(pending)

    def _requeue(self, pending: PendingRequest) -> None:
        """Queue the next attempt, unless the caller has aborted the request."""
        if pending.abort_wanted:
            self._finish_aborted(pending)
        elif not pending.result.done():
            pending.begin_attempt()
            self._waiting.add(pending)
            self._pump_soon()

    def _keep_received(self, attempt: Attempt) -> None:
        """Keep the tokens that an attempt reported; it has ended, and its reply will not count."""
        if self._interrupt_mode != "abort":
            attempt.request.keep(attempt.received_piece())

    def _finish_aborted(self, pending: PendingRequest) -> None:
        self._finish(pending, Completion.empty(pending.request.request_id, FinishReason.ABORT))

    def _finish(self, pending: PendingRequest, last: Completion, replica: str = "") -> None:
        if pending.result.done():
            return
        if last.finish_reason is FinishReason.ABORT:
            self._counts.gave_up(pending.num_generated + len(last.token_ids))
        else:
            self._counts.completed += 1
        pending.result.set_result(pending.merged(last, replica))

    def _forget(self, pending: PendingRequest) -> None:
        """The caller was cancelled: abort the request, and expect no reply."""
        attempt = pending.attempt
        if self._waiting.discard(pending) or attempt.ended or attempt.link is None:
            return
        arrives = attempt.state is AttemptState.RUNNING  # one on the wire is ended when it is acknowledged
        self._end(attempt, AttemptState.ABORTED)
        if arrives:
            self._spawn(self._liveness.end_on_replica(attempt.link, [attempt]), f"abort on {attempt.link.name}")

    async def _end_on_servers(self, attempts: Sequence[Attempt]) -> None:
        """No replica runs these attempts when this returns; those still in an outbox are not sent."""
        by_link: dict[ReplicaLink, list[Attempt]] = {}
        for attempt in attempts:
            if attempt.state is AttemptState.OUTBOX:
                self._end(attempt, AttemptState.ABORTED)
                self._finish_aborted(attempt.request)
            elif attempt.link is not None:
                by_link.setdefault(attempt.link, []).append(attempt)
        await asyncio.gather(*(self._liveness.end_on_replica(link, part) for link, part in by_link.items()))

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
        self._pump_soon()

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
        if not self._links and not self.expects_return:
            await self.wait_failed()  # raises: the loss of the last one has set the failure

    async def pause_training(self, paused: bool) -> None:
        """True: requests of training stop, keeping their tokens, and only those of validations run. False: they go
        on.
        """
        self._floor = VALIDATION_FIRST if paused else VALIDATION_LAST
        if paused:
            self._waiting.validation_priority = VALIDATION_FIRST
            await self._stop_running([a for a in self._all_in_flight() if not a.request.validation])
        else:
            self._pump_soon()

    async def _stop_running(self, attempts: Sequence[Attempt]) -> None:
        """They stop where they run; their requests keep the tokens and go on when they may."""
        await self._end_on_servers(self._preempt(attempts))

    def yield_validation(self, yields: bool) -> None:
        """True: requests of validations take only the slots that training does not want, until `pause_training` calls
        for their end, or False.
        """
        yields = yields and self._floor == VALIDATION_LAST
        self._waiting.validation_priority = VALIDATION_LAST if yields else VALIDATION_FIRST
        self._pump_soon()

    @property
    def pump_is_due(self) -> bool:
        """A pump comes in this turn of the loop: until then requests may wait beside a free slot."""
        return self._pump_handle is not None

    @property
    def validation_yields(self) -> bool:
        """Requests of validations come after those of training."""
        return self._waiting.validation_priority == VALIDATION_LAST

    # Replicas that come and go

    async def add(self, client: Replica) -> None:
        """A new or restarted replica joins; it must already hold the current weights, and run."""
        assert client.name not in self._links, f"{client.name} joins twice"
        self._counts.returned_servers += self.returning.arrived(client.name)
        link = self._links[client.name] = ReplicaLink(client, self, self._spawn)
        self._begin(link)

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
        await self._stop_running(list(link.in_flight.values()))
        await wait_drained([link], REPLY_WITHIN_S)
        if self._links.get(name) is link:  # else it was lost meanwhile, and its requests have moved
            for attempt in self._drop(link):
                self._keep_received(attempt)
                self._requeue(attempt.request)

    def lost(self, link: ReplicaLink, reason: str) -> None:
        """Remove a lost replica; its requests are dispatched again from their last received token."""
        name = link.name
        if self._links.get(name) is not link:
            return
        orphans = self._drop(link)
        logger.warning(
            "engine %s is lost: %s; its %d requests are dispatched to other replicas", name, reason, len(orphans)
        )
        self._counts.lost_servers += 1
        for attempt in orphans:
            self._keep_received(attempt)
            self._retry(attempt.request, link, reason)
        self.returning.lost(name, reason)  # before the next line, which ends a run without a replica to come
        self.end_without_engines(name, reason)

    def _drop(self, link: ReplicaLink) -> list[Attempt]:
        """Close the link to a replica. Returns what was in flight there."""
        del self._links[link.name]
        orphans = link.close()
        self._counts.dropped(link, asyncio.get_running_loop().time())
        self._counts.in_flight -= len(orphans)  # `close` has ended them past `_end`, which counts
        self._choice.remove(link.name)
        self._limit.remove(link)
        self._pump_soon()  # later turns do not wait for it any more
        return orphans

    def end_without_engines(self, name: str, reason: str) -> None:
        """If no replica is left and none is expected, every waiting request fails."""
        if self._links or self.expects_return:
            return
        error = ConnectionError(f"no engine is left; the last one, {name}, was lost: {reason}")
        for pending in self._waiting:
            if not pending.result.done():
                pending.result.set_exception(error)
        self._waiting.clear()
        self._fail(error)

    # Faults

    def fail(self, error: BaseException) -> None:
        """A fault of ours ends all requests: no replica is lost by it, and another attempt would meet it again."""
        defect = Defect.of(error)
        for pending in [*self._waiting, *(attempt.request for attempt in self._all_in_flight())]:
            if not pending.result.done():  # where nobody awaits `wait_failed`, callers must not wait for ever
                pending.result.set_exception(defect)
        self._waiting.clear()
        self._fail(defect)

    def _fail(self, error: BaseException) -> None:
        if self._failure is not None and not self._failure.done():
            self._failure.set_exception(error)
            self._failure.exception()  # marks it as retrieved: a run may end for another reason and never await it

    def _all_in_flight(self) -> list[Attempt]:
        return [a for link in self._links.values() for a in link.in_flight.values()]

    def _spawn(self, work: Coroutine[object, object, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()  # `exception()` of a cancelled task would raise
        if error is not None:
            self.fail(error)


AsyncLLMServerManager = EnginePool
"""The name in ROLL, for programs of users."""
