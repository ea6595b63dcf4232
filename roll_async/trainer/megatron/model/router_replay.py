"""Replay of recorded expert choices: a router takes the experts an engine took, and weighs them with its own logits, so
that gradients reach the router as ever. Engine and trainer then compute the same function of the tokens.

Every `TopKRouter` of Megatron-Core asks its `router_replay` object, the seam of `moe_enable_routing_replay`, which
experts to take. Megatron's own object is told by a list per layer; ours knows the micro-batch under way. Layers whose
activations are computed again in the backward pass replay there what they took in the forward pass. Positions without
a record (-1: padding, the last token of a row) go where the router sends them.

Shape letters: b rows, s fed positions, L layers of the record, K experts per token, N tokens of a layer, E experts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from roll_async.schema import ExpertRows
from roll_async.trainer.megatron.ranks import tensor_group

DefaultTopK = Callable[[Tensor, int, int | None, int | None], tuple[Tensor, Tensor]]


class RouterReplay:
    """All routers of this rank. `feeding` says what they replay until it is left."""

    def __init__(self, chunks: Sequence[torch.nn.Module], config: TransformerConfig) -> None:
        """Raises ValueError for a model without experts, and for a fused router, which cannot be replayed."""
        if config.num_moe_experts is None:
            raise ValueError("actor_train.router_replay=true, but the model has no experts; set it to false")
        if config.moe_router_fusion:
            raise ValueError(
                "actor_train.router_replay=true is not possible with extra.moe_router_fusion; set one of them to false"
            )
        self._config = config
        self._expert_layers = _layers_with_experts(config)
        self._experts: Tensor | None = None
        self._may_recompute = False
        self._routers = [
            _ReplayedRouter(self, router)
            for chunk in chunks
            for router in chunk.modules()
            if isinstance(router, TopKRouter)
        ]
        self._device = next(chunks[0].parameters()).device
        self._feeding = False
        self.begin()

    def check(self, rows: ExpertRows) -> None:
        """Raises ValueError for records of another model."""
        layers, top_k = rows.ids.shape[1:]
        known = (len(self._expert_layers), self._config.num_layers)
        if layers not in known or top_k != self._config.moe_router_topk:
            raise ValueError(
                f"recorded experts have {layers} layers with {top_k} experts per token, the trainer's model "
                f"{known[0]} with {self._config.moe_router_topk}: engine and trainer must load the same model"
            )

    def begin(self) -> None:
        """A new pass over micro-batches."""
        for router in self._routers:
            router.first_passes.clear()
        self._agreed = self._replayed = torch.zeros((), dtype=torch.int64, device=self._device)
        self._routed = 0

    @contextmanager
    def feeding(self, experts: Tensor | None, *, may_recompute: bool) -> Iterator[None]:
        """Inside, a forward pass of one micro-batch: routers replay `experts` [b,s,L,K] int16 of all its positions (of
        this context rank). With `may_recompute`, layers run without gradients will run again in the backward pass.
        """
        self._experts, self._may_recompute, self._feeding = experts, may_recompute, True
        try:
            yield
        finally:
            self._experts, self._feeding = None, False

    def choice(self, router: _ReplayedRouter) -> Tensor | None:
        """[N,K] int64 what a router replays now, -1 where nothing is recorded; None = nothing at all."""
        if not self._feeding:  # the backward pass of a micro-batch: in the order of the forward passes
            return router.first_passes.popleft()
        chosen = None
        if self._experts is not None:
            layers = self._experts.shape[2]
            index = router.layer if layers == self._config.num_layers else self._expert_layers.index(router.layer)
            positions = self._experts[:, :, index].transpose(0, 1)  # [s,b,K], Megatron's order of tokens
            if self._config.sequence_parallel:
                group = tensor_group()
                positions = positions.chunk(group.size())[group.rank()]
            chosen = positions.reshape(-1, positions.shape[-1]).long()
        if self._may_recompute and not torch.is_grad_enabled():
            router.first_passes.append(chosen)
        return chosen

    def count(self, own: Tensor, recorded: Tensor | None) -> None:
        """For `metrics`, once per token and layer: `own` [N,K] the router's choice, beside what it replays."""
        if not self._feeding:
            return
        self._routed += own.numel()
        if recorded is not None:
            # [N,K]; in any order, as the experts of a token are a set.
            same = (own[:, :, None] == recorded[:, None]).any(-1)
            # Not in place: `begin` gives both counts the same tensor.
            self._agreed = self._agreed + same.sum()
            self._replayed = self._replayed + (recorded >= 0).sum()

    def metrics(self) -> dict[str, float]:
        """Over all layers and tokens of all ranks since `begin`; collective."""
        counts = torch.stack([self._agreed, self._replayed, torch.full_like(self._agreed, self._routed)])
        if dist.get_world_size() > 1:
            dist.all_reduce(counts)
        agreed, replayed, routed = counts.tolist()
        return {
            "router/replayed_share": replayed / max(1, routed),
            "router/agreement": agreed / replayed if replayed else 1.0,
        }


class _ReplayedRouter:
    """What one router asks."""

    def __init__(self, replay: RouterReplay, router: TopKRouter) -> None:
        assert router.layer_number is not None, "the layer around it sets the number"
        self.layer = router.layer_number - 1
        """Counted over the whole model."""
        self.first_passes: deque[Tensor | None] = deque()
        """What layers whose activations are computed again replayed, micro-batch by micro-batch."""
        self._replay = replay
        router.router_replay = self  # pyright: ignore[reportAttributeAccessIssue]  # Megatron calls get_replay_topk only

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: DefaultTopK,
    ) -> tuple[Tensor, Tensor]:
        """(scores [N,K] of the experts to take, their ids [N,K]) for `scores` [N,E]."""
        values, own = default_compute_topk(scores, topk, num_groups, group_topk)
        recorded = self._replay.choice(self)
        self._replay.count(own, recorded)
        if recorded is None:
            return values, own
        taken = torch.where(recorded >= 0, recorded, own)
        return scores.gather(1, taken), taken


def _layers_with_experts(config: TransformerConfig) -> list[int]:
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        return [layer for layer in range(config.num_layers) if layer % frequency == 0]
    return [layer for layer, has_experts in enumerate(frequency) if has_experts]
