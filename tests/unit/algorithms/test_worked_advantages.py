"""The worked examples of the documentation: input F, its advantages, reward shaping, log-probs."""

import math

import pytest
import torch

from roll_async.algorithms.advantages import ADVANTAGES, AdvantageInputs
from roll_async.algorithms.logprobs import merge_vocab_shards, token_logprobs
from roll_async.algorithms.rewards import RunningMoments, normalise_rewards, overlong_penalty, role_baselines

MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 0, 1]]).bool()
GROUPS = torch.tensor([7, 7, 7, 3, 3])
SCORES = torch.tensor([1, 0, 0.5, 2, 2], dtype=torch.float64)


def rows(text, fill=0.0):
    """[5,3] float64; one number in a row stands for all its valid tokens."""
    result = torch.full(MASK.shape, fill, dtype=torch.float64)
    for b, row in enumerate(text.split(";")):
        numbers = torch.tensor([float(x) for x in row.split()], dtype=torch.float64)
        result[b, MASK[b]] = numbers.expand(int(MASK[b].sum())) if len(numbers) == 1 else numbers
    return result


def inputs(name):
    stepwise = name in ("gigpo", "step_reinforce")
    return AdvantageInputs(
        scores=torch.tensor([1, 0, 1, 2, 2], dtype=torch.float64) if stepwise else SCORES,
        mask=MASK,
        group_index=GROUPS,
        values=rows("0.1 0.2 0.3; 0.4; 0.5 0.6; 0.7 0.8 0.9; 1.0 1.1", math.nan),
        baseline_scores=torch.tensor([0.5, 0.5, 0.5, 1, 1], dtype=torch.float64),
        trajectory_index=torch.tensor([0, 1, 0, 2, 3]),
        step_index=torch.tensor([0, 0, 1, 0, 0]),
        step_rewards=torch.tensor([0.2, 0, 1, 0.5, 0.3], dtype=torch.float64),
        state_index=torch.tensor([0, 0, 1, 5, 5]),
        reward_parts=torch.tensor([[1, 0], [0, 0], [0.5, 1], [2, 0], [2, 1]], dtype=torch.float64),
        role_baselines=torch.tensor([0.05, 0.0475, 0.070125, 0.1, 0.195], dtype=torch.float64),
        logprobs=rows("-0.1 -0.2 -0.3; -0.4; -0.5 -0.6; -0.7 -0.8 -0.9; -1.0 -1.1", math.nan),
        squares=rows("0.9; 0.5; 0.6; 0.3; 0.2", math.nan),
    )


ESTIMATORS = [
    ("grpo", {}, "0.999998; -0.999998; 0; 0; 0"),
    ("dr_grpo", {}, "0.5; -0.5; 0; 0; 0"),
    ("rloo", {}, "0.75; -0.75; 0; 0; 0"),
    ("opo", {}, "0.333333; -0.666667; -0.166667; 0; 0"),
    ("maxrl", {}, "1; -1; 0; 0; 0"),
    ("gdpo", {}, "0.378029; -1.410824; 1.032795; -0.632455; 0.632455"),
    ("rae", {}, "0.95; -0.0475; 0.429875; 1.9; 1.805"),
    ("optimal_token_baseline", {}, "0.554219 0.357966 0; -0.445781; 0.054219 -0.142034; 0; 0"),
    ("gpg", {}, "0.833333; -0.833333; 0; 0; 0"),
    ("grpo_passk", {}, "0.999998; 0; 0; 0; 0"),
    ("lite_ppo", {}, "0.559016; -0.559016; 0; 0; 0"),
    ("reinforce", {"gamma": 0.9}, "0.81 0.9 1; 0; 0.45 0.5; 1.62 1.8 2; 1.8 2"),
    ("reinforce_plus_plus", {}, "-0.361814; -1.688464; -1.025139; 0.964836; 0.964836"),
    ("reinforce_plus_plus_baseline", {}, "1.356801; -1.959824; -0.301511; -0.301511; -0.301511"),
    ("remax", {}, "0.5; -0.5; 0; 1; 1"),
    ("gae", {}, "0.826750 0.765 0.7; -0.4; 0.005 -0.1; 1.187750 1.145 1.1; 0.955 0.9"),
    ("agentic_reinforce", {"gamma": 0.9}, "1; 0; 0.5; 2; 1.8 2"),
    ("step_reinforce", {}, "1.166411; -1.228897; 0.853980; -0.187459; -0.604034"),
    ("gigpo", {}, "1.414212; -1.414212; 0.707106; 0.707102; -0.707102"),
    ("gigpo", {"normalise_std": False, "step_reward_weight": 0.5}, "0.7875; -0.7875; 0.5; 0.05; -0.05"),
]


