"""Starts the processes of a run: training groups, engine replicas, reward workers. They know nothing of each other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from roll_async import assemble_settings as settings
from roll_async.cluster.engine_group import RayEngineClient, replica_name
from roll_async.cluster.placement import NodePool, ProcessPlacement, place, threads_per_process
from roll_async.cluster.reward_group import RayScorer
from roll_async.cluster.runtime import RuntimeInfo
from roll_async.cluster.trainer_group import RayTrainerGroup, TrainingRole
from roll_async.config.schema import RLVRConfig, WorkerConfig
from roll_async.prompts.load import load_prompts
from roll_async.prompts.stream import ShuffledPrompts
from roll_async.rollout.engine_supervisor import EngineSupervisor
from roll_async.rollout.server_manager import AsyncLLMServerManager
from roll_async.schema import Prompt

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


def training_roles(config: RLVRConfig) -> dict[str, WorkerConfig]:
    """Roles with Megatron ranks of their own."""
    roles = {name: worker for name, worker in config.roles() if name != "actor_infer"}
    if reference_is_actor(config):
        roles.pop("reference")
    return roles


def reference_is_actor(config: RLVRConfig) -> bool:
    """Whether the actor with its adapters off is the reference: the same model on the same devices."""
    actor, reference = config.actor_train, config.reference
    if reference is None or not actor.model_args.lora_rank:
        return False
    same_model = actor.model_args.model_name_or_path == reference.model_args.model_name_or_path
    return same_model and actor.device_mapping == reference.device_mapping


def place_roles(config: RLVRConfig) -> RolePlacements:
    """Device mappings to processes. Raises ValueError for a mapping that spans nodes where it cannot."""
    roles = training_roles(config)
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


def prompts_of(config: RLVRConfig) -> tuple[ShuffledPrompts, Sequence[Prompt]]:
    """The training stream, and the prompts of validation (none without eval_steps). Raises ValueError for bad files."""
    assert config.actor_train.data_args is not None
    probabilities = config.actor_train.data_args.domain_interleave_probs
    train = ShuffledPrompts(
        load_prompts(settings.data_options(config, config.actor_train.data_args)),
        seed=config.seed,
        probabilities=probabilities,
    )
    if config.validation is None or not config.eval_steps:
        return train, ()
    # AIME alone may validate a run over mathematics and code.
    held_out = load_prompts(settings.data_options(config, config.validation.data_args), every_domain=False)
    stream = ShuffledPrompts(held_out, seed=config.seed, num_epochs=1)
    prompts = (stream.at(i) for i in range(config.val_batch_size))
    return train, [p for p in prompts if p is not None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Roles:
    """Everything that runs, ready to be coupled."""

    training: Mapping[str, RayTrainerGroup]
    manager: AsyncLLMServerManager
    """All engine replicas."""
    supervisor: EngineSupervisor
    scorer: RayScorer
    prompts: ShuffledPrompts
    validation: Sequence[Prompt]


class RoleStarter:
    """Starts roles in parallel; all of them are closed when the stack closes."""

    def __init__(
        self, config: RLVRConfig, runtime: RuntimeInfo, placements: RolePlacements, stack: AsyncExitStack
    ) -> None:
        self._config, self._runtime, self._placements, self._stack = config, runtime, placements, stack
        self._engines: dict[str, RayEngineClient] = {}
        self._pool = NodePool(
            placements.all, num_gpus_per_node=config.num_gpus_per_node, timeout_s=config.fault.stall_timeout
        )

    async def start(self) -> Roles:
        """Start everything. Raises ValueError for what the user can fix, RoleFailed for what a role reports."""
        config = self._config
        training = [self._start_training(name, w) for name, w in training_roles(config).items()]
        engines = [self._start_engine(p) for p in self._placements.engines]
        (train, valid), scorer, groups, clients = await asyncio.gather(
            asyncio.to_thread(prompts_of, config),
            self._start_scorer(),
            asyncio.gather(*training),
            asyncio.gather(*engines),
        )
        manager = AsyncLLMServerManager(clients, settings.manager_options(config))
        await manager.start()
        self._stack.push_async_callback(manager.close)
        supervisor = EngineSupervisor(
            manager,
            self._restart_engine,
            max_restarts=config.fault.max_engine_restarts,
            start_timeout_s=config.fault.rpc_timeout,
        )
        self._stack.push_async_callback(supervisor.close)
        return Roles(
            training={g.name: g for g in groups},
            manager=manager,
            supervisor=supervisor,
            scorer=scorer,
            prompts=train,
            validation=valid,
        )

    async def _start_training(self, name: str, worker: WorkerConfig) -> RayTrainerGroup:
        group = await RayTrainerGroup.start(
            TrainingRole(name=name, settings=settings.megatron_settings(self._config, worker)),
            self._placements.training[name],
            self._pool,
            {**self._config.system_envs, **worker.system_envs},
            embedded=self._runtime.embedded,
            bucket_bytes=self._config.weight_sync.bucket_size_mb << 20,
        )
        self._stack.push_async_callback(group.close)
        return group

    async def _start_engine(self, placement: ProcessPlacement, number: int = 0) -> RayEngineClient:
        role = self._config.actor_infer
        client = await RayEngineClient.start(
            role.strategy_args.strategy_name,
            settings.engine_settings(self._config),
            placement,
            self._pool,
            {**self._config.system_envs, **role.system_envs},
            number,
        )
        self._engines[client.name] = client
        self._stack.push_async_callback(client.close)
        return client

    async def _restart_engine(self, name: str, number: int) -> RayEngineClient:
        """A new process where the old one was; whatever is left of that goes first."""
        self._engines[name].kill()
        placement = next(p for p in self._placements.engines if replica_name(p) == name)
        return await self._start_engine(placement, number)

    async def _start_scorer(self) -> RayScorer:
        scorer = await RayScorer.start(self._config.rewards, self._config.pretrain, self._config.system_envs)
        self._stack.push_async_callback(scorer.close)
        return scorer
