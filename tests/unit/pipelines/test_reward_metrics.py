"""What a step says of its rewards."""

import pytest

from roll_async.pipelines.metrics import batch_metrics, reward_metrics
from roll_async.schema import Reward


def group_of(build, domain, *rewards):
    prompt = build.prompt(domain=domain)
    samples = tuple(build.sample(prompt, reward=reward, sample_id=str(i)) for i, reward in enumerate(rewards))
    return build.group(prompt=prompt, samples=samples)


def test_numbers_of_a_reward_become_metrics_of_the_step(build):
    groups = [
        group_of(
            build,
            "math",
            Reward(score=1.0, metrics={"acc": 1.0, "format": 1.0, "f1": 0.5}, scoring_s=0.25),
            Reward(score=0.0, metrics={"acc": 0.0, "format": 0.0}, scoring_s=0.75),
        )
    ]
    metrics = reward_metrics(groups)
    assert metrics == {
        "time/scoring_mean_s": 0.5,
        "time/scoring_max_s": 0.75,
        "reward/metrics/f1": 0.5,
        "reward/metrics/format": 0.5,
    }
    assert batch_metrics(groups, 1)["reward/accuracy"] == 0.5


def test_several_domains_are_reported_one_by_one(build):
    groups = [
        group_of(build, "math", Reward(score=1.0, metrics={"acc": 1.0}), Reward(score=0.5, metrics={"acc": 0.0})),
        group_of(build, "code", Reward(score=-1.0)),
    ]
    metrics = reward_metrics(groups)
    assert metrics["reward/domains/math/share"] == pytest.approx(2 / 3)
    assert (metrics["reward/domains/math/mean"], metrics["reward/domains/math/accuracy"]) == (0.75, 0.5)
    assert (metrics["reward/domains/code/mean"], metrics["reward/domains/code/accuracy"]) == (-1.0, 0.0)
