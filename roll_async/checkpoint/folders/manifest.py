"""The manifest of a checkpoint folder: every file with its size and digest. Written last, read first."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

MANIFEST = "manifest.json"
LORA = "lora"
"""In a manifest: rank, alpha and layers of the adapters that the checkpoint holds; null without any."""
DTYPE = "dtype"
"""In a manifest: `model_args.dtype` of the role."""
_FORMAT = "roll_async checkpoint 2"


def fingerprint(path: Path) -> str:
    """`size:digest` of a file."""
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return f"{path.stat().st_size}:{digest.hexdigest()}"


def write_manifest(folder: Path, files: Mapping[str, str], about: Mapping[str, object]) -> None:
    """`files`: fingerprint by path inside the folder; `about`: fields that readers need before the files."""
    with open(folder / MANIFEST, "w") as file:
        json.dump({"format": _FORMAT, **about, "files": dict(files)}, file, indent=2)
        file.flush()  # fsync knows only what Python has handed on
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> dict:
    """The manifest. Raises ValueError when the folder is not a complete checkpoint of roll_async."""
    file = folder / MANIFEST
    if not file.is_file():
        raise ValueError(f"{folder} is not a checkpoint of roll_async: {MANIFEST} is missing")
    try:
        manifest = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is truncated or not JSON: {error}") from error
    if manifest.get("format") != _FORMAT:
        raise ValueError(f"{file} is the manifest of something else: {manifest.get('format')!r}, not {_FORMAT!r}")
    return manifest


def require_written(folder: Path, step: int) -> None:
    """Raises RuntimeError unless `folder` holds all files of a role for this step, in full length: ranks may have
    written to another folder of the same name. Digests are compared when the checkpoint is read.
    """
    try:
        manifest = read_manifest(folder)
    except ValueError as error:
        raise RuntimeError(f"{error}; its ranks wrote elsewhere, or not at all: all nodes must share it") from error
    if manifest["step"] != step:
        raise RuntimeError(f"{folder} holds step {manifest['step']}, not step {step}")
    for name, expected in manifest["files"].items():
        path, size = folder / name, int(expected.split(":")[0])
        if not path.is_file() or path.stat().st_size != size:
            raise RuntimeError(f"{path} is missing or not {size} bytes long; all nodes must share {folder}")


def recorded_alpha(megatron: Path) -> float | None:
    """`lora_alpha` of the run that wrote a Megatron folder; None when no manifest records it."""
    if not (megatron.parent / MANIFEST).is_file():
        return None
    lora = read_manifest(megatron.parent).get(LORA)
    return None if lora is None else float(lora["alpha"])


def check_files(folder: Path, files: Mapping[str, str]) -> None:
    """Compare files with their fingerprints. Raises ValueError naming the first missing, truncated or changed one."""
    remedy = "choose another checkpoint with checkpoint.resume_from"
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"checkpoint file {path} is missing; {remedy}")
        size = int(expected.split(":")[0])
        if path.stat().st_size != size:
            raise ValueError(f"checkpoint file {path} is truncated: {path.stat().st_size} of {size} bytes; {remedy}")
        if fingerprint(path) != expected:
            raise ValueError(f"checkpoint file {path} was changed after it was written; {remedy}")


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    # A folder can be opened for reading only, and fsync takes such a handle.
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Wait until everything in a folder is on disk. Renamed before, it could be incomplete after a power failure."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


@contextmanager
def replaced(target: Path) -> Iterator[Path]:
    """An empty folder to write what then has the name of `target`; after an error of the writer, or of the disk, it is
    removed.
    """
    goal = target.resolve()
    if goal.exists() and not goal.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(goal))
    # Of a link: on its disk, unless nothing can be made beside what it leads to.
    beside = goal if not goal.exists() or os.access(goal.parent, os.W_OK) else target
    temporary = beside.with_name(f"{beside.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        sync_tree(temporary)
    except BaseException:  # an interrupt as well
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    put_in_place(temporary, goal)


def put_in_place(complete: Path, target: Path) -> None:
    """Rename a folder when it is on disk. What has the name is moved away, and removed last: wherever the process is
    killed, the name stands for one of the two as a whole, or for none. What cannot be moved away is emptied and filled.
    After an error, which names it, `complete` is still there.
    """
    sync_tree(complete)
    formers, former = f".{target.name}.former-", None  # `target.old` would be a name that users give
    try:
        if target.exists():
            former = Path(tempfile.mkdtemp(prefix=formers, dir=target.parent), target.name)
            os.rename(target, former)
        os.rename(complete, target)
    except OSError:
        if not target.exists():
            if former is not None:
                os.rename(former, target)
            raise
        # A mount point, or in a folder that takes no new names.
        # The folder itself stays, with its mode: it may be another user's.
        for path in target.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        for path in complete.iterdir():
            (shutil.copytree if path.is_dir() else shutil.copy2)(path, target / path.name)
        sync_tree(target)
        shutil.rmtree(complete)
    sync(target.parent)
    for path in [path for path in target.parent.iterdir() if path.name.startswith(formers)]:
        shutil.rmtree(path, ignore_errors=True)
