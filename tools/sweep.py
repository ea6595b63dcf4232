"""Many short runs on roles that are started once: experiments, and tests of every variant.

    with ray_runtime(...) as runtime, Sweep(first_config, runtime) as sweep:
        for config in configs:
            metrics = sweep.run(config)

Each run starts from `pretrain` with an optimizer, prompt stream, queue and ledger of its own; processes, engines and
reward workers stay. Configurations may differ in everything that does not shape a process: algorithm, asynchrony,
optimizer, batch, seed, steps.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from types import TracebackType

from roll_async.cluster.runtime import RuntimeInfo
from roll_async.config.schema import RLVRConfig
from roll_async.launch.roles import RoleStarter
from roll_async.launch.rollout import StartedRollout, prompts_of
from roll_async.launch.run import build_run
from roll_async.launch.run_start import go_back, open_run, restored_step
from roll_async.observe.progress import Screen
from roll_async.observe.recorder import Recorder
from roll_async.pipelines.protocol import RunEnd
from roll_async.pipelines.wire import UserHooks
from roll_async.trainer.megatron.settings import MegatronSettings


class Sweep:
    """Roles of the first configuration: a role that any run needs must be in it (the critic, the reference)."""

    def __init__(self, config: RLVRConfig, runtime: RuntimeInfo) -> None:
        self._config, self._runtime = config, runtime
        self._stack = AsyncExitStack()
        self._runner = asyncio.Runner()

    def __enter__(self) -> Sweep:
        config = self._config
        starter = RoleStarter(config, self._runtime, self._stack)
        self._roles = self._runner.run(starter.start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._runner.run(self._stack.aclose())
        self._runner.close()

    def run(
        self, config: RLVRConfig, hooks: UserHooks | None = None, *, timeout_s: float = 3600.0
    ) -> list[dict[str, float]]:
        """Metrics of the steps of one run. Raises TimeoutError after `timeout_s`, and whatever ends a run early."""
        return self._runner.run(self._run(config, UserHooks() if hooks is None else hooks, timeout_s))

    async def _run(self, config: RLVRConfig, hooks: UserHooks, timeout_s: float) -> list[dict[str, float]]:
        for name, reward in config.rewards.items():
            started = self._config.rewards.get(name)
            if name not in config.loss_parts and (started is None or started.type != reward.type):
                found = "is not there" if started is None else f"is {started.type}"
                raise ValueError(
                    f"rewards.{name}: {reward.type} {found} in the first configuration, whose workers stay"
                )
        config, folder, _ = open_run(config)
        go_back(config, folder, restored_step(config, folder))
        recorder = Recorder(folder, [], Screen(config.max_steps), logging_steps=config.max_steps)
        workers = dict(config.roles())
        training, rollout = self._roles
        for name, group in training.items():
            if name in workers:
                await group.restart(MegatronSettings.of(config, workers[name]))
        prompts, pool, held_out = await asyncio.to_thread(prompts_of, config)
        assert isinstance(rollout, StartedRollout)
        rollout = replace(rollout, prompts=prompts, pool=pool, held_out=held_out)
        async with AsyncExitStack() as stack:  # its last checkpoint is complete before the ranks begin anew
            pipeline = await build_run(config, (training, rollout), stack, (recorder, folder), hooks)
            async with asyncio.timeout(timeout_s):
                end = await pipeline.run()
        assert end is RunEnd.FINISHED, f"{config.exp_name} ended with {end}"
        return folder.read_metrics()
