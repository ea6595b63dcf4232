"""Which model a folder holds that a user names. Looks at names only, and needs no torch."""

from __future__ import annotations

from pathlib import Path

from roll_async.checkpoint.run_checkpoints import checkpoints_in

HF_FILES = "huggingface"
"""Folder inside a Megatron checkpoint with config.json and tokenizer, which the conversion to Hugging Face needs."""
TORCH_DIST = "metadata.json"
"""Names the format of a Megatron checkpoint."""
_ADAPTER = "adapter_config.json"


def is_hf(folder: Path) -> bool:
    """Whether this is a Hugging Face folder."""
    return (folder / "config.json").is_file()


def find_model(named: Path) -> Path:
    """The Hugging Face folder, or the folder of one Megatron checkpoint, that `named` means.

        a folder of either kind                       itself
        checkpoints/step_00000004                     its actor_train
        checkpoints                                   the same of the newest step
        the folder of a run                           the same; its hf, where it has no checkpoint

    Raises ValueError for any other.
    """
    if not named.is_dir():
        raise ValueError(f"{named}: no such folder")
    if is_hf(named) or (named / TORCH_DIST).is_file():
        return named
    if (named / _ADAPTER).is_file():
        raise ValueError(f"{named} is a LoRA adapter; merge it: roll-async convert BASE TARGET --adapter-path {named}")
    found = (checkpoints_in(place).find("latest") for place in (named / "checkpoints", named))
    step = next(filter(None, found), named)
    if (step / "actor_train").is_dir():
        return step / "actor_train"
    if is_hf(named / "hf"):
        return named / "hf"
    torch_dist_in(step)
    return step


def torch_dist_in(folder: Path) -> Path:
    """The torch_dist folder: this one, or the only one inside (a run's checkpoint keeps it beside other state).

    Raises ValueError when there is none, or more than one.
    """
    if (folder / TORCH_DIST).is_file():
        return folder
    found = sorted({path.parent for depth in ("*", "*/*") for path in folder.glob(f"{depth}/{TORCH_DIST}")})
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(f"{folder} holds several: {', '.join(str(path) for path in found)}; name one")
    if any(folder.glob("*.safetensors")):
        raise ValueError(f"{folder} has safetensors files but no config.json")
    inside = [str(folder / name) for name in ("hf", "checkpoints") if (folder / name).is_dir()]
    remedy = f"; name {' or '.join(inside)}" if inside else ""
    raise ValueError(f"{folder} holds neither a config.json nor a Megatron checkpoint ({TORCH_DIST}){remedy}")


def side_files(megatron: Path) -> Path | None:
    """The folder with config.json and tokenizer that a Megatron checkpoint carries, if it does."""
    return next((folder for place in (megatron, megatron.parent) if is_hf(folder := place / HF_FILES)), None)


def hf_files_of(megatron: Path, like: Path | None) -> Path:
    """`like`, or what the Megatron checkpoint carries. Raises ValueError for a folder without config.json."""
    if like is not None:
        if not is_hf(like):
            raise ValueError(f"{like} has no config.json")
        return like
    own = side_files(megatron)
    if own is None:
        message = f"{megatron} has no {HF_FILES}/config.json"
        raise ValueError(f"{message}; pass --like with a folder that has the model's config.json")
    return own
