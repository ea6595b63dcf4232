"""Direct preference optimisation (Rafailov et al., 2023): a loss of pairs of whole answers.

Shape letters: P pairs; C chosen, R rejected answers of the same prompt, [P] each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceOptions:
    """Of the loss."""

    beta: float
    label_smoothing: float = 0.0


def preference_loss(
    *, logprobs_2P: Tensor, ref_logprobs_2P: Tensor, options: PreferenceOptions
) -> tuple[Tensor, dict[str, Tensor]]:
    """([P] loss of each pair, metrics as sums over pairs). Sums of log-probs over each answer, in the order chosen,
    rejected, chosen, ...

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