@pytest.mark.parametrize(
    ("name", "options", "expected"), ESTIMATORS, ids=[f"{e[0]}{i}" for i, e in enumerate(ESTIMATORS)]
)
def test_estimators_on_input_f(name, options, expected):
    advantages, _ = ADVANTAGES[name](inputs(name), **options)
    torch.testing.assert_close(advantages, rows(expected), rtol=0, atol=1.01e-6)


def test_baselines_of_roles_on_input_f():
    rows = {"scores_B": SCORES, "role_index_B": torch.tensor([0, 0, 0, 1, 1])}
    found, after = role_baselines(**rows, averages_R=torch.zeros(2), decay=0.95)
    assert found.tolist() == pytest.approx(inputs("rae").role_baselines.tolist())
    assert after.tolist() == pytest.approx([0.070125, 0.195])


def test_every_estimator_has_an_example():
    assert {name for name, _, _ in ESTIMATORS} == set(ADVANTAGES)


def test_gae_returns_on_input_f():
    _, returns = ADVANTAGES["gae"](inputs("gae"))
    expected = rows("0.926750 0.965 1; 0; 0.505 0.5; 1.887750 1.945 2; 1.955 2")
    torch.testing.assert_close(returns, expected, rtol=0, atol=1.01e-6)


@pytest.mark.parametrize(
    ("mean", "std", "expected"),
    [
        ("group", "group", [0.999998, -0.999998, 0, 0, 0]),
        ("batch", "batch", [-0.111803, -1.229836, -0.670820, 1.006229, 1.006229]),
        ("group", "batch", [0.559016, -0.559016, 0, 0, 0]),
        ("none", "group", [1.999996, 0, 0.999998, 2, 2]),
        ("running", "running", [-0.439086, -0.979499, -0.709293, 0.101328, 0.101328]),
    ],
)
def test_normalised_rewards(mean, std, expected):
    first = RunningMoments().merged(scores_B=torch.tensor([1.0, 2, 6]))
    moments = first.merged(scores_B=SCORES)
    assert (moments.count, moments.mean, moments.m2) == (8, pytest.approx(1.8125), pytest.approx(23.96875))
    result = normalise_rewards(scores_B=SCORES, group_index_B=GROUPS, mean=mean, std=std, running=moments)
    assert result.tolist() == pytest.approx(expected, abs=1.01e-6)


def test_overlong_penalty():
    known = {"max_length": 20480, "buffer_length": 4096}
    lengths = torch.tensor([16384, 16385, 18432, 20480, 21000])
    penalty = overlong_penalty(lengths_B=lengths, **known)
    assert penalty.tolist() == pytest.approx([0, -0.000244, -0.5, -1, -1], abs=1e-6)
    assert float(overlong_penalty(lengths_B=lengths[-1:], clamp=False, **known)) == pytest.approx(-1.126953, abs=1e-6)


@pytest.mark.parametrize(
    ("token", "options", "expected"),
    [
        (1, {}, -1.440190),
        (1, {"temperature": 0.5}, -2.145078),
        (1, {"top_k": 2}, -1.313262),
        (1, {"top_p": 0.6}, -1.313262),
        (3, {"top_k": 2}, -3.349012),
    ],
)
def test_token_logprobs(token, options, expected):
    logits = torch.tensor([[[2, 1, 0, -1]]], dtype=torch.float64)
    result = token_logprobs(logits_BTV=logits, tokens_BT=torch.tensor([[token]]), with_entropy=True, **options)
    entropy = 0.455429 if "temperature" in options else 0.947537
    assert float(result.logprobs) == pytest.approx(expected, abs=1e-6)
    assert float(result.entropy) == pytest.approx(entropy, abs=1e-6)


def test_merged_vocabulary_shards():
    merged = merge_vocab_shards(
        max_PN=torch.tensor([[2.0], [0.0]], dtype=torch.float64),
        sumexp_PN=torch.full((2, 1), 1 + math.exp(-1), dtype=torch.float64),
        target_logit_PN=torch.tensor([[1.0], [0.0]], dtype=torch.float64),
    )
    assert merged.tolist() == pytest.approx([-1.440190], abs=1e-6)
