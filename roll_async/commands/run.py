"""The `run` command and the launchers: check, start, train, leave a report. Exit codes as in docs_roll/metrics.md."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import click

from roll_async.buffer.errors import Defect, RaisesAlways, StallError, after_start, first_cause, place_of
from roll_async.commands.command_line import (
    AS_TYPED,
    EXIT_CODES,
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
    EXIT_ROLE_FAILED,
    EXIT_STALLED,
    EXIT_USAGE,
    execute,
)
from roll_async.config.api import dump, load_with_warnings
from roll_async.config.loading.lookup import resolve_config
from roll_async.config.schema import PipelineConfig, RLVRConfig, RunConfig, SupervisedConfig
from roll_async.config.secrets import is_secret, shown_text, with_secrets, without_secrets
from roll_async.config.yaml.compose import OVERRIDE
from roll_async.launch.run_start import checkpoints_of, go_back, how_to_continue, lock_run, open_run, restored_step
from roll_async.launch.signals import EndedAtOnce, outlive_state_requests, run_to_end
from roll_async.observe.disk import Unwritable
from roll_async.observe.progress import tell_start
from roll_async.observe.trace import DRIVER, StartTimeline, followed, starting

if TYPE_CHECKING:
    from roll_async.cluster.runtime import RuntimeInfo
    from roll_async.launch.restarts import Start
    from roll_async.observe.recorder import Recorder
    from roll_async.observe.run_folder import RunFolder
    from roll_async.observe.trackers import Tracker
    from roll_async.pipelines.protocol import RunEnd
    from roll_async.pipelines.wire import UserHooks
    from roll_async.trainer.supervised import GivenData

logger = logging.getLogger(__name__)

_EXAMPLES = {"rlvr": "rlvr_config_async_cpu.yaml", "agentic": "agentic_frozen_lake_async_cpu.yaml"}
_REASON_CHARACTERS = 500
_RUN_HELP = """Train as a config describes.

The config is looked up in the working directory, then in configs/ of the repository, also without .yaml; output goes
below the working directory. KEY=VALUE overrides one of its keys; the value is YAML.

\b
Options:
  --config NAME_OR_PATH                    the config
  --config-path DIR --config-name NAME     the same in two parts
  --device cpu                             on this machine's CPU, with the model and data of the demo (rlvr configs)

\b
Example:
  {example}
