"""The other fakes under the real loops: prompts, scorer, trainer, what saves."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Protocol

from roll_async.buffer.deadline import within
from roll_async.buffer.errors import LedgerError, StallError
from roll_async.pipelines.protocol import BatchQueue
from roll_async.schema import Group, Prompt, Reward, Sample
from roll_async.simulator.lineage import CheckpointStore
from roll_async.simulator.parts.engine import bucket_names, digest_of
from roll_async.simulator.parts.models import RewardModel, ToolModel, TrainModel, uniform
from roll_async.trainer.protocol import StepReport
from roll_async.weight_sync.bucket import Block, Bucket, UpdatePlan

_NEVER_S = 1e9
_HELD_OUT = 10**6
_PROMPT_TOKENS = 4


class TrainerDied(RuntimeError):
    """The trainer died, as the scenario says."""


class SimPrompts:
    """`rollout/protocol.py: PromptSource`: as many prompts as `size` says (None = no end), made of their numbers."""

    def __init__(self, size: int | None, make: Callable[[int], Prompt]) -> None:
        self._size, self._make = size, make

    def at(self, index: int) -> Prompt | None:
        """None from the end of the data on."""
        return None if self._size is not None and index >= self._size else self._make(index)


def chat_prompt(index: int) -> Prompt:
    """Of training; one in three has the shortest length."""
    return prompt_of(index, _PROMPT_TOKENS + index % 3)


@lru_cache(maxsize=4096)
def prompt_of(index: int, num_tokens: int) -> Prompt:
    """The prompt of this number: it is its row_id, and its first token ids are its length and the number."""
    ids = array("i", [num_tokens, index, *range(2, num_tokens)])
    return Prompt(row_id=str(index), token_ids=ids, domain="sim", ground_truth="")


def held_out(count: int) -> tuple[Prompt, ...]:
    """Prompts of a validation; their numbers are those of no training prompt."""
    return tuple(prompt_of(_HELD_OUT + i, _PROMPT_TOKENS) for i in range(count))


def score_of(seed: int, model: RewardModel, prompt: Prompt, sample_id: str) -> float:
    """0 or 1, one value for the whole group of a flat prompt; a greedy answer has a third one."""
    if model.flat_share and uniform("flat", seed, prompt.row_id) < model.flat_share:
        return 1.0
    if sample_id.endswith("/greedy"):
        return 0.25
    if sample_id.endswith("/0"):  # two samples that differ: groups of two and more have a spread
        return 0.0
    return 1.0 if sample_id.endswith("/1") else float(uniform("score", seed, sample_id) < 0.5)


class SimTool:
    """`rollout/tools.py: Tool`: answers, fails or hangs, by where in the text it is called."""

    def __init__(self, seed: int, model: ToolModel) -> None:
        self._seed, self._model = seed, model

    async def __call__(self, arguments: Mapping[str, object]) -> str:
        """The result of one call."""
        model, name = self._model, (self._seed, arguments["at"])
        if uniform("tool hangs", *name) < model.hangs_share:
            await asyncio.sleep(_NEVER_S)
        await asyncio.sleep(model.seconds * (0.5 + uniform("tool time", *name)))
        if uniform("tool fails", *name) < model.fails_share:
            raise OSError("the tool does not work")
        return "done"


class SimScorer:
    """`rollout/protocol.py: Scorer`: scores from the seed, in the time and with the faults of the model."""

    def __init__(self, seed: int, model: RewardModel) -> None:
        self._seed, self._model = seed, model
        self._hung: set[str] = set()
        self.calls = 0

    async def score(self, prompt: Prompt, sample: Sample) -> Reward:
        """See `score_of`. ConnectionError during an outage."""
        self.calls += 1
        model, name = self._model, (self._seed, sample.sample_id)
        if model.hang_share and uniform("hang", *name) < model.hang_share and sample.sample_id not in self._hung:
            self._hung.add(sample.sample_id)  # only the first attempt to score it hangs
            await asyncio.sleep(_NEVER_S)
        slow = model.slow_factor if model.slow_share and uniform("slow", *name) < model.slow_share else 1.0
        if model.seconds:
            await asyncio.sleep(slow * model.seconds * (0.5 + uniform("score time", *name)))
        now, start = asyncio.get_running_loop().time(), model.outage_from_s
        out = start is not None and start <= now < start + model.outage_for_s
        if out or (model.broken_share and uniform("broken", self._seed, prompt.row_id) < model.broken_share):
            raise ConnectionError(f"the scorer is down at {now:.1f} s")
        return Reward(score=score_of(self._seed, model, prompt, sample.sample_id))


class WatchesBatches(Protocol):
    """Checks what is trained."""

    def batch(self, groups: Sequence[Group], step: int) -> None: ...

    def learned(self, num_groups: int, step: int) -> None: ...


class SimTrainer:
    """`pipelines/protocol.py: GroupLearner` and the synchronizer's `WeightSource`: takes time and keeps count.

    `watch` sees every batch before it is trained, and hears when it is.
    """

    def __init__(
        self,
        seed: int,
        model: TrainModel,
        *,
        mask_older_than: int | None,
        watch: WatchesBatches,
        learner: Callable[[Sequence[Group], int], Awaitable[Mapping[str, float]]] | None = None,
    ) -> None:
        """`mask_older_than`: policy token_mask takes older tokens out of the loss; None = another policy. `learner`: a
        real one, and what it publishes.
        """
        self._seed, self._model, self._watch, self._mask_older_than = seed, model, watch, mask_older_than
        self._learner = learner
        self.busy_s = 0.0
        self.failed_s: float | None = None
        """When it died, or its deadline passed."""
        self.trained_tokens = self.masked_tokens = 0
        self.group_lags: list[tuple[int, int]] = []
        """(step, versions between a group's admission and the step), one per trained group."""

    async def learn(self, groups: Sequence[Group], step: int) -> StepReport:
        """One step. Raises TrainerDied where the scenario says so, StallError where it hangs."""
        limit_s = self._model.rpc_timeout_s
        try:
            return await within(limit_s, self._learn(groups, step), f"trainer: step {step} did not return")
        except (TrainerDied, StallError):
            self.failed_s = asyncio.get_running_loop().time()
            raise

    async def _learn(self, groups: Sequence[Group], step: int) -> StepReport:
        model, loop = self._model, asyncio.get_running_loop()
        started = loop.time()
        self._watch.batch(groups, step)
        metrics = {} if self._learner is None else await self._learner(groups, step)
        self.group_lags += [(step, step - 1 - g.admitted_version) for g in groups]
        tokens, masked = self._count(groups, step)
        seconds = model.step_s + model.token_s * (tokens - masked)
        await asyncio.sleep(seconds * (1 + model.jitter * uniform("step", self._seed, step)))
        if model.hangs_at_step == step:
            await asyncio.sleep(_NEVER_S)
        if model.fails_at_step == step:
            raise TrainerDied(f"the trainer died in step {step}")
        self._watch.learned(len(groups), step)
        spent = loop.time() - started
        self.busy_s += spent
        self.trained_tokens += tokens
        self.masked_tokens += masked
        return StepReport(
            metrics={"staleness/masked_fraction": masked / max(1, tokens), **metrics},
            logprobs_s=0.0,
            train_s=spent,
            collation_s=0.0,
            num_samples=sum(len(g.samples) for g in groups),
            num_tokens=tokens,
        )

    def _count(self, groups: Sequence[Group], step: int) -> tuple[int, int]:
        """(response tokens, those that policy token_mask takes out of the loss)."""
        tokens = masked = 0
        for sample in (s for g in groups for s in g.samples):
            tokens += len(sample.response_token_ids)
            if self._mask_older_than is not None:
                masked += sum(n for v, n in sample.version_runs if step - 1 - v > self._mask_older_than)
        return tokens, masked

    async def export_weights(self, plan: UpdatePlan) -> AsyncIterator[UpdatePlan | Bucket | str]:
        """Plan, buckets, digest; the buckets take `transfer_s` together."""
        names = bucket_names(plan.version, self._model.num_buckets)
        yield plan
        for index, name in enumerate(names):
            await asyncio.sleep(self._model.transfer_s / len(names))
            yield Bucket(index=index, blocks=(Block(source=0, slots=(), num_bytes=1, location=name),))
        yield digest_of(plan.version, names)


class SimCheckpoint:
    """`pipelines/protocol.py: Checkpointer`."""

    def __init__(
        self,
        queue: BatchQueue,
        store: CheckpointStore,
        model: TrainModel,
        saved: Callable[[CheckpointStore, int], None],
    ) -> None:
        """`saved`: hears of each complete checkpoint."""
        self._queue, self._store, self._model, self._saved = queue, store, model, saved

    async def save(self, step: int) -> None:
        """Complete only at its end, as a folder that is renamed into place."""
        state = await self._queue.checkpoint_state(step)
        await asyncio.sleep(self._model.save_s)
        self._store.commit(step, state)
        self._saved(self._store, step)
        with suppress(LedgerError, ConnectionError):  # as `pipelines/checkpoint.py`: it is complete
            await self._queue.checkpointed(step)

    async def finish(self) -> None:
        """Nothing goes on in the background."""
