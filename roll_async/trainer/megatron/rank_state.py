"""Checkpoint folder of a role: one file per rank, a manifest written last, one rename."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from pathlib import Path

import torch
import torch.distributed as dist

MANIFEST = "manifest.json"
_STATE = "state.bin"


def save(folder: str, mine: dict[str, object], *, rank: int, world_size: int, step: int, state: bytes) -> None:
    """Collective. Files go to `folder.tmp`, are synced, described in the manifest, and renamed together."""
    target, temporary = Path(folder), Path(folder + ".tmp")
    if rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    dist.barrier()
    path = temporary / _rank_file(rank)
    with open(path, "wb") as file:
        torch.save(mine, file)
        file.flush()
        os.fsync(file.fileno())
    dist.barrier()
    if rank == 0:
        (temporary / _STATE).write_bytes(state)
        files = [_rank_file(r) for r in range(world_size)] + [_STATE]
        manifest = {
            "format": "roll_async rank checkpoint 1",
            "step": step,
            "world_size": world_size,
            "files": {name: _fingerprint(temporary / name) for name in files},
        }
        with open(temporary / MANIFEST, "w") as file:
            json.dump(manifest, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        shutil.rmtree(target, ignore_errors=True)
        os.rename(temporary, target)
        _sync_folder(target.parent)
    dist.barrier()


def load(folder: str, *, rank: int, world_size: int) -> tuple[dict, bytes]:
    """This rank's part and the caller's state. Raises ValueError naming a missing, truncated or foreign file."""
    path = Path(folder)
    manifest = read_manifest(path)
    if manifest["world_size"] != world_size:
        raise ValueError(f"{path} was saved by {manifest['world_size']} ranks and is loaded by {world_size}; use the same layout")
    for name in (_rank_file(rank), _STATE):
        file = path / name
        if not file.is_file():
            raise ValueError(f"checkpoint file {file} is missing; choose another checkpoint with checkpoint.resume_from")
        if _fingerprint(file) != manifest["files"][name]:
            raise ValueError(f"checkpoint file {file} is truncated or changed; choose another with checkpoint.resume_from")
    try:
        mine = torch.load(path / _rank_file(rank), weights_only=False)
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(f"checkpoint file {path / _rank_file(rank)} cannot be read: {error}") from error
    return mine, (path / _STATE).read_bytes()


def read_manifest(path: Path) -> dict:
    """The manifest of a checkpoint folder. Raises ValueError when the folder is not a complete checkpoint of ours."""
    file = path / MANIFEST
    if not file.is_file():
        raise ValueError(f"{path} is not a checkpoint of roll_async: {MANIFEST} is missing")
    try:
        manifest = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is truncated or not JSON: {error}") from error
    if not str(manifest.get("format", "")).startswith("roll_async rank checkpoint"):
        raise ValueError(f"{file} is the manifest of something else")
    return manifest


def _rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.pt"


def _fingerprint(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return f"{path.stat().st_size}:{digest.hexdigest()}"


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
