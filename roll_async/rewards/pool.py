"""Reusable reward worker processes behind asyncio: a hanging task costs its own time-out and nothing else.

    score --> queue --> worker (one task running, one waiting in its pipe) --> verdict

A worker that hangs or dies is replaced by a warm spare; the task it ran gets TIMEOUT or is retried once, the one
behind it
goes to another worker as if nothing had happened.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from roll_async.schema import Reward, RewardStatus

logger = logging.getLogger(__name__)

_PIPE_DEPTH = 2
"""Tasks given to a worker at once: the next one is there when it answers, so no round trip is waited for."""
_MAX_CRASHES = 2
_LINE_LIMIT_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolOptions:
    """One domain's workers."""

    reward: str
    """Name or dotted path."""
    num_workers: int = 1
    timeout_s: float = 30.0
    memory_mb: int = 4096


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
        command = (
            sys.executable,
            "-m",
            "roll_async.rewards.worker",
            self._options.reward,
            str(self._options.memory_mb),
        )
        self.process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=_LINE_LIMIT_BYTES,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    async def stop(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


class RewardPool:
    """Workers of one domain. `start` before use, `close` at the end."""

    def __init__(self, options: PoolOptions) -> None:
        self._options = options
        self._waiting: deque[_Task] = deque()
        self._work = asyncio.Event()
        self._runners: list[asyncio.Task[None]] = []
        self._spare: asyncio.Task[_Worker] | None = None
        self.timeouts = self.crashes = 0

    async def start(self) -> None:
        """Start the workers and prove that the reward can be built. Raises ValueError when it cannot."""
        from roll_async.rewards.registry import create_reward

        create_reward(self._options.reward)
        workers = [await self._new_worker() for _ in range(self._options.num_workers)]
        self._spare = asyncio.ensure_future(self._new_worker())
        self._runners = [asyncio.create_task(self._run(w), name=f"reward worker {i}") for i, w in enumerate(workers)]

    async def close(self) -> None:
        """End all processes; tasks that still wait are cancelled."""
        for runner in self._runners:
            runner.cancel()
        await asyncio.gather(*self._runners, return_exceptions=True)
        if self._spare is not None:
            await (await self._spare).stop()
        for task in self._waiting:
            task.result.cancel()

    async def score(self, text: str, ground_truth: str, extra: Mapping[str, str]) -> Reward:
        """One verdict. TIMEOUT and OUTAGE are states of their own, with score 0 that must not be used."""
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
                if not line:
                    self.crashes += 1
                    worker.tasks.popleft()
                    head.crashes += 1
                    if head.crashes >= _MAX_CRASHES:
                        _resolve(head, _no_score(RewardStatus.TIMEOUT, "its scoring killed the worker twice"))
                    else:
                        self._waiting.appendleft(head)
                    worker = await self._replace(worker)
                    continue
                worker.tasks.popleft()
                _resolve(head, _reward(json.loads(line)))
        finally:
            for task in worker.tasks:
                task.result.cancel()
            await worker.stop()

    async def _feed(self, worker: _Worker) -> None:
        """Fill the worker's pipe; wait only when it has nothing at all to do."""
        while True:
            while self._waiting and len(worker.tasks) < _PIPE_DEPTH:
                task = self._waiting.popleft()
                worker.tasks.append(task)
                try:
                    worker.process.stdin.write(task.line)  # type: ignore[union-attr]
                    await worker.process.stdin.drain()  # type: ignore[union-attr]
                except (BrokenPipeError, ConnectionResetError):
                    return  # the reader sees the end of the output and replaces the worker
            if worker.tasks:
                return
            self._work.clear()
            await self._work.wait()

    async def _replace(self, worker: _Worker) -> _Worker:
        """The spare takes over; tasks behind the bad one go back to the head of the queue."""
        self._waiting.extendleft(reversed(worker.tasks))
        worker.tasks.clear()
        await worker.stop()
        assert self._spare is not None
        fresh = await self._spare
        self._spare = asyncio.ensure_future(self._new_worker())
        return fresh

    async def _new_worker(self) -> _Worker:
        worker = _Worker(self._options)
        await worker.start()
        return worker


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
