"""A user's own loss and estimator, tried on two rows before anything starts.

What a function returns for two small rows tells most of what would end the run at its first step: an error of its own,
another shape, a loss without a gradient, numbers that are not finite.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from roll_async.algorithms.advantages import AdvantageInputs, estimator_function
from roll_async.algorithms.policy_losses import PolicyLossInputs, policy_loss_function
from roll_async.config.schema_algorithm import AlgorithmConfig
from roll_async.config.user_code import told


def unusable_code(algorithm: AlgorithmConfig) -> Iterator[tuple[str, str]]:
    """(key, message) of an own loss or estimator that fails on two rows."""
    attempts = {"algorithm.pg_variant": _try_loss, "algorithm.adv_estimator": _try_estimator}
    for key, path, _, _ in algorithm.own_code():
        try:
            attempts[key](algorithm)
        except Exception as error:  # a user's function may raise anything
            section, separator, text = str(error).partition(": ")
            # The checks of this project begin their message with the key at fault; a user's error does not.
            if isinstance(error, ValueError) and separator and section.startswith("algorithm."):
                yield section, text
            else:
                yield key, f"{path} failed for two example rows: {told(error)}"


def _rows() -> dict[str, Tensor]:
    """Two rows of one group, of three and two trained tokens; everything else is masked."""
    return {
        "mask": torch.tensor([[False, True, True, True], [False, True, True, False]]),
        "logprobs": torch.tensor([[0.0, -0.5, -1.0, -0.1], [0.0, -2.0, -0.3, 0.0]]),
        "scores": torch.tensor([1.0, 0.0]),
    }


def _try_loss(algorithm: AlgorithmConfig) -> None:
    rows = _rows()
    logprobs = rows["logprobs"].clone().requires_grad_()
    inputs = PolicyLossInputs(
        logprobs=logprobs,
        proximal_logprobs=rows["logprobs"] - 0.1,
        behaviour_logprobs=rows["logprobs"] + 0.1,
        advantages=torch.where(rows["mask"], torch.tensor([[1.0], [-1.0]]), 0),
        mask=rows["mask"],
        scores=rows["scores"],
        ref_logprobs=rows["logprobs"] - 0.2,
        segment_ids=torch.zeros_like(rows["mask"], dtype=torch.long),
    )
    loss, metrics = policy_loss_function(algorithm.pg_variant)(inputs, options=algorithm.pg_options)
    if not loss.isfinite().all():
        raise ValueError("algorithm.pg_variant: its loss is not finite for two example rows")
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    if not gradient.isfinite().all():
        raise ValueError("algorithm.pg_variant: its gradient is not finite for two example rows")
    if not gradient.any():
        raise ValueError("algorithm.pg_variant: its loss has no gradient with respect to inputs.logprobs")
    for name, value in metrics.items():
        if not value.isfinite().all():
            raise ValueError(f"algorithm.pg_variant: its metric {name} is not finite for two example rows")


def _try_estimator(algorithm: AlgorithmConfig) -> None:
    rows = _rows()
    inputs = AdvantageInputs(scores=rows["scores"], mask=rows["mask"], group_index=torch.zeros(2, dtype=torch.long))
    options = {"given": getattr(algorithm.adv_options, "given", {})}
    advantages, returns = estimator_function(algorithm.adv_estimator)(inputs, **options)
    if not (advantages.isfinite() & returns.isfinite()).all():
        raise ValueError("algorithm.adv_estimator: what it returns for two example rows is not finite")
