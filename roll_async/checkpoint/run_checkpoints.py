"""The checkpoints of a run: one folder per step, the newest complete one of the run found without a pointer file."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from roll_async.checkpoint.folders.manifest import read_manifest, require_written, sync, sync_tree, write_manifest
from roll_async.checkpoint.lineage import Saved, beyond, left_behind, newest, own_steps
from roll_async.observe.run_record import next_abandoned, read_record

logger = logging.getLogger(__name__)

_NAME = re.compile(r"step_(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunCheckpoints:
    """Names, finds and prunes the checkpoints of one run. A folder with its final name is complete: it is renamed last.

    RunCheckpoints(folder=run / "checkpoints", run_id="3f9a...").find("latest")   # of this run, whatever else is there
    """

    folder: Path
    max_to_keep: int = 0
    """0 = all."""
    run_id: str | None = None
    """The run that writes here; None = unknown: checkpoints without an id are meant then."""

    def folder_of(self, step: int) -> Path:
        """Folder of the checkpoint of a step."""
        return self.folder / f"step_{step:08d}"

    def begin(self, step: int) -> Path:
        """An empty folder to write the checkpoint of a step into. Incomplete folders of killed runs are removed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for old in self.folder.glob("step_*.tmp"):
            old.unlink() if old.is_symlink() else shutil.rmtree(old)  # moved to another disk, it is a link
        staging = self._staging(step)
        staging.mkdir()
        return staging

    def commit(self, step: int, roles: Sequence[str]) -> Path:
        """Rename the folder to its final name. Raises RuntimeError when a role did not write its part here.

        A run only goes forward: later checkpoints of it are of a branch that it has left, and are set aside, as is what
        has the same name.
        """
        final, staging = self.folder_of(step), self._staging(step)
        for role in roles:
            require_written(staging / role, step)
        if self.run_id is not None:
            write_manifest(staging, {}, {"step": step, "run_id": self.run_id, "roles": list(roles)})
        sync_tree(staging)
        # Before the rename: what was just written is then the newest of its run, which pruning never takes.
        self.set_aside([*([step] if final.exists() else []), *left_behind(self.saved(), self.run_id, step)])
        os.rename(staging, final)
        sync(self.folder)
        return final

    def _staging(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}.tmp"

    def saved(self) -> list[Saved]:
        """Every complete checkpoint in the folder, of whatever run."""
        found = (
            # fullmatch: step_N.tmp is not complete.
            [m for path in self.folder.iterdir() if (m := _NAME.fullmatch(path.name))] if self.folder.is_dir() else []
        )
        return [Saved(step=int(m[1]), run_id=run_of(self.folder / m[0])) for m in found]

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint of this run, ascending."""
        return own_steps(self.saved(), self.run_id)

    def find(self, wanted: str) -> Path | None:
        """`wanted`: `latest` or a folder. None when there is no checkpoint at all. Raises ValueError for a missing
        folder, and for `latest` where all checkpoints are of other runs.
        """
        if wanted != "latest":
            if not Path(wanted).is_dir():
                raise ValueError(f"checkpoint.resume_from {wanted}: no such folder")
            return Path(wanted)
        saved = self.saved()
        step = newest(saved, self.run_id)
        if step is None and saved:
            raise ValueError(f"checkpoint.resume_from latest: {self._foreign(saved)}")
        return None if step is None else self.folder_of(step)

    def _foreign(self, saved: Sequence[Saved]) -> str:
        """What to do with checkpoints that are none of this run."""
        last = max(saved, key=lambda one: one.step)
        whose = "a run without an id (an earlier version wrote it)" if last.run_id is None else f"run {last.run_id}"
        return (
            f"{self.folder} holds no checkpoint of this run; its newest is of {whose}: to go on from it, name it: "
            f"checkpoint.resume_from={self.folder_of(last.step)}"
        )

    def set_aside(self, steps: Sequence[int], into: Path | None = None) -> Path | None:
        """Rename checkpoints into a folder of abandoned ones, and say where. None = there is nothing to set aside."""
        if not steps:
            return None
        into = into or next_abandoned(self.folder)
        into.mkdir(parents=True)
        for step in sorted(steps, reverse=True):  # what a kill in between leaves is a whole branch again
            os.rename(self.folder_of(step), into / self.folder_of(step).name)
        sync(into)
        sync(self.folder)
        logger.warning("checkpoints of steps %s are of a branch that was left; they are now in %s", sorted(steps), into)
        return into

    def prune(self) -> None:
        """Remove the oldest of this run beyond max_to_keep."""
        for step in beyond(self.saved(), self.run_id, self.max_to_keep):
            # Renamed before, so that a kill leaves no half of one under its final name.
            old = self._staging(step)
            os.rename(self.folder_of(step), old)
            old.unlink() if old.is_symlink() else shutil.rmtree(old)


def run_of(checkpoint: Path) -> str | None:
    """Id of the run that wrote a checkpoint; None where it says none."""
    try:
        return read_manifest(checkpoint).get("run_id")
    except ValueError:  # an earlier version wrote no manifest beside those of the roles
        return None


def step_of(checkpoint: Path) -> int:
    """Step of a checkpoint. Raises ValueError for a folder that is none."""
    return int(read_manifest(checkpoint / "actor_train")["step"])


def adopt(checkpoint: Path, run_id: str) -> None:
    """Make a checkpoint without an id one of this run."""
    roles = sorted(path.name for path in checkpoint.iterdir() if (path / "manifest.json").is_file())
    write_manifest(checkpoint, {}, {"step": step_of(checkpoint), "run_id": run_id, "roles": roles})


def checkpoints_in(folder: Path) -> RunCheckpoints:
    """The checkpoints of the run that a folder of checkpoints belongs to: that of the run folder around it, else the
    only one that wrote there. Raises ValueError where several did.
    """
    record = read_record(folder.parent)
    found = RunCheckpoints(folder=folder, run_id=None if record is None else record.run_id)
    runs = {one.run_id for one in found.saved()}
    if found.run_id in runs or not runs:
        return found
    if len(runs) > 1:
        named = ", ".join(sorted(map(str, runs)))
        raise ValueError(f"{folder} holds checkpoints of several runs ({named}); name one of its folders step_N")
    return RunCheckpoints(folder=folder, run_id=runs.pop())
