"""The `run` command: check, start, train, leave a report. Exit codes as in docs_roll/metrics.md."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from roll_async.buffer.errors import StallError, first_cause
from roll_async.config.api import ConfigError, dump, load_with_warnings
from roll_async.config.lookup import resolve_config
from roll_async.config.schema import AgenticConfig, RLVRConfig

if TYPE_CHECKING:
    from roll_async.cluster.runtime import RuntimeInfo
    from roll_async.launch.roles import RolePlacements
    from roll_async.launch.run import Assembled, RunClasses
    from roll_async.observe.recorder import Recorder
    from roll_async.observe.run_folder import RunFolder
    from roll_async.pipelines.protocol import RunEnd
    from roll_async.pipelines.rlvr import RLVRPipeline

logger = logging.getLogger(__name__)

EXIT_FINISHED, EXIT_USAGE, EXIT_ROLE_FAILED, EXIT_STALLED, EXIT_INTERRUPTED = 0, 2, 3, 4, 130
_CLOSE_WITHIN_S = 10.0
"""After a second Ctrl-C; the reaper (`cluster/reaper.py`) ends what is left then."""
_MAKERS = {"demo_assets": "make demo-assets", "gsm8k_assets": "python tools/make_gsm8k_assets.py"}


class EndedAtOnce(KeyboardInterrupt):
    """A second Ctrl-C or SIGTERM."""


def run_command(args: Sequence[str], *, pipeline: str | None, classes: RunClasses | None = None) -> int:
    """`--config NAME_OR_PATH [KEY=VALUE ...]` to an exit code. Everything a laptop can check is checked before Ray
    starts. `classes`: the user's own code, see `launch/run.py`.
    """
    try:
        path, overrides = resolve_config(list(args), pipeline)
        loaded = load_with_warnings(path, overrides, pipeline)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
    for warning in loaded.warnings:
        print(warning, file=sys.stderr)
    try:
        from roll_async.launch.gate import refuse_unsupported

        refuse_unsupported(loaded.config)
        _check_inputs(loaded.config)
    except ValueError as error:
        print(f"{path}: {error}", file=sys.stderr)
        return EXIT_USAGE
    return _run(loaded.config, classes)


def _check_inputs(config: RLVRConfig | AgenticConfig) -> None:
    """What must be on this disk before anything is started. A name without a slash may be a hub name."""
    folders = {config.pretrain, *(w.model_args.model_name_or_path for _, w in config.roles())}
    for folder in sorted(folders):
        looks_local = folder.startswith((".", "/")) or folder.count("/") > 1
        if looks_local and not (Path(folder) / "config.json").is_file():
            hint = next((f"; make it with: {maker}" for key, maker in _MAKERS.items() if key in folder), "")
            raise ValueError(f"model folder {folder} does not exist or holds no config.json{hint}")
    if isinstance(config, AgenticConfig):
        from roll_async.launch.agents import check_agents

        check_agents(config)
        return
    data = [config.actor_train.data_args, config.validation.data_args if config.validation else None]
    for file in (f for part in data if part is not None for f in part.file_name):
        if not Path(file).is_file():
            from roll_async.prompts.rows import missing_file

            raise ValueError(missing_file(file))


def _run(config: RLVRConfig | AgenticConfig, classes: RunClasses | None) -> int:
    """Run folder, Ray, the loop, the report; every failure becomes one readable line and an exit code."""
    from roll_async.cluster.folders import absolute_paths
    from roll_async.launch.run import RunClasses
    from roll_async.observe.run_folder import RunFolder

    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    classes = RunClasses() if classes is None else classes
    config = absolute_paths(config, Path.cwd())
    try:
        folder = RunFolder(config.output_dir, config.exp_name)
        folder.open_log(*classes.log_names)
        folder.write_config(dump(config))
        return _run_in(config, folder, classes)
    except EndedAtOnce:
        return EXIT_INTERRUPTED
    except KeyboardInterrupt:
        print("interrupted before the first step; nothing to save", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BaseException as error:
        code = exit_code(error)
        if code == EXIT_INTERRUPTED:
            return code
        cause = first_cause(error)
        logger.error("%s: %s", type(cause).__name__, cause)
        logger.info("where it came from:", exc_info=error)
        if code is None:
            raise
        return code


def exit_code(error: BaseException) -> int | None:
    """Which end of a run an error is; None = a mistake of our own, worth a traceback."""
    match first_cause(error):
        case KeyboardInterrupt() | asyncio.CancelledError():
            return EXIT_INTERRUPTED
        case StallError():
            return EXIT_STALLED
        case ValueError():
            return EXIT_USAGE
        case RuntimeError() | OSError():  # of a role: ConnectionError and TimeoutError are OSErrors
            return EXIT_ROLE_FAILED
    return None


def _run_in(config: RLVRConfig | AgenticConfig, folder: RunFolder, classes: RunClasses) -> int:
    from roll_async.cluster.runtime import ray_runtime
    from roll_async.launch.roles import place_roles
    from roll_async.observe.progress import ProgressLine
    from roll_async.observe.prometheus import PrometheusTracker
    from roll_async.observe.recorder import Recorder
    from roll_async.observe.trace import Trace
    from roll_async.observe.trackers import create_tracker

    placements = place_roles(config)
    tracker = create_tracker(config.tracking.track_with, folder.path, config.tracking.tracker_kwargs)
    progress = ProgressLine(config.max_steps)
    trace = Trace(folder.path / "trace.json") if config.tracking.trace else None
    trackers = [tracker]
    if config.tracking.prometheus_port is not None:
        # Loopback like everything else on one machine; in a cluster the scraper is another host.
        host = "0.0.0.0" if os.environ.get("RAY_ADDRESS") else "127.0.0.1"
        trackers.append(PrometheusTracker(config.exp_name, config.tracking.prometheus_port, host))
    recorder = Recorder(folder, trackers, progress, logging_steps=config.logging_steps, trace=trace)
    where = "CPU" if not any(p.gpu_ids for p in placements.all) else f"{config.num_nodes} node(s)"
    print(
        f"{config.exp_name}: {config.max_steps} steps of {config.groups_per_batch} prompts x "
        f"{config.samples_per_group} samples, ratio {config.async_generation_ratio:g}, on {where}; "
        f"output in {folder.path}",
        flush=True,
    )
    env = {"HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "0"), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    try:
        with ray_runtime(num_processes=len(placements.all) + 2, env=env) as runtime:
            end = asyncio.run(_train(config, runtime, placements, (recorder, folder), classes))
    finally:
        recorder.close()
    return _report(config, folder, end)


async def _train(
    config: RLVRConfig | AgenticConfig,
    runtime: RuntimeInfo,
    placements: RolePlacements,
    observers: tuple[Recorder, RunFolder],
    classes: RunClasses,
) -> RunEnd:
    """Start the roles, train, export."""
    from roll_async.cluster.garbage import start_without_collections
    from roll_async.launch.run import build_run

    loop = asyncio.get_running_loop()
    recorder, folder = observers
    async with AsyncExitStack() as stack:
        starting: asyncio.Task[Assembled] = asyncio.ensure_future(
            build_run(config, runtime, placements, stack, observers, classes)
        )
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
                _say(_way_on(config, run.pipeline.rescued))
    return end


@contextmanager
def obeying_signals(pipeline: RLVRPipeline, checkpoints: str) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM ends the run after the step under way, its state saved. The second ends the block of
    this task at once with EndedAtOnce; if closing the roles takes more than seconds, the process, and the reaper them.
    """
    loop, running = asyncio.get_running_loop(), asyncio.current_task()
    assert running is not None
    signals = 0

    def tell() -> None:
        nonlocal signals
        signals += 1
        if signals == 1:
            _say("stopping after the step under way; the state will be saved (once more: end at once, save nothing)")
            pipeline.request_stop()
            return
        if signals == 2:
            trained = f"the last whole step was {pipeline.trained_step}"
            _say(f"ending at once: what the newest checkpoint in {checkpoints} does not hold is not saved; {trained}")
            loop.call_later(_CLOSE_WITHIN_S, os._exit, EXIT_INTERRUPTED)
        running.cancel()

    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, tell)
    try:
        yield
    except asyncio.CancelledError:
        if signals < 2:
            raise
        raise EndedAtOnce from None


