"""Credit of trajectories: what an estimator says of a token does not depend on how the trajectory was cut into rows."""

import random
from array import array
from dataclasses import replace

import pytest
import torch

from roll_async.algorithms.advantages import ADVANTAGES, AdvantageInputs
from roll_async.buffer.group_codec import decode_group, encode_group
from roll_async.schema import FinishReason, Outcome, Reward, Sample, Turn
from roll_async.trainer import credit
from roll_async.trainer.collate import collate


def trajectories(rng, count):
    """[(turns as (num_tokens, reward, state), score)]"""
    found = []
    for _ in range(count):
        turns = [(rng.randint(1, 4), rng.choice([0.0, 0.25, 1.0]), rng.randint(0, 2)) for _ in range(rng.randint(1, 4))]
        found.append((turns, sum(r for _, r, _ in turns) + rng.choice([0.0, 0.5])))
    return found


def row(name, trajectory, turns, first_index, score, observed=2):
    """One row with these turns, an observation of so many tokens before each."""
    ids, mask, placed = [], [], []
    for offset, (size, reward, state) in enumerate(turns):
        ids += [9] * observed
        mask += [0] * observed
        placed.append(Turn(index=first_index + offset, start=len(ids), num_tokens=size, reward=reward, state=state))
        ids += [7] * size
        mask += [1] * size
    return Sample(
        sample_id=name,
        prompt_token_ids=array("i", [1]),
        response_token_ids=array("i", ids),
        loss_mask=bytes(mask),
        behaviour_logprobs=array("f", [-0.5] * len(ids)),
        version_runs=((0, len(ids)),),
        finish_reason=FinishReason.STOP,
        generation_s=1.0,
        reward=Reward(score=score),
        trajectory=trajectory,
        turns=tuple(placed),
        outcome=Outcome.SOLVED,
    )


def batch_of(build, groups, *, row_per_turn):
    made = []
    for number, members in enumerate(groups):
        samples = []
        for i, (turns, score) in enumerate(members):
            name = f"{number}/{i}"
            cuts = [[t] for t in turns] if row_per_turn else [turns]
            position = 0
            rows = []
            for part in cuts:
                rows.append(row(f"{name}#{position}", name, part, position, score))
                position += len(part)
            samples += reversed(rows)  # the order of rows must not matter
        made.append(build.group(group_id=number + 5, samples=tuple(samples)))
    return collate(made, step=1, domains=("math",))


def by_turn(batch, values):
    """{(trajectory, turn): values of its tokens}"""
    found = {}
    for k in range(len(batch.turns.index)):
        where = batch.turn_of == k
        found[int(batch.turns.trajectory[k]), int(batch.turns.index[k])] = values[where].tolist()
    return found


ESTIMATORS = sorted(set(ADVANTAGES) - {"remax"})


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("seed", range(4))
def test_the_cut_into_rows_changes_no_advantage(build, estimator, seed):
    rng = random.Random(seed)
    groups = [trajectories(rng, 4) for _ in range(3)]
    results = []
    for row_per_turn in (False, True):
        batch = batch_of(build, groups, row_per_turn=row_per_turn)
        parts = torch.stack([batch.scores, batch.scores**2], -1)
        evidence = credit.EstimatorInputs(reward_parts=parts, role_baselines=batch.scores / 3)
        if estimator == "gae":
            values = torch.where(batch.mask, 0.1 * (batch.turns.index[batch.turn_of.clamp(min=0)] + 1), torch.nan)
            evidence = credit.EstimatorInputs(values=values)
        elif estimator == "optimal_token_baseline":
            place = 0.05 * (batch.turns.index[batch.turn_of.clamp(min=0)] + 1)
            nan = torch.full_like(place, torch.nan)
            evidence = credit.EstimatorInputs(
                logprobs=torch.where(batch.mask, -5 * place, nan), squares=torch.where(batch.mask, place + 0.4, nan)
            )
        rewards = credit.token_rewards(batch, batch.scores)
        got, _ = credit.advantages(batch, estimator, {}, scores=batch.scores, rewards=rewards, evidence=evidence)
        assert bool((got[~batch.mask] == 0).all())
        results.append(by_turn(batch, got))
    assert results[0].keys() == results[1].keys()
    for key, expected in results[0].items():
        assert results[1][key] == pytest.approx(expected, abs=1e-5), (estimator, key)


def test_turn_rewards_lie_on_the_last_token_of_their_turn_and_the_rest_of_the_score_on_the_last_of_all(build):
    batch = batch_of(build, [[([(2, 0.2, 0), (1, 0.5, 1)], 1.0)]], row_per_turn=True)
    rewards = credit.token_rewards(batch, batch.scores)
    assert by_turn(batch, rewards) == {(0, 0): pytest.approx([0.0, 0.2]), (0, 1): pytest.approx([0.8])}


