"""A run to its end: its roles are started, and started again from the newest checkpoint when one of them dies.

    train:  life 0 --a role died--> life 1 --...--> life N = fault.max_run_restarts --> the error ends the run

Every life starts all roles anew in the same process and folder; Ray, the log and the metrics go on. What was trained
after the checkpoint is trained again from the groups in the ledger, so every prompt is trained exactly once.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from roll_async.buffer.errors import StallError, first_cause
from roll_async.checkpoint.run_checkpoints import RunCheckpoints
from roll_async.cluster.errors import RoleFailed
from roll_async.cluster.garbage import start_without_collections
from roll_async.cluster.runtime import RuntimeInfo
from roll_async.config.schema import AgenticConfig, PipelineConfig, RLVRConfig
from roll_async.launch.roles import RolePlacements
from roll_async.launch.run import RunClasses, build_run
from roll_async.launch.signals import obeying_signals, say
from roll_async.observe.recorder import Recorder
from roll_async.observe.run_folder import RunFolder
from roll_async.pipelines.protocol import RunEnd

logger = logging.getLogger(__name__)

_HEALED = (ConnectionError, TimeoutError, StallError, RoleFailed)
"""What a new start may heal: a role that died, was killed, does not answer, or raised."""


async def train(
    config: RLVRConfig | AgenticConfig,
    runtime: RuntimeInfo,
    placements: RolePlacements,
    observers: tuple[Recorder, RunFolder],
    classes: RunClasses,
) -> RunEnd:
    """The run, with its restarts. Raises what ends it."""
    recorder = observers[0]
    while True:
        try:
            return await _live(config, runtime, placements, observers, classes)
        except BaseException as error:
            cause = first_cause(error)
            if not isinstance(cause, _HEALED) or recorder.restarts >= config.fault.max_run_restarts:
                raise
            logger.error("%s: %s", type(cause).__name__, cause)
            logger.info("where it came from:", exc_info=error)
        recorder.restarts += 1
        number = f"{recorder.restarts} of {config.fault.max_run_restarts}"
        say(f"starting all roles again from the newest checkpoint (fault.max_run_restarts: {number})")
        logger.warning("restart %s of the run", number)
        config = replace(config, checkpoint=replace(config.checkpoint, resume_from="latest"))


async def _live(
    config: RLVRConfig | AgenticConfig,
    runtime: RuntimeInfo,
    placements: RolePlacements,
    observers: tuple[Recorder, RunFolder],
    classes: RunClasses,
) -> RunEnd:
    """Start the roles, train, export. All roles are closed when this returns or raises."""
    loop = asyncio.get_running_loop()
    recorder, folder = observers
    async with AsyncExitStack() as stack:
        starting = asyncio.ensure_future(build_run(config, runtime, placements, stack, observers, classes))
        for name in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(name, starting.cancel)
        try:
            with start_without_collections(settled=True):
                run = await starting
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        recorder.begin()
        try:
            with obeying_signals(run.pipeline, config.checkpoint.output_dir):
                end = await run.pipeline.run()
                await run.export_hf(str(folder.path / "hf"))
        finally:
            if run.pipeline.rescued is not None:
                say(_how_to_go_on(config, run.pipeline.rescued))
    return end


def _how_to_go_on(config: PipelineConfig, rescued: str) -> str:
    """What is left of a run that failed, and how to go on."""
    checkpoint = config.checkpoint
    newest = RunCheckpoints(folder=Path(checkpoint.output_dir), max_to_keep=checkpoint.max_to_keep).find("latest")
    if newest is None:
        return f"{rescued}; there is no checkpoint"
    return f"{rescued}; go on after {newest} with checkpoint.resume_from=latest"
