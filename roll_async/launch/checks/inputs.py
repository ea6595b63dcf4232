"""The inputs of a run: model folders and prompt files, by path or by a name on a hub.

Names are resolved once, in the driver, before anything starts: every role gets a folder. `Qwen/Qwen2.5-7B` is a
Hugging Face repository unless a folder of that path exists; `hf://datasets/ORG/NAME/FILE` is a file of a Hugging Face
data set; `modelscope://ORG/NAME` is a ModelScope repository, where that package is installed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

from roll_async.config.schema import (
    DataArguments,
    PipelineConfig,
    RLVRConfig,
    RunConfig,
    SupervisedConfig,
    WorkerConfig,
)
from roll_async.config.yaml.compose import CHECKOUT
from roll_async.prompts.rows import missing_file
from roll_async.prompts.tokenizer import load_tokenizer, unread

C = TypeVar("C", bound=RunConfig)

_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9][A-Za-z0-9_.-]*)?")
_DATASET = re.compile(r"hf://datasets/([^/]+/[^/]+)/(.+)")
_MODELSCOPE = "modelscope://"
# Without the copies in other formats that repositories hold beside: twice the download.
_MODEL_FILES = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.py")
_MAKERS = {
    "demo_assets": "roll-async demo --assets-only",
    "agentic_assets": "roll-async demo --assets-only agents",
    "gsm8k_assets": "roll-async demo --assets-only gsm8k",
    "sft_word_problems": "roll-async sft sft_word_problems_cpu",  # before the name that it holds
    "word_problems": "roll-async demo --assets-only word_problems",
    "sft_images": "roll-async sft sft_images_cpu",
    "output/images": "roll-async demo --assets-only images",
}


def is_hub_name(model: str) -> bool:
    """Whether a model is the name of a repository on a hub: no folder of that path exists, nor its parent.

    `output/model` is a missing folder, not a repository, if the folder `output` exists.
    """
    if model.startswith(_MODELSCOPE):
        return True
    if Path(model).is_dir() or not _REPOSITORY.fullmatch(model):
        return False
    return "/" not in model or not Path(model.split("/")[0]).is_dir()


def missing_inputs(config: RunConfig) -> list[tuple[str, str]]:
    """(key, message) of every folder and file that should be on this disk and is not. Names on hubs are not checked."""
    found = [(key, problem) for key, model in models_of(config).items() if (problem := missing_model(model))]
    for key, file in files_of(config):
        folder = isinstance(config, SupervisedConfig) and file.endswith("/") and Path(file).is_dir()
        if not file.startswith("hf://") and not folder and not Path(file).is_file():
            found.append((key, missing_file(file)))
    return [(key, said + _where(said)) for key, said in found]


def _where(said: str) -> str:
    """Where the command is typed that makes a file: a script of a checkout there, one of ours where the run starts."""
    if not re.search("; make it with: (python|bash) ", said) or Path.cwd() == CHECKOUT:
        return ""
    return f" (in {CHECKOUT if (CHECKOUT / 'pyproject.toml').is_file() else 'a checkout of roll_async'})"


def missing_model(model: str) -> str | None:
    """What is missing of a model that should be on this disk."""
    if is_hub_name(model) or (Path(model) / "config.json").is_file():
        return None
    hint = next((f"; make it with: {maker}" for part, maker in _MAKERS.items() if part in model), "")
    return f"model folder {model} does not exist or holds no config.json{hint}"


def resolve_names(config: C) -> C:
    """The config with a folder for every model and a file for every data set. Downloads those that are not in a cache,
    with a progress bar. Raises ValueError, one line with the remedy, when a name does not exist or the hub cannot be
    reached.
    """
    folders = {model: model_folder(key, model) for key, model in models_of(config).items()}
    roles = {name: _with_folder(worker, folders) for name, worker in config.roles()}
    changes: dict[str, object] = {"pretrain": folders[config.pretrain]}
    if isinstance(config, PipelineConfig):
        changes["reward_pretrain"] = folders.get(config.reward_pretrain, config.reward_pretrain)
    if isinstance(config, RLVRConfig | SupervisedConfig) and config.validation is not None:
        changes["validation"] = config.validation.with_files(partial(_file, "validation"))
    return replace(config.with_roles(roles), **changes)


def models_of(config: RunConfig) -> dict[str, str]:
    """Every model of the run, each once, with one of the config keys that name it."""
    found = {"pretrain": config.pretrain}
    for role, worker in config.roles():
        model = worker.model_args.model_name_or_path
        if model not in found.values():
            of_rewards = isinstance(config, PipelineConfig) and model == config.reward_pretrain
            found["reward_pretrain" if of_rewards else f"{role}.model_args.model_name_or_path"] = model
    return found


def files_of(config: RunConfig) -> Iterator[tuple[str, str]]:
    return ((f"{key}.file_name", file) for key, data in _data(config) for file in data.file_name)


def _data(config: RunConfig) -> list[tuple[str, DataArguments]]:
    """(config key, section) of what says how prompts are made."""
    found = [] if config.actor_train.data_args is None else [("actor_train.data_args", config.actor_train.data_args)]
    if isinstance(config, RLVRConfig | SupervisedConfig) and config.validation is not None:
        found += dict(config.validation.data.values()).items()
    return found


def unread_variables(config: RunConfig) -> Iterator[tuple[str, str]]:
    """(key, message) of every variable that is given to a chat template and that it does not read. Raises ValueError
    for a model without a tokenizer.
    """
    for key, data in _data(config):
        if data.template_kwargs:  # others do not wait for transformers
            tokenizer = load_tokenizer(config.pretrain, proves=False)
            for name, problem in unread(tokenizer, data.template, data.template_kwargs).items():
                yield f"{key}.template_kwargs.{name}", problem


def _with_folder(worker: WorkerConfig, folders: dict[str, str]) -> WorkerConfig:
    model = replace(worker.model_args, model_name_or_path=folders[worker.model_args.model_name_or_path])
    data = worker.data_args
    if data is not None:
        data = replace(data, file_name=tuple(_file("actor_train", f) for f in data.file_name))
    return replace(worker, model_args=model, data_args=data)


@cache
def model_folder(key: str, model: str) -> str:
    """Where a model is on this disk, fetched if it has to be. Raises ValueError, one line, for one that cannot be."""
    if not is_hub_name(model):
        return model
    if model.startswith(_MODELSCOPE):
        return _from_modelscope(key, model.removeprefix(_MODELSCOPE))
    from huggingface_hub import snapshot_download

    def get(cached: bool) -> str:
        return snapshot_download(model, allow_patterns=list(_MODEL_FILES), local_files_only=cached)

    return _asked(f"{key}: {model}", f"hf download {model}", get, is_complete)


@cache
def _file(role: str, file: str) -> str:
    match = _DATASET.fullmatch(file)
    if match is None:
        return file
    from huggingface_hub import hf_hub_download

    def get(cached: bool) -> str:
        return hf_hub_download(match[1], match[2], repo_type="dataset", local_files_only=cached)

    remedy = f"hf download --repo-type dataset {match[1]} {match[2]}"
    return _asked(f"{role}.data_args.file_name: {file}", remedy, get, lambda path: Path(path).is_file())


def _asked(name: str, remedy: str, get: Callable[[bool], str], is_complete: Callable[[str], bool]) -> str:
    """From the local cache, else from the hub."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        if is_complete(found := get(True)):  # first without a question to the hub, which may be out of reach
            return found
    except (LocalEntryNotFoundError, FileNotFoundError):
        pass
    try:
        return get(False)
    except GatedRepoError as error:  # before RepositoryNotFoundError, of which it is a kind
        raise ValueError(f"{name} is gated; accept its terms on the hub and run: hf auth login") from error
    except RepositoryNotFoundError as error:
        raise ValueError(f"{name} is neither a folder here nor a repository of the hub (or a private one)") from error
    except (OfflineModeIsEnabled, LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ValueError(
            f"{name} is not in the cache, and the hub cannot be reached; where it can, run: {remedy} - or name a folder"
        ) from error


def is_complete(folder: str) -> bool:
    """Whether a cached snapshot holds a model: its config and all its weights."""
    path = Path(folder)
    index = path / "model.safetensors.index.json"
    if index.is_file():
        import json

        # A download that was cut off leaves the index without some of its files.
        names = set(json.loads(index.read_text())["weight_map"].values())
        return all((path / name).is_file() for name in names)
    return (path / "config.json").is_file() and any(path.glob("*.safetensors"))


def _from_modelscope(key: str, model: str) -> str:
    try:
        from modelscope import snapshot_download  # type: ignore[import-not-found]
    except ImportError as error:
        raise ValueError(f"{key}: {_MODELSCOPE}{model} needs the package modelscope; pip install modelscope") from error
    try:
        return snapshot_download(model, allow_patterns=list(_MODEL_FILES))
    except (OSError, ValueError) as error:  # requests' errors are OSErrors
        raise ValueError(f"{key}: {_MODELSCOPE}{model} cannot be fetched: {error}; name a folder") from error
