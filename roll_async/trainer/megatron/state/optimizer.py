"""Gradient buffers and the optimizer of a rank.

Megatron's own averaging is off (`calculate_per_token_loss` without a token count): the loss of a micro-batch is already
its share of the whole step, so gradients are summed over micro-batches, data- and context-parallel ranks, nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import (
    Adam,  # pyright: ignore[reportAttributeAccessIssue]  # the first of three imports that works
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from roll_async.trainer.megatron import cpu_shim
from roll_async.trainer.megatron.model.lora import sum_shared_gradients
from roll_async.trainer.megatron.settings import OptimizerSettings
from roll_async.trainer.megatron.state.optimizer_state import parts_of

logger = logging.getLogger(__name__)


class GradScale:
    """`config.grad_scale_func`: Megatron calls it with the loss (loss scaling) and with a constant 1, for the weight of
    the routers' auxiliary loss. That loss comes multiplied by the tokens of its micro-batch: divided by the tokens of
    the step here, it is the mean over tokens, whatever the split.
    """

    def __init__(self, scale_loss: Callable[[Tensor], Tensor]) -> None:
        self._scale_loss = scale_loss
        self.step_tokens = 1
        """Tokens of all rows of the step, padding excluded."""

    def __call__(self, x: Tensor) -> Tensor:
        scaled = self._scale_loss(x)
        # Only the loss has a gradient: this tells the two calls apart.
        return scaled if x.requires_grad else scaled / self.step_tokens


def _fuse(optimizer: MegatronOptimizer) -> None:
    """One pass over parameters and moments instead of ten, where torch's own Adam is the choice."""
    for part in parts_of(optimizer):
        if isinstance(part.optimizer, torch.optim.AdamW):
            for group in part.optimizer.param_groups:
                group["fused"] = True


@cache
def _log_choice() -> None:
    """Megatron takes Transformer Engine's Adam, else NVIDIA Apex's, else torch's."""
    owner = Adam.__module__.partition(".")[0]
    reasons = {
        "transformer_engine": "Transformer Engine is installed",
        "apex": "NVIDIA Apex is installed, Transformer Engine is not",
        "torch": "neither Transformer Engine nor NVIDIA Apex is installed",
    }
    logger.info("Adam of %s: %s", owner, reasons.get(owner, "Megatron's choice"))


def sum_gradients(model: list[torch.nn.Module], num_tokens: Tensor | None = None, **kwargs: object) -> None:
    """`config.finalize_model_grads_func` without the division by `num_tokens`."""
    finalize_model_grads(model, None, **kwargs)  # type: ignore[arg-type]
    sum_shared_gradients(model)


def wrap(
    chunks: Sequence[torch.nn.Module], config: TransformerConfig, settings: OptimizerSettings
) -> list[DistributedDataParallel]:
    """Gradient buffers around every part of the model. Sets the schedule's hooks on `config`."""
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=is_distributed(settings),
        overlap_grad_reduce=settings.overlap_grad_reduce,
        overlap_param_gather=settings.overlap_param_gather and is_distributed(settings),
        check_for_nan_in_grad=False,
    )
    # As Megatron's own training: later chunks reduce while others compute, without buckets.
    network = [DistributedDataParallel(config, ddp, chunk, disable_bucketing=i > 0) for i, chunk in enumerate(chunks)]
    config.finalize_model_grads_func = sum_gradients
    if settings.overlap_grad_reduce:
        config.no_sync_func = network[0].no_sync if len(network) == 1 else [part.no_sync for part in network]  # type: ignore[assignment]
    return network


def gradients_are_finite(network: Sequence[DistributedDataParallel]) -> bool:
    """Whether all gradients of all ranks are finite; collective, and waits for the device. A single NaN would go
    through clipping into every weight.
    """
    # By these names Megatron hides two of torch's.
    buffers = [b for part in network for b in part.buffers + part.expert_parallel_buffers]  # pyright: ignore[reportOperatorIssue]
    found = torch.zeros((), device=next(network[0].parameters()).device)  # of a stage that trains nothing
    for buffer in buffers:
        found += ~torch.isfinite(torch.linalg.vector_norm(buffer.grad_data, float("inf")))
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return not found.item()


def is_distributed(settings: OptimizerSettings) -> bool:
    """Whether the optimizer is sharded: only where there is more than one data-parallel rank."""
    return settings.distributed and parallel_state.get_data_parallel_world_size(with_context_parallel=True) > 1


def build_optimizer(
    network: list[DistributedDataParallel], config: TransformerConfig, settings: OptimizerSettings
) -> tuple[MegatronOptimizer, GradScale]:
    """AdamW with fp32 main parameters; sets `config.grad_scale_func`."""
    distributed = is_distributed(settings)
    if settings.distributed and not distributed:
        logger.info("one data-parallel rank: plain optimizer, there is nothing to shard")
    _log_choice()
    with cpu_shim.cuda_type_names():
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=settings.learning_rate,
                min_lr=0.0,  # `Schedule` gives the rate of each step
                weight_decay=settings.weight_decay,
                adam_beta1=settings.beta1,
                adam_beta2=settings.beta2,
                adam_eps=settings.epsilon,
                clip_grad=settings.max_grad_norm,
                bf16=config.bf16,
                fp16=config.fp16,
                params_dtype=config.params_dtype,
                use_distributed_optimizer=distributed,
                overlap_param_gather=settings.overlap_param_gather and distributed,
            ),
            list(network),
            use_gloo_process_groups=False,  # `ranks.join` makes none
        )
    _fuse(optimizer)
    scale = GradScale(optimizer.scale_loss)
    config.grad_scale_func = scale  # type: ignore[assignment]
    return optimizer, scale
