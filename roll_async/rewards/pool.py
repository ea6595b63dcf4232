"""Reusable reward worker processes behind asyncio: a hanging task costs its own time-out and nothing else.

    score --> waiting --> worker (one task computed, a few behind it in its socket) --> verdict
                              | the head takes suspiciously long (rules only)
                              +--> aside: goes on until its time-out, while a fresh worker takes the place

A worker that hangs or dies is replaced; the task it ran gets TIMEOUT or is tried once more, the ones behind it go to
other workers as if nothing had happened. Cost of a sample in this process: one line written, one line read; both come
in bunches, and there is one timer per worker, not per sample.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from roll_async.rewards.launchers import Launcher, Spawner, Template
from roll_async.rewards.registry import create_reward, is_rule
from roll_async.rewards.worker_process import JudgeTask, JudgeWorker, WorkerOptions
from roll_async.schema import Prompt, Reward, RewardStatus

logger = logging.getLogger(__name__)

_RULE_DEPTH, _DEPTH = 8, 1
"""Tasks a worker has at once. Rules judge in less than a round trip, so the next ones are there when it answers; where
each may take seconds nothing waits behind another one while a worker is idle.
"""
_PATIENCE, _PATIENCE_S = 0.1, 1.0
"""A rule judges in milliseconds. One that takes this share of its time-out, or these seconds, goes on aside."""
_MAX_CRASHES = 2
_MAX_STARTS = 3
"""Attempts to replace a worker before what waits is told that nobody is left."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardPoolOptions:
    """One domain's workers."""

    reward: str
    """Name or dotted path."""
    num_workers: int = 1
    """Processes that judge. A rule may have as many more aside, each with a task that takes suspiciously long."""
    timeout_s: float = 30.0
    """Seconds one sample may compute; what it waits for a worker does not count."""
    memory_mb: int = 4096
    """Of one process."""
    arguments: Mapping[str, object] = field(default_factory=dict)
    """Keyword arguments of the reward's class, plain JSON values."""


