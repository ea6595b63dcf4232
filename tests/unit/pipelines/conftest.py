"""A whole run on fakes and the virtual clock: real queue, rollouter, synchronizer, train loop and health monitor."""

import asyncio

import pytest

from roll_async.buffer.ledger import MemoryLedger
from roll_async.buffer.message_queue import MessageQueue
from roll_async.buffer.states import QueueOptions
from roll_async.pipelines.health import HealthMonitor
from roll_async.pipelines.rlvr import RLVRPipeline
from roll_async.pipelines.train_loop import PipelineParts, RunPlan, TrainLoop
from roll_async.rollout.chat_scheduler import ChatCompletionScheduler, SchedulerOptions
from roll_async.rollout.engine_supervisor import EngineSupervisor
from roll_async.rollout.manager_options import ManagerOptions
from roll_async.rollout.rollouter import Rollouter
from roll_async.rollout.server_manager import AsyncLLMServerManager
from roll_async.schema import SamplingParams
from roll_async.trainer.protocol import StepReport
from roll_async.weight_sync.bucket import UpdatePlan
from roll_async.weight_sync.synchronizer import ParameterSynchronizer, SyncOptions


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
        parts=1,
        speeds=(1.0, 1.5),
        oversample_groups=0,
        trainer=TrainLoop,
        **plan,
    ):
        self.build, self.replica_class = build, replica_class
        self.learned, self.saved, self.published, self.events = [], [], [], []
        self.size, self.version, self.learn_s, self.save_s = 10**9, 0, 8.0, 0.0
        options = QueueOptions(groups_per_batch=4, async_generation_ratio=ratio, oversample_groups=oversample_groups)
        self.queue = MessageQueue(options, MemoryLedger())
        self.replicas = [self._replica(f"engine-{i}", s) for i, s in enumerate(speeds)]
        self.manager = AsyncLLMServerManager(self.replicas, ManagerOptions())
        self.supervisor = EngineSupervisor(self.manager, self.restart, max_restarts=2, start_timeout_s=100.0)
        options = SchedulerOptions(
            samples_per_group=2, sampling=SamplingParams(max_new_tokens=10), spread_samples=False
        )
        self.scheduler = ChatCompletionScheduler(self.manager, scorer_class(), options)
        self.rollouter = Rollouter(self.queue, self.scheduler, self.manager, self)
        self.sync = ParameterSynchronizer(
            self,
            self.rollouter,
            lambda: self.manager.clients,
            SyncOptions(transport="shm"),
            weights_held=self.queue.weights_held,
            take_out=self.supervisor.take_out,
            put_back=self.supervisor.put_back,
            comes_back=lambda: self.manager.expects_return,
        )
        self.supervisor.attach(self.sync.rejoin)
        self.parts = PipelineParts(
            queue=self.queue, rollouter=self.rollouter, learner=self, synchronizer=self.sync, checkpoint=self,
            observer=self, validate=self.validate,
        )  # fmt: skip
        plan = {"first_step": 1, "sync_every": 1, "save_every": 0, "eval_every": 0, **plan}
        self.plan = RunPlan(
            **plan, max_steps=steps, groups_per_batch=4, samples_per_group=2, groups_per_part=4 // parts
        )
        self.trainer = trainer(self.parts, self.plan)
        self.monitor = HealthMonitor(self.trainer, self.parts, interval_s=5.0)
        self.pipeline = RLVRPipeline(self.parts, self.plan, trainer=self.trainer, watch=self.monitor.run)

    def _replica(self, name, token_s):
        """A fake replica that also takes weights."""
        replica = self.replica_class(name, token_s=token_s)

        async def nothing(*args):
            replica._alive("update")

        async def finish():
            return "digest"

        async def commit(version):
            replica.version = version

        replica.begin_update = replica.load_bucket = nothing
        replica.finish_update, replica.commit = finish, commit
        return replica

    async def restart(self, name, number):
        await asyncio.sleep(3)
        self.replicas.append(self._replica(name, 1.0))
        return self.replicas[-1]

    def at(self, index):
        return self.build.prompt(row_id=str(index)) if index < self.size else None

    async def learn(self, groups, step):
        self.learned.append((step, [int(g.prompt.row_id) for g in groups]))
        await asyncio.sleep(self.learn_s * len(groups) / 4)
        metrics = {"trainer/loss": float(len(self.learned)), "trainer/optimizer_steps": 1.0, "correction/rho_max": 2.0}
        return StepReport(metrics=metrics, logprobs_s=1.0, train_s=2.0, num_samples=2 * len(groups), num_tokens=40)

    async def export_weights(self, version, transport, verify):
        yield UpdatePlan(version=version, transport=transport, verify=verify)
        yield "digest"

    async def save(self, step):
        await asyncio.sleep(self.save_s)
        self.saved.append(step)

    async def finish(self):
        pass

    async def validate(self, step):
        prompts = [self.build.prompt()] * 3
        samples = await self.scheduler.validate(prompts, SamplingParams(max_new_tokens=5), name=f"validation.{step}")
        return {"validation/reward": 0.5, "validation/samples": float(len(samples))}

    def step(self, step, metrics):
        self.published.append(metrics)

    def span(self, *args, **fields):
        pass

    def event(self, name, **fields):
        self.events.append(name)

    async def go(self):
        before = asyncio.all_tasks()
        await self.manager.start()
        try:
            return await self.pipeline.run()
        finally:
            await self.supervisor.close()
            await self.manager.close()
            assert asyncio.all_tasks() - before == set(), "the run left tasks behind"

    @property
    def rows(self):
        return [row for _, rows in self.learned for row in rows]


@pytest.fixture
def a_run(build, replica_class, scorer_class):
    return lambda **options: Run(build, replica_class, scorer_class, **options)
