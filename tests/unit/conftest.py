"""What the unit tests share: a virtual clock, and builders of prompts, samples and groups with sensible defaults."""

import asyncio
import heapq
from array import array

import pytest

from roll_async.schema import FinishReason, Group, Prompt, Reward, Sample


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose clock jumps to the next timer when nothing is ready: sleeps cost nothing, a deadlock is an error."""

    now_s = 0.0

    def time(self):
        return self.now_s

    def _run_once(self):
        if not self._ready:
            while self._scheduled and self._scheduled[0]._cancelled:
                heapq.heappop(self._scheduled)._scheduled = False
            if self._scheduled:
                self.now_s = max(self.now_s, self._scheduled[0]._when)
            elif not self._stopping:
                raise RuntimeError("every coroutine waits, and nothing will ever wake one")
        super()._run_once()


@pytest.fixture
def run():
    """Run a coroutine on the virtual clock. Only for code without threads, processes and sockets."""

    def go(work):
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(work)

    return go


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