class RewardPool:
    """Workers of one domain. `start` before use, `close` at the end."""

    def __init__(self, options: RewardPoolOptions) -> None:
        self._options = options
        worker = WorkerOptions(reward=options.reward, memory_mb=options.memory_mb, arguments=options.arguments)
        rule = is_rule(options.reward)
        self._launcher: Launcher = Template(worker) if rule else Spawner(worker)
        self._depth = _RULE_DEPTH if rule else _DEPTH
        self._patience_s = min(_PATIENCE * options.timeout_s, _PATIENCE_S) if rule else options.timeout_s
        self._waiting: deque[JudgeTask] = deque()
        self._workers: set[JudgeWorker] = set()
        self._aside: set[JudgeWorker] = set()
        self._starting_up: set[asyncio.Task[None]] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._handing_out = False
        self.timeouts = self.crashes = 0

    async def start(self) -> None:
        """Start the workers. Raises ValueError when the reward cannot be built, here or in a worker."""
        options = self._options
        create_reward(options.reward, options.arguments)
        self._loop = asyncio.get_running_loop()
        started = await asyncio.gather(
            *(self._launcher.start_worker() for _ in range(options.num_workers)), return_exceptions=True
        )
        for worker in started:
            if isinstance(worker, JudgeWorker):
                self._seat(worker)
        failed = [e for e in started if isinstance(e, BaseException)]
        if failed:
            await self.close()
            raise ValueError(f"reward {options.reward!r} does not start in a worker process: {failed[0]}")

    async def close(self) -> None:
        """End all processes; tasks that still wait are cancelled."""
        for task in (*self._waiting, *(t for w in (*self._workers, *self._aside) for t in w.tasks)):
            task.result.cancel()
        self._waiting.clear()
        for starting in self._starting_up:
            starting.cancel()
        await asyncio.gather(*self._starting_up, return_exceptions=True)
        for worker in (*self._workers, *self._aside):
            self._end(worker)
        while self._ending:
            await asyncio.wait(self._ending)
        await self._launcher.close()

    async def score_response(self, prompt: Prompt, text: str) -> Reward:
        """`score` with what the prompt says."""
        return await self.score(text, prompt.ground_truth, prompt.extra)

    async def score(self, text: str, ground_truth: str, extra: Mapping[str, str]) -> Reward:
        """One verdict. TIMEOUT, ERROR and OUTAGE are states of their own, with a score of 0 that must not be used. A
        caller that gives up takes its task out of the queue.
        """
        line = json.dumps({"text": text, "ground_truth": ground_truth, "extra": dict(extra)}).encode() + b"\n"
        task = JudgeTask(line, self._loop.create_future())
        self._waiting.append(task)
        self._hand_out_soon()
        return await task.result

    def _seat(self, worker: JudgeWorker) -> None:
        """From now on it gets tasks."""
        worker.on_answer, worker.on_end = self._answered, self._ended
        self._workers.add(worker)
        if worker.ended:  # while it was a spare
            self._ended(worker)
        self._hand_out_soon()

    def _hand_out_soon(self) -> None:
        """Once for all samples that come in one turn of the loop."""
        if not self._handing_out:
            self._handing_out = True
            self._loop.call_soon(self._hand_out)

    def _hand_out(self) -> None:
        """Equal shares to the idle ones, in one write each. A busy one gets more when it answers: it might hang."""
        self._handing_out = False
        idle = [worker for worker in self._workers if not worker.tasks]
        if not idle:
            return
        share = min(self._depth, -(-len(self._waiting) // len(idle)))
        for worker in idle:
            self._give(worker, share)

    def _give(self, worker: JudgeWorker, up_to: int) -> None:
        """Fill it to this number of tasks."""
        lines = []
        was_idle = not worker.tasks
        while self._waiting and len(worker.tasks) < up_to:
            task = self._waiting.popleft()
            if not task.result.done():  # else nobody waits for it any more
                worker.tasks.append(task)
                lines.append(task.line)
        if not lines:
            return
        worker.send(lines)
        if was_idle:
            worker.since_s = self._loop.time()
        if worker.timer is None:
            worker.timer = self._loop.call_at(worker.since_s + self._patience_s, self._look, worker)

    def _answered(self, worker: JudgeWorker, lines: list[bytes]) -> None:
        worker.since_s = self._loop.time()
        for line in lines:
            try:
                reward = _reward(json.loads(line))
                task = worker.tasks.popleft()
            except (ValueError, TypeError, KeyError, IndexError):  # its parser was taken over, if it is a rule's
                self._ended(worker)
                return
            _resolve(task, reward)
        if worker in self._aside:
            self._drop(worker)
        elif len(worker.tasks) <= self._depth // 2:
            self._give(worker, self._depth)

    def _look(self, worker: JudgeWorker) -> None:
        """The worker's timer. Tasks pass without touching it, so most of the time the head is a young one."""
        worker.timer = None
        if not worker.tasks:
            return
        age_s, timeout_s = self._loop.time() - worker.since_s, self._options.timeout_s
        given_up = age_s >= self._patience_s and worker.tasks[0].result.done()
        if age_s >= timeout_s or given_up:
            self.timeouts += 1
            _resolve(worker.tasks.popleft(), _no_score(RewardStatus.TIMEOUT, f"no verdict within {timeout_s:g} s"))
            self._drop(worker)
            return
        if age_s >= self._patience_s and worker in self._workers and len(self._aside) < self._options.num_workers:
            self._workers.discard(worker)
            self._aside.add(worker)
            self._take_back(worker, keep=1)
            self._replace()
        wait_s = self._patience_s if age_s < self._patience_s else timeout_s
        worker.timer = self._loop.call_at(worker.since_s + wait_s, self._look, worker)

    def _ended(self, worker: JudgeWorker) -> None:
        """It died, or answered what no worker answers."""
        self.crashes += 1
        head = worker.tasks.popleft() if worker.tasks else None
        self._drop(worker, head)

    def _drop(self, worker: JudgeWorker, crashed: JudgeTask | None = None) -> None:
        """Another one takes its place; `crashed` is what it ended with."""
        self._take_back(worker, keep=0)
        seated = worker in self._workers
        self._end(worker, crashed)
        if seated:
            self._replace()
        for other in list(self._workers):  # there is room aside, perhaps
            if other.tasks and other.timer is not None and self._loop.time() - other.since_s >= self._patience_s:
                other.timer.cancel()
                self._look(other)

    def _take_back(self, worker: JudgeWorker, keep: int) -> None:
        """All but the first tasks go back to the head of the queue."""
        while len(worker.tasks) > keep:
            self._waiting.appendleft(worker.tasks.pop())
        self._hand_out_soon()

    def _end(self, worker: JudgeWorker, crashed: JudgeTask | None = None) -> None:
        worker.on_end = worker.on_answer = None
        self._workers.discard(worker)
        self._aside.discard(worker)
        _keep(self._ending, asyncio.create_task(self._bury(worker, crashed), name="ending reward worker"))

    async def _bury(self, worker: JudgeWorker, crashed: JudgeTask | None) -> None:
        status = await worker.stop()
        if crashed is None:
            return
        crashed.crashes += 1
        if crashed.crashes < _MAX_CRASHES:
            self._waiting.appendleft(crashed)
            self._hand_out_soon()
        else:
            reason = f"its scoring killed the worker twice ({_ending(status)})"
            _resolve(crashed, _no_score(RewardStatus.TIMEOUT, reason))

    def _replace(self) -> None:
        _keep(self._starting_up, asyncio.create_task(self._new_worker(), name="starting reward worker"))

    async def _new_worker(self) -> None:
        """When no worker starts any more, what waits is told of an outage, until one does."""
        attempt = 0
        while True:
            try:
                self._seat(await self._launcher.start_worker())
                return
            except (RuntimeError, OSError) as problem:
                logger.warning("reward %s: a worker does not start: %s", self._options.reward, problem)
                attempt += 1
                if attempt >= _MAX_STARTS:
                    self._tell_all(f"no worker starts: {problem}")
            await asyncio.sleep(min(30.0, 0.5 * 2**attempt))

    def _tell_all(self, reason: str) -> None:
        for task in self._waiting:
            _resolve(task, _no_score(RewardStatus.OUTAGE, reason))
        self._waiting.clear()


def _keep(tasks: set[asyncio.Task[None]], task: asyncio.Task[None]) -> None:
    """A strong reference until it is done."""
    tasks.add(task)
    task.add_done_callback(tasks.discard)


def _ending(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"


def _resolve(task: JudgeTask, reward: Reward) -> None:
    if not task.result.done():
        task.result.set_result(reward)


def _no_score(status: RewardStatus, reason: str) -> Reward:
    return Reward(score=0.0, status=status, reason=reason)


def _reward(answer: Mapping) -> Reward:
    return Reward(
        score=answer["score"],
        status=RewardStatus(answer["status"]),
        metrics=answer["metrics"],
        reason=answer["reason"],
        scoring_s=answer["scoring_s"],
        place=answer.get("place", ""),
        traceback=answer.get("traceback", ""),
    )
