"""One Megatron rank: scores given tokens, takes optimizer steps, saves and exports. Synchronous, plain torch.

Every rank is handed the whole batch and takes its data-parallel part: counts over the batch need no communication, and
the
loss of a token does not depend on which rank holds it. Shape letters: B rows, T positions.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from roll_async.trainer.megatron import cpu_shim

cpu_shim.install()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # noqa: E402

from roll_async.algorithms.aggregation import count_denominators, reduce_metrics  # noqa: E402
from roll_async.algorithms.policy_losses import SILENT_WITHOUT_ADVANTAGE  # noqa: E402
from roll_async.checkpoint.hf_folder import write_hf_folder  # noqa: E402
from roll_async.trainer.megatron import rank_state  # noqa: E402
from roll_async.trainer.megatron.logprobs import next_token_logprobs  # noqa: E402
from roll_async.trainer.megatron.loss_scale import framework_scale  # noqa: E402
from roll_async.trainer.megatron.micro_batches import MicroBatch, cut, split_rows  # noqa: E402
from roll_async.trainer.megatron.model import TORCH_DTYPES, HfBackedModel  # noqa: E402
from roll_async.trainer.megatron.policy_step import policy_loss  # noqa: E402
from roll_async.trainer.megatron.schedule import learning_rate_at  # noqa: E402
from roll_async.trainer.megatron.settings import MegatronSettings  # noqa: E402
from roll_async.trainer.protocol import PolicyRows, TokenRows  # noqa: E402

logger = logging.getLogger(__name__)

LossOfMicroBatch = Callable[[MicroBatch, Tensor], tuple[Tensor, Mapping[str, Tensor]]]
"""(micro-batch, logits) -> (share of the step's loss, metric sums)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSpec:
    """This process among the ranks of its role."""

    rank: int
    world_size: int
    master_addr: str
    master_port: int
    device: str
    """cpu (gloo) or cuda (nccl)."""
    timeout_s: float = 600.0


class MegatronWorker:
    """One rank of actor_train, reference or teacher."""

    def __init__(self, spec: RankSpec, settings: MegatronSettings) -> None:
        self._spec, self._settings = spec, settings
        self._optimizer_steps = 0

    def start(self) -> None:
        """Join the process group and load the model. Blocks until all ranks are there."""
        spec, parallel = self._spec, self._settings.parallel
        if spec.device == "cpu":
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        else:
            torch.cuda.set_device(0)  # CUDA_VISIBLE_DEVICES shows this process its own device only
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        dist.init_process_group(
            "gloo" if spec.device == "cpu" else "nccl",
            init_method=f"tcp://{spec.master_addr}:{spec.master_port}",
            rank=spec.rank,
            world_size=spec.world_size,
            timeout=timedelta(seconds=spec.timeout_s),
        )
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            context_parallel_size=parallel.context,
            expert_model_parallel_size=parallel.expert,
            expert_tensor_parallel_size=parallel.expert_tensor,
        )
        model_parallel_cuda_manual_seed(self._settings.seed)
        self._device = torch.device(spec.device)
        self._model = HfBackedModel(self._settings, self._device)
        if self._settings.optimizer is None:
            self._model.module.requires_grad_(False)
            self._network = self._model.module
        else:
            self._build_optimizer()

    def _build_optimizer(self) -> None:
        settings = self._settings.optimizer
        assert settings is not None
        data_parallel = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        distributed = settings.distributed and data_parallel > 1
        if settings.distributed and not distributed:
            logger.info("one data-parallel rank: plain optimizer, there is nothing to shard")
        config = self._model.config
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=distributed, check_for_nan_in_grad=False
        )
        self._network = DistributedDataParallel(config, ddp, self._model.module)
        config.finalize_model_grads_func = finalize_model_grads
        with cpu_shim.cuda_type_names():
            self._optimizer = get_megatron_optimizer(
                OptimizerConfig(
                    optimizer="adam",
                    lr=settings.learning_rate,
                    min_lr=0.0,
                    weight_decay=settings.weight_decay,
                    adam_beta1=settings.beta1,
                    adam_beta2=settings.beta2,
                    adam_eps=settings.epsilon,
                    clip_grad=settings.max_grad_norm,
                    bf16=self._settings.dtype == "bf16",
                    fp16=self._settings.dtype == "fp16",
                    params_dtype=TORCH_DTYPES[self._settings.dtype],
                    use_distributed_optimizer=distributed,
                ),
                [self._network],
            )
        config.grad_scale_func = self._optimizer.scale_loss

    # Scoring

    @torch.no_grad()
    def compute_logprobs(self, rows: TokenRows) -> Tensor | None:
        """[B,T] float32 on rank 0, None elsewhere; 0 where not in the mask."""

        def score(batch: MicroBatch, logits: Tensor) -> Tensor:
            return self._logprobs(batch, logits, with_entropy=False).logprobs.float().cpu()

        return self._score(rows, score)

    def _score(self, rows: TokenRows, score: Callable[[MicroBatch, Tensor], Tensor]) -> Tensor | None:
        self._model.module.eval()
        mine = self._my_rows(range(len(rows.lengths)))
        batches = self._micro_batches(mine, rows.tokens, rows.lengths, rows.mask, {}, self._settings.scoring_rows)
        outputs: list[tuple[MicroBatch, Tensor]] = []

        def keep(batch: MicroBatch, logits: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
            outputs.append((batch, score(batch, logits)))
            return logits.new_zeros(()), {}

        self._run(batches, keep, forward_only=True)
        result = torch.zeros(rows.tokens.shape)
        if parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0:
            for batch, values in outputs:
                width = min(values.shape[1], result.shape[1])
                result[batch.rows, :width] = values[:, :width]
        if self._spec.world_size > 1:
            shared = result.to(self._device)
            dist.all_reduce(shared)
            result = shared.cpu()
        return result if self._spec.rank == 0 else None

    def _logprobs(self, batch: MicroBatch, logits: Tensor, *, with_entropy: bool):  # noqa: ANN202
        group = parallel_state.get_tensor_model_parallel_group()
        return next_token_logprobs(logits, batch.tokens, batch.mask, self._settings, group, with_entropy=with_entropy)

    # Training

    def update_policy(self, rows: PolicyRows, step: int) -> dict[str, float]:
        """One optimizer step per mini-batch, in row order, `ppo_epochs` times over the batch."""
        loss_settings, size = self._settings.loss, self._settings.mini_batch_rows
        assert loss_settings is not None, "a role without a loss cannot train"
        fields = {
            name: getattr(rows, name)
            for name in ("advantages", "behaviour_logprobs", "proximal_logprobs", "correction_weights", "scores",
                         "version_lag", "ref_logprobs", "segment_ids", "selection")
        }  # fmt: skip
        results = []
        for _ in range(loss_settings.ppo_epochs):
            for start in range(0, len(rows.lengths), size):
                whole = range(start, min(start + size, len(rows.lengths)))
                part = self._rows_with_signal(rows, whole)
                denominators = count_denominators(
                    mask_BT=rows.mask[whole.start : whole.stop], normalizer_length=loss_settings.normalizer_length
                )

                def loss_of(batch: MicroBatch, logits: Tensor, denominators=denominators):  # noqa: ANN001, ANN202
                    current = self._logprobs(batch, logits, with_entropy=True)
                    return policy_loss(batch, current, loss_settings, denominators)

                result = self._step(part, rows.tokens, rows.lengths, rows.mask, fields, loss_of)
                seen = count_denominators(mask_BT=rows.mask[part], normalizer_length=1)
                metrics = reduce_metrics(parts=result.pop("parts"), denominators=seen)
                silent = 1 - len(part) / len(whole)
                results.append({**result, **metrics, "trainer/silent_rows_share": silent})
        return _mean_of(results)

    def _rows_with_signal(self, rows: PolicyRows, part: range) -> list[int]:
        """The rows of a mini-batch that can move a weight. Where every answer of a group has the same score, all
        advantages are zero, and so is the gradient: half of a late GRPO batch. The step is exactly the same without
        them, because the denominators count all rows. One row per data-parallel rank stays, for the schedule.
        """
        loss = self._settings.loss
        assert loss is not None
        speaks_always = loss.kl_coef > 0 or loss.entropy_coef > 0 or self._model.config.num_moe_experts is not None
        if speaks_always or loss.pg_variant not in SILENT_WITHOUT_ADVANTAGE:
            return list(part)
        signal = rows.mask & (rows.advantages != 0)
        if rows.correction_weights is not None:
            signal &= rows.correction_weights != 0
        heard = [row for row in part if bool(signal[row].any())]
        least = min(len(part), parallel_state.get_data_parallel_world_size())
        silent = [row for row in part if not bool(signal[row].any())]
        return sorted(heard + silent[: max(0, least - len(heard))])

    def supervised_update(self, tokens: Tensor, lengths: Tensor, mask: Tensor) -> float:
        """One cross-entropy step on the masked tokens; the mean loss per token."""
        denominators = count_denominators(mask_BT=mask, normalizer_length=1)

        def loss_of(batch: MicroBatch, logits: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
            logprobs = self._logprobs(batch, logits, with_entropy=False).logprobs
            return -logprobs.sum() / max(1, denominators.global_tokens), {}

        result = self._step(range(len(lengths)), tokens, lengths, mask, {}, loss_of)
        return result["trainer/loss"]

    def _step(
        self,
        rows: Sequence[int],
        tokens: Tensor,
        lengths: Tensor,
        mask: Tensor,
        fields: Mapping[str, Tensor | None],
        loss_of: LossOfMicroBatch,
    ) -> dict:
        """Forward and backward over the micro-batches of these rows, clip, Adam. Metrics, and `parts` of all ranks to
        reduce.
        """
        self._model.module.train()
        settings = self._settings.optimizer
        assert settings is not None
        rate = learning_rate_at(self._optimizer_steps, settings)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._network.zero_grad_buffer()
        self._optimizer.zero_grad()
        mine = self._my_rows(rows)
        batches = self._micro_batches(mine, tokens, lengths, mask, fields, self._settings.micro_batch_rows)
        losses, parts = self._run(batches, loss_of, forward_only=False)
        with cpu_shim.cuda_type_names():
            stepped, grad_norm, _ = self._optimizer.step()
        self._optimizer_steps += 1
        loss, parts = self._collect(losses, parts)
        return {
            "trainer/loss": loss,
            "trainer/grad_norm": float(grad_norm) if grad_norm is not None else 0.0,
            "trainer/learning_rate": rate,
            "trainer/skipped_steps": float(not stepped),
            "parts": parts,
        }

    def _run(
        self, batches: list[MicroBatch], loss_of: LossOfMicroBatch, *, forward_only: bool
    ) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
        """Megatron's schedule over the micro-batches; losses and metric sums of this rank (last pipeline stage only).
        """
        scale = framework_scale(
            num_micro_batches=len(batches), data_parallel_size=parallel_state.get_data_parallel_world_size()
        )
        losses: list[Tensor] = []
        parts: list[dict[str, Tensor]] = []

        def loss_function(batch: MicroBatch, logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            loss, metrics = loss_of(batch, logits)
            losses.append(loss.detach())
            parts.append(dict(metrics))
            return loss * scale, {}

        def forward_step(iterator: Iterator[MicroBatch], model: torch.nn.Module):  # noqa: ANN202
            batch = next(iterator)
            return model(batch.tokens, batch.positions, None), partial(loss_function, batch)

        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=[self._network],
            num_microbatches=len(batches),
            seq_length=max(b.tokens.shape[1] for b in batches),
            micro_batch_size=len(batches[0].rows),
            forward_only=forward_only,
        )
        return losses, parts

    def _micro_batches(
        self, rows: list[int], tokens: Tensor, lengths: Tensor, mask: Tensor, fields: Mapping[str, Tensor | None], size: int
    ) -> list[MicroBatch]:
        split = split_rows(lengths[rows].tolist(), self._settings, rows_per_batch=size)
        return [
            cut(
                [rows[i] for i in part],
                tokens=tokens,
                lengths=lengths,
                mask=mask,
                fields=fields,
                settings=self._settings,
                device=self._device,
            )
            for part in split
        ]

    def _my_rows(self, rows: Sequence[int]) -> list[int]:
        """This data-parallel rank's rows: every size-th, so that long groups spread."""
        rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        return list(rows[rank::size])

    def _collect(self, losses: list[Tensor], parts: list[dict[str, Tensor]]) -> tuple[float, list[dict[str, Tensor]]]:
        """The step's loss, and the metric sums of every data-parallel rank, on all ranks."""
        loss = float(torch.stack(losses).sum()) if losses else 0.0
        if self._spec.world_size == 1:
            return loss, parts
        speaks = parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0
        own = (loss, [{k: v.cpu() for k, v in p.items()} for p in parts]) if speaks else (0.0, [])
        gathered: list = [None] * self._spec.world_size
        dist.all_gather_object(gathered, own)
        return sum(x[0] for x in gathered), [part for x in gathered for part in x[1]]

    # Weights and checkpoints

    def export_named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """HF-named full tensors; collective, so every rank must exhaust it."""
        return self._model.export()

    def export_hf(self, folder: str) -> None:
        """Write a transformers-loadable folder from rank 0."""
        tensors = self.export_named_tensors()
        if self._spec.rank == 0:
            dtype = str(TORCH_DTYPES[self._settings.dtype]).removeprefix("torch.")
            write_hf_folder(folder, tensors, like=self._settings.model_folder, dtype=dtype)
        else:
            for _ in tensors:
                pass

    def save(self, folder: str, step: int, state: bytes) -> None:
        """Atomic checkpoint of all ranks: `folder` exists only when it is complete."""
        mine = {
            "model": self._model.module.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "optimizer_steps": self._optimizer_steps,
            "rng": torch.get_rng_state(),
        }
        rank_state.save(folder, mine, rank=self._spec.rank, world_size=self._spec.world_size, step=step, state=state)

    def load(self, folder: str) -> bytes:
        """Restore what `save` wrote on the same layout; returns the caller's state. Raises ValueError naming a bad
        file.
        """
        mine, state = rank_state.load(folder, rank=self._spec.rank, world_size=self._spec.world_size)
        self._model.module.load_state_dict(mine["model"])
        with cpu_shim.cuda_type_names():
            self._optimizer.load_state_dict(mine["optimizer"])
        self._optimizer_steps = mine["optimizer_steps"]
        torch.set_rng_state(mine["rng"])
        return state


def _mean_of(results: list[dict[str, float]]) -> dict[str, float]:
    """Mean over the optimizer steps of a batch; extremes by key; the learning rate of the last one."""
    merged: dict[str, float] = {"trainer/optimizer_steps": float(len(results))}
    for key in results[0]:
        values = [r[key] for r in results if key in r]
        if key.endswith("_max"):
            merged[key] = max(values)
        elif key.endswith("_min"):
            merged[key] = min(values)
        else:
            merged[key] = sum(values) / len(values)
    merged["trainer/learning_rate"] = results[-1]["trainer/learning_rate"]
    return merged
