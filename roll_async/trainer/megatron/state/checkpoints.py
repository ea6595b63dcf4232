"""Checkpoints of a role: model, Adam's state, counters and RNG in Megatron's torch_dist format, loadable by any layout.

    folder/megatron/     .metadata, __<rank>_0.distcp, common.pt, metadata.json: what `roll-async convert` reads, too
    folder/huggingface/  config.json and tokenizer of the model
    folder/state.bin     the caller's own state
    folder/manifest.json every file with its digest, written last

Everything is written to `folder.tmp` and renamed when it is complete and on disk.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from torch.distributed.checkpoint.api import CheckpointException

from roll_async.checkpoint.folders.find_model import HF_FILES
from roll_async.checkpoint.folders.hf_folder import copy_side_files
from roll_async.checkpoint.folders.manifest import (
    DTYPE,
    LORA,
    check_files,
    fingerprint,
    put_in_place,
    read_manifest,
    write_manifest,
)
from roll_async.checkpoint.lora_targets import target_layers
from roll_async.trainer.megatron import ranks
from roll_async.trainer.megatron.model.model import HfBackedModel
from roll_async.trainer.megatron.schedule import Schedule
from roll_async.trainer.megatron.settings import MegatronSettings
from roll_async.trainer.megatron.state.optimizer_state import ParameterState, parameter_states, parts_of, restore_steps
from roll_async.trainer.megatron.state.torch_dist import TorchDistSave

logger = logging.getLogger(__name__)

_MEGATRON, _STATE = "megatron", "state.bin"
_EXTRA_STATE = "_extra_state"


def described_parts(chunk: GPTModel) -> dict:
    """Megatron's description of a model part, without what only one kind of layer has: Transformer Engine's layers keep
    scales of fp8 in an extra state, which is empty here and unknown to local layers.
    """
    parts = chunk.sharded_state_dict()
    return {name: part for name, part in parts.items() if _EXTRA_STATE not in name}


def _described(settings: MegatronSettings) -> dict[str, object] | None:
    """The adapters of a role, for the manifest."""
    if not settings.lora_rank:
        return None
    layers = target_layers(settings.lora_targets)
    return {
        "rank": settings.lora_rank,
        "alpha": settings.lora_alpha,
        "layers": "all-linear" if layers is None else sorted(layers),
    }


def _said(lora: Mapping[str, object] | None) -> str:
    if lora is None:
        return "lora_rank=0"
    return f"lora_rank={lora['rank']}, lora_alpha={lora['alpha']}, lora_target={lora['layers']}"


class _Owners:
    """Which of the data-parallel ranks writes a tensor that all of them hold: the one with the fewest bytes so far."""

    def __init__(self) -> None:
        dense = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        self._bytes = {False: [0] * dense, True: [0] * parallel_state.get_expert_data_parallel_world_size()}

    def next(self, tensor: torch.Tensor) -> tuple[int, int]:
        """(owner, size of the group), the same on all of its ranks."""
        # False marks experts, which have data-parallel groups of their own.
        loads = self._bytes[not getattr(tensor, "allreduce", True)]
        owner = loads.index(min(loads))
        loads[owner] += tensor.numel() * tensor.element_size()
        return owner, len(loads)


def _give(part: ShardedTensor | ShardedTensorFactory, owners: _Owners, tensor: torch.Tensor) -> int:
    """Make an owner the main replica; the last of a replica's three numbers is the data-parallel rank."""
    owner, size = owners.next(tensor)
    assert isinstance(part.replica_id, tuple)
    part.replica_id = (*part.replica_id[:-1], (part.replica_id[-1] - owner) % size)
    return owner


