"""Reward workers behind a Ray actor: text is decoded and scored there, never in the driver.

Traffic is batched both ways, like that of the engines: `submit` carries samples that finished at the same time and
returns the scores that are there at once, `collect` the others. A slow sample or domain does not delay others, because
an answer need not come with the answers to the questions it was submitted with.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorAlreadyExistsError

from roll_async.buffer.errors import RoleFailed, StallError
from roll_async.cluster.ray_channel import RayChannel, wait_ended
from roll_async.cluster.remote import CallRules, remote, served
from roll_async.cluster.role_log import open_role_log
from roll_async.config.schema import RewardConfig
from roll_async.observe.thoughts import ThoughtMarks, marks_of
from roll_async.observe.trace import starting
from roll_async.prompts.end_marks import EndMarks
from roll_async.prompts.tokenizer import BatchDecode, batch_decoder, load_tokenizer
from roll_async.schema import Prompt, Reward, Sample

logger = logging.getLogger(__name__)

_COALESCE_S = 0.005
"""Batching window of questions: how long the first one waits for others to be sent with it."""
_ANSWER_COALESCE_S = 0.02
"""Batching window of answers while others are being scored: a message costs a millisecond of a core."""
_CONCURRENT_CALLS = 64
"""Concurrent calls on the host: one collect, one submit, and the calls of control."""
_FIRST_RESTART_S, _LONGEST_RESTART_S = 1.0, 30.0
Question = tuple[int, Prompt, array]
"""(number, prompt, token ids of the response)."""
Answer = tuple[int, Reward | None, str]
"""(number, reward, reason for None)."""


class RewardCalls(Protocol):
    """Calls of a reward host."""

    async def start(self, decode: BatchDecode, marks: Sequence[ThoughtMarks]) -> None: ...

    async def submit(self, questions: Sequence[Question]) -> tuple[list[Answer], list[str]]: ...

    async def collect(self) -> tuple[list[Answer], list[str]]: ...


@ray.remote(max_restarts=0)
@served({})
class RewardHost:
    """The worker pools of all domains on one node."""

    def __init__(self, rewards: Mapping[str, RewardConfig]) -> None:
        open_role_log()
        self._rewards = rewards
        self._late: set[asyncio.Task[Answer]] = set()
        """Scoring that goes on after the `submit` that asked for it has returned."""
        self._answers: list[Answer] = []
        """Of late scoring, for the next `collect`."""
        self._news = asyncio.Event()

    async def start(self, decode: BatchDecode, marks: Sequence[ThoughtMarks]) -> None:
        """Start the worker processes of every domain. `marks`: of thoughts, in what `decode` gives. Both come from the
        caller, because finding a tokenizer's class imports all of torch and transformers, seconds of a core and 300 MB
        that this process has no use for.
        """
        from roll_async.rewards.serving.router import RewardRouter

        self._decode = decode
        self._router = RewardRouter(self._rewards, marks)
        await self._router.start()

    async def submit(self, questions: Sequence[Question]) -> tuple[list[Answer], list[str]]:
        """Score these. Returns, after one batching window at the latest, the answers that are there, and warnings for
        the user; the other answers come with `collect`.
        """
        ids = [list(response) for _, _, response in questions]
        texts = self._decode(ids)
        tasks = [
            asyncio.create_task(self._score(number, prompt, text))
            for (number, prompt, _), text in zip(questions, texts, strict=True)
        ]
        done, late = await asyncio.wait(tasks, timeout=_ANSWER_COALESCE_S)  # not gather: late ones go on
        self._late |= late
        for task in late:
            task.add_done_callback(self._ended_late)
        return [task.result() for task in done], self._take_notices()

    async def _score(self, number: int, prompt: Prompt, text: str) -> Answer:
        try:
            return number, await self._router.score(prompt, text), ""
        except ConnectionError as error:
            return number, None, str(error)

    def _ended_late(self, task: asyncio.Task[Answer]) -> None:
        self._late.discard(task)
        self._answers.append(task.result())
        self._news.set()

    async def collect(self) -> tuple[list[Answer], list[str]]:
        """Wait for at least one answer that came too late for `submit`, and one batching window for more."""
        await self._news.wait()
        await asyncio.sleep(_ANSWER_COALESCE_S if self._late else 0)  # without late ones none can join
        self._news.clear()
        answers, self._answers = self._answers, []
        return answers, self._take_notices()

    def _take_notices(self) -> list[str]:
        notices, self._router.notices = self._router.notices, []
        return notices

    async def close(self) -> None:
        await self._router.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class HostPlan:
    """All that is needed to start a reward host, also after it died."""

    rewards: Mapping[str, RewardConfig]
    tokenizer_folder: str
    env: Mapping[str, str]
    rpc_timeout_s: float
    """Seconds of one call, the start included."""
    stops: tuple[str, ...] = ()
    """Stop strings that are no part of an answer."""

    async def start(self, attempt: int) -> ActorHandle:
        """Start the reward workers. Raises ValueError for a reward that can not be built or a model folder without a
        tokenizer, StallError when they are not up in time.
        """
        options = {
            "num_cpus": 1,
            "max_concurrency": _CONCURRENT_CALLS,
            "runtime_env": {"env_vars": {**self.env, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}},
        }
        host = self._host(attempt, options)
        try:
            with starting("rewards", "tokenizer"):  # while the process starts
                tokenizer = await asyncio.to_thread(load_tokenizer, self.tokenizer_folder)
            # Marks that only a template has are special tokens, which are left out anyway.
            decoder = batch_decoder(tokenizer, EndMarks.of(tokenizer).ids, self.stops)
            with starting("rewards", "workers"):
                await self.calls(host).start(decoder, marks_of(tokenizer))
        except BaseException:  # also when cancelled: the process must not be left
            ray.kill(host)
            raise
        return host

    def _host(self, number: int, options: Mapping[str, object]) -> ActorHandle:
        """Its process. Ray may still have one that died under its name, and a run that starts again counts anew."""
        try:
            host = RewardHost.options(**options, name=f"rewards-{number}").remote(dict(self.rewards))
        except ActorAlreadyExistsError:
            return self._host(number + 1, options)
        assert isinstance(host, ActorHandle)  # Ray says "or the class itself", for the sake of editors
        return host

    def calls(self, host: ActorHandle) -> RewardCalls:
        """Its typed calls."""
        rules = CallRules(
            role="rewards",
            deadline_s=self.rpc_timeout_s,
            waits={RewardCalls.collect},  # each sample has a deadline of its own (ScoringOptions.reward_timeout_s)
            starts={RewardCalls.start},
        )
        return remote(RewardCalls, RayChannel(host), rules)


class RayScorer:
    """`rollout/protocol.py: Scorer` over one RewardHost at a time.

    When a host dies, its open questions fail as an outage, which the scheduler retries, and another host is started.
    A host that raises is no outage: the error ends the run.
    """

    def __init__(self, host: ActorHandle, plan: HostPlan) -> None:
        self._host, self._plan = host, plan
        self._waiting: dict[int, asyncio.Future[Reward]] = {}
        self._outbox: list[Question] = []
        self._number = 0
        self._sending: asyncio.Task[None] | None = None
        self._reading = asyncio.create_task(self._read(), name="reward reader")
        self._gone: ConnectionError | RoleFailed | None = None
        self.restarts = 0

    @classmethod
    async def start(cls, plan: HostPlan) -> RayScorer:
        """Start the reward workers. Raises what `HostPlan.start` raises."""
        return cls(await plan.start(0), plan)

    async def score(self, prompt: Prompt, sample: Sample) -> Reward:
        """Score one sample. Raises ConnectionError for an outage, also while the host is gone, RoleFailed for a fault
        in the host.
        """
        if self._gone is not None:
            raise self._gone
        number, self._number = self._number, self._number + 1
        result = self._waiting[number] = asyncio.get_running_loop().create_future()
        asked = replace(prompt, images=()) if prompt.images else prompt  # scorers read texts; files are large
        self._outbox.append((number, asked, sample.response_token_ids))
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send(), name="reward sender")
        try:
            return await result
        finally:
            self._waiting.pop(number, None)  # also when cancelled: the answer is nobody's then

    async def _send(self) -> None:
        while self._outbox:
            await asyncio.sleep(_COALESCE_S)
            batch, self._outbox = self._outbox, []  # what comes during the call is the next batch
            try:
                self._answer(*await self._plan.calls(self._host).submit(batch))
            except StallError:
                ray.kill(self._host)  # it does not answer; the reader sees it die, and starts another
            except (ConnectionError, RoleFailed) as error:  # if the host died, the reader starts another
                self._fail([number for number, _, _ in batch], error)

    async def _read(self) -> None:
        """Read answers until the scorer is closed, over restarts of the host."""
        while not isinstance(self._gone, RoleFailed):
            calls = self._plan.calls(self._host)
            try:
                while True:
                    self._answer(*await calls.collect())
            except (ConnectionError, RoleFailed) as error:
                self._gone = error
                self._fail(list(self._waiting), error)
            if isinstance(self._gone, ConnectionError):
                await self._restart()

    def _fail(self, numbers: Sequence[int], error: Exception) -> None:
        """No answer comes to these questions."""
        for number in numbers:
            result = self._waiting.get(number)
            if result is not None and not result.done():
                result.set_exception(error)

    def _answer(self, answers: Sequence[Answer], notices: Sequence[str] = ()) -> None:
        for notice in notices:
            logger.warning("%s", notice)
        for number, reward, problem in answers:
            result = self._waiting.get(number)
            if reward is None:
                self._fail([number], ConnectionError(problem))
            elif result is not None and not result.done():  # its caller may be gone
                result.set_result(reward)

    async def _restart(self) -> None:
        """Start hosts until one is up. There is no limit here: those that wait for a score have their own."""
        pause_s = _FIRST_RESTART_S
        while self._gone is not None:
            self.restarts += 1
            try:
                self._host = await self._plan.start(self.restarts)
            except (ConnectionError, ValueError, RoleFailed, StallError) as error:
                logger.warning("the reward host does not start again: %s; trying again in %g s", error, pause_s)
                await asyncio.sleep(pause_s)
                pause_s = min(_LONGEST_RESTART_S, 2 * pause_s)
                continue
            logger.warning("the reward host died (%s) and was started again", self._gone)
            self._gone = None

    async def close(self) -> None:
        """Stop the worker processes."""
        self._reading.cancel()
        await wait_ended([self._host.close.remote()], timeout_s=5)
        ray.kill(self._host)
