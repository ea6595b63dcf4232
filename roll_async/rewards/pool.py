"""Reusable reward worker processes behind asyncio: a hanging task costs its own time-out and nothing else.

    score --> queue --> worker (one task running, one waiting in its pipe) --> verdict

A worker that hangs or dies is replaced by a warm spare; the task it ran gets TIMEOUT or is tried once more, the one
behind it goes to another worker as if nothing had happened.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from roll_async.rewards.registry import create_reward, is_rule, needs_environment
from roll_async.schema import Prompt, Reward, RewardStatus

logger = logging.getLogger(__name__)

_PIPE_DEPTH = 2
"""Tasks given to a worker at once: the next one is there when it answers, so no round trip is waited for."""
_MAX_CRASHES = 2
_MAX_SPARES = 4
_MAX_STARTS = 3
"""Attempts to replace a worker before what waits is told that nobody is left."""
_START_TIMEOUT_S = 120.0
"""Importing a reward's libraries on a busy machine."""
_LINE_LIMIT_BYTES = 16 << 20
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
"""A script in a checkout finds the package by its own path; its workers must find the same one."""
_KEPT_ENVIRONMENT = (
    "PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "HOME", "TMPDIR", "VIRTUAL_ENV", "ROLL_ASYNC_RUN",
)  # fmt: skip
"""What Python needs, and the mark by which the processes of a run are found when its driver was killed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolOptions:
    """One domain's workers."""

    reward: str
    """Name or dotted path."""
    num_workers: int = 1
    timeout_s: float = 30.0
    """Seconds one sample may compute; what it waits for a worker does not count."""
    memory_mb: int = 4096
    arguments: Mapping[str, object] = field(default_factory=dict)
    """Keyword arguments of the reward's class, plain JSON values."""


@dataclass(eq=False, slots=True)
class _Task:
    line: bytes
    result: asyncio.Future[Reward]
    crashes: int = 0


