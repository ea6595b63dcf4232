"""The loss of pairs against its formula."""

import math

import pytest
import torch

from roll_async.algorithms.objective import PreferenceOptions, preference_loss

LOGPROBS, REFERENCE = torch.tensor([-3.0, -5.0, -4.0, -2.0]), torch.tensor([-4.0, -4.5, -4.0, -3.0])


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_is_that_of_the_paper(smoothing):
    losses, sums = preference_loss(
        logprobs_2P=LOGPROBS,
        ref_logprobs_2P=REFERENCE,
        options=PreferenceOptions(beta=0.5, label_smoothing=smoothing),
    )
    margins = [0.5 * (1.0 - -0.5), 0.5 * (0.0 - 1.0)]
    expected = [-(1 - smoothing) * math.log(sigmoid(h)) - smoothing * math.log(sigmoid(-h)) for h in margins]
    assert losses.tolist() == pytest.approx(expected, rel=1e-5)
    assert {name: float(x) for name, x in sums.items()} == pytest.approx(
        {"rewards/chosen": 0.5, "rewards/rejected": 0.25, "rewards/margins": 0.25, "rewards/accuracies": 1.0}
    )


def test_the_gradient_raises_the_chosen_and_lowers_the_rejected_answer():
    logprobs = LOGPROBS.clone().requires_grad_()
    losses, _ = preference_loss(logprobs_2P=logprobs, ref_logprobs_2P=REFERENCE, options=PreferenceOptions(beta=0.5))
    losses.sum().backward()
    assert logprobs.grad is not None
    weight = [0.5 * sigmoid(-0.75), 0.5 * sigmoid(0.5)]
    assert logprobs.grad.tolist() == pytest.approx([-weight[0], weight[0], -weight[1], weight[1]], rel=1e-5)
