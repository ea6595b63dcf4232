"""A whole run on fakes and the virtual clock: real queue, rollouter, synchronizer, train loop and health monitor."""

import asyncio
import json
from array import array
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial

import pytest

from roll_async.buffer.ledger import MemoryLedger
from roll_async.buffer.states import QueueOptions
from roll_async.pipelines.protocol import PipelineParts, RunPlan
from roll_async.pipelines.validation import HeldOut
from roll_async.pipelines.wire import RolloutParts, UserHooks, build_engines, build_pipeline, build_rollout
from roll_async.rollout.chat_scheduler import ChatCompletionScheduler, SchedulerOptions
from roll_async.rollout.dispatch.manager_options import ManagerOptions
from roll_async.schema import SamplingParams
from roll_async.trainer.protocol import StepReport
from roll_async.weight_sync.bucket import Block, Bucket
from roll_async.weight_sync.protocol import OWN_DEVICES, SyncOptions


class Starter:
    """Brings replicas back."""

    def __init__(self, run):
        self.run = run

    async def start(self, name, number):
        return await self.run.restart(name, number)

    def name(self, index):
        return f"engine-{index}"

    async def reserve(self, name):
        """There is room."""

    async def stop(self, name):
        """They end with the test."""


class SlowValidation:
    """The run's own, after `validation_s` of it."""

    def __init__(self, run, validate):
        self.run, self.validate = run, validate

    async def prepare(self, step):
        return await self.validate.prepare(step)

    async def __call__(self, step):
        self.run.validations_begun.append(step)
        await asyncio.sleep(self.run.validation_s)
        return await self.validate(step)


