"""One request to one replica: load-aware dispatch, interruption, re-dispatch of what a dead or silent replica held.

    generate --> waiting --pump--> outbox of the least busy replica --submit--> replica
                   ^                                                             |
                   +---- requeued with its tokens <---- reader <----collect------+

Dispatch is event-driven: every freed slot is refilled at once; new requests may wait `batch_creation_interval` for
company. Calls to a replica carry batches. No lock is held across a wait. A replica that does not answer a control call
in time is taken out like one that died.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING

from roll_async.inference.protocol import EngineReport, PauseMode
from roll_async.rollout.load_index import ReplicaChoice
from roll_async.rollout.manager_options import ManagerOptions
from roll_async.rollout.protocol import Replica
from roll_async.rollout.replica_link import ReplicaLink, abort_on, ask_all, wait_drained
from roll_async.rollout.requests import GenerationFailed, Interrupted, PendingRequest, empty_completion
from roll_async.rollout.server_counts import ServerCounts, ServerStats
from roll_async.rollout.waiting import WaitingRequests
from roll_async.schema import Completion, FinishReason, GenerateRequest, Prompt

if TYPE_CHECKING:
    from roll_async.rollout.chat_scheduler import ChatCompletionScheduler, RolloutResult

logger = logging.getLogger(__name__)

_SWEEPS_PER_TIMEOUT = 10

_HEARTBEAT_S = 5.0
"""How often replicas are asked whether they live."""
_HEARTBEAT_SLICES = 10


class AsyncLLMServerManager:
    """All replicas of `actor_infer`. `start` before use, `close` at the end; failures of the readers surface in
    `wait_failed`.
    """

    def __init__(self, clients: Sequence[Replica], options: ManagerOptions) -> None:
        self._options = options
        self._links = {c.name: ReplicaLink(c, self, self._spawn) for c in clients}
        self._returns: Callable[[str, str], bool] | None = None
        self._expected: set[str] = set()
        self._choice = ReplicaChoice(options.max_concurrent_per_server)
        self._waiting = WaitingRequests()
        self._counts = ServerCounts()
        self._dispatching, self._foreground_only = True, False
        self._num_interrupts = 0
        self._interrupt_mode: str | None = None
        self._round: asyncio.Handle | None = None
        self._last_round_s = float("-inf")
        self._scheduler: ChatCompletionScheduler | None = None
        self._failure: asyncio.Future[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Begin to read replies."""
        self._failure = asyncio.get_running_loop().create_future()
        for name in list(self._links):
            self._begin(name)
        self._spawn(self._sweep(), "request deadlines")
        self._spawn(self._heartbeat(), "heartbeat of the engines")

    def _begin(self, name: str) -> None:
        self._choice.set(name, 0)
        self._links[name].open()

    async def close(self) -> None:
        """Stop reading; requests that still wait are cancelled."""
        if self._round is not None:
            self._round.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for pending in [*self._waiting, *self._all_in_flight()]:
            pending.result.cancel()
        self._waiting.clear()

    async def wait_failed(self) -> None:
        """Returns never; raises what ended the last replica."""
        assert self._failure is not None, "start() first"
        await asyncio.shield(self._failure)

    @property
    def num_servers(self) -> int:
        """Replicas alive."""
        return len(self._links)

    @property
    def clients(self) -> list[Replica]:
        """Replicas alive."""
        return [s.client for s in self._links.values()]

    def stats(self) -> ServerStats:
        """Counters since the start."""
        return self._counts.stats(queued=len(self._waiting), now_s=asyncio.get_running_loop().time())

    # Requests

    async def generate(
        self,
        request: GenerateRequest,
        *,
        affinity: str | None = None,
        conversation: str | None = None,
        foreground: bool = False,
    ) -> Completion:
        """Run a request to its end, over as many replicas and weight versions as it takes.

        `affinity`: requests with the same key go to one replica while it lives and has room. `conversation`: later
        requests with this key go where the first one went while that lives, at once and also when it is full: its cache
        holds all they begin with. `foreground`: runs also while `set_aside` holds the others back.
        Raises Interrupted (mode abort), GenerationFailed, ConnectionError when no replica is left.
        """
        result = asyncio.get_running_loop().create_future()
        later = conversation is not None and self._choice.is_settled(conversation)
        pending = PendingRequest(request, result, affinity, foreground, conversation, later)
        self._waiting.add(pending)
        self._plan_round()
        try:
            return await pending.result
        except asyncio.CancelledError:
            self._forget(pending)
            raise

    def scheduled_by(self, scheduler: ChatCompletionScheduler) -> None:
        """Who runs the rounds of `generate_sequences`."""
        self._scheduler = scheduler

    async def generate_sequences(
        self, prompts: Sequence[Prompt], num_groups: int, *, validation: bool = False, first_id: int = 0
    ) -> RolloutResult:
        """Main entry of one rollout round: see `ChatCompletionScheduler.generate_sequences`, which does the work."""
        if self._scheduler is None:
            raise RuntimeError("generate_sequences: no ChatCompletionScheduler was made with this manager")
        return await self._scheduler.generate_sequences(prompts, num_groups, validation=validation, first_id=first_id)

    async def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests; their `generate` calls have returned (FinishReason.ABORT) when this returns."""
        wanted = set(request_ids)
        for pending in [p for p in self._waiting if p.request.request_id in wanted]:
            self._waiting.discard(pending)
            self._finish(pending, empty_completion(pending.wire_id, FinishReason.ABORT))
        running = [p for p in self._all_in_flight() if p.request.request_id in wanted]
        for pending in running:
            pending.abort_wanted = True
        await self._abort_on_servers(running)
        if running:
            await asyncio.wait([p.result for p in running], timeout=self._options.interrupt_timeout_s)
        for pending in running:
            if not pending.result.done():  # the replica acknowledged without a reply: it has nothing to tell
                self._detach(pending)
                self._finish(pending, empty_completion(pending.wire_id, FinishReason.ABORT))

    async def abort_all(self) -> None:
        """End every request, queued or running."""
        await self.abort([p.request.request_id for p in [*self._waiting, *self._all_in_flight()]])

    def forget_affinity(self, key: str) -> None:
        """No further request will come with this affinity or conversation key."""
        self._choice.forget(key)

    # Weight pushes and validation

    async def interrupt(self, mode: str, timeout_s: float) -> None:
        """Bring all replicas to a stand-still within `timeout_s`, whatever the length of a sample.

        wait: nothing new starts, running requests finish; what is not finished by half of the time is treated as
        resume.
        resume: running requests stop and keep their tokens. abort: they are discarded. keep: they stay in the engine.
        A replica that does not acknowledge in time is taken out; its requests go on elsewhere from their last token.
        Raises ConnectionError when it was the last one and does not come back.
        """
        self._dispatching, self._num_interrupts = False, self._num_interrupts + 1
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        if mode == "wait":
            await wait_drained(self._links.values(), timeout_s / 2)
        self._interrupt_mode = "abort" if mode == "abort" else "resume"
        pause = PauseMode.KEEP if mode == "keep" else PauseMode.ABORT
        if mode != "keep":
            self._recall()
        await self._command("pause", lambda link: link.stop(pause), deadline - loop.time(), of_s=timeout_s)
        if mode != "keep":
            await wait_drained(self._links.values(), max(0.0, deadline - loop.time()))
            for pending in self._all_in_flight():  # stopped, and its tokens never came: continue from what we have
                self._detach(pending)
                self._keep_received(pending)
                self._requeue(pending)

    def _recall(self) -> None:
        """What has not left for its replica yet waits again, in its order."""
        for pending in reversed([p for link in self._links.values() for p in link.recall()]):
            self._detach(pending)
            self._requeue(pending)

    async def resume(self) -> None:
        """Let the replicas run again and dispatch what waits. One that does not acknowledge in time is taken out."""
        timeout_s = self._options.interrupt_timeout_s
        await self._command("resume", ReplicaLink.resume, timeout_s, of_s=timeout_s)
        self._interrupt_mode = None
        self._dispatching = True
        self._pump()

    async def _command(
        self, what: str, call: Callable[[ReplicaLink], Coroutine[object, object, None]], left_s: float, *, of_s: float
    ) -> None:
        """A control call to every replica at once. Who fails it, or is not done in what is left of the time, is out.
        Raises ConnectionError when nobody is left.
        """
        if not self._links:
            return
        for link, error in (await ask_all(self._links.values(), what, call, left_s)).items():
            self.lost(link, f"did not {what}: {error}" if error else f"did not {what} within {of_s:g} s")
        if not self._links and not self._expected:
            await self.wait_failed()

    async def set_aside(self, aside: bool) -> None:
        """True: background requests stop, keeping their tokens, and only foreground ones run (validation). False: they
        go on.
        """
        self._foreground_only = aside
        if aside:
            await self._abort_on_servers([p for p in self._all_in_flight() if not p.foreground])
        else:
            self._pump()

    async def add(self, client: Replica) -> None:
        """A new or restarted replica joins; it must already hold the current weights, and run."""
        assert client.name not in self._links, f"{client.name} joins twice"
        self._expected.discard(client.name)
        self._counts.returned_servers += 1
        self._links[client.name] = ReplicaLink(client, self, self._spawn)
        self._begin(client.name)
        self._pump()

    def supervise(self, returns: Callable[[str, str], bool]) -> None:
        """`returns(name, reason)` is asked when a replica is lost: True = it will come back by `add`, or be given up by
        `give_up`. Until then requests wait for it if no other replica is there.
        """
        self._returns = returns

    def give_up(self, name: str, reason: str) -> None:
        """A lost replica will not come back."""
        self._expected.discard(name)
        self._end_without_engines(name, reason)

    @property
    def expects_return(self) -> bool:
        """Whether a lost replica is on its way back."""
        return bool(self._expected)

    async def remove(self, name: str, reason: str) -> None:
        """Take a replica out; its requests go on elsewhere from their last token."""
        if name in self._links:
            self.lost(self._links[name], reason)

    # Inside

    def _plan_round(self) -> None:
        """A new request: dispatch it with the next round, which is at once unless one was held just before."""
        if self._round is not None:
            return
        loop = asyncio.get_running_loop()
        wait_s = self._last_round_s + self._options.batch_creation_interval_s - loop.time()
        self._round = loop.call_later(wait_s, self._hold_round) if wait_s > 0 else loop.call_soon(self._hold_round)

    def _hold_round(self) -> None:
        self._round, self._last_round_s = None, asyncio.get_running_loop().time()
        self._pump()

    def _pump(self) -> None:
        """Give waiting requests to replicas with free slots, the most free one first; later turns go home in any
        case.
        """
        if not self._dispatching:
            return
        if self._waiting.any_later_turn:
            self._send_home()
        while (pending := self._waiting.first(foreground_only=self._foreground_only)) is not None:
            name = self._choice.choose(pending.affinity, pending.failed_on)
            if name is None:
                return
            if pending.conversation is not None:
                self._choice.settle(pending.conversation, name)
            self._waiting.discard(pending)
            self._dispatch(pending, self._links[name])

    def _send_home(self) -> None:
        for pending in self._waiting.later_turns(foreground_only=self._foreground_only):
            assert pending.conversation is not None
            if (home := self._choice.home(pending.conversation, pending.failed_on)) is not None:
                self._waiting.discard(pending)
                self._dispatch(pending, self._links[home])

    def _dispatch(self, pending: PendingRequest, link: ReplicaLink) -> None:
        if pending.num_generated >= pending.request.sampling.max_new_tokens:
            self._finish(pending, empty_completion(pending.wire_id, FinishReason.LENGTH))
            return
        now = asyncio.get_running_loop().time()
        pending.server, pending.dispatched_s = link.name, now
        link.send(pending)
        self._counts.dispatched += 1
        self._counts.resumed += bool(pending.pieces)
        self._counts.began(now)
        self._choice.set(link.name, len(link.in_flight))

    def reported(self, link: ReplicaLink, report: EngineReport) -> None:
        """What came back from a replica."""
        for progress in report.progress:
            pending = link.in_flight.get(progress.piece.request_id)
            if pending is not None:  # else of an attempt that is over
                pending.receive(progress)
        for completion in report.completions:
            self._reply(link, completion)
        for wire_id, reason in report.failures:
            self._failed(link, wire_id, reason)
        self._choice.set(link.name, len(link.in_flight))
        self._pump()

    def _reply(self, link: ReplicaLink, completion: Completion) -> None:
        pending = self._take(link, completion.request_id)
        if pending is None:
            return
        self._counts.generated_tokens += len(completion.token_ids)
        if completion.finish_reason is not FinishReason.ABORT or pending.abort_wanted:
            self._finish(pending, completion)
        elif self._interrupt_mode == "abort":
            self._counts.gave_up(pending.num_generated + len(completion.token_ids))
            if not pending.result.done():
                pending.result.set_exception(Interrupted(pending.request.request_id))
        else:
            pending.keep(completion)
            self._requeue(pending)

    def _failed(self, link: ReplicaLink, wire_id: str, reason: str) -> None:
        pending = self._take(link, wire_id)
        if pending is not None:
            self._retry(pending, link.name, reason)

    def _take(self, link: ReplicaLink, wire_id: str) -> PendingRequest | None:
        """The request of this attempt, which ends here. None, and counted: it had ended before."""
        pending = link.take(wire_id)
        if pending is None:
            self._counts.late_results += 1
            return None
        pending.server = None
        self._counts.ended(asyncio.get_running_loop().time())
        return pending

    def _retry(self, pending: PendingRequest, name: str, reason: str) -> None:
        self._keep_received(pending)
        pending.failures, pending.failed_on = pending.failures + 1, name
        if pending.failures > self._options.request_retries:
            if not pending.result.done():
                whole = f"request {pending.request.request_id} failed {pending.failures} times"
                pending.result.set_exception(GenerationFailed(f"{whole}; last: {name}: {reason}"))
            return
        self._counts.retried += 1
        self._requeue(pending)

    def _requeue(self, pending: PendingRequest) -> None:
        """Back to where it waited: it is older than everything behind it."""
        if not pending.result.done():
            self._waiting.put_back(pending)

    def _keep_received(self, pending: PendingRequest) -> None:
        """An attempt is over, and its reply will not count: its last reported token is the last one that there is."""
        if self._interrupt_mode == "abort":
            pending.received = None
        else:
            self._counts.generated_tokens += pending.keep_received()

    def _detach(self, pending: PendingRequest) -> None:
        """The present attempt ends here; later replies of it are late."""
        link, pending.server = self._links.get(pending.server or ""), None
        if link is not None and link.take(pending.wire_id) is not None:
            self._counts.ended(asyncio.get_running_loop().time())
            self._choice.set(link.name, len(link.in_flight))

    def _finish(self, pending: PendingRequest, last: Completion) -> None:
        if last.finish_reason is FinishReason.ABORT:
            self._counts.gave_up(pending.num_generated + len(last.token_ids))
        else:
            self._counts.completed += 1
        if not pending.result.done():
            pending.result.set_result(pending.merged(last))

    def _forget(self, pending: PendingRequest) -> None:
        """Its caller is gone: stop the work, expect no reply."""
        if self._waiting.discard(pending):
            return
        link, wire_id = self._links.get(pending.server or ""), pending.wire_id
        self._detach(pending)
        if link is not None:
            self._spawn(link.abort([wire_id]), f"abort on {link.name}")
        self._pump()

    def lost(self, link: ReplicaLink, reason: str) -> None:
        """A replica is gone: its requests are dispatched again from their last received token."""
        name = link.name
        if self._links.get(name) is not link:
            return
        del self._links[name]
        orphans = link.cut()
        logger.warning("engine %s is out: %s; its %d requests go elsewhere", name, reason, len(orphans))
        self._counts.lost_servers += 1
        self._counts.ended(asyncio.get_running_loop().time(), len(orphans))
        self._choice.remove(name)
        for pending in reversed(orphans):
            pending.server = None
            self._retry(pending, name, reason)
        if self._returns is not None and self._returns(name, reason):
            self._expected.add(name)
        self._end_without_engines(name, reason)
        self._pump()

    def _end_without_engines(self, name: str, reason: str) -> None:
        """Nobody is there and nobody will come: everything that waits fails."""
        if self._links or self._expected:
            return
        error = ConnectionError(f"no engine is left; the last one, {name}, went with: {reason}")
        for pending in self._waiting:
            if not pending.result.done():
                pending.result.set_exception(error)
        self._waiting.clear()
        self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self._failure is not None and not self._failure.done():
            self._failure.set_exception(error)

    async def _sweep(self) -> None:
        """Take requests away from replicas that are silent for `generation_timeout`."""
        timeout = self._options.generation_timeout_s
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(timeout / _SWEEPS_PER_TIMEOUT)
            limit = loop.time() - timeout
            late = [p for p in self._all_in_flight() if p.dispatched_s < limit]
            if not late or not self._dispatching:
                continue
            for pending in late:
                logger.warning("request %s did not end within %g s on %s", pending.wire_id, timeout, pending.server)
            await self._abort_on_servers(late)
            await asyncio.sleep(timeout / _SWEEPS_PER_TIMEOUT)
            for pending in late:
                if pending.server is not None and pending.dispatched_s < limit:
                    name = pending.server
                    self._detach(pending)
                    self._retry(pending, name, f"silent for {timeout:g} s")
            self._pump()

    async def _heartbeat(self) -> None:
        """Take out replicas that do nothing at all, such as a stopped process: no call to them fails, and requests
        alone would tell after `generation_timeout`. A weight push has deadlines of its own: none is asked while it
        stops the replicas, and an answer it came across says nothing.
        """
        limit_s = self._options.interrupt_timeout_s
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            if not self._dispatching:
                continue
            before = self._num_interrupts
            links, call = self._links.values(), ReplicaLink.ping
            failed = await ask_all(links, "heartbeat of", call, limit_s, slices=_HEARTBEAT_SLICES)
            for link, error in failed.items() if before == self._num_interrupts else ():
                self.lost(link, f"its load is an error: {error}" if error else f"no sign of life for {limit_s:g} s")

    async def _abort_on_servers(self, running: Sequence[PendingRequest]) -> None:
        if not await abort_on(self._links, running, self._options.interrupt_timeout_s):
            logger.warning("abort was not acknowledged within %g s", self._options.interrupt_timeout_s)

    def _all_in_flight(self) -> list[PendingRequest]:
        return [p for link in self._links.values() for p in link.in_flight.values()]

    def _spawn(self, work: Coroutine[object, object, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fail(error)
