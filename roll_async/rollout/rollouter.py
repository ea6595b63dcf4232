"""Continuous generation: slots from the queue, groups back to it.

    queue.reserve --slot--> run_group --KEPT--> queue.put
                               |  FILTERED, FAILED, REQUEUED --> queue.release (the slot is free at once)
    queue.early_stop --surplus--> abort_groups --> REQUEUED

One task per admitted group. Only `reserve` holds generation back: admission and staleness are the queue's.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from roll_async.buffer.message_queue import MessageQueue
from roll_async.buffer.states import ReleaseReason, Slot
from roll_async.observe.outside import OutsideError, asked, border
from roll_async.rollout.dispatch.engine_pool import EnginePool
from roll_async.rollout.dispatch.server_counts import RequestSpan
from roll_async.rollout.filters.duplicates import DuplicateAnswers
from roll_async.rollout.filters.filter_budget import FilterBudget
from roll_async.rollout.filters.first_batch import FirstBatch
from roll_async.rollout.filters.group_filter import metric_of
from roll_async.rollout.group_source import GroupFate, GroupOutcome
from roll_async.rollout.groups import GroupRunner
from roll_async.rollout.protocol import PromptPool, PromptSource
from roll_async.schema import Group, Prompt

logger = logging.getLogger(__name__)

_RESERVE_AT_ONCE = 64
_MAX_READS, _FIRST_PAUSE_S = 5, 0.25
_ABORT_AGAIN_S = 1.0
"""An abort is repeated, because a conversation may have begun its next turn while its last one was aborted."""


JUDGED = ("seen", "kept", "dropped_equal", "dropped_invalid", "dropped_singleton", "singletons")
"""Counters of the group filter (algorithms.group_variance); seen = kept + the three dropped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RollouterStats:
    """Counters since the start; names of the fully asynchronous mode's metrics."""

    total_generated_samples: int
    generation_errors: int
    """Groups that failed; their prompts are not used again."""
    param_sync_requests: int
    filtered_groups: int
    running_groups: int
    reward_outages: int
    """Attempts to score that gave no score because the scorer did not work."""
    reward_timeouts: int
    """Attempts that gave no score because scoring took too long."""
    reward_errors: int
    """Attempts that gave no score because the reward raised."""
    tool_calls: int
    tool_failures: int
    """Tool calls that ended in an error, which the model then read."""
    aborted_requests: int
    """Requests aborted and not continued: early stop, interrupt mode abort."""
    aborted_tokens: int
    """Tokens that these had generated."""
    num_servers: int
    """Engines alive now."""
    lost_servers: int
    returned_servers: int
    retried: int
    """Requests sent again because an engine died, failed or did not end them."""
    resumed: int
    """Requests sent to an engine with the tokens generated so far."""
    generated_tokens: int
    """Tokens of attempts that have ended, and those that running ones have reported; it never falls."""
    late_results: int
    """Replies of attempts that had ended already; they are discarded."""
    busy_s_by_server: Mapping[str, float] = field(default_factory=dict)
    """Seconds during which at least one request ran there, by replica, over all its restarts."""
    spans: tuple[RequestSpan, ...] = ()
    """`ServerStats.spans`."""
    duplicate_share: float = 0.0
    """Share of the samples of the last groups that have an exact copy in their group."""
    judged: Mapping[str, int] = field(default_factory=dict)
    """Groups by the filter's verdict; keys of JUDGED."""
    source: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the group source, and of the engines' KV caches and memory, by key."""
    ratios: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Of the group source: `SourceCounts.ratios`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationBatch:
    """One admitted slot with its prompt, of which all samples are to be generated."""

    slot: Slot
    prompt: Prompt


