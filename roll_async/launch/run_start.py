"""What a start does with what lies in its folder: the run there goes on, or it is moved away, whole.

    checkpoint.resume_from    in the folder    what happens
    null                      a former run     its folder becomes NAME.1, then a new run
    latest                    a run            it goes on after its newest checkpoint
    latest                    nothing          a new run
    a checkpoint of the run   the run          it goes back to that step; what came later is set aside in abandoned/
    one without an id         its checkpoint   the checkpoint is adopted, then as one of the run
    one of another run        a former run     its folder becomes NAME.1, then a new run that begins there

Nothing is read or written before the folder is locked.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from roll_async.checkpoint.lineage import left_behind
from roll_async.checkpoint.run_checkpoints import RunCheckpoints, adopt, run_of, step_of
from roll_async.config.schema import PipelineConfig, RunConfig
from roll_async.config.secrets import shown_override
from roll_async.observe.disk import Unwritable
from roll_async.observe.run_folder import RunFolder
from roll_async.observe.run_record import (
    FolderLock,
    RunRecord,
    is_locked,
    locked_names,
    next_abandoned,
    read_record,
    unused,
    write_record,
)
from roll_async.observe.sample_dump import SAMPLES

logger = logging.getLogger(__name__)
C = TypeVar("C", bound=RunConfig)

# SQLite's files beside the database: what was committed last may be in the log alone.
_LEDGER_FILES = ("", "-wal", "-shm")


def lock_run(config: RunConfig, held: ExitStack) -> None:
    """Keep the folder of the run, and what it has outside of it, to this process until the stack closes. Raises
    ValueError when another process has one of them.
    """
    places = [(key, locked_names(path)) for key, path in (("exp_name", _folder(config)), *_outside(config))]
    own = {names[0] for _, names in places}
    keys: dict[Path, str] = {}
    for key, names in places:
        if (other := keys.setdefault(names[-1], key)) != key:
            raise ValueError(f"{key} {names[-1]}: {other} is the same place; choose another {key}")
    for name, key in {name: key for key, names in places for name in names}.items():
        try:
            held.callback(FolderLock(name, key).close)
        except (ValueError, Unwritable) as error:
            # Of what a link leads to the folder may be the user's, and not the place where its lock would be.
            if name in own or error.__cause__ is None or is_locked(name):  # None: another process has it
                raise


def checkpoints_of(config: RunConfig, record: RunRecord | None) -> RunCheckpoints:
    """The checkpoints of a run; those without an id where there is no record."""
    keep = config.checkpoint.max_to_keep
    run_id = None if record is None else record.run_id
    return RunCheckpoints(folder=Path(config.checkpoint.output_dir), max_to_keep=keep, run_id=run_id)


def open_run(config: C) -> tuple[C, RunFolder, list[str]]:
    """The config with the time that templates see, the folder of the run, and what the user should be told. Raises
    ValueError for a checkpoint that is none of this run, and for a folder of checkpoints that another run writes to.
    """
    path, wanted = _folder(config), config.checkpoint.resume_from
    former = read_record(path)
    run = former or RunRecord()
    checkpoints = checkpoints_of(config, run)
    source = None if wanted is None else checkpoints.find(wanted)
    whose = None if source is None else run_of(source)
    # Resolved: a link may lead to either.
    is_here = source is not None and source.resolve().parent == checkpoints.folder.resolve()
    adopts = is_here and whose is None
    notices: list[str] = []
    if not adopts and not (former is not None and (wanted == "latest" or (is_here and whose == run.run_id))):
        _require_unshared(checkpoints, former)  # refused before anything is moved
        moved = _move_former(config, former)
        notices, source = [] if moved is None else [moved[1]], _followed(source, path, moved and moved[0])
        parent = None if source is None else {"run_id": whose, "checkpoint": str(source)}
        run = RunRecord(parent=parent)
        if source is not None:
            config = replace(config, checkpoint=replace(config.checkpoint, resume_from=str(source)))
    folder = RunFolder(config.output_dir, config.exp_name, run)
    places = tuple(f"{key}={place}" for key, place in _outside(config))
    folder.update_record(command=_typed(), places=places, state="running", reason="")
    if adopts and source is not None:
        adopt(source, run.run_id)
        notices.append(f"{source} had no run id; it is one of run {run.run_id} now")
    # Of the run, not of this start: a resumed run must render its prompts as before.
    return replace(config, template_time=config.template_time or run.started), folder, notices


def restored_step(config: RunConfig, folder: RunFolder) -> int:
    """Step after which the run goes on; 0 = it begins. Raises ValueError for a folder that is no checkpoint."""
    wanted = config.checkpoint.resume_from
    source = None if wanted is None else checkpoints_of(config, folder.record).find(wanted)
    return 0 if source is None else step_of(source)


def go_back(config: RunConfig, folder: RunFolder, step: int) -> bool:
    """Set aside what the run has of steps after `step`: checkpoints, metrics, dumps, what trackers wrote; with
    checkpoints a copy of the ledger, too. Whether there was anything.
    """
    assert folder.record is not None
    checkpoints = checkpoints_of(config, folder.record)
    later = left_behind(checkpoints.saved(), checkpoints.run_id, step)
    dumps = [file for file in _dumps(config) if int(file.stem.removeprefix("step_")) > step]
    kept = folder.path / SAMPLES
    if not later and not dumps and max(folder.last_step, folder.record.exported_step) <= step:
        return False
    into = next_abandoned(folder.path, f"_after_step_{step}")
    inside = folder.path.resolve() in checkpoints.folder.resolve().parents
    checkpoints.set_aside(later, into / "checkpoints" if inside else None)
    for file in dumps:
        aside = into / (SAMPLES if file.parent == kept else "dumps")
        aside.mkdir(parents=True, exist_ok=True)
        shutil.move(file, aside / file.name)  # not rename: dumps may be on another disk than the run
    ledger = _ledger(config)
    for suffix in _LEDGER_FILES if later and ledger is not None else ():
        if (part := Path(f"{ledger}{suffix}")).is_file():
            into.mkdir(parents=True, exist_ok=True)
            shutil.copy2(part, into / part.name)  # a copy: the run goes on with the ledger itself
    folder.update_record(branch=folder.record.branch + 1)  # before the metrics end there, and there is nothing to do
    folder.leave_behind(step, into)
    logger.warning("the run goes back to step %d; what it made of later steps is in %s", step, into)
    return True


def how_to_continue(config: RunConfig, record: RunRecord, *more: str) -> str:
    """The command that continues a run."""
    changed = {word.split("=")[0] for word in more} | {"checkpoint.resume_from"}
    words = [word for word in record.command if word.split("=")[0] not in changed]
    return shlex.join([*words, *more, "checkpoint.resume_from=latest"])


def _folder(config: RunConfig) -> Path:
    return Path(config.output_dir) / config.exp_name


def _ledger(config: RunConfig) -> Path | None:
    """None: a run without engines has no groups to keep."""
    return Path(config.ledger.path) if isinstance(config, PipelineConfig) else None


def _outside(config: RunConfig) -> list[tuple[str, Path]]:
    """Keys and paths of what the run has outside of its folder."""
    named = {
        "checkpoint.output_dir": config.checkpoint.output_dir,
        "ledger.path": _ledger(config),
        "tracking.rollout_dump_dir": config.tracking.rollout_dump_dir,
    }
    folder = _folder(config).resolve()
    paths = [(key, Path(path)) for key, path in named.items() if path is not None]
    return [(key, path) for key, path in paths if folder not in path.resolve().parents]


def _require_unshared(checkpoints: RunCheckpoints, former: RunRecord | None) -> None:
    """Raises ValueError when another run than the former one of this folder writes its checkpoints there."""
    known = {None, None if former is None else former.run_id}
    foreign = sorted({one.run_id for one in checkpoints.saved() if one.run_id is not None} - known)
    if foreign:
        raise ValueError(
            f"checkpoint.output_dir {checkpoints.folder}: run {foreign[0]} has its checkpoints there, and two runs "
            "cannot share a folder; choose another one, or continue that run with its exp_name and "
            "checkpoint.resume_from=latest"
        )


def _move_former(config: RunConfig, former: RunRecord | None) -> tuple[Path, str] | None:
    """Move a former run away, with all that it has outside of its folder. Returns its new folder and one line for the
    user; None where a former run made nothing.
    """
    path, ledger = _folder(config), _ledger(config)
    made = [path / "metrics.jsonl", Path(config.checkpoint.output_dir), *_dumps(config)]
    if ledger is not None:
        made.append(ledger)
    if not any(place.is_file() or (place.is_dir() and any(place.iterdir())) for place in made):
        return None
    moved, changes = unused(path), []
    number = moved.name.rpartition(".")[2]
    for key, place in _outside(config):
        for suffix in _LEDGER_FILES if place == ledger else ("",):
            if (part := Path(f"{place}{suffix}")).exists():
                _move(config, part, Path(f"{place}.{number}{suffix}"))
                changes.append(f"{key}={place}.{number}")
    changes = sorted(set(changes))  # the files of a ledger are one key
    if path.exists():
        _move(config, path, moved)
    else:
        moved.mkdir(parents=True)
    if former is None:
        return moved, f"{path} held a run of an earlier version; it is now {moved}"
    former = replace(former, places=tuple(changes))
    write_record(moved, former)
    again = how_to_continue(config, former, f"exp_name={moved.name}", *changes)
    return moved, f"the former run {former.run_id} is now {moved}; continue it with: {again}"


def _move(config: RunConfig, place: Path, to: Path) -> None:
    """Rename what a former run has. Of a link, what it leads to is no longer of this run, unless it names a place in
    there: its lock is given back.
    """
    goal = place.resolve()
    place.rename(to)
    if to.is_symlink() and not any(goal in path.resolve().parents for _, path in _outside(config)):
        with suppress(OSError):  # of others: there is no lock
            goal.with_name(f".{goal.name}.lock").unlink()


def _followed(source: Path | None, folder: Path, moved: Path | None) -> Path | None:
    """A checkpoint's path after its folder was moved."""
    if source is None or moved is None or folder.absolute() not in source.absolute().parents:
        return source
    return moved / source.absolute().relative_to(folder.absolute())


def _dumps(config: RunConfig) -> Iterator[Path]:
    dumped, kept = config.tracking.rollout_dump_dir, _folder(config) / SAMPLES
    folders = {kept} if dumped is None else {kept, Path(dumped)}  # they may be one
    return (file for folder in sorted(folders) for file in sorted(folder.glob("step_*.jsonl")))


def _typed() -> tuple[str, ...]:
    """The command of this process, as a user types it; without secrets."""
    main = sys.modules["__main__"]
    if (spec := getattr(main, "__spec__", None)) is not None and spec.name != "__main__":
        program = ["python", "-m", spec.name.removesuffix(".__main__")]
    elif sys.argv[0].endswith(".py"):
        program = ["python", sys.argv[0]]
    else:
        program = [os.path.basename(sys.argv[0])]
    return (*program, *map(shown_override, sys.argv[1:]))