def _say(line: str) -> None:
    print(f"\n{line}", file=sys.stderr, flush=True)


def _way_on(config: RLVRConfig | AgenticConfig, rescued: str) -> str:
    """What is left of a run that failed, and how to go on."""
    from roll_async.checkpoint.run_checkpoints import RunCheckpoints

    checkpoint = config.checkpoint
    newest = RunCheckpoints(folder=Path(checkpoint.output_dir), max_to_keep=checkpoint.max_to_keep).find("latest")
    if newest is None:
        return f"{rescued}; there is no checkpoint"
    return f"{rescued}; go on after {newest} with checkpoint.resume_from=latest"


def _report(config: RLVRConfig | AgenticConfig, folder: RunFolder, end: RunEnd) -> int:
    from roll_async.observe import report
    from roll_async.pipelines.protocol import RunEnd

    metrics = folder.read_metrics()
    if metrics:
        report.draw(metrics, folder.path / "reward.png", f"{config.exp_name}, ratio {config.async_generation_ratio:g}")
        rows = [
            ("model (Transformers)", str(folder.path / "hf")),
            ("checkpoints", config.checkpoint.output_dir),
            ("picture", str(folder.path / "reward.png")),
        ]
        print(f"\n{end.value}\n{report.summary(metrics, rows)}", flush=True)
    return EXIT_INTERRUPTED if end is RunEnd.INTERRUPTED else EXIT_FINISHED
