"""Starts the processes of a run: training groups, engine replicas, reward workers, independently of each other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

from roll_async.cluster.folders import SharedFolders, shared_folders
from roll_async.cluster.node_pool import NodePool
from roll_async.cluster.placement import ProcessPlacement, devices_of, place, threads_per_process
from roll_async.cluster.roles.engine_group import replica_name
from roll_async.cluster.roles.rollout_process import RolloutProcess
from roll_async.cluster.roles.trainer_group import RayTrainerGroup
from roll_async.cluster.roles.training_role import TrainingRole
from roll_async.cluster.runtime import RuntimeInfo, pretended_gpus
from roll_async.config.schema import (
    PipelineConfig,
    RunConfig,
    WorkerConfig,
    reference_is_actor,
    roles_on_engine_devices,
)
from roll_async.launch.engines import ReplicaStarter
from roll_async.launch.rollout import StartedRollout, groups_on, start_engines, start_rollout, start_scorers
from roll_async.pipelines.colocation import DeviceMemory, PhaseSwitcher
from roll_async.rollout.dispatch.engine_pool import EnginePool
from roll_async.rollout.groups import GroupRunner
from roll_async.weight_sync.protocol import DevicePhase

logger = logging.getLogger(__name__)


def training_roles(config: RunConfig) -> dict[str, WorkerConfig]:
    """Roles with Megatron ranks of their own."""
    roles = {name: worker for name, worker in config.roles() if name != "actor_infer"}
    if isinstance(config, PipelineConfig) and reference_is_actor(config):
        roles.pop("reference")
    return roles


def place_roles(config: RunConfig) -> dict[str, tuple[ProcessPlacement, ...]]:
    """Device mappings to the processes of each role: of actor_train, reference, critic, teacher as configured, and last
    the engines, actor_infer. Raises ValueError for a mapping that spans nodes where it cannot.
    """
    roles = training_roles(config)
    cpu = sum(w.num_ranks for w in roles.values() if w.device_mapping is None)
    engines = config.actor_infer if isinstance(config, PipelineConfig) else None
    cpu += engines.num_servers if engines is not None and engines.device_mapping is None else 0
    threads = threads_per_process(cpu)  # of processes on CPU; those with a GPU have theirs from the granted node

    def put(worker: WorkerConfig, count: int) -> tuple[ProcessPlacement, ...]:
        return place(
            worker.device_mapping,
            num_processes=count,
            num_gpus_per_node=config.num_gpus_per_node,
            num_threads=threads,
            pretended=pretended_gpus() > 0,
        )

    training = {name: put(w, w.num_ranks) for name, w in roles.items()}
    return training if engines is None else {**training, "actor_infer": put(engines, engines.num_servers)}


def processes_of(config: RunConfig) -> list[ProcessPlacement]:
    """The processes of all roles."""
    return list(chain.from_iterable(place_roles(config).values()))


async def start_without_training(config: PipelineConfig, stack: AsyncExitStack) -> tuple[GroupRunner, EnginePool]:
    """Groups of answers of engines that hold the weights they were loaded with, and these. Ray runs; all of it closes
    with the stack. Raises ValueError for what the user can fix, RoleFailed and ConnectionError for engines that do not
    start or are lost.
    """
    placements = place_roles(config)["actor_infer"]
    pool = NodePool(placements)
    await pool.reserve(config.fault.stall_timeout)
    stack.callback(pool.release)
    starter = ReplicaStarter(config, placements, pool, stack)
    scorers, engines, _ = await start_engines(config, starter, start_scorers(config, stack, trains=False), stack)
    return groups_on(config, scorers)(engines.manager), engines.manager


def loading_weights(worker: WorkerConfig) -> WorkerConfig:
    """Engines that load their weights: dummy ones wait for the first push of a run."""
    if worker.is_megatron or worker.engine.load_format == "auto":
        return worker
    loads = replace(worker.engine, load_format="auto")
    return replace(worker, strategy_args=replace(worker.strategy_args, strategy_config=loads))


def _written(config: RunConfig) -> list[tuple[str, str]]:
    """Folders that the driver and the ranks write into."""
    run = Path(config.output_dir) / config.exp_name
    keys = {"output_dir": run, "checkpoint.output_dir": Path(config.checkpoint.output_dir)}
    return [(key, str(path.absolute())) for key, path in keys.items()]


StartedRoles = tuple[Mapping[str, RayTrainerGroup], StartedRollout | RolloutProcess]
"""The training roles by name, and the rollout side."""


class RoleStarter:
    """Starts roles in parallel; all of them are closed when the stack closes."""

    def __init__(self, config: RunConfig, runtime: RuntimeInfo, stack: AsyncExitStack) -> None:
        self._config, self._runtime, self._stack = config, runtime, stack
        self._placements = place_roles(config)
        self._pool = NodePool(processes_of(config))

    async def start_ranks(self) -> dict[str, RayTrainerGroup]:
        """All roles of a run without engines. Raises as `start`."""
        await self._reserve()
        with shared_folders(_written(self._config)) as folders:
            workers = training_roles(self._config).items()
            groups = await asyncio.gather(*(self._start_training(name, worker, folders) for name, worker in workers))
        return {group.name: group for group in groups}

    async def _reserve(self) -> None:
        await self._pool.reserve(self._config.fault.stall_timeout)
        self._stack.callback(self._pool.release)  # first, so the last to close: processes end before their nodes go

    async def start(self, *, rollout_log_files: Sequence[str] | None = None) -> StartedRoles:
        """Start all roles. `rollout_log_files`: the rollout has a process of its own, which logs to these files.

        Raises ValueError for what the user can fix, RoleFailed for what a role reports.
        """
        await self._reserve()
        assert isinstance(self._config, PipelineConfig), "a run without engines: start_ranks"
        with shared_folders(_written(self._config)) as folders:
            if sharing := [name for name in roles_on_engine_devices(self._config) if name in self._placements]:
                if rollout_log_files is not None:
                    raise ValueError(
                        f"{', '.join(sharing)} and actor_infer share devices, which the fully asynchronous mode can "
                        "not: give them separate ones in device_mapping, or use examples/start_rlvr_pipeline.py"
                    )
                return await self._start_colocated(sharing, folders)
            workers = training_roles(self._config).items()
            training = asyncio.gather(*(self._start_training(name, worker, folders) for name, worker in workers))
            if rollout_log_files is None:
                starting = start_rollout(self._config, self._placements["actor_infer"], self._pool, self._stack)
            else:
                starting = self._start_process(rollout_log_files)
            groups, rollout = await asyncio.gather(training, starting)
        return {g.name: g for g in groups}, rollout

    async def _start_colocated(self, sharing: Sequence[str], folders: SharedFolders) -> StartedRoles:
        """Start the engines first, which measure the free memory of their devices. Then they sleep, and the ranks
        start on free devices.
        """
        config, placements = self._config, self._placements
        assert isinstance(config, PipelineConfig)
        rollout = await start_rollout(config, placements["actor_infer"], self._pool, self._stack)
        engines = {replica_name(p.index): devices_of([p], config.num_gpus_per_node) for p in placements["actor_infer"]}
        ranks = {name: devices_of(placements[name], config.num_gpus_per_node) for name in sharing}
        theirs = {device for devices in ranks.values() for device in devices}
        sleepers = {name for name, devices in engines.items() if theirs & set(devices)}
        memory = DeviceMemory(devices_of={**engines, **ranks})
        manager = rollout.engines.manager
        devices = PhaseSwitcher(
            manager,
            lambda: [r for r in manager.clients if r.name in sleepers],  # type: ignore[misc]
            memory,
            pause_timeout_s=config.async_training.interrupt.timeout,
        )
        await devices.phase(DevicePhase.TRAIN, drop_engine_weights=True)  # the first push of a run sends all weights
        workers = training_roles(config).items()
        groups = await asyncio.gather(*(self._start_training(name, worker, folders) for name, worker in workers))
        training = {group.name: group for group in groups}
        await devices.add_groups({name: training[name] for name in sharing})
        logger.info("%s and %s take turns on devices %s", ", ".join(sharing), ", ".join(sleepers), sorted(theirs))
        return training, replace(rollout, devices=devices)

    async def _start_process(self, log_files: Sequence[str]) -> RolloutProcess:
        assert isinstance(self._config, PipelineConfig)
        start = partial(start_rollout, self._config, self._placements["actor_infer"], self._pool)
        process = await RolloutProcess.start(
            start,
            log_files=log_files,
            silence_s=self._config.fault.stall_timeout,
            rpc_timeout_s=self._config.fault.rpc_timeout,
            env=self._config.system_envs,
        )
        self._stack.push_async_callback(process.close)
        return process

    async def _start_training(self, name: str, worker: WorkerConfig, folders: SharedFolders) -> RayTrainerGroup:
        group = await RayTrainerGroup.start(
            TrainingRole.of(self._config, name, worker),
            self._placements[name],
            self._pool,
            {**self._config.system_envs, **worker.system_envs},
            embedded=self._runtime.embedded,
            folders=folders,
        )
        self._stack.push_async_callback(group.close)
        return group
