"""Starts and closes the roles of a run, and decides whether they are started again when one of them dies.

    first start --a role died--> restart 1 --...--> restart N = fault.max_run_restarts --> the error ends the run

A restart starts all roles anew from the newest checkpoint, in the same process and folder; Ray, the log and the metrics
go on. Steps after the checkpoint are trained again from the groups in the ledger, so every prompt is trained exactly
once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import TypeVar

from roll_async.buffer.errors import RoleFailed, StallError, first_cause
from roll_async.cluster.gc_policy import defer_gc_during_startup
from roll_async.cluster.runtime import RuntimeInfo, wait_names_free
from roll_async.config.schema import RunConfig
from roll_async.launch.run_start import checkpoints_of, go_back, how_to_continue, restored_step
from roll_async.launch.signals import on_stop_signals, print_line, stop_on_signals
from roll_async.observe.recorder import Recorder
from roll_async.observe.run_folder import RunFolder
from roll_async.pipelines.rlvr import RLVRPipeline
from roll_async.pipelines.supervised import SupervisedPipeline

logger = logging.getLogger(__name__)
C = TypeVar("C", bound=RunConfig)

Pipeline = RLVRPipeline | SupervisedPipeline
Start = Callable[[C, RuntimeInfo, AsyncExitStack, tuple[Recorder, RunFolder]], Awaitable[Pipeline]]
"""Starts every role and builds the run on them; they close with the stack."""

_RESTARTABLE = (ConnectionError, TimeoutError, StallError, RoleFailed)
"""Errors after which a restart may help: a role died, was killed, does not answer, or raised."""


@asynccontextmanager
async def started_roles(
    config: C,
    runtime: RuntimeInfo,
    observers: tuple[Recorder, RunFolder],
    start: Start[C],
) -> AsyncIterator[Pipeline]:
    """The run on started roles, with signal handlers. All of them are closed when the block ends."""
    await wait_names_free()  # of the roles before a restart
    async with AsyncExitStack() as stack:
        starting = asyncio.ensure_future(start(config, runtime, stack, observers))
        on_stop_signals(starting.cancel)  # there is no pipeline yet to be asked to stop
        try:
            with defer_gc_during_startup(settled=True):
                pipeline = await starting
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        observers[0].begin(lambda: pipeline.doing)
        try:
            with stop_on_signals(pipeline, config.checkpoint.output_dir):
                yield pipeline
        finally:
            if pipeline.rescued is not None:
                print_line(_how_to_resume(config, observers[1], pipeline.rescued))


def can_restart(config: RunConfig, restarts: int, error: BaseException) -> bool:
    """Whether starting all roles again may help, and `fault.max_run_restarts` allows one more restart."""
    return isinstance(first_cause(error), _RESTARTABLE) and restarts < config.fault.max_run_restarts


def restart_from_newest(config: C, recorder: Recorder, folder: RunFolder, error: BaseException) -> C:
    """Count and announce a restart. Returns the config that resumes from the newest checkpoint of the run, or where the
    run began as long as it has none.
    """
    cause = first_cause(error)
    logger.error("%s: %s", type(cause).__name__, cause)
    logger.info("traceback:", exc_info=error)
    recorder.restarts += 1
    number = f"{recorder.restarts} of {config.fault.max_run_restarts}"
    print_line(f"starting all roles again from the newest checkpoint (fault.max_run_restarts: {number})")
    logger.warning("restart %s of the run", number)
    if config.checkpoint.resume_from is None or checkpoints_of(config, folder.record).steps():
        config = replace(config, checkpoint=replace(config.checkpoint, resume_from="latest"))
    if go_back(config, folder, restored_step(config, folder)):
        recorder.new_branch()
    return config


def _how_to_resume(config: RunConfig, folder: RunFolder, rescued: str) -> str:
    """Text for a run that failed: whether its last step is saved, and how to resume it."""
    steps = checkpoints_of(config, folder.record).steps()
    if not steps or folder.record is None:
        return f"{rescued}; there is no checkpoint"
    return f"{rescued}; resume after step {steps[-1]} with: {how_to_continue(config, folder.record)}"