class Run:
    """One training run: its own learner, weight source, checkpoint and observer."""

    def __init__(
        self,
        build,
        replica_class,
        scorer_class,
        *,
        steps=4,
        ratio=1.0,
        num_groups=4,
        parts=1,
        speeds=(1.0, 1.5),
        validator_speeds=(),
        validation_sets=("",),
        oversample_groups=0,
        staleness=None,
        hooks=UserHooks(),
        devices_of=lambda manager, replicas: None,
        pool=None,
        position=None,
        scorer=None,
        canary=None,
        ids_of=lambda index: (5, 6),
        **plan,
    ):
        self.build, self.replica_class, self.ids_of = build, replica_class, ids_of
        self.scored = []
        self.learned, self.saved, self.published, self.events = [], [], [], []
        self.positions, self.validations_begun, self.dumped = {}, [], []
        self.size, self.version, self.learn_s, self.save_s, self.restart_s = 10**9, 0, 8.0, 0.0, 3.0
        self.collation_s = self.roles_s = self.push_s = self.validation_s = self.answer_s = 0.0
        self.push_bytes = 0
        self.replicas = [self._replica(f"engine-{i}", s) for i, s in enumerate(speeds)]
        build_pool = partial(
            build_engines, starter=Starter(self), options=ManagerOptions(), max_restarts=2, start_timeout_s=100.0
        )
        self.engines = build_pool(self.replicas)
        self.manager = self.engines.manager
        self.validators = None
        if own := [self._replica(f"validator-{i}", s) for i, s in enumerate(validator_speeds)]:
            self.validators = build_pool(own)
            self.replicas = [*self.replicas, *own]
        scheduling = SchedulerOptions(
            samples_per_group=2, sampling=SamplingParams(max_new_tokens=10), spread_samples=False
        )
        self.devices = devices_of(self.manager, self.replicas)
        queue = QueueOptions(
            groups_per_batch=num_groups,
            async_generation_ratio=ratio,
            oversample_groups=oversample_groups,
            trigger_parameter_sync_step=plan.get("sync_every", 1),
            **(staleness or {}),
        )
        validated = SamplingParams(max_new_tokens=5)
        rollout = RolloutParts(
            devices=self.devices,
            pool=pool,
            restored=0 if position is None else position["step"],
            position=position,
            engines=self.engines,
            groups=lambda manager: ChatCompletionScheduler(manager, (scorer or scorer_class)(), scheduling),
            prompts=self,
            weights=self,
            ledger=MemoryLedger(),
            held_out=[HeldOut(name, [build.prompt()] * 3, validated) for name in validation_sets],
            validators=self.validators,
            queue=queue,
            sync=SyncOptions(transport="shm"),
            stop_timeout_s=30.0,
            validation_mode=plan.get("validation_mode", "pause"),
            canary=canary,
        )
        self.side = build_rollout(rollout, hooks)
        self.queue, self.rollouter, self.sync = self.side.queue, self.side.rollouter, self.side.synchronizer
        self.parts = PipelineParts(
            queue=self.queue, rollouter=self.rollouter, learner=self, synchronizer=self.sync, checkpoint=self,
            observer=self, validate=None if self.side.validate is None else SlowValidation(self, self.side.validate),
            dump=lambda *step: self.dumped.append(step), devices=self.devices or OWN_DEVICES,
        )  # fmt: skip
        first = 1 if position is None else position["step"] + 1
        plan = {"first_step": first, "sync_every": 1, "save_every": 0, "eval_every": 0, **plan}
        self.plan = RunPlan(
            **plan,
            max_steps=steps,
            groups_per_batch=num_groups,
            samples_per_group=2,
            groups_per_part=num_groups // parts,
        )
        self.pipeline = build_pipeline(self.parts, self.plan, replace(hooks, monitor_interval_s=5.0))
        self.trainer = self.pipeline.trainer

    def _replica(self, name, token_s):
        """A fake replica that also takes weights."""
        replica = self.replica_class(name, token_s=token_s)

        async def nothing(*args):
            replica._alive("update")

        async def finish():
            return "digest"

        async def commit(version):
            replica.version = version

        async def score(rows):
            version = replica.version
            await asyncio.sleep(self.answer_s)
            assert replica.version == version, "the weights changed while the canary was scored"
            return [array("f", [-1.0 - version] * (len(row) - 1)) for row in rows]

        replica.score = score
        replica.begin_update = replica.load_bucket = nothing
        replica.finish_update, replica.commit = finish, commit
        return replica

    async def restart(self, name, number):
        await asyncio.sleep(self.restart_s)
        self.replicas.append(self._replica(name, 1.0))
        return self.replicas[-1]

    def at(self, index):
        return self.build.prompt(row_id=str(index), ids=self.ids_of(index)) if index < self.size else None

    async def learn(self, groups, step):
        self.learned.append((step, [int(g.prompt.row_id) for g in groups]))
        await asyncio.sleep(self.collation_s + self.roles_s + self.learn_s * len(groups) / 4)
        metrics = {"trainer/loss": float(len(self.learned)), "trainer/optimizer_steps": 1.0, "correction/rho_max": 2.0}
        values = tuple(array("f", [2 * group.group_id + i]) for group in groups for i in range(2))
        return StepReport(
            metrics=metrics, logprobs_s=1.0, train_s=2.0, collation_s=self.collation_s, roles_s=self.roles_s,
            num_samples=2 * len(groups), num_tokens=40,
            advantages=values, entropies=values,
        )  # fmt: skip

    async def score(self, rows):
        self.scored.append((len(self.learned), rows))
        return [array("f", [-1.0 - len(self.learned)] * (len(row) - 1)) for row in rows]

    async def export_weights(self, plan):
        await asyncio.sleep(self.push_s)
        yield plan
        yield Bucket(index=0, blocks=(Block(source=0, slots=(), num_bytes=self.push_bytes, location=""),))
        yield "digest"

    async def save(self, step):
        self.positions[step] = json.loads(json.dumps(await self.queue.checkpoint_state(step)))
        await asyncio.sleep(self.save_s)
        self.saved.append(step)

    async def finish(self):
        pass

    def step(self, step, metrics):
        self.published.append(metrics)

    def span(self, *args, **fields):
        pass

    def event(self, name, **fields):
        self.events.append((name, fields))

    async def go(self):
        before = asyncio.all_tasks()
        try:
            async with AsyncExitStack() as stack:
                await self.engines.start(stack)
                if self.validators is not None:
                    await self.validators.start(stack)
                return await self.pipeline.run()
        finally:
            assert asyncio.all_tasks() - before == set(), "the run left tasks behind"

    @property
    def rows(self):
        return [row for _, rows in self.learned for row in rows]


@pytest.fixture
def a_run(build, replica_class, scorer_class):
    return lambda **options: Run(build, replica_class, scorer_class, **options)
