"""The loss of one micro-batch, from log-probs to the number that is differentiated.

    policy          policy * correction weights - entropy_coef * entropy      rows with an advantage
    cross_entropy   cross_entropy_coef * -log pi                              supervised rows
    reference_kl    kl_coef * KL(reference)                                   distilled rows; without any, the policy's

The loss is the sum of the three, in one aggregation mode, each over the tokens and rows of its own part: one more
supervised row does not change the weight of the others.

Apart: the loss of pairs of whole answers (Rafailov et al., 2023), for rows that are not sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from roll_async.algorithms.aggregation import (
    Denominators,
    aggregate,
    count_denominators,
    merge_metrics,
    reduce_metrics,
)
from roll_async.algorithms.correction import CorrectionOptions, correct, correction_metrics, interpolate_proximal
from roll_async.algorithms.kl import kl_estimate
from roll_async.algorithms.logprobs import TokenLogprobs
from roll_async.algorithms.policy_losses import PolicyLossInputs, policy_loss_function
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
    cross_entropy_coef: float = 1.0
    ppo_epochs: int = 1
    proximal_logprobs: str = "reuse"
    """Where they come from when a micro-batch has none: interpolated, or else its own forward pass."""
    correction: CorrectionOptions = field(default_factory=lambda: CorrectionOptions(weight_level="none"))
    """For micro-batches without proximal log-probs, whose weights are not known before."""

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
            cross_entropy_coef=algorithm.cross_entropy_coef,
            ppo_epochs=algorithm.ppo_epochs,
            proximal_logprobs=config.source_of_proximal,
            correction=algorithm.correction,
        )


def part_masks(fields: Mapping[str, Tensor], mask: Tensor) -> dict[str, Tensor]:
    """[B,T] by part: the tokens each part trains. `mask`: the trained tokens of all parts."""
    policy = fields.get("policy_mask", mask)
    return {
        "policy": policy,
        "cross_entropy": fields.get("cross_entropy_mask", torch.zeros_like(mask)),
        "reference_kl": fields.get("reference_kl_mask", policy),
    }


def count_parts(
    fields: Mapping[str, Tensor], mask: Tensor, rows: Sequence[int], normalizer_length: int
) -> dict[str, Denominators]:
    """By part, the counts over these rows."""
    index = list(rows)
    return {
        name: count_denominators(mask_BT=part[index], normalizer_length=normalizer_length)
        for name, part in part_masks(fields, mask).items()
    }


def policy_loss(
    fields: Mapping[str, Tensor],
    mask: Tensor,
    current: TokenLogprobs,
    settings: LossSettings,
    denominators: Mapping[str, Denominators],
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """([] share of the step's loss, metric sums). Shapes: B rows, T positions.

    `fields`: the tensors [B,T] of a micro-batch by name, as in `trainer/protocol.py: PolicyRows` (`scores` is [B]).
    `mask`: [B,T] bool, the trained tokens of all parts. `denominators`: of the whole batch, by part. Metrics are sums
    over the tokens of the part their keys begin with.
    """
    f, masks = fields, part_masks(fields, mask)
    # From here `mask` is that of the policy part alone.
    supervised, mask = masks["cross_entropy"], masks["policy"]
    proximal, weights, corrected = f.get("proximal_logprobs"), f.get("correction_weights"), {}
    if proximal is None:
        proximal = _proximal_of(f, mask, current, settings)
        correction = correct(
            train_logprobs_BT=proximal,
            rollout_logprobs_BT=f["behaviour_logprobs"],
            mask_BT=mask,
            options=settings.correction,
            segment_ids_BT=f.get("segment_ids"),
            version_lag_BT=f["version_lag"],
        )
        weights, corrected = correction.weights, correction.sums
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
    per_token, metrics = policy_loss_function(settings.pg_variant)(inputs, options=settings.pg_options)

    def total(part: str, loss: Tensor, weights: Tensor | None = None) -> Tensor:
        return aggregate(
            loss_BT=loss,
            mask_BT=masks[part],
            mode=settings.loss_agg_mode,
            denominators=denominators[part],
            weights_BT=weights,
        )

    loss = total("policy", per_token, weights)
    metrics = {**metrics, **corrected}
    if "cross_entropy_mask" in f:
        loss = loss + settings.cross_entropy_coef * total("cross_entropy", -current.logprobs)
        metrics["cross_entropy/loss"] = -torch.where(supervised, current.logprobs.detach(), 0).sum()
    if settings.kl_coef > 0:
        kl = kl_estimate(
            logprobs_BT=current.logprobs,
            ref_logprobs_BT=f["ref_logprobs"],
            mask_BT=masks["reference_kl"],
            estimator=settings.kl_estimator,
        )
        loss = loss + settings.kl_coef * total("reference_kl", kl)
        # The first part of a key names the counts that its sum is divided by (`reduce_metrics`).
        own = "reference_kl/loss" if "reference_kl_mask" in f else "policy/reference_kl"
        metrics[own] = kl.detach().sum()
    if current.entropy is not None:
        metrics["policy/entropy"] = torch.where(mask, current.entropy.detach(), 0).sum()
        if settings.entropy_coef > 0:
            loss = loss - settings.entropy_coef * total("policy", current.entropy)
    return loss, metrics


def _proximal_of(fields: Mapping[str, Tensor], mask: Tensor, current: TokenLogprobs, settings: LossSettings) -> Tensor:
    """[B,T] proximal log-probs of a micro-batch that was not scored before the step."""
    if settings.proximal_logprobs != "interpolate":
        return current.logprobs.detach()
    return interpolate_proximal(
        logprobs_BT=current.logprobs,
        behaviour_logprobs_BT=fields["behaviour_logprobs"],
        version_lag_BT=fields["version_lag"],
        mask_BT=mask,
    )


def step_metrics(parts: Sequence[Mapping[str, Tensor]], counts: Mapping[str, Denominators]) -> dict[str, float]:
    """Published metrics of an optimizer step from those of all its micro-batches. `counts`: of the rows that were
    computed, by part of the loss.
    """
    own = [{key: x for key, x in part.items() if not key.startswith("correction/")} for part in parts]
    published = reduce_metrics(parts=own, denominators=counts["policy"], others=counts)
    # Apart: `correction_metrics` divides these sums by one another, not by the tokens of the loss.
    sums = merge_metrics([{key: x for key, x in part.items() if key.startswith("correction/")} for part in parts])
    return published | correction_metrics(sums=sums) if sums else published


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceOptions:
    """Of the loss."""

    beta: float
    label_smoothing: float = 0.0


def preference_loss(
    *, logprobs_2P: Tensor, ref_logprobs_2P: Tensor, options: PreferenceOptions
) -> tuple[Tensor, dict[str, Tensor]]:
    """([P] loss of each pair, metrics as sums over pairs), from sums of log-probs over each answer of P pairs, in the
    order chosen, rejected, chosen, ...

    Eq. 7 with a share `label_smoothing` of swapped labels:
    -(1 - s) log sigmoid(h) - s log sigmoid(-h), h = beta * (log-ratio of the chosen - log-ratio of the rejected).
    """
    rewards = options.beta * (logprobs_2P - ref_logprobs_2P)
    chosen, rejected = rewards.view(-1, 2).unbind(-1)
    margins = chosen - rejected
    smoothing = options.label_smoothing
    losses = -(1 - smoothing) * logsigmoid(margins) - smoothing * logsigmoid(-margins)
    sums = {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": margins,
        "rewards/accuracies": (margins > 0).float(),
    }
    return losses, {name: torch.sum(values.detach()) for name, values in sums.items()}
