"""Starts the roles of a run and couples them: config -> trainer, engines, rewards -> queue, scheduler, rollouter ->
pipeline.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from roll_async import assemble_settings as settings
from roll_async.buffer.ledger import Ledger, MemoryLedger, SqliteLedger, set_aside
from roll_async.buffer.message_queue import MessageQueue
from roll_async.checkpoint.run_checkpoints import RunCheckpoints
from roll_async.cluster.engine_group import RayEngineClient
from roll_async.cluster.placement import NodePool, ProcessPlacement, place, threads_per_process
from roll_async.cluster.reward_group import RayScorer
from roll_async.cluster.runtime import RuntimeInfo
from roll_async.cluster.trainer_group import RayTrainerGroup, TrainingRole
from roll_async.config.schema import RLVRConfig, WorkerConfig
from roll_async.observe.recorder import Recorder
from roll_async.observe.run_folder import RunFolder
from roll_async.pipelines.rlvr import PipelineParts, RLVRPipeline, RunPlan
from roll_async.prompts.load import load_prompts
from roll_async.prompts.stream import ShuffledPrompts
from roll_async.rollout.chat_scheduler import ChatCompletionScheduler
from roll_async.rollout.rollouter import Rollouter
from roll_async.rollout.server_manager import AsyncLLMServerManager
from roll_async.schema import Prompt
from roll_async.trainer.learner import Learner, LearnerParts, LearnerState
from roll_async.weight_sync.synchronizer import ParameterSynchronizer
from roll_async.weight_sync.transports import choose_transport

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class RolePlacements:
    """Where every process of a run goes."""

    training: Mapping[str, tuple[ProcessPlacement, ...]]
    """By role: actor_train, and reference, critic, teacher when configured."""
    engines: tuple[ProcessPlacement, ...]

    @property
    def all(self) -> tuple[ProcessPlacement, ...]:
        """Every process."""
        return (*(p for part in self.training.values() for p in part), *self.engines)


def place_roles(config: RLVRConfig) -> RolePlacements:
    """Device mappings to processes. Raises ValueError for a mapping that spans nodes where it cannot."""
    roles = {name: worker for name, worker in config.roles() if name != "actor_infer"}
    cpu = sum(w.num_ranks for w in roles.values() if w.device_mapping is None)
    cpu += config.num_servers if config.actor_infer.device_mapping is None else 0
    threads = threads_per_process(cpu)

    def put(worker: WorkerConfig, count: int) -> tuple[ProcessPlacement, ...]:
        return place(
            worker.device_mapping,
            num_processes=count,
            num_gpus_per_node=config.num_gpus_per_node,
            num_threads=threads if worker.device_mapping is None else 4,
        )

    return RolePlacements(
        training={name: put(w, w.num_ranks) for name, w in roles.items()},
        engines=put(config.actor_infer, config.num_servers),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Assembled:
    """A run ready to go."""

    pipeline: RLVRPipeline
    actor: RayTrainerGroup
    manager: AsyncLLMServerManager
    synchronizer: ParameterSynchronizer


class Assembly:
    """Starts roles in parallel and closes all of them when its stack closes."""

    def __init__(
        self, config: RLVRConfig, runtime: RuntimeInfo, placements: RolePlacements, stack: AsyncExitStack
    ) -> None:
        self._config, self._runtime, self._placements, self._stack = config, runtime, placements, stack
        self._pool = NodePool(
            placements.all, num_gpus_per_node=config.num_gpus_per_node, timeout_s=config.fault.stall_timeout
        )

    async def build(self, recorder: Recorder, folder: RunFolder) -> Assembled:
        """Start everything. Raises ValueError for what the user can fix, RoleFailed for what a role reports."""
        config = self._config
        (train, valid), (groups, clients), scorer = await asyncio.gather(
            asyncio.to_thread(self._prompts), self._models(), self._start_scorer()
        )
        manager = AsyncLLMServerManager(clients, settings.manager_options(config))
        await manager.start()
        self._stack.push_async_callback(manager.close)
        scheduler = ChatCompletionScheduler(manager, scorer, settings.scheduler_options(config))
        learner = Learner(
            LearnerParts(actor=groups["actor_train"], reference=groups.get("reference"), teacher=groups.get("teacher")),
            settings.learner_options(config),
        )
        checkpoints = RunCheckpoints(
            folder=Path(config.checkpoint.output_dir), max_to_keep=config.checkpoint.max_to_keep
        )
        restored, position = await restore_loop(config, groups["actor_train"], learner, checkpoints)
        folder.truncate_metrics(restored)
        queue = MessageQueue(settings.queue_options(config), self._ledger())
        queue.restore(restored, position)
        saver = LoopCheckpoint(config, groups["actor_train"], learner, queue, checkpoints)
        rollouter = Rollouter(queue, scheduler, manager, train)
        synchronizer = ParameterSynchronizer(
            groups["actor_train"],
            rollouter,
            lambda: manager.clients,  # type: ignore[arg-type, return-value]
            settings.sync_options(config, self._transport()),
            weights_held=queue.weights_held,
            take_out=manager.remove,
        )
        parts = PipelineParts(
            queue=queue,
            rollouter=rollouter,
            learner=learner,
            synchronizer=synchronizer,
            checkpoint=saver,
            observer=recorder,
            validate=self._validator(scheduler, valid) if valid else None,
        )
        plan = RunPlan(
            first_step=restored + 1,
            max_steps=config.max_steps,
            sync_every=config.async_training.trigger_parameter_sync_step,
            save_every=config.save_steps,
            eval_every=config.eval_steps,
        )
        pipeline = RLVRPipeline(parts, plan)
        return Assembled(pipeline=pipeline, actor=groups["actor_train"], manager=manager, synchronizer=synchronizer)

    def _prompts(self) -> tuple[ShuffledPrompts, Sequence[Prompt]]:
        config = self._config
        assert config.actor_train.data_args is not None
        probabilities = config.actor_train.data_args.domain_interleave_probs
        train = ShuffledPrompts(
            load_prompts(settings.data_options(config, config.actor_train.data_args)),
            seed=config.seed,
            probabilities=probabilities,
        )
        if config.validation is None or not config.eval_steps:
            return train, ()
        held_out = load_prompts(settings.data_options(config, config.validation.data_args))
        stream = ShuffledPrompts(held_out, seed=config.seed, num_epochs=1)
        prompts = (stream.at(i) for i in range(config.val_batch_size))
        return train, [p for p in prompts if p is not None]

    async def _models(self) -> tuple[dict[str, RayTrainerGroup], list[RayEngineClient]]:
        env = dict(self._config.system_envs)
        training = [
            self._start_training(name, worker, env) for name, worker in self._config.roles() if name != "actor_infer"
        ]
        engines = [self._start_engine(p, env) for p in self._placements.engines]
        started = await asyncio.gather(*training, *engines)
        groups = started[: len(training)]
        return {g.name: g for g in groups}, list(started[len(training) :])  # type: ignore[union-attr, return-value, arg-type]

    async def _start_training(self, name: str, worker: WorkerConfig, env: dict[str, str]) -> RayTrainerGroup:
        group = await RayTrainerGroup.start(
            TrainingRole(name=name, settings=settings.megatron_settings(self._config, worker)),
            self._placements.training[name],
            self._pool,
            {**env, **worker.system_envs},
            embedded=self._runtime.embedded,
            bucket_bytes=self._config.weight_sync.bucket_size_mb << 20,
        )
        self._stack.push_async_callback(group.close)
        return group

    async def _start_engine(self, placement: ProcessPlacement, env: dict[str, str]) -> RayEngineClient:
        role = self._config.actor_infer
        client = await RayEngineClient.start(
            role.strategy_args.strategy_name,
            settings.engine_settings(self._config),
            placement,
            self._pool,
            {**env, **role.system_envs},
        )
        self._stack.push_async_callback(client.close)
        return client

    async def _start_scorer(self) -> RayScorer:
        scorer = await RayScorer.start(self._config.rewards, self._config.pretrain, self._config.system_envs)
        self._stack.push_async_callback(scorer.close)
        return scorer

    def _ledger(self) -> Ledger:
        ledger = self._config.ledger
        path = Path(ledger.path)
        if self._config.checkpoint.resume_from is None:
            # A fresh run must not train groups of an older one; they are kept beside it, not lost.
            set_aside(path)
        return SqliteLedger(ledger.path, fsync=ledger.fsync) if ledger.enable else MemoryLedger()

    def _transport(self) -> str:
        config = self._config
        name, reason = choose_transport(
            config.weight_sync.transport,
            trainer_devices=config.actor_train.device_mapping,
            engine_devices=config.actor_infer.device_mapping,
            num_gpus_per_node=config.num_gpus_per_node,
        )
        logger.info("weight transport: %s (%s)", name, reason)
        return name

    def _validator(
        self, scheduler: ChatCompletionScheduler, prompts: Sequence[Prompt]
    ) -> Callable[[int], asyncio.Future[Mapping[str, float]]]:
        assert self._config.validation is not None
        sampling = settings.sampling_params(self._config.validation.generating_args)

        async def validate(step: int) -> Mapping[str, float]:
            samples = await scheduler.validate(prompts, sampling, name=f"validation.{step}")
            rewards = [s.reward for s in samples if s.reward is not None]
            count = max(1, len(rewards))
            return {
                "validation/reward": sum(r.score for r in rewards) / count,
                "validation/accuracy": sum(r.metrics.get("acc", float(r.score > 0)) for r in rewards) / count,
                "validation/samples": float(len(rewards)),
                "validation/length_mean": sum(len(s.response_token_ids) for s in samples) / max(1, len(samples)),
            }

        return validate  # type: ignore[return-value]


class LoopCheckpoint:
    """`pipelines/protocol.py: Saves`: ranks, learner state and ledger position under one step number."""

    def __init__(
        self,
        config: RLVRConfig,
        actor: RayTrainerGroup,
        learner: Learner,
        queue: MessageQueue,
        checkpoints: RunCheckpoints,
    ) -> None:
        self._config, self._actor, self._learner = config, actor, learner
        self._queue, self._checkpoints = queue, checkpoints

    async def save(self, step: int) -> None:
        """Write the checkpoint of a step; older ones beyond max_to_keep go afterwards."""
        state = {"step": step, "learner": self._learner.state.to_json(), "queue": self._queue.checkpoint_state()}
        target = self._checkpoints.folder_of(step)
        await self._actor.save(str(target), step, json.dumps(state).encode())
        if self._config.checkpoint.save_hf_model:
            await self._actor.export_hf(str(target / "hf"))
        self._queue.checkpointed(step)
        self._checkpoints.prune()


async def restore_loop(
    config: RLVRConfig, actor: RayTrainerGroup, learner: Learner, checkpoints: RunCheckpoints
) -> tuple[int, Mapping[str, object] | None]:
    """Load what `checkpoint.resume_from` names: the step the run continues after (0 for a fresh run) and its position
    in the prompt stream.
    """
    wanted = config.checkpoint.resume_from
    if wanted is None:
        return 0, None
    folder = checkpoints.find(wanted)
    if folder is None:
        logger.info("resume_from latest: no checkpoint yet, starting fresh")
        return 0, None
    state = json.loads(await actor.load(str(folder)))
    learner.state = LearnerState.from_json(state["learner"])
    logger.info("resumed after step %d from %s", state["step"], folder)
    return int(state["step"]), state.get("queue")