class RoleCheckpoint:
    """Saves and loads what one rank of a role holds. All methods are collective."""

    def __init__(
        self, model: HfBackedModel, optimizer: MegatronOptimizer, schedule: Schedule, settings: MegatronSettings
    ) -> None:
        self._model, self._optimizer, self._schedule = model, optimizer, schedule
        self._model_folder = settings.model_folder
        self._lora, self._dtype, self._is_critic = _described(settings), settings.dtype, settings.with_value_head
        self._open: Callable[[], None] | None = None
        self._writing: TorchDistSave | None = None

    def save(self, folder: str, *, step: int, state: bytes, background: bool) -> None:
        """Write a checkpoint; with `background` only begin, `finish` completes it. One at a time."""
        self.finish()
        target, temporary = Path(folder), Path(folder + ".tmp")
        if dist.get_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            (temporary / _MEGATRON).mkdir(parents=True)
        # No rank may write before rank 0 has made the folder.
        dist.barrier()
        content, fresh = self._content(saving=True)
        content["common"] = {**self._schedule.state(), "step": step, "grad_scalers": self._grad_scalers()}
        writing = self._writing = TorchDistSave(temporary / _MEGATRON, content, background=background, fresh=fresh)
        # By a local name: `finish` lets go of the attribute first.
        self._open = lambda: self._complete(writing, temporary, target, step, state)
        if not background:
            self.finish()

    def written(self) -> bool:
        """Whether this rank's bytes of a save in the background are on disk: `finish` will not wait for them."""
        return self._writing is None or self._writing.done()

    def finish(self) -> None:
        """Complete a save that is under way, if any."""
        pending, self._open, self._writing = self._open, None, None
        if pending is not None:
            pending()

    def _complete(self, writing: TorchDistSave, temporary: Path, target: Path, step: int, state: bytes) -> None:
        files = writing.finish()
        if dist.get_rank() == 0:
            (temporary / _STATE).write_bytes(state)
            (temporary / HF_FILES).mkdir()
            copy_side_files(Path(self._model_folder), temporary / HF_FILES, critic=self._is_critic)
            rest = [_STATE, *(f"{HF_FILES}/{path.name}" for path in (temporary / HF_FILES).iterdir())]
            prints = {f"{_MEGATRON}/{name}": value for name, value in files.items()}
            prints |= {name: fingerprint(temporary / name) for name in rest}
            about = {"step": step, "world_size": dist.get_world_size(), DTYPE: self._dtype, LORA: self._lora}
            write_manifest(temporary, prints, about)
            put_in_place(temporary, target)
        dist.barrier()

    def load(self, folder: str) -> bytes:
        """Restore what `save` wrote under any layout; the caller's state. Raises ValueError, on every rank, naming a
        missing, truncated, changed or foreign file.
        """
        path = Path(folder)
        manifest = self._verified(path)
        content, _ = self._content(saving=False)
        if manifest["world_size"] != dist.get_world_size():
            content.pop("rng")
            logger.info("%s: saved by %d ranks; random generators start anew", path, manifest["world_size"])
        if self._is_critic and self._lora:  # its head was frozen before 2026-11-29: without state, which begins at 0
            known = dist_checkpointing.load_tensors_metadata(str(path / _MEGATRON))
            for parts in content["optimizer"].values():
                for name in [n for n, p in parts.items() if "output_layer." in p.key and p.key not in known]:
                    del parts[name]
        try:
            loaded = dist_checkpointing.load(content, str(path / _MEGATRON))
        except CheckpointException as error:  # what the planners of the ranks raised
            first = next(iter(error.failures.values()))[0]
            raise ValueError(f"{path} does not fit this model: {str(first)[:200]}") from error
        except (CheckpointingException, KeyError) as error:
            raise ValueError(f"{path} does not fit this model: {str(error)[:200]}") from error
        assert isinstance(loaded, dict)  # with more only when asked for, by `strict`
        for number, chunk in enumerate(self._model.chunks):
            missing, unexpected = chunk.load_state_dict(loaded[f"model{number}"], strict=False)
            left = [name for name in missing if _EXTRA_STATE not in name]
            assert not left and not unexpected, (left, unexpected)
        common = loaded["common"]
        self._schedule.restore(common, int(common["step"]))
        self._restore_optimizer(loaded["optimizer"], common, self._schedule.optimizer_steps)
        if "rng" in loaded:
            ranks.set_random_state(loaded["rng"])
        return (path / _STATE).read_bytes()

    def _verified(self, path: Path) -> dict:
        """The manifest, after each rank compared its share of the files with it."""
        problem, manifest = None, {}
        try:
            manifest = read_manifest(path)
            self._check_adapters(path, manifest)
            self._check_dtype(path, manifest)
            names = sorted(manifest["files"])[dist.get_rank() :: dist.get_world_size()]
            check_files(path, {name: manifest["files"][name] for name in names})
        except ValueError as error:
            problem = str(error)
        problems: list = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
        # On every rank: one that raised alone would leave the others in the next collective call.
        for found in problems:
            if found is not None:
                raise ValueError(found)
        return manifest

    def _check_adapters(self, path: Path, manifest: dict) -> None:
        """The files hold the halves of the adapters, not what they are multiplied with: another alpha would fit, and be
        another model.
        """
        # A manifest without the entry is taken for one of the same settings.
        saved = manifest.get(LORA, self._lora)
        if saved != self._lora:
            raise ValueError(
                f"{path} was written with {_said(saved)}, this run has {_said(self._lora)}; set model_args as they "
                "were, or choose another checkpoint with checkpoint.resume_from"
            )

    def _check_dtype(self, path: Path, manifest: dict) -> None:
        """Parameters of lower precision have a float32 copy in the optimizer's state, those of float32 have none."""
        saved, role = manifest.get(DTYPE, self._dtype), "critic" if self._is_critic else "actor_train"
        if saved != self._dtype:
            raise ValueError(
                f"{path} was written with {role}.model_args.dtype={saved}, this run has {self._dtype} (the default "
                f"depends on the CPU); set {role}.model_args.dtype={saved}, or choose another checkpoint with "
                "checkpoint.resume_from"
            )

    # Content

    def _content(self, *, saving: bool) -> tuple[dict, set[int]]:
        """The sharded state dict: Megatron's description of the model, and of each parameter's state by its name; and
        the addresses of storages that were made for it. What all data-parallel ranks hold is dealt out to them, evenly
        by bytes: each writes its part, and gathers no more of a distributed optimizer than that.
        """
        content: dict = {f"model{n}": described_parts(chunk) for n, chunk in enumerate(self._model.chunks)}
        owners = _Owners()
        described = {}
        for part in nested_values(content):
            if isinstance(part, ShardedTensor | ShardedTensorFactory) and part.data is not None:
                # A copy: the part gets an owner below, the state of the parameter one of its own.
                described[id(part.data)] = replace(part)
                _give(part, owners, part.data)
        optimizer: dict = {}
        fresh: set[int] = set()
        for number, state in enumerate(parameter_states(self._optimizer)):
            optimizer[str(number)] = {}
            for name in state.names:
                description = replace(described[id(state.parameter)])
                owner = _give(description, owners, state.parameter)
                tensor = self._tensor(state, name, saving, owner)
                if state.group is not None:
                    fresh.add(tensor.untyped_storage().data_ptr())
                optimizer[str(number)][name] = make_sharded_optimizer_tensor(
                    description, tensor, f"optimizer.state.{name}"
                )
        rank, size = dist.get_rank(), dist.get_world_size()
        rng = ShardedObject("rng_state", ranks.random_state(), (size,), (rank,))
        return {**content, "optimizer": optimizer, "rng": rng}, fresh

    @staticmethod
    def _tensor(state: ParameterState, name: str, saving: bool, owner: int) -> torch.Tensor:
        return state.gathered(name, owner) if saving else torch.empty(state.parameter.shape, dtype=torch.float32)

    def _restore_optimizer(self, tensors: dict, common: dict, steps: int) -> None:
        for number, state in enumerate(parameter_states(self._optimizer)):
            state.restore(tensors.get(str(number), {}), steps)
        restore_steps(self._optimizer, steps)
        for scaler, saved in zip(self._scalers(), common["grad_scalers"], strict=False):
            scaler.load_state_dict(saved)

    def _scalers(self) -> list:
        scalers = [getattr(part, "grad_scaler", None) for part in parts_of(self._optimizer)]
        return [scaler for scaler in scalers if scaler is not None]

    def _grad_scalers(self) -> list[dict]:
        """fp16's loss scale and its growth counters."""
        return [scaler.state_dict() for scaler in self._scalers()]
