"""Megatron's pipeline schedule over the micro-batches of a step, and the model's answers per row.

Shape letters: b rows of a micro-batch, t its width, s fed positions, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from roll_async.algorithms.logprobs import TokenLogprobs
from roll_async.prompts.images import ImageReader
from roll_async.trainer.megatron.micro_batches import MicroBatch, ModelFeed, StepRows, cut, rows_of
from roll_async.trainer.megatron.model.attention import PackedRows
from roll_async.trainer.megatron.model.images import blank_image, embedded_with_images, tower_to_run
from roll_async.trainer.megatron.model.model_config import layers_of
from roll_async.trainer.megatron.model.output_head import OutputHead, logprobs_of_hidden
from roll_async.trainer.megatron.model.router_replay import RouterReplay
from roll_async.trainer.megatron.ranks import context_group, context_share, tensor_group
from roll_async.trainer.megatron.settings import MegatronSettings
from roll_async.trainer.megatron.shares import MiniBatch

LossOfMicroBatch = Callable[[MicroBatch, Tensor], tuple[Tensor, Mapping[str, Tensor]]]
"""(micro-batch, model output [b,s,H] or [b,s,1]) -> (share of the step's loss, metric sums)."""


class ModelRunner:
    """Feeds the parts of a model on this rank. `network`: one module, or one per virtual pipeline stage."""

    def __init__(
        self,
        network: Sequence[torch.nn.Module],
        config: TransformerConfig,
        settings: MegatronSettings,
        replay: RouterReplay | None = None,
    ) -> None:
        self._network, self._config, self._settings, self._replay = list(network), config, settings, replay
        self._device = next(p for part in self._network for p in part.parameters()).device
        heads = [m for part in self._network for m in part.modules() if isinstance(m, OutputHead)]
        self._head = heads[0] if heads else None
        for head in heads:
            head.deferred = True
        self._bounds_on_device = layers_of(settings).engine_attention

    def micro_batches(self, rows: StepRows, mini_batch: MiniBatch) -> list[MicroBatch]:
        """The micro-batches of a mini-batch, on the device; `rows` are those of this rank's share."""
        image_token = self._reader.token_id if rows.images else -1
        return [
            cut(
                part,
                rows,
                self._settings,
                device=self._device,
                context=context_share(),
                feed_shape=mini_batch.feed_shape,
                image_token=image_token,
            )
            for part in mini_batch.micro_batches
        ]

    @cached_property
    def _reader(self) -> ImageReader:
        """Raises ValueError for a model that reads no images."""
        return ImageReader(self._settings.model_folder)

    def run(
        self, batches: Sequence[MicroBatch], loss_of: LossOfMicroBatch, *, forward_only: bool
    ) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
        """Forward, and backward unless `forward_only`, over all micro-batches; losses and metric sums of this rank
        (last pipeline stage only).
        """
        losses: list[Tensor] = []
        parts: list[dict[str, Tensor]] = []

        def loss_function(batch: MicroBatch, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            if len(batch.rows):
                loss, metrics = loss_of(batch, output)
                losses.append(loss.detach())
                parts.append(dict(metrics))
            else:
                loss = output.sum() * 0  # filler: keeps the graph, adds nothing
            # Three values: of two Megatron would divide the loss by the number of micro-batches. The count is not used.
            return loss, torch.zeros((), dtype=torch.int, device=output.device), {}

        def forward_step(iterator: Iterator[MicroBatch], model: torch.nn.Module):  # noqa: ANN202
            batch = next(iterator)
            with self._replaying(batch.feed, may_recompute=not forward_only):
                return self._forward(model, batch.feed), partial(loss_function, batch)

        if self._replay is not None:
            self._replay.begin()
        interleaved = len(self._network) > 1
        feeds = [b.feed.tokens.shape for b in batches]
        get_forward_backward_func()(
            forward_step_func=forward_step,
            # Every interleaved stage takes the micro-batches from the first on.
            data_iterator=[iter(batches) for _ in self._network] if interleaved else iter(batches),
            model=self._network,
            num_microbatches=len(batches),
            # Of the whole row: Megatron divides it by the context ranks.
            seq_length=max(shape[1] for shape in feeds) * parallel_state.get_context_parallel_world_size(),
            micro_batch_size=max(shape[0] for shape in feeds),
            forward_only=forward_only,
        )
        return losses, parts

    def _forward(self, model: torch.nn.Module, feed: ModelFeed) -> Tensor:
        keywords: dict[str, object] = {}
        if feed.bounds is not None:
            assert feed.starts is not None
            keywords["packed_seq_params"] = PackedRows.of(
                feed.bounds,
                feed.starts,
                feed.positions[0] if feed.axes is None else feed.axes[:, 0],
                ranks=parallel_state.get_context_parallel_world_size(),
                on_device=self._bounds_on_device,
            )
        if self._config.num_moe_experts is not None and self._config.moe_aux_loss_coeff:
            keywords["padding_mask"] = self._padding_of_stage(model, feed)
        # A model that trains is wrapped for its gradients (`wrap`), one that only scores is not.
        part: GPTModel = getattr(model, "module", model)  # type: ignore[assignment]
        if (tower := tower_to_run(part, feed)) is not None:
            pixels = self._reader.pixels(feed.images) if feed.images else blank_image(tower)
            keywords["decoder_input"] = embedded_with_images(part, tower, feed, *pixels)
        return model(feed.tokens, feed.positions, None, **keywords)

    def _replaying(self, feed: ModelFeed, *, may_recompute: bool) -> AbstractContextManager[None]:
        """Inside, routers take the experts of the feed's record."""
        if self._replay is None:
            return nullcontext()
        return self._replay.feeding(feed.experts, may_recompute=may_recompute)

    def _padding_of_stage(self, model: torch.nn.Module, feed: ModelFeed) -> Tensor:
        """Megatron cuts the mask for sequence parallelism on the first stage only."""
        # A model that trains is wrapped for its gradients (`wrap`), one that only scores is not.
        first = getattr(model, "module", model).pre_process
        if first or not self._config.sequence_parallel:
            return feed.padding
        group = tensor_group()
        return feed.padding.chunk(group.size(), 1)[group.rank()].contiguous()

    def logprobs(
        self, batch: MicroBatch, hidden: Tensor, *, with_entropy: bool, with_squares: bool = False, plain: bool = False
    ) -> TokenLogprobs:
        """Log-prob of each token of the rows ([b,t], 0 outside the mask); entropy, sum of squared probabilities of what
        it was sampled from. `hidden` [b,s,H] is the model's output. `plain`: of the whole distribution at temperature 1
        instead.
        """
        settings = replace(self._settings, temperature=1.0, top_k=0, top_p=1.0) if plain else self._settings
        assert self._head is not None, "a role with a value head has no log-probs"
        feed = batch.feed
        result = logprobs_of_hidden(
            hidden,
            self._head,
            feed.targets,
            feed.asked,
            settings,
            with_entropy=with_entropy,
            with_squares=with_squares,
        )
        return TokenLogprobs(
            logprobs=self.to_rows(batch, result.logprobs),
            entropy=None if result.entropy is None else self.to_rows(batch, result.entropy),
            squares=None if result.squares is None else self.to_rows(batch, result.squares),
        )

    def to_rows(self, batch: MicroBatch, answers: Tensor) -> Tensor:
        """[b,t] of one answer per fed position ([b,s] of this context rank)."""
        flat = answers.reshape(-1)
        if parallel_state.get_context_parallel_world_size() > 1:
            flat = _GatherAnswers.apply(flat, context_group())
        return rows_of(batch, flat)


class _GatherAnswers(torch.autograd.Function):
    """All context ranks' answers. Every rank computes the same loss of whole rows, so each keeps its own share of the
    gradient: nothing is summed here, the gradient buffers sum over context ranks.
    """

    @staticmethod
    def forward(ctx, answers: Tensor, group: dist.ProcessGroup) -> Tensor:  # noqa: ANN001
        ctx.group = group
        out = answers.new_empty(group.size() * answers.shape[0])
        dist.all_gather_into_tensor(out, answers.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ANN001
        return grad.chunk(ctx.group.size())[ctx.group.rank()].contiguous(), None
