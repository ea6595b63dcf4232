"""Starts the processes of a run: training groups, engine replicas, reward workers, independently of each other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from roll_async.cluster.folders import SharedFolders, shared_folders
from roll_async.cluster.node_pool import NodePool
from roll_async.cluster.placement import devices_of, place_roles, processes_of, training_roles
from roll_async.cluster.roles.engine_group import replica_name
from roll_async.cluster.roles.rollout_process import RolloutProcess
from roll_async.cluster.roles.trainer_group import RayTrainerGroup
from roll_async.cluster.roles.training_role import TrainingRole
from roll_async.cluster.runtime import RuntimeInfo
from roll_async.config.schema import (
    PipelineConfig,
    RunConfig,
    WorkerConfig,
    roles_in_turns,
    roles_on_engine_devices,
)
from roll_async.launch.engines import ReplicaStarter
from roll_async.launch.rollout import StartedRollout, groups_on, start_engines, start_rollout, start_scorers
from roll_async.observe.trace import DRIVER, starting
from roll_async.pipelines.colocation import DeviceMemory, PhaseSwitcher
from roll_async.rollout.dispatch.engine_pool import EnginePool
from roll_async.rollout.groups import GroupRunner
from roll_async.weight_sync.protocol import DevicePhase

logger = logging.getLogger(__name__)


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
        no_engines = asyncio.Event()
        no_engines.set()
        with shared_folders(_written(self._config)) as folders:
            workers = training_roles(self._config).items()
            groups = await asyncio.gather(*(self._start_training(*role, folders, no_engines) for role in workers))
        return {group.name: group for group in groups}

    async def _reserve(self) -> None:
        with starting(DRIVER, "placement"):
            await self._pool.reserve(self._config.fault.stall_timeout)
        self._stack.callback(self._pool.release)  # first, so the last to close: processes end before their nodes go

    async def start(self, *, rollout_log_files: Sequence[str] | None = None) -> StartedRoles:
        """Start all roles. `rollout_log_files`: the rollout has a process of its own, which logs to these files.

        Raises ValueError for what the user can fix, RoleFailed for what a role reports.
        """
        await self._reserve()
        assert isinstance(self._config, PipelineConfig), "a run without engines: start_ranks"
        with shared_folders(_written(self._config)) as folders:
            sharing = [name for name in roles_on_engine_devices(self._config) if name in self._placements]
            in_turns = sharing if roles_in_turns(self._config) else []
            if in_turns and rollout_log_files is not None:
                raise ValueError(
                    f"{', '.join(in_turns)} and actor_infer share devices, which in turns the fully asynchronous "
                    "mode can not: give them separate ones in device_mapping, or set colocation: resident, or use "
                    "examples/start_rlvr_pipeline.py"
                )
            engines_up = asyncio.Event()
            if not sharing:
                engines_up.set()
            workers = training_roles(self._config).items()
            async with asyncio.TaskGroup() as tasks:  # one that fails ends the others, which may wait for it
                side = tasks.create_task(self._start_side(rollout_log_files, in_turns, engines_up))
                starts = [tasks.create_task(self._start_training(*role, folders, engines_up)) for role in workers]
        training, rollout = {group.name: group for group in (start.result() for start in starts)}, side.result()
        if rollout.devices is not None:
            await rollout.devices.add_groups({name: training[name] for name in in_turns})
        return training, rollout

    async def _start_side(
        self, log_files: Sequence[str] | None, in_turns: Sequence[str], engines_up: asyncio.Event
    ) -> StartedRollout | RolloutProcess:
        """Engines, rewards and prompts. On shared devices the engines come first: they measure the free memory, and
        would take for theirs what a rank frees meanwhile.
        """
        assert isinstance(self._config, PipelineConfig)
        if log_files is None:
            side = await start_rollout(self._config, self._placements["actor_infer"], self._pool, self._stack)
            if in_turns:
                side = replace(side, devices=await self._asleep(side, in_turns))
        else:
            side = await self._start_process(log_files)
        engines_up.set()
        return side

    async def _asleep(self, rollout: StartedRollout, in_turns: Sequence[str]) -> PhaseSwitcher:
        """Put the engines to sleep, so that the ranks start on free devices."""
        config, placements = self._config, self._placements
        assert isinstance(config, PipelineConfig)
        engines = {replica_name(p.index): devices_of([p], config.num_gpus_per_node) for p in placements["actor_infer"]}
        ranks = {name: devices_of(placements[name], config.num_gpus_per_node) for name in in_turns}
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
        logger.info("%s and %s take turns on devices %s", ", ".join(in_turns), ", ".join(sleepers), sorted(theirs))
        return devices

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

    async def _start_training(
        self, name: str, worker: WorkerConfig, folders: SharedFolders, engines_up: asyncio.Event
    ) -> RayTrainerGroup:
        group = await RayTrainerGroup.start(
            TrainingRole.of(self._config, name, worker),
            self._placements[name],
            self._pool,
            {**self._config.system_envs, **worker.system_envs},
            embedded=self._runtime.embedded,
            folders=folders,
        )
        self._stack.push_async_callback(group.close)
        if not engines_up.is_set():
            with starting(name, "wait_engines"):
                await engines_up.wait()
        await group.load_model()
        return group
