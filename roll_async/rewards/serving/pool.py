"""Reusable reward worker processes behind asyncio: a hanging task costs its own time-out and nothing else.

    score --> waiting --> worker (one task computed, a few behind it in its socket) --> verdict
                              | the head takes suspiciously long (rules only)
                              +--> slow: goes on until its time-out, while a fresh worker takes the place

A worker that hangs or dies is replaced; the task it ran gets TIMEOUT or is tried once more, the ones behind it go to
other workers as if nothing had happened. Cost of a sample in this process: one line written, one line read; both come
in bunches, and there is one timer per worker, not per sample.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from roll_async.processes.pool import ProcessPool, Program, WorkerProcess
from roll_async.rewards.registry import create_reward, is_rule, needs_environment
from roll_async.schema import Prompt, Reward, RewardStatus

_RULE_DEPTH, _DEPTH = 8, 1
"""Tasks a worker has at once. Rules judge in less than a round trip, so the next ones are there when it answers; where
each may take seconds nothing waits behind another one while a worker is idle.
"""
_PATIENCE, _PATIENCE_S = 0.1, 1.0
"""A rule slower than this share of its time-out, or than these seconds, moves to an extra worker so that the queue
continues. It judges in milliseconds otherwise.
"""
_MAX_CRASHES = 2  # a worker may die of another sample's memory; twice is this sample's own doing
_START_S = 120.0
"""Importing a reward's libraries on a busy machine."""
_ANSWER_LIMIT_BYTES = 16 << 20
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[3])
"""A script in a checkout finds the package by its own path; its workers must find the same one."""
_KEPT_ENVIRONMENT = (
    "PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "HOME", "TMPDIR", "VIRTUAL_ENV", "ROLL_ASYNC_RUN",
)  # fmt: skip
"""What Python needs, and the mark by which the processes of a run are found when its driver was killed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardPoolOptions:
    """One domain's workers."""

    reward: str
    """Name or dotted path."""
    num_workers: int = 1
    """Processes that judge. A rule may have as many more, each with a task that takes suspiciously long."""
    timeout_s: float = 30.0
    """Seconds one sample may compute; what it waits for a worker does not count."""
    memory_mb: int = 4096
    """Of one process."""
    arguments: Mapping[str, object] = field(default_factory=dict)
    """Keyword arguments of the reward's class, plain JSON values."""


@dataclass(eq=False, slots=True)
class JudgeTask:
    """One sample to judge: its line for the worker, and who waits."""

    line: bytes
    result: asyncio.Future[Reward]
    crashes: int = 0


@dataclass(eq=False, slots=True)
class JudgeWorker:
    """One process and the tasks it has, the head being computed."""

    process: WorkerProcess
    tasks: deque[JudgeTask] = field(default_factory=deque)
    since_s: float = 0.0
    """Loop time at which the head began."""
    timer: asyncio.TimerHandle | None = None


