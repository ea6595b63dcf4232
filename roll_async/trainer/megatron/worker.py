"""One Megatron rank: scores given tokens, takes optimizer steps, saves and exports. Synchronous, plain torch.

Every rank is handed the whole batch and takes its data-parallel part: counts over the batch need no communication,
and the loss of a token does not depend on which rank holds it. Shape letters: B rows, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from roll_async.trainer.megatron import cpu_shim

cpu_shim.install()

from megatron.core import parallel_state  # noqa: E402

from roll_async.algorithms.aggregation import Denominators, aggregate, reduce_metrics  # noqa: E402
from roll_async.algorithms.critic import value_loss  # noqa: E402
from roll_async.algorithms.objective import count_parts, policy_loss  # noqa: E402
from roll_async.algorithms.policy_losses import ZERO_GRADIENT_WITHOUT_ADVANTAGE  # noqa: E402
from roll_async.checkpoint.hf_folder import write_hf_folder  # noqa: E402
from roll_async.schema import ExpertRows  # noqa: E402
from roll_async.trainer.megatron import ranks  # noqa: E402
from roll_async.trainer.megatron.checkpoints import RoleCheckpoint  # noqa: E402
from roll_async.trainer.megatron.device_state import DeviceState  # noqa: E402
from roll_async.trainer.megatron.host_state import host_state  # noqa: E402
from roll_async.trainer.megatron.lora import adapters_off  # noqa: E402
from roll_async.trainer.megatron.micro_batches import MicroBatch, StepRows  # noqa: E402
from roll_async.trainer.megatron.model import TORCH_DTYPES, HfBackedModel  # noqa: E402
from roll_async.trainer.megatron.optimizer import build_optimizer, wrap  # noqa: E402
from roll_async.trainer.megatron.ranks import RankSpec  # noqa: E402
from roll_async.trainer.megatron.router_replay import RouterReplay  # noqa: E402
from roll_async.trainer.megatron.runner import LossOfMicroBatch, Runner  # noqa: E402
from roll_async.trainer.megatron.schedule import learning_rate_at  # noqa: E402
from roll_async.trainer.megatron.settings import MegatronSettings  # noqa: E402
from roll_async.trainer.protocol import STATE_KINDS, PolicyRows, StateMemory, TokenRows, ValueRows  # noqa: E402
from roll_async.weight_sync.packing import TensorPart  # noqa: E402

_POLICY_FIELDS = (
    "advantages",
    "behaviour_logprobs",
    "proximal_logprobs",
    "correction_weights",
    "scores",
    "version_lag",
    "ref_logprobs",
    "segment_ids",
    "selection",
    "policy_mask",
    "cross_entropy_mask",
    "reference_kl_mask",
)


class MegatronWorker:
    """One rank of actor_train, critic, reference or teacher."""

    def __init__(self, spec: RankSpec, settings: MegatronSettings) -> None:
        self._spec, self._settings = spec, settings
        self._optimizer_steps = 0

    def start(self) -> None:
        """Join the process group and load the model. Blocks until all ranks are there. Raises ValueError for a process
        that does not see the devices of its rank.
        """
        cpu_shim.demand_device(self._spec.device, cuda=torch.cuda.is_available())
        ranks.join(self._spec, self._settings.parallel, self._settings.seed)
        self._device = torch.device(self._spec.device)
        self._model = HfBackedModel(self._settings, self._device)
        self._replay = RouterReplay(self._model.chunks, self._model.config) if self._settings.router_replay else None
        self._network = []
        if self._settings.optimizer is None:
            for chunk in self._model.chunks:
                chunk.requires_grad_(False)
            self._state = DeviceState(self._model.chunks, [], None, self._device)
            self._runner = Runner(self._model.chunks, self._model.config, self._settings, self._replay)
            return
        self._network = wrap(self._model.chunks, self._model.config, self._settings.optimizer)
        self._optimizer, self._grad_scale = build_optimizer(self._network, self._model.config, self._settings.optimizer)
        self._host_state = None
        if self._settings.optimizer.cpu_offload:
            self._host_state = host_state(self._optimizer, self._device)
        self._runner = Runner(self._network, self._model.config, self._settings, self._replay)
        self._state = DeviceState(self._model.chunks, self._network, self._optimizer, self._device)
        self._checkpoint = RoleCheckpoint(self._model, self._optimizer, self._settings)

    def stop(self) -> None:
        """Leave the process groups and let go of the model; the process may start another worker."""
        for name in ("_model", "_network", "_optimizer", "_runner", "_checkpoint", "_state"):
            self.__dict__.pop(name, None)
        ranks.leave()

    # Memory

    def offload_states(self, kinds: Sequence[str] = STATE_KINDS) -> StateMemory:
        """Move weights, optimizer state or gradients to host memory; collective. See `OffloadingGroup`."""
        if not self._state.is_away("weights"):
            self._gather_parameters()
        return self._state.offload(kinds)

    def load_states(self, kinds: Sequence[str] = STATE_KINDS) -> StateMemory:
        """Bring them back."""
        return self._state.load(kinds)

    # Scoring

    @torch.no_grad()
    def compute_logprobs(self, rows: TokenRows) -> Tensor | None:
        """[B,T] float32 on rank 0, None elsewhere; 0 where not in the mask."""
        return self._score(rows, lambda batch, out: self._runner.logprobs(batch, out, with_entropy=False).logprobs)

    @torch.no_grad()
    def compute_plain_logprobs(self, rows: TokenRows) -> Tensor | None:
        """`compute_logprobs` of the whole distribution at temperature 1, whatever the samples are drawn from."""
        return self._score(
            rows, lambda batch, out: self._runner.logprobs(batch, out, with_entropy=False, plain=True).logprobs
        )

    @torch.no_grad()
    def compute_squares(self, rows: TokenRows) -> Tensor | None:
        """[B,T] float32 on rank 0, None elsewhere: the sum of all squared probabilities at the token."""

        def squares(batch: MicroBatch, output: Tensor) -> Tensor:
            found = self._runner.logprobs(batch, output, with_entropy=False, with_squares=True).squares
            assert found is not None
            return found

        return self._score(rows, squares)

    @torch.no_grad()
    def compute_base_logprobs(self, rows: TokenRows) -> Tensor | None:
        """`compute_logprobs` of the model without its adapters."""
        with adapters_off(self._model.chunks):
            return self.compute_logprobs(rows)

    def _score(self, rows: TokenRows, score: Callable[[MicroBatch, Tensor], Tensor]) -> Tensor | None:
        self._state.demand("weights")
        self._model.train(False)
        experts = self._experts_of(rows)
        step = StepRows(tokens=rows.tokens, lengths=rows.lengths, mask=rows.mask, fields={}, experts=experts)
        batches = self._runner.micro_batches(step, range(len(rows.lengths)), self._settings.scoring_rows)
        result = torch.zeros(rows.tokens.shape)

        def keep(batch: MicroBatch, output: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
            values = score(batch, output).float().cpu()
            if ranks.reports():
                width = min(values.shape[1], result.shape[1])
                result[batch.rows, :width] = values[:, :width]
            return output.new_zeros(()), {}

        self._runner.run(batches, keep, forward_only=True)
        if self._spec.world_size > 1:
            shared = result.to(self._device)
            dist.all_reduce(shared)
            result = shared.cpu()
        return result if self._spec.rank == 0 else None

    def _experts_of(self, rows: TokenRows | PolicyRows) -> ExpertRows | None:
        """What the routers shall replay."""
        if self._replay is None or rows.experts is None:
            return None
        self._replay.check(rows.experts)
        return rows.experts

    # Training

    def update_policy(self, rows: PolicyRows, step: int) -> dict[str, float]:
        """One optimizer step per mini-batch, in row order, `ppo_epochs` times over the batch."""
        settings = self._settings.loss
        assert settings is not None, "a role without a loss cannot train"
        fields = {name: x for name in _POLICY_FIELDS if (x := getattr(rows, name)) is not None}
        experts = self._experts_of(rows)
        whole = StepRows(tokens=rows.tokens, lengths=rows.lengths, mask=rows.mask, fields=fields, experts=experts)

        def loss_for(denominators: Mapping[str, Denominators]) -> LossOfMicroBatch:
            def loss_of(batch: MicroBatch, output: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
                current = self._runner.logprobs(batch, output, with_entropy=True)
                return policy_loss(batch.fields, batch.mask, current, settings, denominators)

            return loss_of

        results = []
        for _ in range(settings.ppo_epochs):
            for part in self._mini_batches(whole):
                rows_to_train = self._rows_to_train(rows, part)
                result = self._step(whole, part, rows_to_train, loss_for, settings.normalizer_length)
                share = 1 - len(rows_to_train) / len(part)
                results.append({**result, "trainer/zero_gradient_rows_share": share})
        return _mean_of(results, "trainer")

    def _rows_to_train(self, rows: PolicyRows, part: range) -> list[int]:
        """The rows of a mini-batch with a gradient. Where every answer of a group has the same score, all
        advantages are zero, and so is the gradient: half of a late GRPO batch. The step is exactly the same without
        them, because the denominators count all rows. One row per data-parallel rank stays, for the schedule.
        """
        loss = self._settings.loss
        assert loss is not None
        all_have_gradients = loss.kl_coef > 0 or loss.entropy_coef > 0 or self._model.config.num_moe_experts is not None
        if all_have_gradients or loss.pg_variant not in ZERO_GRADIENT_WITHOUT_ADVANTAGE:
            return list(part)
        signal = rows.mask & (rows.advantages != 0)
        if rows.correction_weights is not None:
            signal &= rows.correction_weights != 0
        if rows.cross_entropy_mask is not None:
            signal |= rows.cross_entropy_mask
        has_gradient = signal.any(-1).tolist()
        to_train = [row for row in part if has_gradient[row]]
        least = min(len(part), parallel_state.get_data_parallel_world_size())
        zero_gradient = [row for row in part if not has_gradient[row]]
        return sorted(to_train + zero_gradient[: max(0, least - len(to_train))])

    @torch.no_grad()
    def compute_values(self, rows: TokenRows) -> Tensor | None:
        """[B,T] float32 on rank 0, None elsewhere: the value of the state before token t; 0 where not in the mask."""
        return self._score(rows, lambda batch, out: self._runner.to_rows(batch, out[..., 0]))

    def update_values(self, rows: ValueRows, step: int) -> dict[str, float]:
        """One optimizer step of the critic per mini-batch, in row order."""
        fields = {"old_values": rows.old_values, "returns": rows.returns}
        whole = StepRows(tokens=rows.tokens, lengths=rows.lengths, mask=rows.mask, fields=fields)

        def loss_for(denominators: Mapping[str, Denominators]) -> LossOfMicroBatch:
            def loss_of(batch: MicroBatch, output: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
                per_token, metrics = value_loss(
                    values_BT=self._runner.to_rows(batch, output[..., 0]),
                    old_values_BT=batch.fields["old_values"],
                    returns_BT=batch.fields["returns"],
                    mask_BT=batch.mask,
                    clip=self._settings.value_clip,
                )
                return aggregate(loss_BT=per_token, mask_BT=batch.mask, denominators=denominators["policy"]), metrics

            return loss_of

        results = [self._step(whole, part, part, loss_for, 1) for part in self._mini_batches(whole)]
        renamed = [{key.replace("trainer/", "critic/"): value for key, value in r.items()} for r in results]
        return _mean_of(renamed, "critic")

    def supervised_update(self, tokens: Tensor, lengths: Tensor, mask: Tensor) -> float:
        """One cross-entropy step on the masked tokens; the mean loss per token."""
        whole = StepRows(tokens=tokens, lengths=lengths, mask=mask, fields={})

        def loss_for(denominators: Mapping[str, Denominators]) -> LossOfMicroBatch:
            def loss_of(batch: MicroBatch, output: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
                logprobs = self._runner.logprobs(batch, output, with_entropy=False).logprobs
                return -logprobs.sum() / max(1, denominators["policy"].global_tokens), {}

            return loss_of

        rows = range(len(lengths))
        return self._step(whole, rows, rows, loss_for, 1)["trainer/loss"]

    def _mini_batches(self, whole: StepRows) -> list[range]:
        """Of equal size: trajectories of several rows make a batch that is no multiple of a mini-batch."""
        count = len(whole.lengths)
        parts = max(1, round(count / self._settings.mini_batch_rows))
        return [range(count * i // parts, count * (i + 1) // parts) for i in range(parts)]

    def _step(
        self,
        whole: StepRows,
        mini_batch: range,
        rows: Sequence[int],
        loss_for: Callable[[Mapping[str, Denominators]], LossOfMicroBatch],
        normalizer_length: int,
    ) -> dict[str, float]:
        """Forward and backward over the micro-batches of `rows`, clip, Adam; the step's metrics. The loss is divided by
        the counts of the whole mini-batch, metrics by the tokens they were summed over.
        """
        settings = self._settings.optimizer
        assert settings is not None
        self._state.demand(*STATE_KINDS)
        self._model.train(True)
        denominators = count_parts(whole.fields, whole.mask, mini_batch, normalizer_length)
        seen = count_parts(whole.fields, whole.mask, rows, 1)
        rate = learning_rate_at(self._optimizer_steps, settings)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        for part in self._network:
            part.zero_grad_buffer()
        self._optimizer.zero_grad()
        self._grad_scale.step_tokens = max(1, int(whole.lengths[list(rows)].sum()))
        batches = self._runner.micro_batches(whole, rows, self._settings.micro_batch_rows)
        losses, parts = self._runner.run(batches, loss_for(denominators), forward_only=False)
        on_device = nullcontext() if self._host_state is None else self._host_state.on_device()
        with cpu_shim.cuda_type_names(), on_device:
            stepped, grad_norm, _ = self._optimizer.step()  # pyright: ignore[reportGeneralTypeIssues]  # base: None
        self._optimizer_steps += 1
        loss, parts = self._collect(losses, parts)
        return {
            "trainer/loss": loss,
            "trainer/grad_norm": float(grad_norm) if grad_norm is not None else 0.0,
            "trainer/learning_rate": rate,
            "trainer/skipped_steps": float(not stepped),
            **reduce_metrics(parts=parts, denominators=seen["policy"], others=seen),
            **(self._replay.metrics() if self._replay is not None else {}),
        }

    def _collect(self, losses: list[Tensor], parts: list[dict[str, Tensor]]) -> tuple[float, list[dict[str, Tensor]]]:
        """The step's loss, and the metric sums of every data-parallel rank, on all ranks."""
        loss = float(torch.stack(losses).sum()) if losses else 0.0
        if self._spec.world_size == 1:
            return loss, parts
        own = (loss, [{k: v.cpu() for k, v in p.items()} for p in parts]) if ranks.reports() else (0.0, [])
        gathered: list = [None] * self._spec.world_size
        dist.all_gather_object(gathered, own)
        return sum(x[0] for x in gathered), [part for x in gathered for part in x[1]]

    # Weights and checkpoints

    def export_named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """HF-named full tensors; collective, so every rank must exhaust it. Only one data-parallel replica takes part:
        the other ranks get nothing and go on at once.
        """
        self._state.demand("weights")
        self._gather_parameters()
        return self._model.export() if ranks.exports(self._settings.parallel) else iter(())

    def weight_parts(self) -> Iterator[TensorPart]:
        """What this rank sends of the present weights in a push; no other rank takes part."""
        self._gather_parameters()
        return self._model.parts()

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
        """Write a transformers-loadable folder from rank 0."""
        tensors = self.export_named_tensors()
        if self._spec.rank == 0:
            dtype = str(TORCH_DTYPES[self._settings.dtype]).removeprefix("torch.")
            settings = self._settings
            write_hf_folder(folder, tensors, like=settings.model_folder, dtype=dtype, critic=settings.with_value_head)
        else:
            for _ in tensors:
                pass

    def save(self, folder: str, step: int, state: bytes, *, background: bool = False) -> None:
        """Atomic checkpoint of all ranks: `folder` exists only when it is complete. With `background` the weights of
        this moment are written while training goes on; `finish_save` completes it.
        """
        self._state.demand("weights", "optimizer")
        self._gather_parameters()
        self._checkpoint.save(
            folder, step=step, state=state, optimizer_steps=self._optimizer_steps, background=background
        )

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
        self._state.demand("weights", "optimizer")
        state, self._optimizer_steps = self._checkpoint.load(folder)
        return state


def _mean_of(results: list[dict[str, float]], part: str) -> dict[str, float]:
    """Mean over the optimizer steps of a batch; extremes by key; the learning rate of the last one."""
    merged: dict[str, float] = {f"{part}/optimizer_steps": float(len(results))}
    for key in results[0]:
        values = [r[key] for r in results if key in r]
        if key.endswith("_max"):
            merged[key] = max(values)
        elif key.endswith("_min"):
            merged[key] = min(values)
        else:
            merged[key] = sum(values) / len(values)
    merged[f"{part}/learning_rate"] = results[-1][f"{part}/learning_rate"]
    return merged
