"""What the unit tests share: a virtual clock, builders of prompts, samples and groups with sensible defaults, and
replicas and scorers written by hand.
"""

import asyncio
from array import array

import pytest

from roll_async.inference.protocol import EngineCapabilities, EngineLoad, EngineReport, PauseMode, Progress
from roll_async.schema import (
    Completion,
    FinishReason,
    GenerateRequest,
    Group,
    Prompt,
    Reward,
    Sample,
    SamplingParams,
)
from roll_async.simulator.clock import run_virtual


@pytest.fixture
def run():
    """Run a coroutine on the virtual clock. Only for code without threads, processes and sockets."""
    return run_virtual


class Build:
    """Nouns of the schema; every argument has a default."""

    @staticmethod
    def prompt(row_id="row", ids=(5, 6), **fields):
        return Prompt(row_id=row_id, token_ids=array("i", ids), **{"domain": "math", "ground_truth": "42", **fields})

    @staticmethod
    def sample(prompt, ids=(7, 8), runs=None, score=1.0, **fields):
        size = len(ids)
        return Sample(
            **{
                "sample_id": "sample",
                "prompt_token_ids": prompt.token_ids,
                "response_token_ids": array("i", ids),
                "loss_mask": b"\x01" * size,
                "behaviour_logprobs": array("f", [-0.5] * size),
                "version_runs": ((0, size),) if runs is None else tuple(runs),
                "finish_reason": FinishReason.STOP,
                "generation_s": 1.0,
                "reward": None if score is None else Reward(score=score),
                **fields,
            }
        )

    def group(self, group_id=0, version=0, scores=(1.0, 0.0), length=2, **fields):
        prompt = fields.pop("prompt", None) or self.prompt(row_id=f"row{group_id}")
        samples = fields.pop("samples", None) or tuple(
            self.sample(prompt, range(7, 7 + length), ((version, length),), score, sample_id=f"{group_id}/{i}")
            for i, score in enumerate(scores)
        )
        times = {"admitted_s": 0.0, "finished_s": 1.0, "admitted_version": version}
        return Group(group_id=group_id, prompt=prompt, samples=samples, **{**times, **fields})


@pytest.fixture
def build():
    return Build()


class FakeReplica:
    """Samples one token per `token_s` and request. The token at position p of the whole text is 1000 + p, so a request
    that is continued elsewhere must end with the same tokens as one that was never touched.
    """

    capabilities = EngineCapabilities(keep_in_place=True)

    def __init__(self, name, token_s=1.0, version=0):
        self.name, self.token_s, self.version = name, token_s, version
        self.submitted, self.calls, self.aborted, self.told = [], [], [], []
        self.silent = self.deaf = self.frozen = False
        self.refuse = 0
        self.load_s, self.load_error = 0.0, None
        self.peak = 0
        self._texts, self._tasks, self._done, self._failed = {}, {}, [], []
        self._dead, self._news, self._serving = None, asyncio.Event(), asyncio.Event()
        self._serving.set()

    def _alive(self, call):
        self.calls.append(call)
        if self._dead:
            raise ConnectionError(self._dead)

    def die(self, reason="killed"):
        self._dead = reason
        for task in self._tasks.values():
            task.cancel()
        self._news.set()

    def tell(self):
        """Report what running requests have generated, from their first token on."""
        for request_id, (tokens, versions) in self._texts.items():
            self.told.append(Progress(start=0, piece=piece(request_id, tokens, versions, FinishReason.ABORT)))
        self._news.set()

    def reply(self, completion):
        self._done.append(completion)
        self._news.set()

    async def _reach(self):
        if self.frozen:
            await asyncio.sleep(1e6)

    async def submit(self, requests):
        await self._reach()
        self._alive(f"submit {len(requests)}")
        for request in requests:
            self.submitted.append(request)
            if self.refuse:
                self.refuse -= 1
                self._failed.append((request.request_id, "out of memory"))
                self._news.set()
            elif not self.silent:
                self._texts[request.request_id] = ([], [])
                self._tasks[request.request_id] = asyncio.create_task(self._generate(request))
        self.peak = max(self.peak, len(self._tasks))

    async def _generate(self, request):
        tokens, versions = self._texts[request.request_id]
        while len(tokens) < request.sampling.max_new_tokens:
            await asyncio.sleep(self.token_s)
            await self._serving.wait()
            tokens.append(1000 + len(request.prompt_token_ids) + len(tokens))
            versions.append(self.version)
        self._end(request.request_id, FinishReason.LENGTH)

    def _end(self, request_id, reason):
        del self._tasks[request_id]
        tokens, versions = self._texts.pop(request_id)
        self.reply(piece(request_id, tokens, versions, reason))

    async def collect(self):
        await self._news.wait()
        self._alive("collect")
        self._news.clear()
        done, self._done = self._done, []
        failed, self._failed = self._failed, []
        told, self.told = self.told, []
        load = self._load()
        return EngineReport(completions=tuple(done), failures=tuple(failed), load=load, progress=tuple(told))

    async def abort(self, request_ids):
        self._alive("abort")
        await self._reach()
        if self.deaf:
            await asyncio.sleep(1e6)
        self.aborted += request_ids
        for request_id in request_ids:
            if request_id in self._tasks:
                self._tasks[request_id].cancel()
                self._end(request_id, FinishReason.ABORT)

    async def pause(self, mode):
        self._alive(f"pause {mode.value}")
        if self.deaf:
            await asyncio.sleep(1e6)
        self._serving.clear()
        if mode is PauseMode.ABORT:
            await self.abort(list(self._tasks))

    async def resume(self):
        self._alive("resume")
        self._serving.set()

    async def load(self):
        self.calls.append("load")
        await self._reach()
        await asyncio.sleep(self.load_s / 2)
        await asyncio.sleep(self.load_s / 2)
        if self.load_error is not None:
            raise self.load_error
        return self._load()

    def _load(self):
        return EngineLoad(running=len(self._tasks), waiting=0, free_kv_fraction=0.5)


def piece(request_id, tokens, versions, reason):
    return Completion(
        request_id=request_id,
        token_ids=array("i", tokens),
        logprobs=array("f", [-t / 1000 for t in tokens]),
        version_runs=tuple((v, versions.count(v)) for v in sorted(set(versions))),
        finish_reason=reason,
        generation_s=float(len(tokens)),
    )


class FakeScorer:
    """Scores by `rule(prompt, sample)`: a number, a Reward, or an exception to raise. Takes `score_s`."""

    def __init__(self, rule=lambda prompt, sample: 1.0, score_s=0.5):
        self.rule, self.score_s, self.calls = rule, score_s, 0

    async def score(self, prompt, sample):
        self.calls += 1
        await asyncio.sleep(self.score_s)
        verdict = self.rule(prompt, sample)
        if isinstance(verdict, BaseException):
            raise verdict
        return verdict if isinstance(verdict, Reward) else Reward(score=verdict)


def make_request(name="r", prompt=(1, 2, 3), tokens=10, **sampling):
    return GenerateRequest(
        request_id=name,
        prompt_token_ids=array("i", prompt),
        sampling=SamplingParams(max_new_tokens=tokens, **sampling),
    )


@pytest.fixture
def replica_class():
    return FakeReplica


@pytest.fixture
def scorer_class():
    return FakeScorer


@pytest.fixture
def make():
    return make_request