"""


def launcher(
    name: str,
    *,
    pipeline: str | None,
    hooks: UserHooks | None = None,
    default: str | None = None,
    example: str | None = None,
) -> click.Command:
    """A command that trains. `pipeline`: the kind it runs; None = what the config is. `default`: its config when none
    is given. `hooks`: the user's own code, see `pipelines/wire.py`.
    """

    @click.command(
        name=name,
        context_settings=AS_TYPED,
        help=_RUN_HELP.format(example=example or f"{name} --config rlvr_config_async_cpu max_steps=5"),
        epilog=EXIT_CODES,
        options_metavar="[--config NAME_OR_PATH]",
    )
    @click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar="[KEY=VALUE]...")
    def train(args: tuple[str, ...]) -> int:
        if any(arg.startswith("--config") for arg in args):  # also --config-name
            return run_command(args, pipeline=pipeline, hooks=hooks)
        if args and not args[0].startswith("-") and not OVERRIDE.match(args[0]):
            return run_command(["--config", *args], pipeline=pipeline, hooks=hooks)
        named = () if default is None else ("--config", default)
        return run_command([*named, *args], pipeline=pipeline, hooks=hooks)

    return train


command = launcher("run", pipeline=None, example="roll-async run --config rlvr_config_async_cpu max_steps=5")


def launch(name: str, args: Sequence[str], *, pipeline: str, hooks: UserHooks | None = None) -> int:
    """What a start script does: its arguments to an exit code. `hooks`: as of `run_command`."""
    example = f"python {name} --config {_EXAMPLES[pipeline]} max_steps=5"
    return execute(launcher(name, pipeline=pipeline, hooks=hooks, example=example), args, name)


def run_command(args: Sequence[str], *, pipeline: str | None, hooks: UserHooks | None = None) -> int:
    """`--config NAME_OR_PATH [KEY=VALUE ...]` to an exit code. Everything a laptop can check is checked before Ray
    starts. `hooks`: the user's own code, see `pipelines/wire.py`.
    """
    from roll_async.pipelines.protocol import RunEnd

    with ExitStack() as held:
        try:
            config, folder = opened(*_resolved(args, pipeline), pipeline, hooks, held)
        except (ValueError, Unwritable) as error:
            print(error, file=sys.stderr)
            return EXIT_ROLE_FAILED if isinstance(error, Unwritable) else EXIT_USAGE
        try:
            end = trained(config, folder, hooks)
        except BaseException as error:  # also an interrupt, which may be inside an ExceptionGroup
            code = exit_code(error)  # `trained` has said and logged it
            return EXIT_ROLE_FAILED if code is None else code
        return EXIT_INTERRUPTED if end is RunEnd.INTERRUPTED else EXIT_FINISHED


def opened(
    path: Path, overrides: Sequence[str], pipeline: str | None, hooks: UserHooks | None, held: ExitStack
) -> tuple[RunConfig, RunFolder]:
    """The config past all that a laptop can check, and the folder of its run, locked until `held` closes. Raises
    ValueError for what keeps the run from starting, Unwritable for a disk.
    """
    from roll_async.cluster.folders import absolute_paths

    held.enter_context(StartTimeline().current(tell_start))
    # Before all that takes time: a second start beside a running one ends at once, and touches nothing.
    lock_run(load_with_warnings(path, overrides, pipeline).config, held)
    with starting(DRIVER, "checks"):
        config = absolute_paths(_admitted(path, overrides, pipeline), Path.cwd())
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    outlive_state_requests()  # before the record tells anybody the process to ask
    config, folder, notices = open_run(config)
    held.callback(folder.close_log)
    folder.open_log(*(hooks.log_names if hooks else ()), modules=hooks.modules if hooks else ())
    for notice in notices:
        logger.warning(notice)
    return config, folder


def _resolved(args: Sequence[str], pipeline: str | None) -> tuple[Path, list[str]]:
    """`resolve_config` of a launcher, which knows `--device cpu` as well."""
    from roll_async.launch.checks.on_cpu import cpu_overrides, take_device

    rest, on_cpu = take_device(args)
    path, overrides = resolve_config(rest, pipeline)
    return path, [*cpu_overrides(path, overrides, pipeline), *overrides] if on_cpu else overrides


def prepare(args: Sequence[str], pipeline: str | None) -> RunConfig:
    """The config that a launcher's arguments name, past the gate and with a folder for every model. Warnings go to
    stderr. Raises ValueError for everything that keeps the run from starting and that a laptop can see.
    """
    return _admitted(*_resolved(args, pipeline), pipeline)


def _admitted(path: Path, overrides: Sequence[str], pipeline: str | None) -> RunConfig:
    from roll_async.launch.checks.gate import check_supported, require_devices, require_inputs, require_models
    from roll_async.launch.checks.inputs import resolve_names

    loaded = check_supported(path, overrides, pipeline)
    require_devices(loaded)
    require_inputs(loaded)
    for warning in loaded.warnings:
        print(warning, file=sys.stderr)
    config = resolve_names(with_secrets(loaded.config, os.environ))
    require_models(loaded, config)
    _check_memory(config)
    return config


def _check_memory(config: RunConfig) -> None:
    """Against the devices of this machine, where a role uses any; those of other machines are taken to be alike."""
    if not any(role.device_mapping for _, role in config.roles()):
        return  # before torch, whose import takes seconds that the start of Ray can use
    import torch

    if torch.cuda.is_available():
        from roll_async.launch.checks.device_memory import require_fit

        require_fit(config, torch.cuda.get_device_properties(0).total_memory)


def trained(config: RunConfig, folder: RunFolder, hooks: UserHooks | None = None) -> RunEnd:
    """Ray, the loop, the report. Every failure is one readable line, here and in the run's record, before it is raised
    again; an interrupt too, when the state is saved that can be.
    """
    from roll_async.pipelines.wire import UserHooks

    hooks = hooks or UserHooks()
    try:
        config, data = _rows_of(config)
        folder.write_config(dump(without_secrets(config)), is_secret)
        return _run_in(config, folder, hooks, data)
    except BaseException as error:  # also an interrupt, which may be inside an ExceptionGroup
        if exit_code(error) == EXIT_INTERRUPTED:
            if isinstance(error, KeyboardInterrupt) and not isinstance(error, EndedAtOnce):
                print("interrupted before the first step; nothing to save", file=sys.stderr)
            _interrupted(config, folder)
            raise
        cause = shown_cause(error)
        logger.error("%s: %s%s", type(cause).__name__, cause, origin(error))
        # All that waited for the part with the defect raise it: the way that matters is that of the cause.
        first = first_cause(error)
        logger.info("traceback:", exc_info=first.__cause__ if isinstance(first, Defect) else error)
        _ended(folder, "failed", reason=f"{type(cause).__name__}: {cause}"[:_REASON_CHARACTERS])
        raise


def _rows_of(config: RunConfig) -> tuple[RunConfig, GivenData | None]:
    """The rows of an sft or dpo run, and the config with the steps that they make. Raises ValueError for rows that
    cannot be trained on.
    """
    if not isinstance(config, SupervisedConfig):
        return config, None
    from roll_async.launch.supervised import load_data
    from roll_async.trainer.supervised import num_steps

    data = load_data(config)
    return replace(config, max_steps=num_steps(config, data)), data


def _start_of(data: GivenData | None, hooks: UserHooks) -> Start:
    """What starts the roles of the run."""
    if data is not None:
        from roll_async.launch.supervised import start_supervised

        return partial(start_supervised, data=data)
    from roll_async.launch.run import start_run

    return partial(start_run, hooks=hooks)


def _interrupted(config: RunConfig, folder: RunFolder) -> None:
    """Say how the run is continued, if there is something to continue."""
    if folder.record is not None and checkpoints_of(config, folder.record).steps():
        print(f"continue with: {how_to_continue(config, folder.record)}", file=sys.stderr, flush=True)
    _ended(folder, "interrupted")


def _ended(folder: RunFolder, state: str, *, reason: str = "") -> None:
    """Say in the record how the run ended."""
    with suppress(OSError):  # of a full disk, whose error ended the run and is told already
        folder.update_record(state=state, reason=reason)


def shown_cause(error: BaseException) -> BaseException:
    """The error that the user is shown: the first of a group, and of a Defect its cause."""
    cause = first_cause(error)
    return first_cause(cause.__cause__) if isinstance(cause, Defect) and cause.__cause__ is not None else cause


def origin(error: BaseException) -> str:
    """The place in this package that raised an error, also in the process of a role, appended to its message; empty if
    raised elsewhere. Of a Defect it may be in the user's own code.
    """
    cause, is_defect = shown_cause(error), isinstance(first_cause(error), Defect)
    place = "" if isinstance(cause, RaisesAlways | Unwritable) else place_of(cause, theirs=is_defect)
    return f" [{place}; the whole way is in run.log]" if place else ""


def exit_code(error: BaseException) -> int | None:
    """The exit code of an error; None for a defect of roll_async itself, of which all callers show the traceback."""
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


def ended(name: str, work: Callable[[], int]) -> int:
    """The exit code of the work of a command that starts engines; an error of it is one line on stderr."""
    try:
        return work()
    except BaseException as error:  # also an interrupt, which may be inside an ExceptionGroup
        code = exit_code(error)
        if code is None:  # there is no run.log that would keep the way to it
            traceback.print_exception(error)
            return EXIT_ROLE_FAILED
        if code != EXIT_INTERRUPTED:
            print(f"roll-async {name}: {first_cause(error)}", file=sys.stderr)
        return code


def _run_in(config: RunConfig, folder: RunFolder, hooks: UserHooks, data: GivenData | None) -> RunEnd:
    with starting(DRIVER, "ray_import"):
        from roll_async.cluster.placement import processes_of
        from roll_async.cluster.role_log import role_environment
        from roll_async.cluster.runtime import ray_runtime

    processes = processes_of(config)
    folder.keep_trace()
    step = restored_step(config, folder)
    went_back = go_back(config, folder, step)
    epochs = config.num_train_epochs if isinstance(config, SupervisedConfig) else None
    if step >= config.max_steps and epochs is None:
        logger.warning("step %d of %d is trained: nothing is left to do; raise max_steps", step, config.max_steps)
    recorder = _recorder(config, folder)
    recorder.on_step = hooks.on_step
    if went_back:
        recorder.repeat()
    where = "CPU" if not any(p.gpu_ids for p in processes) else f"{config.num_nodes} node(s)"
    print(
        f"{config.exp_name}: {config.max_steps} steps of {_step_of(config)}, on {where}; output in {folder.path}",
        flush=True,
    )
    env = role_environment(folder.role_logs())
    recorder.screen.starting(recorder.start)
    # torch is most of these imports, and Ray waits for its own processes meanwhile.
    threading.Thread(target=import_module, args=("roll_async.launch.run",), name="imports", daemon=True).start()
    try:
        with ray_runtime(num_processes=len(processes) + 2, env=env) as runtime:
            end = run_to_end(lambda: _train(config, runtime, (recorder, folder), hooks, data))
    except BaseException:  # the first error is the one that is told
        with suppress(OSError):
            recorder.close()
        raise
    recorder.close()
    _report(config, folder, end)
    return end


def _step_of(config: RunConfig) -> str:
    if isinstance(config, PipelineConfig):
        size = f"{config.groups_per_batch} prompts x {config.samples_per_group} samples"
        return f"{size}, ratio {config.async_generation_ratio:g}"
    assert isinstance(config, SupervisedConfig)
    return f"{config.train_batch_size} {'pairs' if config.pipeline == 'dpo' else 'rows'}"


def _recorder(config: RunConfig, folder: RunFolder) -> Recorder:
    """Everything that observes the run. Raises ValueError for a tracker that cannot be opened."""
    from roll_async.observe.machine import gpus_of_machine
    from roll_async.observe.progress import Screen
    from roll_async.observe.prometheus import PrometheusTracker
    from roll_async.observe.recorder import KEYS_WITHOUT_ENGINES, REQUIRED_KEYS, Recorder
    from roll_async.observe.trace import Trace
    from roll_async.observe.trackers import create_tracker

    tracking = config.tracking

    def create(name: str) -> Tracker:
        assert folder.record is not None
        options = tracking.kwargs_of(name)
        shown = partial(shown_text, handed=options)
        return create_tracker(name, folder.path, options, folder.record.tracker_run, shown)

    trackers: list[Tracker] = []
    if tracking.prometheus_port is not None:
        # On one machine everything binds to loopback; in a cluster the scraper runs on another host.
        host = "0.0.0.0" if os.environ.get("RAY_ADDRESS") else "127.0.0.1"
        trackers.append(PrometheusTracker(config.exp_name, tracking.prometheus_port, host))
    return Recorder(
        folder,
        trackers,
        Screen(config.max_steps),
        logging_steps=config.logging_steps,
        samples_every=tracking.samples_every,
        trace=Trace(folder.path / "trace.json") if tracking.trace else None,
        gpus=gpus_of_machine(),
        create={name: partial(create, name) for name in tracking.track_with},
        alarms=tracking.alarms,
        start=followed(),
        required=REQUIRED_KEYS if isinstance(config, PipelineConfig) else KEYS_WITHOUT_ENGINES,
    )


async def _train(
    config: RunConfig,
    runtime: RuntimeInfo,
    observers: tuple[Recorder, RunFolder],
    hooks: UserHooks,
    data: GivenData | None,
) -> RunEnd:
    """Start the roles, run the loop, export the model. When a role dies, all roles are started again."""
    with starting(DRIVER, "imports"):
        from roll_async.launch.restarts import can_restart, restart_from_newest, started_roles
        from roll_async.rollout.filters.filter_budget import GeneratedTooMany

        start = _start_of(data, hooks)
    recorder, folder = observers
    while True:
        try:
            async with started_roles(config, runtime, observers, start) as pipeline:
                with after_start(GeneratedTooMany):
                    end = await pipeline.run()
                    folder.update_record(exported_step=0)
                    await pipeline.export_hf(str(folder.path / "hf"))
                folder.update_record(exported_step=pipeline.trained_step)
            return end
        except Exception as error:  # `can_restart` names the types, which may be inside an ExceptionGroup
            if not can_restart(config, recorder.restarts, error):
                raise
            config = restart_from_newest(config, recorder, folder, error)
            recorder.start.begin()
            recorder.screen.starting(recorder.start)


def _report(config: RunConfig, folder: RunFolder, end: RunEnd) -> None:
    from roll_async.observe import report
    from roll_async.pipelines.protocol import RunEnd

    metrics = folder.read_metrics()
    if metrics:
        rows = [("model (Transformers)", str(folder.path / "hf")), ("checkpoints", config.checkpoint.output_dir)]
        if isinstance(config, PipelineConfig):
            picture = folder.path / "reward.png"
            report.draw(metrics, picture, f"{config.exp_name}, ratio {config.async_generation_ratio:g}")
            said = report.summary(metrics, [*rows, ("picture", str(picture))])
        else:
            said = report.summary_without_engines(metrics, rows)
        _say(f"\n{end.value}\n{said}")
    if end is RunEnd.INTERRUPTED:
        _interrupted(config, folder)
        return
    _ended(folder, "finished")
    if isinstance(config, RLVRConfig):
        _advise(config, metrics)


def _say(text: str) -> None:
    """On the screen and in run.log."""
    print(text, flush=True)
    logger.info(text)


def _advise(config: RLVRConfig, metrics: Sequence[Mapping[str, float]]) -> None:
    """The last line: what to change for how much. The run has ended well, whatever becomes of it."""
    from roll_async.simulator.advice import advice

    try:
        line = advice(config, metrics)
    except (Exception, KeyboardInterrupt):  # of a run that is over and saved: no fault of its advice is one of the run
        logger.info("no advice:", exc_info=True)
        return
    if line is not None:
        _say(f"  advice: {line}")