class _Worker:
    """One process and what is in its pipe."""

    def __init__(self, options: PoolOptions) -> None:
        self._options = options
        self.tasks: deque[_Task] = deque()

    async def start(self) -> None:
        """Start the process and wait until it is ready. Raises RuntimeError with its reason when it cannot be."""
        options = self._options
        settings = {
            "reward": options.reward,
            "memory_mb": options.memory_mb,
            "options": dict(options.arguments),
            "parent": os.getpid(),
        }
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "roll_async.rewards.worker",
            json.dumps(settings),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=_LINE_LIMIT_BYTES,
            env=_environment(options.reward),
            start_new_session=True,  # what a user's reward starts ends with it
        )
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                line = await self.process.stdout.readline()  # type: ignore[union-attr]
        except BaseException as error:
            await self.stop()
            if isinstance(error, TimeoutError):
                raise RuntimeError(f"not ready within {_START_TIMEOUT_S:g} s") from error
            raise
        answer = json.loads(line) if line else {}
        if "ready" not in answer:
            await self.stop()
            raise RuntimeError(answer.get("error") or f"it ended with status {self.process.returncode}")

    def kill(self) -> None:
        """End the process and everything it started."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    async def stop(self) -> None:
        """`kill`, and wait until it is gone."""
        self.kill()
        await self.process.wait()


class RewardPool:
    """Workers of one domain. `start` before use, `close` at the end."""

    def __init__(self, options: PoolOptions) -> None:
        self._options = options
        self._waiting: deque[_Task] = deque()
        self._work = asyncio.Event()
        self._runners: list[asyncio.Task[None]] = []
        # Workers hang together when the same prompt hangs them. What a user's reward holds in memory is not known.
        self._num_spares = min(options.num_workers, _MAX_SPARES) if is_rule(options.reward) else 1
        self._spares: set[asyncio.Task[_Worker]] = set()
        self._taking_spare = asyncio.Lock()
        self._ending: set[asyncio.Task[None]] = set()
        self.timeouts = self.crashes = 0

    async def start(self) -> None:
        """Start the workers. Raises ValueError when the reward cannot be built, here or in a worker."""
        options = self._options
        create_reward(options.reward, options.arguments)
        started = await asyncio.gather(
            *(self._new_worker() for _ in range(options.num_workers)), return_exceptions=True
        )
        workers = [w for w in started if isinstance(w, _Worker)]
        failed = [e for e in started if isinstance(e, BaseException)]
        if failed:
            await asyncio.gather(*(w.stop() for w in workers))
            raise ValueError(f"reward {options.reward!r} does not start in a worker process: {failed[0]}")
        self._order_spares()
        self._runners = [asyncio.create_task(self._run(w), name=f"reward worker {i}") for i, w in enumerate(workers)]

    async def close(self) -> None:
        """End all processes; tasks that still wait are cancelled."""
        for runner in self._runners:
            runner.cancel()
        await asyncio.gather(*self._runners, return_exceptions=True)
        spares, self._spares = self._spares, set()
        for spare in spares:
            spare.cancel()
        for worker in await asyncio.gather(*spares, return_exceptions=True):
            if isinstance(worker, _Worker):
                await worker.stop()
        if self._ending:
            await asyncio.wait(self._ending)
        for task in self._waiting:
            task.result.cancel()

    async def score_response(self, prompt: Prompt, text: str) -> Reward:
        """`score` with what the prompt says."""
        return await self.score(text, prompt.ground_truth, prompt.extra)

    async def score(self, text: str, ground_truth: str, extra: Mapping[str, str]) -> Reward:
        """One verdict. TIMEOUT, ERROR and OUTAGE are states of their own, with a score of 0 that must not be used. A
        caller that gives up takes its task out of the queue.
        """
        line = json.dumps({"text": text, "ground_truth": ground_truth, "extra": dict(extra)}).encode() + b"\n"
        task = _Task(line, asyncio.get_running_loop().create_future())
        self._waiting.append(task)
        self._work.set()
        return await task.result

    async def _run(self, worker: _Worker) -> None:
        """Feed one worker; on a hang or a crash go on with the spare."""
        try:
            while True:
                await self._feed(worker)
                head = worker.tasks[0]
                try:
                    async with asyncio.timeout(self._options.timeout_s):
                        line = await worker.process.stdout.readline()  # type: ignore[union-attr]
                except TimeoutError:
                    self.timeouts += 1
                    worker.tasks.popleft()
                    _resolve(head, _no_score(RewardStatus.TIMEOUT, f"no verdict within {self._options.timeout_s:g} s"))
                    worker = await self._replace(worker)
                    continue
                if line:
                    worker.tasks.popleft()
                    _resolve(head, _reward(json.loads(line)))
                    continue
                await worker.stop()
                worker.tasks.popleft()
                self.crashes += 1
                head.crashes += 1
                if head.crashes < _MAX_CRASHES:
                    self._waiting.appendleft(head)
                else:
                    ending = _ending(worker.process.returncode)
                    _resolve(head, _no_score(RewardStatus.TIMEOUT, f"its scoring killed the worker twice ({ending})"))
                worker = await self._replace(worker)
        finally:
            for task in worker.tasks:
                task.result.cancel()
            await worker.stop()

    async def _feed(self, worker: _Worker) -> None:
        """Fill the worker's pipe; wait only when it has nothing at all to do."""
        while True:
            while self._waiting and len(worker.tasks) < _PIPE_DEPTH:
                task = self._waiting.popleft()
                if task.result.done():  # nobody waits for it any more
                    continue
                worker.tasks.append(task)
                # Not drained: a long task behind a hanging one would be waited for without a time-out. A broken pipe
                # shows as the end of the output.
                worker.process.stdin.write(task.line)  # type: ignore[union-attr]
            if worker.tasks:
                return
            self._work.clear()
            await self._work.wait()

    async def _replace(self, worker: _Worker) -> _Worker:
        """The spare takes over; tasks behind the bad one go back to the head of the queue. When no worker starts any
        more, what waits is told of an outage, until one does.
        """
        self._waiting.extendleft(reversed(worker.tasks))
        worker.tasks.clear()
        self._work.set()  # an idle worker may take them before the spare is there
        worker.kill()
        ending = asyncio.create_task(worker.stop())  # it may hold gigabytes; nobody waits for their release
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        async with self._taking_spare:
            return await self._take_spare()

    async def _take_spare(self) -> _Worker:
        attempt = 0
        while True:
            # Unlike awaiting one, this does not end it when the pool closes.
            done, _ = await asyncio.wait(self._spares, return_when=asyncio.FIRST_COMPLETED)
            spare = next(iter(done))
            self._spares.discard(spare)
            self._order_spares()
            if not spare.cancelled() and spare.exception() is None:
                return spare.result()
            problem = "cancelled" if spare.cancelled() else spare.exception()
            logger.warning("reward %s: a worker does not start: %s", self._options.reward, problem)
            attempt += 1
            if attempt >= _MAX_STARTS:
                for task in self._waiting:
                    _resolve(task, _no_score(RewardStatus.OUTAGE, f"no worker starts: {problem}"))
                self._waiting.clear()
            await asyncio.sleep(min(30.0, 0.5 * 2**attempt))

    def _order_spares(self) -> None:
        while len(self._spares) < self._num_spares:
            self._spares.add(asyncio.ensure_future(self._new_worker()))

    async def _new_worker(self) -> _Worker:
        worker = _Worker(self._options)
        await worker.start()
        return worker


def _environment(reward: str) -> dict[str, str]:
    """A user's reward sees the environment, keys included; ours see what Python itself needs."""
    kept = os.environ if needs_environment(reward) else {k: v for k, v in os.environ.items() if k in _KEPT_ENVIRONMENT}
    path = os.pathsep.join(filter(None, (_PACKAGE_ROOT, kept.get("PYTHONPATH"))))
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def _ending(returncode: int | None) -> str:
    if returncode is not None and returncode < 0:
        return signal.Signals(-returncode).name
    return f"exit status {returncode}"


def _resolve(task: _Task, reward: Reward) -> None:
    if not task.result.done():
        task.result.set_result(reward)


def _no_score(status: RewardStatus, reason: str) -> Reward:
    return Reward(score=0.0, status=status, reason=reason)


def _reward(answer: dict) -> Reward:
    return Reward(
        score=answer["score"],
        status=RewardStatus(answer["status"]),
        metrics=answer["metrics"],
        reason=answer["reason"],
        scoring_s=answer["scoring_s"],
    )
