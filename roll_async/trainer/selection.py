"""Token selections of the losses that need batch-wide statistics. Shape letters: B rows, T positions."""

from __future__ import annotations

import torch
from torch import Tensor

from roll_async.algorithms.token_selection import select_clip_cov, select_kl_cov, select_m2po
from roll_async.config.options.policy_loss_options import ClipCovOptions, KlCovOptions, M2poOptions
from roll_async.schema import TrainBatch


def select_tokens(
    pg_variant: str,
    options: object,
    *,
    batch: TrainBatch,
    proximal: Tensor,
    advantages: Tensor,
    mask: Tensor,
    seed: int,
) -> Tensor | None:
    """[B,T] bool for clip_cov, kl_cov and m2po, None for every other loss. `proximal` [B,T] stands for the current
    log-probs.
    """
    base = batch.behaviour_logprobs if getattr(options, "ratio_base", "") == "behaviour" else proximal
    match options:
        case ClipCovOptions():
            # A generator of its own, by seed and step: a step that is repeated after a restart selects the same.
            generator = torch.Generator().manual_seed(seed * 1_000_003 + batch.step)
            keys = torch.rand(mask.shape, generator=generator)
            return select_clip_cov(
                logprobs_BT=proximal,
                base_logprobs_BT=base,
                advantages_BT=advantages,
                mask_BT=mask,
                random_keys_BT=keys,
                options=options,
            )
        case KlCovOptions():
            return select_kl_cov(logprobs_BT=proximal, advantages_BT=advantages, mask_BT=mask, options=options)
        case M2poOptions():
            return select_m2po(logprobs_BT=proximal, base_logprobs_BT=base, mask_BT=mask, options=options)
        case _:
            return None
