"""Advantage estimators. Shape letters: B rows, T positions. No gradients.

Each takes `AdvantageInputs` and its own keyword options and returns (advantages [B,T], returns [B,T]), 0 where masked.
Names, defaults and ranges of the options are those of its class in `config/options/advantage_options.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from roll_async.algorithms.masked import (
    check_mask,
    check_shape,
    clean,
    dense_segments,
    segment_ids_from_mask,
    valid_positions_first,
    whiten,
    working_dtype,
)
from roll_async.algorithms.rewards import GroupStatistics, group_statistics, normalise_rewards
from roll_async.config.options.advantage_options import (
    ADVANTAGE_OPTIONS,
    AdvantageOptions,
    DiscountAdvantageOptions,
    GaeAdvantageOptions,
    GdpoAdvantageOptions,
    GigpoAdvantageOptions,
    GpgAdvantageOptions,
    GroupAdvantageOptions,
    LitePpoAdvantageOptions,
    OptimalTokenBaselineAdvantageOptions,
    RaeAdvantageOptions,
    StepReinforceAdvantageOptions,
)
from roll_async.config.options.user_options import own_function

Result = tuple[Tensor, Tensor]
O = TypeVar("O", bound=AdvantageOptions)  # noqa: E741


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageInputs:
    """A whole batch: groups complete, in any row order."""

    scores: Tensor  # [B] outcome score per row, after reward shaping
    mask: Tensor  # [B,T] bool
    group_index: Tensor  # [B] int64, rows of one prompt share a value
    token_rewards: Tensor | None = None  # [B,T]; replaces scores: row score = sum over valid tokens
    row_mask: Tensor | None = None  # [B] bool, False = padding row
    values: Tensor | None = None  # [B,T] critic (gae)
    baseline_scores: Tensor | None = None  # [B] greedy score of the row's prompt (remax)
    segment_ids: Tensor | None = None  # [B,T] (agentic_reinforce)
    trajectory_index: Tensor | None = None  # [B] int64, unique across groups (step_reinforce, gigpo)
    step_index: Tensor | None = None  # [B] int64, order inside the trajectory
    step_rewards: Tensor | None = None  # [B] reward of that step
    state_index: Tensor | None = None  # [B] int64 anchor state, meaningful inside a group (gigpo)
    reward_parts: Tensor | None = None  # [B,K] one column per reward (gdpo)
    role_baselines: Tensor | None = None  # [B] of rewards.py: role_baselines (rae)
    logprobs: Tensor | None = None  # [B,T] best known ones of the current weights (optimal_token_baseline)
    squares: Tensor | None = None  # [B,T] sum of all squared probabilities at the token (optimal_token_baseline)

    def __post_init__(self) -> None:
        check_mask(self.mask)


@dataclass(frozen=True, slots=True)
class _Batch:
    mask: Tensor  # [B,T], padding rows removed
    rows: Tensor  # [B] bool, counted rows
    rewards: Tensor  # [B,T]
    scores: Tensor  # [B], 0 in padding rows
    groups: GroupStatistics


def _batch(inputs: AdvantageInputs) -> _Batch:
    dtype = working_dtype(
        inputs.scores,
        inputs.token_rewards,
        inputs.values,
        inputs.baseline_scores,
        inputs.step_rewards,
        inputs.reward_parts,
        inputs.role_baselines,
        inputs.logprobs,
        inputs.squares,
    )
    rows = inputs.mask.new_ones(inputs.mask.shape[0]) if inputs.row_mask is None else inputs.row_mask
    mask = inputs.mask & rows[:, None]
    if inputs.token_rewards is not None:
        rewards = clean(inputs.token_rewards.detach(), mask, dtype)
        scores = rewards.sum(-1)
    else:
        scores = torch.where(rows, inputs.scores.detach().to(dtype), 0)
        last = mask & (mask.long().flip(-1).cumsum(-1).flip(-1) == 1)
        # On the last valid token, so that returns to go carry it to every token before.
        rewards = torch.where(last, scores[:, None], 0)
    return _Batch(mask, rows, rewards, scores, group_statistics(scores, inputs.group_index, rows))


def _need(inputs: AdvantageInputs, estimator: str, *names: str) -> list[Tensor]:
    missing = [name for name in names if getattr(inputs, name) is None]
    if missing:
        raise ValueError(f"{estimator} needs {', '.join(missing)}")
    return [getattr(inputs, name) for name in names]


def _spread(values_B: Tensor, batch: _Batch) -> Tensor:
    return torch.where(batch.mask, values_B[:, None], 0)


def _row_constant(advantage_B: Tensor, batch: _Batch) -> Result:
    return _spread(torch.where(batch.rows, advantage_B, 0), batch), _spread(batch.scores, batch)


def _centred(batch: _Batch) -> Tensor:
    """[B] score minus group mean; exactly 0 where all members are equal."""
    return torch.where(batch.groups.equal, 0, batch.scores - batch.groups.mean)


def _group_relative(batch: _Batch, normalise_std: bool, epsilon: float) -> Tensor:
    centred = _centred(batch)
    return centred / (batch.groups.std + epsilon) if normalise_std else centred


def keyword_options(estimator: Callable[[AdvantageInputs, O], Result]) -> Callable[..., Result]:
    """The estimator as a function of keywords, which its options class checks.

    >>> grpo(inputs, normalise_std=False)
    """
    options: Any = ADVANTAGE_OPTIONS[estimator.__name__]

    @wraps(estimator)
    def estimate(inputs: AdvantageInputs, **values: object) -> Result:
        return estimator(inputs, options(**values))

    return estimate


@keyword_options
def grpo(inputs: AdvantageInputs, options: GroupAdvantageOptions) -> Result:
    """GRPO (arXiv 2402.03300)."""
    batch = _batch(inputs)
    return _row_constant(_group_relative(batch, options.normalise_std, options.epsilon), batch)


def dr_grpo(inputs: AdvantageInputs) -> Result:
    """Dr. GRPO (arXiv 2503.20783): no division by the spread."""
    batch = _batch(inputs)
    return _row_constant(_centred(batch), batch)


def rloo(inputs: AdvantageInputs) -> Result:
    """RLOO (arXiv 2402.14740): R minus the mean of the other members = n / (n - 1) (R - mean)."""
    batch = _batch(inputs)
    n = batch.groups.count
    # A single member has nobody to compare with: its centred score is 0, whatever the factor.
    return _row_constant(_centred(batch) * n / (n - 1).clamp(min=1), batch)


def maxrl(inputs: AdvantageInputs) -> Result:
    """MaxRL (arXiv 2602.02710): (R - mean) / mean, the gradient of the log of the success rate, for scores >= 0. A
    group whose mean is not positive has advantage 0.
    """
    batch = _batch(inputs)
    mean = batch.groups.mean
    return _row_constant(torch.where(mean > 0, _centred(batch) / torch.where(mean > 0, mean, 1), 0), batch)


def opo(inputs: AdvantageInputs) -> Result:
    """OPO (arXiv 2505.23585): the length-weighted mean of the group as baseline."""
    batch = _batch(inputs)
    lengths = batch.mask.sum(-1).to(batch.scores.dtype)
    # Group ids grow over the run; scatter_add needs indices from 0.
    _, group = torch.unique(inputs.group_index, return_inverse=True)
    zeros = torch.zeros(int(group.max()) + 1 if group.numel() else 0, dtype=batch.scores.dtype, device=group.device)
    total = zeros.scatter_add(0, group, lengths)
    weighted = zeros.scatter_add(0, group, lengths * batch.scores)
    baseline = (weighted / torch.where(total > 0, total, 1))[group]
    return _row_constant(torch.where(batch.groups.equal, 0, batch.scores - baseline), batch)


@keyword_options
def gdpo(inputs: AdvantageInputs, options: GdpoAdvantageOptions) -> Result:
    """GDPO (arXiv 2601.05242): each reward normalised in its group, their weighted sum divided by its spread over the
    batch. The mean over the batch, which the paper subtracts, is 0: every group of every reward is centred.
    """
    (parts,) = _need(inputs, "gdpo", "reward_parts")
    batch = _batch(inputs)
    columns = parts.detach().to(batch.scores.dtype).unbind(-1)
    weights = options.weights or (1.0,) * len(columns)
    if len(weights) != len(columns):
        raise ValueError(f"gdpo has {len(weights)} weights for {len(columns)} rewards")
    normalise = partial(
        normalise_rewards, group_index_B=inputs.group_index, row_mask_B=batch.rows, epsilon=options.epsilon
    )
    total = torch.zeros_like(batch.scores)
    for weight, column in zip(weights, columns, strict=True):
        total = total + weight * normalise(scores_B=column, mean="group", std="group")
    return _row_constant(normalise(scores_B=total, mean="none", std="batch"), batch)


@keyword_options
def rae(inputs: AdvantageInputs, options: RaeAdvantageOptions) -> Result:
    """Role-conditioned advantage estimation (SPIRAL, arXiv 2506.24119): R minus the moving average of the scores of the
    row's role. The average is state of the run, which `rewards.py: role_baselines` takes on with `options.decay`.
    """
    (baselines,) = _need(inputs, "rae", "role_baselines")
    batch = _batch(inputs)
    return _row_constant(batch.scores - torch.where(batch.rows, baselines.detach().to(batch.scores.dtype), 0), batch)


@keyword_options
def optimal_token_baseline(inputs: AdvantageInputs, options: OptimalTokenBaselineAdvantageOptions) -> Result:
    """The optimal token baseline (arXiv 2602.07078): G_t - B_t, with B_t the mean return to go at the t-th sampled
    token over the group, weighted by W_t = sum over tokens up to t of 1 - 2 pi + sum pi^2, the squared norm of the
    gradient of the log-prob with respect to the logits.
    """
    logprobs, squares = _need(inputs, "optimal_token_baseline", "logprobs", "squares")
    batch = _batch(inputs)
    dtype = batch.scores.dtype
    order, inverse = valid_positions_first(batch.mask)
    valid = batch.mask.gather(1, order)
    energy = 1 - 2 * torch.exp(clean(logprobs.detach(), batch.mask, dtype)) + clean(squares.detach(), batch.mask, dtype)
    # A squared norm: at least (1 - pi)^2, but rounding can take it below 0.
    weight = torch.where(valid, torch.where(batch.mask, energy.clamp(min=0), 0).gather(1, order).cumsum(-1), 0)
    returns = _discounted(batch.rewards, batch.mask, 1.0)
    to_go = returns.gather(1, order)
    _, group = torch.unique(inputs.group_index, return_inverse=True)
    empty = to_go.new_zeros(int(group.max()) + 1 if group.numel() else 0, to_go.shape[1])
    count, plain, total, weighted = (
        empty.index_add(0, group, x) for x in (valid.to(dtype), to_go, weight, weight * to_go)
    )
    # No weight at all: every token so far was certain. Then the plain mean.
    baseline = torch.where(total > 0, weighted / torch.where(total > 0, total, 1), plain / count.clamp(min=1))[group]
    index = group[:, None].expand_as(to_go)
    lowest, highest = (
        (empty + sign * torch.inf).scatter_reduce(0, index, torch.where(valid, to_go, sign * torch.inf), reduce)[group]
        for sign, reduce in ((1, "amin"), (-1, "amax"))
    )
    # Equal members, or one alone: exactly 0, without the rounding of the weighted mean.
    advantage = torch.where(lowest >= highest, 0, to_go - baseline)
    if options.zero_tail:
        # Past the end of all others a token would be its own baseline. A group of one stays 0.
        advantage = torch.where((count[group] == 1) & (count[group, :1] > 1), to_go, advantage)
    return torch.where(batch.mask, advantage.gather(1, inverse), 0), returns


@keyword_options
def gpg(inputs: AdvantageInputs, options: GpgAdvantageOptions) -> Result:
    """GPG (arXiv 2504.02546): scaled up by the share of rows whose group has a signal."""
    batch = _batch(inputs)
    rows = batch.rows.sum()
    informative = (batch.rows & ~batch.groups.equal).sum()
    share = rows.to(batch.scores.dtype) / informative.clamp(min=1)
    alpha = torch.where(informative > 0, share, 1)
    return _row_constant(alpha * _group_relative(batch, options.normalise_std, options.epsilon), batch)


@keyword_options
def grpo_passk(inputs: AdvantageInputs, options: GroupAdvantageOptions) -> Result:
    """Pass@k training (arXiv 2503.19595): only the best member, by its lead over the second."""
    batch = _batch(inputs)
    advantage = torch.zeros_like(batch.scores)
    for index in torch.unique(inputs.group_index[batch.rows]):
        members = (batch.rows & (inputs.group_index == index)).nonzero()[:, 0]
        if len(members) < 2:
            continue
        top = batch.scores[members].topk(2)
        lead = top.values[0] - top.values[1]
        # A tie has no best member.
        if lead > 0:
            best = members[top.indices[0]]
            advantage[best] = lead / (batch.groups.std[best] + options.epsilon) if options.normalise_std else lead
    return _row_constant(advantage, batch)


@keyword_options
def lite_ppo(inputs: AdvantageInputs, options: LitePpoAdvantageOptions) -> Result:
    """Lite PPO (arXiv 2508.08221): group mean, batch spread."""
    batch = _batch(inputs)
    whole = group_statistics(batch.scores, torch.zeros_like(inputs.group_index), batch.rows)
    # The spread of equal values may be a rounding error instead of 0.
    usable = (whole.std > 0) & (whole.count >= 2) & ~whole.equal
    return _row_constant(torch.where(usable, _centred(batch) / (whole.std + options.epsilon), 0), batch)


def _discounted(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """[B,T] G_t = r_t + gamma * G of the next valid token; masked gaps neither discount nor contribute."""
    order, inverse = valid_positions_first(mask)
    compact, returns = rewards.gather(1, order), torch.zeros_like(rewards)
    # [B] of T = 0, too, where there is no column 0.
    running = torch.zeros_like(rewards[:, 0]) if rewards.shape[1] else rewards.sum(-1)
    for t in range(rewards.shape[1] - 1, -1, -1):
        running = compact[:, t] + gamma * running
        returns[:, t] = running
    return torch.where(mask, returns.gather(1, inverse), 0)


@keyword_options
def reinforce(inputs: AdvantageInputs, options: DiscountAdvantageOptions) -> Result:
    """REINFORCE: the discounted return to go."""
    batch = _batch(inputs)
    returns = _discounted(batch.rewards, batch.mask, options.gamma)
    return returns, returns


@keyword_options
def reinforce_plus_plus(inputs: AdvantageInputs, options: DiscountAdvantageOptions) -> Result:
    """REINFORCE++ (arXiv 2501.03262): returns whitened over the batch."""
    returns, _ = reinforce(inputs, gamma=options.gamma)
    # Not inputs.mask, which may have padding rows.
    return whiten(values_BT=returns, mask_BT=_batch(inputs).mask), returns


def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> Result:
    """REINFORCE++ with the group mean as baseline, whitened over the batch."""
    batch = _batch(inputs)
    spread, returns = _row_constant(_centred(batch), batch)
    return whiten(values_BT=spread, mask_BT=batch.mask), returns


def remax(inputs: AdvantageInputs) -> Result:
    """ReMax (arXiv 2310.10505): return minus the score of a greedy answer to the same prompt."""
    (baseline,) = _need(inputs, "remax", "baseline_scores")
    batch = _batch(inputs)
    returns = _discounted(batch.rewards, batch.mask, 1.0)
    baseline = torch.where(batch.rows, baseline.detach().to(returns.dtype), 0)
    return torch.where(batch.mask, returns - baseline[:, None], 0), returns


@keyword_options
def gae(inputs: AdvantageInputs, options: GaeAdvantageOptions) -> Result:
    """GAE (arXiv 1506.02438) on the compacted valid tokens; the value after the last valid token is 0. Not whitened."""
    (given,) = _need(inputs, "gae", "values")
    batch = _batch(inputs)
    dtype = batch.rewards.dtype
    order, inverse = valid_positions_first(batch.mask)
    values = clean(given.detach(), batch.mask, dtype).gather(1, order)
    rewards = batch.rewards.gather(1, order)
    advantages = torch.zeros_like(values)
    # [B]; a sum, because column 0 is not there where T is 0.
    following_value, following = torch.zeros_like(values.sum(-1)), torch.zeros_like(values.sum(-1))
    valid = batch.mask.gather(1, order)
    for t in range(values.shape[1] - 1, -1, -1):
        delta = rewards[:, t] + options.gamma * following_value - values[:, t]
        following = torch.where(valid[:, t], delta + options.gamma * options.lam * following, 0)
        advantages[:, t] = following
        following_value = values[:, t]
    returns = advantages + values
    back = [torch.where(batch.mask, x.gather(1, inverse), 0) for x in (advantages, returns)]
    return back[0], back[1]


@keyword_options
def agentic_reinforce(inputs: AdvantageInputs, options: DiscountAdvantageOptions) -> Result:
    """Return to go over turns: G_k = (rewards of turn k) + gamma G_{k+1}, on all tokens of the turn."""
    batch = _batch(inputs)
    ids = segment_ids_from_mask(mask_BT=batch.mask) if inputs.segment_ids is None else inputs.segment_ids
    ids = dense_segments(segment_ids_BT=ids, mask_BT=batch.mask)
    # Masked tokens are counted to turn 0, with a reward of 0.
    per_turn = torch.zeros_like(batch.rewards).scatter_add(1, ids, batch.rewards)
    running, returns = torch.zeros_like(batch.scores), torch.zeros_like(batch.rewards)
    # Turns that a row does not have come after its last one, and hold 0.
    for k in range(per_turn.shape[1] - 1, -1, -1):
        running = per_turn[:, k] + options.gamma * running
        returns[:, k] = running
    result = torch.where(batch.mask, returns.gather(1, ids), 0)
    return result, result


def _step_returns(trajectory: Tensor, step: Tensor, rewards: Tensor, rows: Tensor, gamma: float) -> Tensor:
    """[B] S_i = reward_i + gamma S of the next step of the same trajectory."""
    returns = torch.zeros_like(rewards)
    for index in torch.unique(trajectory[rows]):
        members = (rows & (trajectory == index)).nonzero()[:, 0]
        running = rewards.new_zeros(())
        for row in members[torch.argsort(step[members], descending=True)]:
            running = rewards[row] + gamma * running
            returns[row] = running
    return returns


@keyword_options
def step_reinforce(inputs: AdvantageInputs, options: StepReinforceAdvantageOptions) -> Result:
    """Discounted step returns, normalised over batch or group; one row is one step."""
    trajectory, step, rewards = _need(inputs, "step_reinforce", "trajectory_index", "step_index", "step_rewards")
    batch = _batch(inputs)
    rewards = torch.where(batch.rows, rewards.detach().to(batch.scores.dtype), 0)
    returns = _step_returns(trajectory, step, rewards, batch.rows, options.step_reward_gamma)
    normed = normalise_rewards(
        scores_B=returns,
        group_index_B=inputs.group_index,
        mean=options.mean,
        std=options.std,
        row_mask_B=batch.rows,
        epsilon=options.epsilon,
    )
    return _spread(normed, batch), _spread(returns, batch)


@keyword_options
def gigpo(inputs: AdvantageInputs, options: GigpoAdvantageOptions) -> Result:
    """GiGPO (arXiv 2505.10978): episode advantage within the group plus step advantage within the same anchor state."""
    trajectory, step, rewards, state = _need(
        inputs, "gigpo", "trajectory_index", "step_index", "step_rewards", "state_index"
    )
    batch = _batch(inputs)
    rewards = torch.where(batch.rows, rewards.detach().to(batch.scores.dtype), 0)
    returns = _step_returns(trajectory, step, rewards, batch.rows, options.step_reward_gamma)
    first = torch.zeros_like(batch.rows)
    first_of = torch.arange(len(first), device=first.device)
    for index in torch.unique(trajectory[batch.rows]):
        members = (batch.rows & (trajectory == index)).nonzero()[:, 0]
        lead = members[torch.argmin(step[members])]
        # An episode counts once in its group, by its first step, however many steps it has.
        first[lead], first_of[members] = True, lead

    def relative(x: Tensor, stats: GroupStatistics) -> Tensor:
        centred = torch.where(stats.equal, 0, x - stats.mean)
        return centred / (stats.std + options.epsilon) if options.normalise_std else centred

    # Token rewards hold one step's share; what the whole episode earned stands in `scores` alone.
    scores = torch.where(first, inputs.scores.detach().to(batch.scores.dtype), 0)
    episode = relative(scores, group_statistics(scores, inputs.group_index, first))[first_of]
    # With the group: state numbers have a meaning inside a group only.
    _, anchor = torch.unique(torch.stack([inputs.group_index, state], -1), dim=0, return_inverse=True)
    steps = relative(returns, group_statistics(returns, anchor, batch.rows))
    combined = torch.where(batch.rows, options.episode_reward_weight * episode + options.step_reward_weight * steps, 0)
    return _spread(combined, batch), _spread(returns, batch)


ADVANTAGES: dict[str, Callable[..., Result]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "opo": opo,
    "maxrl": maxrl,
    "gdpo": gdpo,
    "rae": rae,
    "optimal_token_baseline": optimal_token_baseline,
    "gpg": gpg,
    "grpo_passk": grpo_passk,
    "lite_ppo": lite_ppo,
    "reinforce": reinforce,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
    "gae": gae,
    "agentic_reinforce": agentic_reinforce,
    "step_reinforce": step_reinforce,
    "gigpo": gigpo,
}


def estimator_function(name: str) -> Callable[..., Result]:
    """An estimator by its name, or a user's own by dotted path. Raises ValueError where there is none."""
    return ADVANTAGES[name] if name in ADVANTAGES else _own_estimator(name)


@cache
def _own_estimator(path: str) -> Callable[..., Result]:
    """`function(inputs, options)` returns (advantages [B,T], returns [B,T]); what it returns where masked is dropped.
    A row of its inputs is a trajectory, `token_rewards` and `row_mask` are always there, and padding rows are masked.
    """
    function = own_function(path, "algorithm.adv_estimator", "algorithm.adv_options", "(advantages, returns)")

    def estimate(inputs: AdvantageInputs, *, given: Mapping[str, object]) -> Result:
        batch = _batch(inputs)
        whole = replace(inputs, scores=batch.scores, mask=batch.mask, row_mask=batch.rows, token_rewards=batch.rewards)
        advantages, returns = function(whole, given)
        check_shape(advantages, batch.mask, f"algorithm.adv_estimator: the advantages of {path}")
        check_shape(returns, batch.mask, f"algorithm.adv_estimator: the returns of {path}")
        return torch.where(batch.mask, advantages, 0), torch.where(batch.mask, returns, 0)

    return estimate
