"""The policy loss of one micro-batch: everything between log-probs and the number that is differentiated.

policy * correction weights + kl_coef * KL(reference) - entropy_coef * entropy, same aggregation, same denominators
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from roll_async.algorithms.aggregation import Denominators, aggregate
from roll_async.algorithms.correction import interpolate_proximal
from roll_async.algorithms.kl import kl_estimate
from roll_async.algorithms.logprobs import TokenLogprobs
from roll_async.algorithms.policy_losses import POLICY_LOSSES, PolicyLossInputs
from roll_async.config.schema import PipelineConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSettings:
    """The policy loss; names as in roll_async.algorithms."""

    pg_variant: str
    pg_options: object
    loss_agg_mode: str = "token-mean"
    normalizer_length: int = 1
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    ppo_epochs: int = 1

    @classmethod
    def of(cls, config: PipelineConfig) -> LossSettings:
        """As the config has it."""
        algorithm = config.algorithm
        return cls(
            pg_variant=algorithm.pg_variant,
            pg_options=algorithm.pg_options,
            loss_agg_mode=algorithm.loss_agg_mode,
            normalizer_length=config.longest_response,
            entropy_coef=algorithm.entropy_loss_coef,
            kl_coef=algorithm.kl_loss_coef,
            kl_estimator=algorithm.kl_estimator,
            ppo_epochs=algorithm.ppo_epochs,
        )


def policy_loss(
    fields: Mapping[str, Tensor],
    mask: Tensor,
    current: TokenLogprobs,
    settings: LossSettings,
    denominators: Denominators,
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """([] share of the step's loss, metric sums). Shapes: B rows, T positions.

    `fields`: the tensors [B,T] of a micro-batch by name, as in `trainer/protocol.py: PolicyRows` (`scores` is [B]).
    `mask`: [B,T] bool, the trained tokens. `denominators`: of the whole batch.
    """
    f = fields
    proximal = f.get("proximal_logprobs")
    if proximal is None:
        proximal = interpolate_proximal(
            logprobs_BT=current.logprobs,
            behaviour_logprobs_BT=f["behaviour_logprobs"],
            version_lag_BT=f["version_lag"],
            mask_BT=mask,
        )
    inputs = PolicyLossInputs(
        logprobs=current.logprobs,
        proximal_logprobs=proximal,
        behaviour_logprobs=f["behaviour_logprobs"],
        advantages=f["advantages"],
        mask=mask,
        scores=f["scores"],
        ref_logprobs=f.get("ref_logprobs"),
        segment_ids=f.get("segment_ids"),
        selection=f.get("selection"),
    )
    per_token, metrics = POLICY_LOSSES[settings.pg_variant](inputs, options=settings.pg_options)

    def total(loss: Tensor, weights: Tensor | None = None) -> Tensor:
        return aggregate(
            loss_BT=loss, mask_BT=mask, mode=settings.loss_agg_mode, denominators=denominators, weights_BT=weights
        )

    loss = total(per_token, f.get("correction_weights"))
    metrics = dict(metrics)
    if settings.kl_coef > 0:
        kl = kl_estimate(
            logprobs_BT=current.logprobs,
            ref_logprobs_BT=f["ref_logprobs"],
            mask_BT=mask,
            estimator=settings.kl_estimator,
        )
        loss = loss + settings.kl_coef * total(kl)
        metrics["policy/reference_kl"] = kl.detach().sum()
    if current.entropy is not None:
        metrics["policy/entropy"] = torch.where(mask, current.entropy.detach(), 0).sum()
        if settings.entropy_coef > 0:
            loss = loss - settings.entropy_coef * total(current.entropy)
    return loss, metrics
