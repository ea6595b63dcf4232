"""Logits of a Megatron torch_dist checkpoint against Transformers on a Hugging Face folder. One process, float32."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from roll_async.trainer.megatron import cpu_shim

cpu_shim.install()

from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.dist_checkpointing.core import CheckpointingException  # noqa: E402
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # noqa: E402

from roll_async.checkpoint.folders.hf_folder import HfFolder  # noqa: E402
from roll_async.checkpoint.folders.megatron_folder import MegatronFolder  # noqa: E402
from roll_async.trainer.megatron.model.model import HfBackedModel  # noqa: E402
from roll_async.trainer.megatron.settings import MegatronSettings  # noqa: E402
from roll_async.trainer.megatron.state.checkpoints import described_parts  # noqa: E402

_ROWS, _POSITIONS = 2, 24


def largest_difference(megatron: Path, hf: Path, files: Path) -> tuple[float, float]:
    """(largest absolute difference, largest absolute logit) on random tokens. `files` has config.json."""
    vocabulary = HfFolder(files).config.integer("vocab_size")
    tokens = torch.randint(0, vocabulary, (_ROWS, _POSITIONS), generator=torch.Generator().manual_seed(0))
    ours, theirs = _megatron_logits(megatron, files, tokens), _transformers_logits(hf, tokens)
    return (ours - theirs).abs().max().item(), theirs.abs().max().item()


def transformers_model(folder: Path) -> torch.nn.Module:
    """Transformers' own of a folder, in float32, with its tower if it has one."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils import logging

    logging.disable_progress_bar()
    kind = AutoModelForImageTextToText if "vision_config" in HfFolder(folder).config else AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()


@torch.no_grad()
def _transformers_logits(folder: Path, tokens: Tensor) -> Tensor:
    return transformers_model(folder)(tokens).logits


@torch.no_grad()
def _megatron_logits(checkpoint: Path, files: Path, tokens: Tensor) -> Tensor:
    # A store in memory: one process needs no port.
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    try:
        model_parallel_cuda_manual_seed(0)
        settings = MegatronSettings(model_folder=str(files), dtype="fp32", transformer_impl="local")
        module = HfBackedModel(settings, torch.device("cpu"), with_weights=False).module
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch calls parts of itself that it is about to replace
            # A run writes no extra states (`described_parts`); where there are any, Megatron wants all of them.
            whole = MegatronFolder(checkpoint).has_extra_states
            parts = module.sharded_state_dict() if whole else described_parts(module)
            loaded = dist_checkpointing.load(parts, str(checkpoint))
        assert isinstance(loaded, dict)
        module.load_state_dict(loaded, strict=False)  # all that can be missing is the layers' extra state
        positions = torch.arange(tokens.shape[1]).expand(len(tokens), -1)
        return module.eval()(tokens, positions, None)
    except CheckpointingException as error:
        raise ValueError(f"{checkpoint} does not load in Megatron: {error}") from error
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
