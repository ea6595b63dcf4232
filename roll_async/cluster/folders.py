"""Folders that several processes use: a path must name the same files in each of them.

A Ray worker starts in a folder of the raylet's, on any node. So every path of a config is made absolute before a role
gets it, and at the start each rank checks that it sees the file which the driver wrote into each folder.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from roll_async.config.schema import PipelineConfig, RLVRConfig, RunConfig, SupervisedConfig, WorkerConfig

Config = TypeVar("Config", bound=RunConfig)


def absolute_paths(config: Config, base: Path) -> Config:
    """The config with every path absolute; relative ones are relative to `base`. A model name is left unchanged unless
    a file or folder of that name exists: it may be a name on a model hub.
    """

    def there(path: str) -> str:
        return str((base / path).absolute())

    def model(name: str) -> str:
        return there(name) if (base / name).exists() else name

    def worker(role: WorkerConfig) -> WorkerConfig:
        arguments = replace(role.model_args, model_name_or_path=model(role.model_args.model_name_or_path))
        data = role.data_args
        if data is not None:
            data = replace(data, file_name=tuple(there(file) for file in data.file_name))
        return replace(role, model_args=arguments, data_args=data)

    resume, dump = config.checkpoint.resume_from, config.tracking.rollout_dump_dir
    changes: dict[str, object] = {
        "output_dir": there(config.output_dir),
        "pretrain": model(config.pretrain),
        "checkpoint": replace(
            config.checkpoint,
            output_dir=there(config.checkpoint.output_dir),
            resume_from=resume if resume in (None, "latest") else there(resume),
        ),
        "tracking": replace(config.tracking, rollout_dump_dir=None if dump is None else there(dump)),
    }
    if isinstance(config, PipelineConfig):
        changes["reward_pretrain"] = model(config.reward_pretrain)
        changes["ledger"] = replace(config.ledger, path=there(config.ledger.path))
    if isinstance(config, RLVRConfig | SupervisedConfig) and config.validation is not None:
        changes["validation"] = config.validation.with_files(there)
    roles = {name: worker(role) for name, role in config.roles()}
    return replace(config.with_roles(roles), **changes)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedFolders:
    """Folders that driver and ranks write into, and a file of this run in each of them that every rank must see."""

    mark: str
    """Name of the file."""
    written: tuple[tuple[str, str], ...]
    """(config key, absolute folder)."""

    def problems(self) -> list[str]:
        """Folders that this process does not share or cannot write, with remedy; empty = none."""
        host = socket.gethostname()
        remedy = "put it on a file system that all nodes share, under the same name"
        found = []
        for key, folder in self.written:
            if not (Path(folder) / self.mark).is_file():
                found.append(f"{key}={folder} is not the driver's folder on host {host}; {remedy}")
            elif not os.access(folder, os.W_OK):
                found.append(f"{key}={folder} cannot be written on host {host} by user {os.getuid()}")
        return found


def require_model(folder: str) -> None:
    """Raises ValueError when an absolute model folder is not on the host of this process."""
    if os.path.isabs(folder) and not (Path(folder) / "config.json").is_file():
        raise ValueError(
            f"model folder {folder} does not exist on host {socket.gethostname()} or holds no config.json; put it on "
            "a file system that all nodes share, or copy it there"
        )


@contextmanager
def shared_folders(written: Sequence[tuple[str, str]]) -> Iterator[SharedFolders]:
    """Put the mark into every (config key, absolute folder) for the length of the block."""
    mark = f".roll_async-{uuid.uuid4().hex}"
    files = [Path(folder) / mark for _, folder in written]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    try:
        yield SharedFolders(mark=mark, written=tuple(written))
    finally:
        for file in files:
            file.unlink(missing_ok=True)
