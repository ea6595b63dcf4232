"""The checkpoints of a run: one folder per step, the newest complete one found without a pointer file."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from roll_async.checkpoint.manifest import require_written, sync, sync_tree

_NAME = re.compile(r"step_(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunCheckpoints:
    """Names, finds and prunes checkpoints. A folder with its final name is complete: it is renamed last."""

    folder: Path
    max_to_keep: int = 0
    """0 = all."""

    def folder_of(self, step: int) -> Path:
        """Folder of the checkpoint of a step."""
        return self.folder / f"step_{step:08d}"

    def begin(self, step: int) -> Path:
        """An empty folder to write the checkpoint of a step into. Incomplete folders of killed runs are removed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for old in self.folder.glob("step_*.tmp"):
            shutil.rmtree(old)
        staging = self._staging(step)
        staging.mkdir()
        return staging

    def commit(self, step: int, roles: Sequence[str]) -> Path:
        """Rename the folder to its final name; an older checkpoint of the same step is replaced. Raises RuntimeError
        when a role did not write its part here, and keeps the older checkpoint then.
        """
        final = self.folder_of(step)
        for role in roles:
            require_written(self._staging(step) / role, step)
        shutil.rmtree(final, ignore_errors=True)
        sync_tree(self._staging(step))
        os.rename(self._staging(step), final)
        sync(self.folder)
        return final

    def _staging(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}.tmp"

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, ascending."""
        names = (p.name for p in self.folder.iterdir()) if self.folder.is_dir() else ()
        return sorted(int(m[1]) for name in names if (m := _NAME.fullmatch(name)))

    def find(self, wanted: str) -> Path | None:
        """`wanted`: `latest` or a folder. None when there is no latest. Raises ValueError for a missing folder."""
        if wanted == "latest":
            steps = self.steps()
            return self.folder_of(steps[-1]) if steps else None
        path = Path(wanted)
        if not path.is_dir():
            raise ValueError(f"checkpoint.resume_from {wanted}: no such folder")
        return path

    def prune(self) -> None:
        """Remove the oldest beyond max_to_keep."""
        if self.max_to_keep:
            for step in self.steps()[: -self.max_to_keep]:
                shutil.rmtree(self.folder_of(step))