class Rollouter:
    """Produces finished groups until the data ends or `stop` is called.

    Sub-class it and override `custom_generation_logic(batch)` to change how groups are generated; hand the class to
    `FullyAsyncMain`.
    """

    def __init__(
        self,
        queue: MessageQueue,
        source: GroupRunner,
        manager: EnginePool,
        prompts: PromptSource,
        *,
        budget: FilterBudget | None = None,
        pool: PromptPool | None = None,
        stop_timeout_s: float = 30.0,
    ) -> None:
        """`source`: what turns a prompt into a group. `pool`: used instead of `prompts`, and given the results of the
        groups. `stop_timeout_s`: how long `stop` waits for groups before it cancels them.
        """
        self._queue, self._source, self._manager, self._pool = queue, source, manager, pool
        self._prompts = prompts if pool is None else pool
        self._budget, self._stop_timeout_s = budget, stop_timeout_s
        self._groups: dict[int, asyncio.Task[None]] = {}
        self._stopping = asyncio.Event()
        self._running = asyncio.Event()
        self._running.set()
        self._samples = self._errors = self._filtered = self._syncs = 0
        self._duplicates = DuplicateAnswers()
        self._first = FirstBatch(queue.groups_per_batch)
        self._outages_told = 0
        self._judged: dict[str, int] = dict.fromkeys(JUDGED, 0)

    async def run(self) -> None:
        """Consumes slots, produces groups; waits for admission, unblocked by weight pushes, releases and `stop`."""
        async with asyncio.TaskGroup() as tasks:
            failure = tasks.create_task(self._manager.wait_failed(), name="engine watch")
            surplus = tasks.create_task(self._stop_early(), name="early stop")
            reserving = tasks.create_task(self._reserve(tasks), name="reserve")
            await reserving
            while self._groups:
                await asyncio.wait(list(self._groups.values()))  # a copy: groups leave the dict as they end
            failure.cancel()  # both would wait on, and the TaskGroup for them
            surplus.cancel()

    async def _reserve(self, tasks: asyncio.TaskGroup) -> None:
        while not self._stopping.is_set():
            await self._running.wait()
            slots = await self._queue.reserve(_RESERVE_AT_ONCE)
            if not slots:
                return
            for slot in slots:
                await self._start(slot, tasks)

    async def _start(self, slot: Slot, tasks: asyncio.TaskGroup) -> None:
        try:
            prompt = await self._prompt(slot.prompt_index)
        except OutsideError as error:
            await self._deliver(slot, GroupOutcome(fate=GroupFate.FAILED, reason=f"no prompt: {error}"))
            return
        if prompt is None:
            await self._queue.release(slot.group_id, ReleaseReason.UNUSED)
            self._queue.end_of_data()
            return
        if self._stopping.is_set():  # admitted before the stop, which may have aborted the running groups already
            await self._queue.release(slot.group_id, ReleaseReason.REQUEUED, "stop")
            return
        batch = GenerationBatch(slot=slot, prompt=prompt)
        task = tasks.create_task(self._produce(batch), name=f"group {slot.group_id}")
        self._groups[slot.group_id] = task
        task.add_done_callback(lambda _: self._groups.pop(slot.group_id))

    async def _prompt(self, index: int) -> Prompt | None:
        """The prompt at this position. A source that cannot read it, from a folder in the network perhaps, is asked
        again, `_MAX_READS` times in all. Raises OutsideError.
        """
        for reads in itertools.count(1):
            try:
                with border():
                    prompt = self._prompts.at(index)
                    if not isinstance(prompt, Prompt | None):
                        raise TypeError(f"expected a Prompt, got {type(prompt).__name__}")
                    return prompt
            except OutsideError as error:
                if not isinstance(error.__cause__, OSError) or reads == _MAX_READS or self._stopping.is_set():
                    raise
                pause_s = _FIRST_PAUSE_S * 2**reads  # 0.5, 1, 2, 4 s
                logger.warning("prompt %d: %s; reading it again in %g s", index, error, pause_s)
            await asyncio.sleep(pause_s)

    async def _produce(self, batch: GenerationBatch) -> None:
        self._first.started(batch.slot.group_id)
        try:
            # The loss of all replicas ends the run by the engine watch.
            outcome = await asked(lambda: self.custom_generation_logic(batch), partial(_read, batch.slot), math.inf)
        except OutsideError as error:
            logger.error("group %d: %s", batch.slot.group_id, error, exc_info=error.__cause__)
            outcome = GroupOutcome(fate=GroupFate.FAILED, reason=str(error))
        outcome = outcome or await self.generate(batch)  # outside of the border: a fault of ours ends the run
        await self._deliver(batch.slot, outcome)
        # Last, because it may end the run: the group is accounted for by now.
        self._first.ended(batch.slot.group_id, batch.prompt.domain, outcome)

    def custom_generation_logic(self, batch: GenerationBatch) -> GroupOutcome | Awaitable[GroupOutcome | None] | None:
        """Hook, plain or async, called before a group is generated. An outcome replaces the generation; None goes on
        with `generate(batch)`, which the hook may also call itself.
        """
        return self._custom_generation_logic(batch)

    def _custom_generation_logic(self, batch: GenerationBatch) -> GroupOutcome | Awaitable[GroupOutcome | None] | None:
        """The hook under the name that it has in other documents."""
        return None

    async def generate(self, batch: GenerationBatch) -> GroupOutcome:
        """One group the usual way."""
        slot = batch.slot
        return await self._source.run_group(
            batch.prompt, group_id=slot.group_id, attempt=slot.attempt, admitted_version=slot.admitted_version
        )

    async def _deliver(self, slot: Slot, outcome: GroupOutcome) -> None:
        if outcome.group is not None:
            self._samples += len(outcome.group.samples)
        self._count(outcome)
        if self._pool is not None and outcome.group is not None and outcome.is_scored:
            self._pool.record(slot.prompt_index, _values(outcome.group, self._pool.metric))
        match outcome.fate:
            case GroupFate.KEPT:
                assert outcome.group is not None
                await self._queue.put(outcome.group)
            case GroupFate.FILTERED:
                self._filtered += 1
                await self._queue.release(slot.group_id, ReleaseReason.FILTERED, outcome.reason, group=outcome.group)
            case GroupFate.FAILED:
                self._errors += 1
                level = logging.INFO if outcome.raised else logging.ERROR  # that it raises has been told
                logger.log(level, "group %d (prompt %d) failed: %s", slot.group_id, slot.prompt_index, outcome.reason)
                await self._queue.release(slot.group_id, ReleaseReason.FAILED, outcome.reason)
            case GroupFate.REQUEUED:
                await self._queue.release(slot.group_id, ReleaseReason.REQUEUED, outcome.reason, group=outcome.remains)
        if self._budget is not None and outcome.fate in (GroupFate.KEPT, GroupFate.FILTERED):
            # Last, because it raises at the limit: the queue has the group.
            self._budget.judged(kept=outcome.fate is GroupFate.KEPT)

    def _count(self, outcome: GroupOutcome) -> None:
        """Count the filter's verdict, and copies among the samples."""
        if outcome.fate not in (GroupFate.KEPT, GroupFate.FILTERED):
            return
        verdict = "kept" if outcome.fate is GroupFate.KEPT else outcome.verdict
        if outcome.group is not None:
            self._duplicates.add(outcome.group)
        self._judged["seen"] += 1
        self._judged[verdict if verdict in JUDGED else "dropped_invalid"] += 1
        self._judged["singletons"] += outcome.group is not None and len(outcome.group.samples) == 1

    async def _stop_early(self) -> None:
        """Abort surplus groups as soon as the queue reports them; their tasks end as REQUEUED. Repeat the abort for
        groups that go on: a request may not have existed yet, or belong to a later turn.
        """
        asked: set[int] = set()
        while True:
            try:
                async with asyncio.timeout(_ABORT_AGAIN_S if asked else None):
                    surplus = await self._queue.early_stop(asked)
            except TimeoutError:
                asked = set()
                continue
            if not surplus:
                return
            await self._source.abort_groups([i for i in surplus if i not in asked])
            asked = set(surplus)

    async def pause(self) -> None:
        """Hold generation back for a validation: no new group starts, running requests stop and keep their tokens."""
        self._running.clear()  # first: no group may start while the others are set aside
        await self._manager.pause_training(True)

    async def resume(self) -> None:
        """Continue after `pause`."""
        await self._manager.pause_training(False)
        self._running.set()

    async def interrupt(self, mode: str, timeout_s: float) -> None:
        """Bring the engines to a stand-still for a weight push."""
        self._syncs += 1
        await self._manager.interrupt(mode, timeout_s)

    async def release(self) -> None:
        """The weight push is over: engines run again."""
        await self._manager.resume()

    async def stop(self) -> None:
        """Start no more groups, abort those that run, give their slots back; `run` then returns. Groups that have not
        ended after `stop_timeout_s`, because they are being scored or run user code, are cancelled.
        """
        self._stopping.set()
        self._running.set()  # a run that is paused must be able to stop: `_reserve` waits for it
        self._queue.stop_reserving()
        deadline = asyncio.get_running_loop().time() + self._stop_timeout_s
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                while running := self._unfinished():
                    await self._manager.abort_all()
                    await asyncio.wait(running.values(), timeout=_ABORT_AGAIN_S)
        if self._unfinished():
            await self._cut_short()

    def _unfinished(self) -> dict[int, asyncio.Task[None]]:
        return {group_id: task for group_id, task in self._groups.items() if not task.done()}

    async def _cut_short(self) -> None:
        """Cancel the groups that are left. Their prompts are generated again when the run is resumed."""
        cut = self._unfinished()
        logger.warning("%d groups did not end within %g s and are cancelled", len(cut), self._stop_timeout_s)
        while running := self._unfinished():
            for task in running.values():
                task.cancel()  # again and again: user code may swallow a cancellation
            await asyncio.wait(running.values(), timeout=_ABORT_AGAIN_S)
        for group_id, task in cut.items():
            if task.cancelled():  # the others have released their slots themselves
                await self._queue.release(group_id, ReleaseReason.REQUEUED, "cancelled by the stop")

    def stall_diagnosis(self) -> str:
        """What keeps groups from finishing, as text for reports of a wait; empty when no cause is known."""
        if not self._manager.num_servers:
            coming = "one is being restarted" if self._manager.expects_return else "none is being restarted"
            return f"no engine is alive, {coming}"
        before, self._outages_told = self._outages_told, self._source.counts().reward_outages
        failed = self._outages_told - before
        return f"{failed} attempts to score failed since the last report: the scorer does not work" if failed else ""

    def stats(self) -> RollouterStats:
        """Counters since the start."""
        servers, source = self._manager.stats(), self._source.counts()
        return RollouterStats(
            total_generated_samples=self._samples,
            generation_errors=self._errors,
            param_sync_requests=self._syncs,
            filtered_groups=self._filtered,
            running_groups=len(self._groups),
            reward_outages=source.reward_outages,
            reward_timeouts=source.reward_timeouts,
            reward_errors=source.reward_errors,
            tool_calls=source.tool_calls,
            tool_failures=source.tool_failures,
            aborted_requests=servers.aborted,
            aborted_tokens=servers.aborted_tokens,
            num_servers=self._manager.num_servers,
            lost_servers=servers.lost_servers,
            returned_servers=servers.returned_servers,
            retried=servers.retried,
            resumed=servers.resumed,
            generated_tokens=servers.generated_tokens,
            late_results=servers.late_results,
            busy_s_by_server=dict(servers.busy_s_by_server),
            spans=servers.spans,
            duplicate_share=self._duplicates.share,
            judged=dict(self._judged),
            source={
                **source.metrics,
                **(self._pool.metrics() if self._pool is not None else {}),
                **servers.engines,
            },
            ratios=source.ratios,
        )


def _read(slot: Slot, outcome: object) -> GroupOutcome | None:
    """What a hook gave for a slot. Raises TypeError or ValueError for what would be accounted to another one."""
    if outcome is None:
        return None
    if not isinstance(outcome, GroupOutcome):
        raise TypeError(f"custom_generation_logic gave {type(outcome).__name__}, not a GroupOutcome")
    group = outcome.group
    if group is None and outcome.fate is GroupFate.KEPT:
        raise ValueError("custom_generation_logic gave a KEPT outcome without a group")
    if group is not None and group.group_id != slot.group_id:
        raise ValueError(f"custom_generation_logic gave group {group.group_id} for group {slot.group_id}")
    if group is not None and any(sample.reward is None for sample in group.samples):
        raise ValueError("custom_generation_logic gave a group with a sample that has no reward")
    return outcome


def _values(group: Group, metric: str) -> list[float]:
    try:
        return [metric_of(sample, metric) for sample in group.samples]
    except KeyError as missing:
        raise ValueError(
            f"prompt_pool.metric {missing} is not reported by the reward of {group.prompt.domain}"
        ) from None