class RewardPool:
    """Workers of one domain. `start` before use, `close` at the end."""

    def __init__(self, options: RewardPoolOptions) -> None:
        self._options = options
        rule = is_rule(options.reward)  # it holds nothing that a fork would break
        self._processes = ProcessPool(program_of(options), forks=rule, spare=not rule)
        self._depth = _RULE_DEPTH if rule else _DEPTH
        self._patience_s = min(_PATIENCE * options.timeout_s, _PATIENCE_S) if rule else options.timeout_s
        self._waiting: deque[JudgeTask] = deque()
        self._active: set[JudgeWorker] = set()
        """They get tasks."""
        self._slow: set[JudgeWorker] = set()
        """Each has one task left, and a replacement among the active ones."""
        self._assigning = False
        self.timeouts = self.crashes = 0

    async def start(self) -> None:
        """Start the workers. Raises ValueError when the reward cannot be built, here or in a worker."""
        options = self._options
        create_reward(options.reward, options.arguments)
        self._loop = asyncio.get_running_loop()
        starts = (self._processes.start() for _ in range(options.num_workers))
        # All results, also beside an error: what has started must be ended.
        started = await asyncio.gather(*starts, return_exceptions=True)
        for process in started:
            if isinstance(process, WorkerProcess):
                self._activate(process)
        failed = [e for e in started if isinstance(e, BaseException)]
        if failed:
            await self.close()
            raise ValueError(f"reward {options.reward!r} does not start in a worker process: {failed[0]}")

    async def close(self) -> None:
        """End all processes; tasks that still wait are cancelled."""
        workers = (*self._active, *self._slow)
        for task in (*self._waiting, *(t for w in workers for t in w.tasks)):
            task.result.cancel()
        self._waiting.clear()
        for worker in workers:
            self._end(worker)
        await self._processes.close()

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
        self._assign_soon()
        return await task.result

    def _activate(self, process: WorkerProcess) -> None:
        """From now on it gets tasks."""
        worker = JudgeWorker(process)
        self._active.add(worker)
        process.attach(partial(self._answered, worker), partial(self._crashed, worker))
        self._assign_soon()

    def _assign_soon(self) -> None:
        """Once for all samples that come in one turn of the loop."""
        if not self._assigning:
            self._assigning = True
            self._loop.call_soon(self._assign_to_idle)

    def _assign_to_idle(self) -> None:
        """Equal shares to the idle ones, in one write each. A busy one gets more when it answers: it might hang."""
        self._assigning = False
        idle = [worker for worker in self._active if not worker.tasks]
        if not idle:
            return
        share = min(self._depth, -(-len(self._waiting) // len(idle)))  # rounded up
        for worker in idle:
            self._assign(worker, share)

    def _assign(self, worker: JudgeWorker, up_to: int) -> None:
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
        worker.process.send(lines)
        if was_idle:
            worker.since_s = self._loop.time()
        if worker.timer is None:
            worker.timer = self._loop.call_at(worker.since_s + self._patience_s, self._check_deadline, worker)

    def _answered(self, worker: JudgeWorker, lines: list[bytes]) -> None:
        worker.since_s = self._loop.time()
        for line in lines:
            try:
                reward = reward_of(json.loads(line))
                task = worker.tasks.popleft()
            except (ValueError, TypeError, KeyError, IndexError):  # its parser was taken over, if it is a rule's
                self._crashed(worker)
                return
            _resolve(task, reward)
        if worker in self._slow:
            self._drop(worker)
        # At half, so that several new ones are one write.
        elif len(worker.tasks) <= self._depth // 2:
            self._assign(worker, self._depth)

    def _check_deadline(self, worker: JudgeWorker) -> None:
        """The worker's timer. Tasks pass without touching it, so most of the time the head is a young one."""
        worker.timer = None
        if not worker.tasks:
            return
        age_s, timeout_s = self._loop.time() - worker.since_s, self._options.timeout_s
        # Its caller has left: no worker is kept busy for it until the time-out.
        given_up = age_s >= self._patience_s and worker.tasks[0].result.done()
        if age_s >= timeout_s or given_up:
            self.timeouts += 1
            _resolve(worker.tasks.popleft(), _no_score(RewardStatus.TIMEOUT, f"no verdict within {timeout_s:g} s"))
            self._drop(worker)
            return
        if age_s >= self._patience_s and worker in self._active and len(self._slow) < self._options.num_workers:
            self._active.discard(worker)
            self._slow.add(worker)
            self._requeue(worker, keep=1)
            self._replace()
        wait_s = self._patience_s if age_s < self._patience_s else timeout_s
        worker.timer = self._loop.call_at(worker.since_s + wait_s, self._check_deadline, worker)

    def _crashed(self, worker: JudgeWorker) -> None:
        """It died, or answered what no worker answers."""
        self.crashes += 1
        head = worker.tasks.popleft() if worker.tasks else None
        self._drop(worker, head)

    def _drop(self, worker: JudgeWorker, crashed: JudgeTask | None = None) -> None:
        """Another one takes its place; `crashed` is what it ended with."""
        self._requeue(worker, keep=0)
        was_active = worker in self._active
        self._end(worker, crashed)
        if was_active:
            self._replace()
        for other in list(self._active):  # one more slow one may move to an extra worker
            if other.tasks and other.timer is not None and self._loop.time() - other.since_s >= self._patience_s:
                other.timer.cancel()
                self._check_deadline(other)

    def _requeue(self, worker: JudgeWorker, keep: int) -> None:
        """All but the first tasks go back to the head of the queue."""
        while len(worker.tasks) > keep:
            self._waiting.appendleft(worker.tasks.pop())  # from the back, so that they keep their order
        self._assign_soon()

    def _end(self, worker: JudgeWorker, crashed: JudgeTask | None = None) -> None:
        self._active.discard(worker)
        self._slow.discard(worker)
        if worker.timer is not None:
            worker.timer.cancel()
        self._processes.end(worker.process, None if crashed is None else partial(self._reap, crashed))

    def _reap(self, crashed: JudgeTask, status: int) -> None:
        """The process is gone with which this task ended: a worker may die of something else, so it is tried again."""
        crashed.crashes += 1
        if crashed.crashes < _MAX_CRASHES:
            self._waiting.appendleft(crashed)
            self._assign_soon()
        else:
            how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
            _resolve(crashed, _no_score(RewardStatus.TIMEOUT, f"its scoring killed the worker twice ({how})"))

    def _replace(self) -> None:
        self._processes.restart(self._activate, self._fail_waiting)

    def _fail_waiting(self, reason: str) -> None:
        """When no worker starts any more, what waits is told of an outage, until one does."""
        for task in self._waiting:
            _resolve(task, _no_score(RewardStatus.OUTAGE, reason))
        self._waiting.clear()


def program_of(options: RewardPoolOptions) -> Program:
    """What a worker process of these options runs."""
    return Program(
        name=f"reward {options.reward}",
        module="roll_async.rewards.serving.worker",
        settings={"reward": options.reward, "memory_mb": options.memory_mb, "options": dict(options.arguments)},
        environment=partial(_environment, options.reward),
        line_bytes=_ANSWER_LIMIT_BYTES,
        start_timeout_s=_START_S,
    )


def _environment(reward: str) -> dict[str, str]:
    """A user's reward sees the environment, keys included; ours see what Python itself needs."""
    kept = os.environ if needs_environment(reward) else {k: v for k, v in os.environ.items() if k in _KEPT_ENVIRONMENT}
    path = os.pathsep.join(filter(None, (_PACKAGE_ROOT, kept.get("PYTHONPATH"))))
    return {**kept, "PYTHONPATH": path}


def _resolve(task: JudgeTask, reward: Reward) -> None:
    if not task.result.done():
        task.result.set_result(reward)


def _no_score(status: RewardStatus, reason: str) -> Reward:
    return Reward(score=0.0, status=status, reason=reason)


def reward_of(answer: Mapping) -> Reward:
    """The verdict in an answer of a worker: its fields are those of `Reward`."""
    return Reward(**{**answer, "status": RewardStatus(answer["status"])})
