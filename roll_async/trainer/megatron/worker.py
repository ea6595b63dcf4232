"""One Megatron rank: scores given tokens, takes optimizer steps, saves and exports. Synchronous, plain torch.

A rank is handed its share of a batch (`shares.py`): its own rows, and counts over the whole batch. So counting needs no
communication, and the loss of a token does not depend on which rank holds it. Shape letters: b rows of the share, T
positions.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from roll_async.trainer.megatron import cpu_shim

# Before any module below binds `torch`: Megatron's must find the proxy where there is no CUDA.
cpu_shim.install()

from roll_async.algorithms.aggregation import Denominators, aggregate  # noqa: E402
from roll_async.algorithms.critic import value_loss  # noqa: E402
from roll_async.algorithms.objective import (  # noqa: E402
    policy_loss,
    preference_loss,
    step_metrics,
)
from roll_async.checkpoint.folders.hf_folder import write_hf_folder  # noqa: E402
from roll_async.checkpoint.folders.manifest import replaced  # noqa: E402
from roll_async.checkpoint.lora import write_adapter  # noqa: E402
from roll_async.observe.trace import starting  # noqa: E402
from roll_async.trainer.megatron import ranks  # noqa: E402
from roll_async.trainer.megatron.micro_batches import MicroBatch  # noqa: E402
from roll_async.trainer.megatron.model.lora import adapters_off  # noqa: E402
from roll_async.trainer.megatron.model.model import TORCH_DTYPES, HfBackedModel  # noqa: E402
from roll_async.trainer.megatron.model.model_flops import peak_tflops  # noqa: E402
from roll_async.trainer.megatron.model.router_replay import RouterReplay  # noqa: E402
from roll_async.trainer.megatron.ranks import RankSpec  # noqa: E402
from roll_async.trainer.megatron.runner import LossOfMicroBatch, ModelRunner  # noqa: E402
from roll_async.trainer.megatron.schedule import Schedule  # noqa: E402
from roll_async.trainer.megatron.settings import MegatronSettings  # noqa: E402
from roll_async.trainer.megatron.shares import BatchSplitter, DataParallelShard, MiniBatch, ModelTraits  # noqa: E402
from roll_async.trainer.megatron.state.checkpoints import RoleCheckpoint  # noqa: E402
from roll_async.trainer.megatron.state.device_state import DeviceState  # noqa: E402
from roll_async.trainer.megatron.state.host_state import host_state  # noqa: E402
from roll_async.trainer.megatron.state.optimizer import build_optimizer, gradients_are_finite, wrap  # noqa: E402
from roll_async.trainer.protocol import STATE_KINDS, GivenRows, StateMemory  # noqa: E402
from roll_async.weight_sync.bucket import Content  # noqa: E402
from roll_async.weight_sync.transfer import TensorPart, joined  # noqa: E402

logger = logging.getLogger(__name__)
MOST_SKIPPED = 8
"""Optimizer steps in a row without a gradient in numbers: by then it is no accident of a batch."""


class MegatronWorker:
    """One rank of actor_train, critic, reference or teacher."""

    def __init__(self, spec: RankSpec, settings: MegatronSettings) -> None:
        self._spec, self._settings = spec, settings

    def start(self) -> None:
        """Join the process group and load the model. Blocks until all ranks are there. Raises ValueError for a process
        that does not see the devices of its rank.
        """
        cpu_shim.require_device(self._spec.device, cuda=torch.cuda.is_available())
        with starting("", "join"):
            ranks.join(self._spec, self._settings.parallel, self._settings.seed)
        self._device = torch.device(self._spec.device)
        self._model = HfBackedModel(self._settings, self._device)
        self._replay = RouterReplay(self._model.chunks, self._model.config) if self._settings.router_replay else None
        self._network, self._skipped = [], 0
        if self._settings.optimizer is None:
            for chunk in self._model.chunks:
                chunk.requires_grad_(False)
            self._state = DeviceState(self._model.chunks, [], None, self._device)
            self._runner = ModelRunner(self._model.chunks, self._model.config, self._settings, self._replay)
            return
        chunks, config = self._model.chunks, self._model.config
        with starting("", "optimizer"):
            self._network = wrap(chunks, config, self._settings.optimizer)
            self._optimizer, self._grad_scale = build_optimizer(self._network, config, self._settings.optimizer)
        self._host_state = None
        if self._settings.optimizer.cpu_offload:
            self._host_state = host_state(self._optimizer, self._device)
        self._runner = ModelRunner(self._network, self._model.config, self._settings, self._replay)
        self._state = DeviceState(self._model.chunks, self._network, self._optimizer, self._device)
        self._schedule = Schedule(self._settings.optimizer)
        self._checkpoint = RoleCheckpoint(self._model, self._optimizer, self._schedule, self._settings)

    @property
    def data_parallel_rank(self) -> int:
        """Which share of a batch is this rank's."""
        return ranks.data_parallel_place()[0]

    @property
    def splitter(self) -> BatchSplitter:
        """Makes the shares of whole batches; the same on all ranks."""
        config = self._model.config
        # The allgather dispatcher gathers as many tokens from every rank.
        exchanged = config.num_moe_experts is not None and self._settings.moe_dispatcher != "alltoall"
        # Stages that do not tell each other the shapes expect one.
        staged = config.pipeline_model_parallel_size > 1 and not config.variable_seq_lengths
        traits = ModelTraits(
            flops=self._model.flops,
            has_experts=config.num_moe_experts is not None,
            common_shape=exchanged or staged,
        )
        return BatchSplitter(self._settings, traits, ranks.data_parallel_place()[1])

    def stop(self) -> None:
        """Leave the process groups and let go of the model; the process may start another worker."""
        for name in ("_model", "_network", "_optimizer", "_runner", "_checkpoint", "_state"):
            self.__dict__.pop(name, None)
        ranks.leave()

    # Memory

    def offload_states(self, kinds: Sequence[str] = STATE_KINDS) -> StateMemory:
        """Move weights, optimizer state or gradients to host memory; collective. See `OffloadingGroup`."""
        # What is copied away must not be stale; weights that are away have no memory to gather into.
        if not self._state.is_away("weights"):
            self._gather_parameters()
        return self._state.offload(kinds)

    def load_states(self, kinds: Sequence[str] = STATE_KINDS) -> StateMemory:
        """Bring them back."""
        return self._state.load(kinds)

    # Scoring

    @torch.no_grad()
    def compute_logprobs(self, share: DataParallelShard) -> Tensor | None:
        """[b,T] float32; 0 where not in the mask. Of all ranks with the same share one answers, the others None."""
        return self._score(share, self._logprobs)

    @torch.no_grad()
    def compute_plain_logprobs(self, share: DataParallelShard) -> Tensor | None:
        """`compute_logprobs` of the whole distribution at temperature 1, whatever the samples are drawn from."""
        return self._score(
            share, lambda batch, out: self._runner.logprobs(batch, out, with_entropy=False, plain=True).logprobs
        )

    @torch.no_grad()
    def compute_squares(self, share: DataParallelShard) -> Tensor | None:
        """[b,T] float32, or None as of `compute_logprobs`: the sum of all squared probabilities at the token."""

        def squares(batch: MicroBatch, output: Tensor) -> Tensor:
            found = self._runner.logprobs(batch, output, with_entropy=False, with_squares=True).squares
            assert found is not None
            return found

        return self._score(share, squares)

    @torch.no_grad()
    def compute_base_logprobs(self, share: DataParallelShard) -> Tensor | None:
        """`compute_logprobs` of the model without its adapters."""
        with adapters_off(self._model.chunks):
            return self._score(share, self._logprobs)

    def _logprobs(self, batch: MicroBatch, output: Tensor) -> Tensor:
        return self._runner.logprobs(batch, output, with_entropy=False).logprobs

    def _score(self, share: DataParallelShard, score: Callable[[MicroBatch, Tensor], Tensor]) -> Tensor | None:
        self._state.require("weights")
        self._model.train(False)
        self._check_experts(share)
        (whole,) = share.mini_batches
        result = torch.zeros(share.rows.tokens.shape)

        def keep(batch: MicroBatch, output: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
            # By all ranks of a replica, whoever reports: it holds collectives over tensor and context ranks.
            values = score(batch, output).float().cpu()
            if ranks.is_reporting_rank():
                width = min(values.shape[1], result.shape[1])
                result[batch.rows, :width] = values[:, :width]
            # The schedule wants a loss; without gradients nothing is made of it.
            return output.new_zeros(()), {}

        self._runner.run(self._runner.micro_batches(share.rows, whole), keep, forward_only=True)
        return result if ranks.is_reporting_rank() else None

    def _check_experts(self, share: DataParallelShard) -> None:
        """Raises ValueError for records of another model."""
        if self._replay is not None and share.rows.experts is not None:
            self._replay.check(share.rows.experts)

    # Training

    def update_policy(self, share: DataParallelShard, step: int) -> tuple[dict[str, float], Tensor | None]:
        """One optimizer step per mini-batch, in row order, `ppo_epochs` times over the batch. Metrics; of the share's k
        kept rows also the [k,T] float32 entropies of the first epoch, NaN outside of the mask, from one of the ranks
        with the same share, as of `compute_logprobs`.
        """
        settings = self._settings.loss
        assert settings is not None, "a role without a loss cannot train"
        self._check_experts(share)

        def loss_for(denominators: Mapping[str, Denominators]) -> LossOfMicroBatch:
            def loss_of(batch: MicroBatch, output: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
                current = self._runner.logprobs(batch, output, with_entropy=True)
                if kept is not None and len(results) < len(share.mini_batches):
                    assert current.entropy is not None
                    # Copied after the step: here the host would wait for the device.
                    entropies.append((batch.rows, current.entropy.detach()))
                return policy_loss(batch.fields, batch.mask, current, settings, denominators)

            return loss_of

        kept, entropies = share.rows.fields.get("kept"), list[tuple[Tensor, Tensor]]()
        results, began_s = [], time.perf_counter()
        parts = [part for _ in range(settings.ppo_epochs) for part in share.mini_batches]
        for part, rate in zip(parts, self._schedule.rates(len(parts)), strict=True):
            result = self._step(share, part, loss_for, rate)
            result["trainer/zero_gradient_rows_share"] = part.zero_gradient_rows_share
            result["trainer/copied_rows_share"] = part.copied_rows_share
            results.append(result)
        used = self._use_of_device(share, settings.ppo_epochs, time.perf_counter() - began_s)
        metrics = {**_mean_of(results, "trainer"), **used}
        if kept is None or not ranks.is_reporting_rank():
            return metrics, None
        found = torch.full(share.rows.mask.shape, torch.nan)
        for rows, values in entropies:
            found[rows, : values.shape[1]] = values.float().cpu()
        return metrics, found.masked_fill(~share.rows.mask, torch.nan)[kept]

    def _use_of_device(self, share: DataParallelShard, epochs: int, seconds: float) -> dict[str, float]:
        """What this rank's device did in a step, as its share of what the ranks with the same rows did."""
        fed = [rows[0] for part in share.mini_batches for batch in part.micro_batches for rows in batch]
        lengths = share.rows.lengths[fed].tolist()
        sizes = self._settings.parallel
        rank_seconds = seconds * sizes.tensor * sizes.pipeline * sizes.context
        tflops = epochs * self._model.flops.step(lengths) / rank_seconds / 1e12
        used = {
            "trainer/tflops_per_device": tflops,
            "trainer/tokens_per_device_s": epochs * sum(lengths) / rank_seconds,
            "memory/trainer_peak_bytes": ranks.peak_bytes(self._device),
        }
        if self._device.type == "cuda" and self._settings.dtype != "fp32":
            peak = peak_tflops(torch.cuda.get_device_name(self._device))
            used |= {} if peak is None else {"trainer/mfu": tflops / peak}
        return used

    @torch.no_grad()
    def compute_values(self, share: DataParallelShard) -> Tensor | None:
        """[b,T] float32, or None as of `compute_logprobs`: the value of the state before token t; 0 where not in the
        mask.
        """
        return self._score(share, lambda batch, out: self._runner.to_rows(batch, out[..., 0]))

    def update_values(self, share: DataParallelShard, step: int) -> dict[str, float]:
        """One optimizer step of the critic per mini-batch, in row order."""

        def loss_for(denominators: Mapping[str, Denominators]) -> LossOfMicroBatch:
            def loss_of(batch: MicroBatch, output: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
                per_token, metrics = value_loss(
                    values_BT=self._runner.to_rows(batch, output[..., 0]),
                    old_values_BT=batch.fields["old_values"],
                    returns_BT=batch.fields["returns"],
                    mask_BT=batch.mask,
                    clip=self._settings.value_clip,
                )
                # Where rows name no parts, all of them are counted as the policy's (`part_masks`).
                return aggregate(loss_BT=per_token, mask_BT=batch.mask, denominators=denominators["policy"]), metrics

            return loss_of

        rates = self._schedule.rates(len(share.mini_batches))
        results = [
            self._step(share, part, loss_for, rate) for part, rate in zip(share.mini_batches, rates, strict=True)
        ]
        renamed = [{key.replace("trainer/", "critic/"): value for key, value in r.items()} for r in results]
        return _mean_of(renamed, "critic")

    def supervised_update(self, tokens: Tensor, lengths: Tensor, mask: Tensor) -> float:
        """One cross-entropy step on the masked tokens of a whole batch; the mean loss per token."""
        share = self.splitter.given(GivenRows(tokens=tokens, lengths=lengths, mask=mask))[self.data_parallel_rank]
        return self.update_given(share, step=0)["trainer/loss"]

    def update_given(self, share: DataParallelShard, step: int) -> dict[str, float]:
        """One optimizer step on given rows: cross-entropy per token, or the loss of pairs per pair."""
        preference, (whole,), began_s = share.preference, share.mini_batches, time.perf_counter()

        def loss_for(denominators: Mapping[str, Denominators]) -> LossOfMicroBatch:
            counts = denominators["policy"]

            def loss_of(batch: MicroBatch, output: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
                # Log-probs are 0 outside of the mask.
                logprobs = self._runner.logprobs(batch, output, with_entropy=False).logprobs
                if preference is None:
                    return -logprobs.sum() / max(1, counts.global_tokens), {}
                losses, sums = preference_loss(
                    logprobs_2P=logprobs.sum(-1), ref_logprobs_2P=batch.fields["ref_logprobs"], options=preference
                )
                # `step_metrics` divides by tokens, and these are means over pairs.
                scale = counts.global_tokens / max(1, counts.global_sequences // 2)
                return losses.sum() / max(1, counts.global_sequences // 2), {k: v * scale for k, v in sums.items()}

            return loss_of

        (rate,) = self._schedule.rates(1)
        metrics = self._step(share, whole, loss_for, rate)
        return {**metrics, **self._use_of_device(share, 1, time.perf_counter() - began_s)}

    def _step(
        self,
        share: DataParallelShard,
        mini_batch: MiniBatch,
        loss_for: Callable[[Mapping[str, Denominators]], LossOfMicroBatch],
        rate: float,
    ) -> dict[str, float]:
        """Forward and backward over the micro-batches, clip, Adam; the step's metrics. The loss is divided by the
        counts of the whole mini-batch, metrics by the tokens they were summed over.
        """
        self._state.require(*STATE_KINDS)
        self._model.train(True)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        for part in self._network:
            part.zero_grad_buffer()
        # Also the float32 copies that the last step was taken from; the line above is for Megatron's flat buffers.
        self._optimizer.zero_grad()
        self._grad_scale.step_tokens = max(1, mini_batch.num_tokens)
        batches = self._runner.micro_batches(share.rows, mini_batch)
        losses, parts = self._runner.run(batches, loss_for(mini_batch.denominators), forward_only=False)
        on_device = nullcontext() if self._host_state is None else self._host_state.on_device()
        stepped, grad_norm = False, None
        # Of the whole mini-batch, so that all ranks go the same way.
        if not any(counts.global_tokens for counts in mini_batch.denominators.values()):
            pass  # Adam would move the weights all the same, by its momentum and the decay
        # The scaler of fp16 looks itself, and goes down.
        elif self._model.config.fp16 or gradients_are_finite(self._network):
            with cpu_shim.cuda_type_names(), on_device:
                stepped, grad_norm, _ = self._optimizer.step()  # pyright: ignore[reportGeneralTypeIssues]  # base: None
            self._schedule.optimizer_steps += stepped
            self._skipped = 0
        else:
            self._skip()
        loss, parts = self._collect(losses, parts)
        return {
            "trainer/loss": loss,
            "trainer/grad_norm": float(grad_norm) if grad_norm is not None else 0.0,
            "trainer/learning_rate": rate,
            "trainer/skipped_steps": float(not stepped),
            **step_metrics(parts, mini_batch.computed),
            **(self._replay.metrics() if self._replay is not None else {}),
        }

    def _skip(self) -> None:
        """The weights stay as they are. Raises FloatingPointError where that has become the rule."""
        self._skipped += 1
        reason = "a gradient is no number (NaN or infinite): too large a learning rate, scores or advantages, or a bug"
        if self._skipped == MOST_SKIPPED:
            raise FloatingPointError(f"{reason}; {MOST_SKIPPED} optimizer steps in a row were skipped")
        if dist.get_rank() == 0:
            logger.warning("optimizer step skipped (trainer/skipped_steps), the weights stay: %s", reason)

    def _collect(self, losses: list[Tensor], parts: list[dict[str, Tensor]]) -> tuple[float, list[dict[str, Tensor]]]:
        """The step's loss, and the metric sums of every data-parallel rank, on all ranks."""
        loss = float(torch.stack(losses).sum()) if losses else 0.0
        if self._spec.world_size == 1:
            return loss, parts
        # One rank of each replica: the others computed the same loss. On the CPU, as objects are pickled.
        own = (loss, [{k: v.cpu() for k, v in p.items()} for p in parts]) if ranks.is_reporting_rank() else (0.0, [])
        gathered: list = [None] * self._spec.world_size
        dist.all_gather_object(gathered, own)
        return sum(x[0] for x in gathered), [part for x in gathered for part in x[1]]

    # Weights and checkpoints

    def export_named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """HF-named full tensors; collective, so every rank must exhaust it. Only one data-parallel replica takes part:
        the other ranks get nothing and go on at once.
        """
        self._state.require("weights")
        self._gather_parameters()
        return self._model.export() if ranks.is_export_rank(self._settings.parallel) else iter(())

    def weight_parts(self, content: Content = Content.MERGED) -> Iterator[TensorPart]:
        """What this rank sends of the present weights in a push; no other rank takes part."""
        self._gather_parameters()
        return self._model.parts(content)

    @property
    def num_kv_heads(self) -> int:
        """Key-value heads of the model."""
        return self._model.heads.num_groups

    def _gather_parameters(self) -> None:
        """With overlap_param_gather, parameters are stale until the next forward pass."""
        for part in self._network:
            if part.ddp_config.overlap_param_gather:
                part.start_param_sync(force_sync=True)

    def export_hf(self, folder: str) -> None:
        """Write a transformers-loadable folder from rank 0, and the adapters of a LoRA run beside it."""
        tensors = self.export_named_tensors()
        if self._spec.rank == 0:
            dtype = str(TORCH_DTYPES[self._settings.dtype]).removeprefix("torch.")
            settings = self._settings
            with replaced(Path(folder)) as new:
                write_hf_folder(new, tensors, like=settings.model_folder, dtype=dtype, critic=settings.with_value_head)
        else:
            # Their gathering is collective: without this rank, rank 0 would wait for ever.
            for _ in tensors:
                pass
        if self._settings.lora_rank:
            self._export_adapter(Path(f"{folder}_adapter"))

    def _export_adapter(self, folder: Path) -> None:
        """Write the adapters alone from rank 0, in PEFT's format; collective."""
        first, gathered = self._spec.rank == 0, [None] * self._spec.world_size
        # Objects are pickled: CUDA tensors would be made anew on the receiver's device.
        own = [replace(part, tensor=part.tensor.cpu()) for part in self._model.adapters()]
        dist.gather_object(own, gathered if first else None)
        if first:
            whole = joined(part for parts in gathered for part in parts or ())
            with replaced(folder) as new:
                write_adapter(new, whole, alpha=self._settings.lora_alpha, base=self._settings.model_folder)

    def save(self, folder: str, step: int, state: bytes, *, background: bool = False) -> None:
        """Atomic checkpoint of all ranks: `folder` exists only when it is complete. With `background` the weights of
        this moment are written while training goes on; `finish_save` completes it.
        """
        self._state.require("weights", "optimizer")
        self._gather_parameters()
        self._checkpoint.save(folder, step=step, state=state, background=background)

    def save_written(self) -> bool:
        """Whether a save in the background only waits for `finish_save`."""
        return self._checkpoint.written()

    def finish_save(self) -> None:
        """Complete a save in the background; collective. Raises OSError when a rank could not write."""
        self._checkpoint.finish()

    def load(self, folder: str) -> bytes:
        """Restore what `save` wrote, under this or another layout; returns the caller's state. Raises ValueError naming
        a bad file.
        """
        self._state.require("weights", "optimizer")
        return self._checkpoint.load(folder)


def _mean_of(results: list[dict[str, float]], part: str) -> dict[str, float]:
    """Mean over the optimizer steps of a batch; extremes by key; the learning rate of the last one."""
    merged: dict[str, float] = {f"{part}/optimizer_steps": float(len(results))}
    for key in results[0]:
        # A step without a valid token has no extremes (`reduce_metrics`).
        values = [r[key] for r in results if key in r]
        if key.endswith("_max"):
            merged[key] = max(values)
        elif key.endswith("_min"):
            merged[key] = min(values)
        else:
            merged[key] = sum(values) / len(values)
    merged[f"{part}/learning_rate"] = results[-1][f"{part}/learning_rate"]
    return merged