def test_grpo_counts_a_trajectory_once_however_many_rows_it_has(build):
    members = [([(1, 0.0, 0)] * 3, 1.0), ([(1, 0.0, 0)], 0.0)]
    batch = batch_of(build, [members], row_per_turn=True)
    got, _ = credit.advantages(batch, "grpo", {}, scores=batch.scores, rewards=None, evidence=credit.EstimatorInputs())
    plain, _ = ADVANTAGES["grpo"](
        AdvantageInputs(
            scores=torch.tensor([1.0, 0.0]), mask=torch.ones(2, 1, dtype=torch.bool), group_index=torch.tensor([5, 5])
        )
    )
    found = by_turn(batch, got)
    assert found[0, 0] == found[0, 1] == found[0, 2] == [pytest.approx(float(plain[0, 0]))]
    assert found[1, 0] == [pytest.approx(float(plain[1, 0]))]


@pytest.mark.parametrize("observed", [0, 2])
def test_a_turn_ends_where_it_says_and_not_where_an_observation_begins(build, observed):
    """A world may answer with nothing: then two turns lie side by side in the row."""
    turns, scores = [(2, 0.25, 0), (3, 1.0, 1), (1, 0.0, 2)], {"a": 1.5, "b": 1.0, "c": 0.5}
    samples = [row(n, n, turns[: 3 - i], 0, score, observed) for i, (n, score) in enumerate(scores.items())]
    batch = collate([build.group(samples=tuple(samples))], step=1, domains=("math",))
    found, _ = credit.advantages(
        batch,
        "agentic_reinforce",
        {},
        scores=batch.scores,
        rewards=credit.token_rewards(batch, batch.scores),
        evidence=credit.EstimatorInputs(),
    )
    # What is left of the score after the turns' own rewards comes with the last turn.
    returns = {
        (0, 0): [1.5] * 2,
        (0, 1): [1.25] * 3,
        (0, 2): [0.25],
        (1, 0): [1.0] * 2,
        (1, 1): [0.75] * 3,
        (2, 0): [0.5] * 2,
    }
    assert by_turn(batch, found) == returns


def test_gigpo_and_step_returns_follow_a_slow_loop(build):
    groups = [trajectories(random.Random(7), 5), trajectories(random.Random(8), 5)]
    batch = batch_of(build, groups, row_per_turn=False)
    _, returns = credit.advantages(
        batch,
        "step_reinforce",
        {"step_reward_gamma": 0.9},
        scores=batch.scores,
        rewards=None,
        evidence=credit.EstimatorInputs(),
    )
    found = by_turn(batch, returns)
    for number, (turns, score) in enumerate(member for group in groups for member in group):
        rewards = [r for _, r, _ in turns]
        rewards[-1] += score - sum(rewards)
        running = 0.0
        for index in reversed(range(len(turns))):
            running = rewards[index] + 0.9 * running
            assert found[number, index] == pytest.approx([running] * turns[index][0], abs=1e-5)


def test_estimators_that_compare_turns_refuse_single_answers(build):
    batch = collate([build.group()], step=1, domains=("math",))
    with pytest.raises(ValueError, match="need trajectories of turns"):
        credit.advantages(batch, "gigpo", {}, scores=batch.scores, rewards=None, evidence=credit.EstimatorInputs())


def test_rows_of_trajectories_survive_the_ledger(build):
    whole = row("a#0", "a", [(2, 0.25, 3), (1, 1.0, -4)], 0, 1.25)
    group = build.group(samples=(whole, replace(whole, sample_id="b#0", trajectory="b", outcome=Outcome.FAILED)))
    again = decode_group(*encode_group(group))
    assert again == group and len(again.trajectories) == 2


@pytest.mark.parametrize("outcome", [o for o in Outcome if not o.is_trusted])
def test_an_end_that_says_nothing_about_the_policy_carries_no_reward(outcome):
    whole = row("a", "a", [(2, 0.0, 0)], 0, 0.0)
    with pytest.raises(ValueError, match="carries no reward"):
        replace(whole, outcome=outcome)


def test_a_trained_token_outside_of_every_turn_is_refused(build):
    whole = row("a", "a", [(2, 0.0, 0)], 0, 1.0)
    cut = replace(whole, turns=(replace(whole.turns[0], num_tokens=1),))
    with pytest.raises(ValueError, match="none of its turns"):
        collate([build.group(samples=(cut,))], step=1, domains=("math",))
