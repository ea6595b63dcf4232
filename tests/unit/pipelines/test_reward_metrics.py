"""What a step says of its rewards."""

import pytest

from roll_async.pipelines.metrics import batch_metrics, reward_metrics, validation_metrics
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


def answered(build, domain, reward):
    prompt = build.prompt(domain=domain)
    return prompt, build.sample(prompt, reward=reward)


def test_a_validation_reports_the_whole_and_each_of_several_domains(build):
    metrics = validation_metrics(
        [
            answered(build, "math", Reward(score=1.0, metrics={"acc": 1.0, "format": 1.0})),
            answered(build, "math", Reward(score=0.5, metrics={"acc": 0.0, "format": 0.0})),
            answered(build, "code", Reward(score=0.0, metrics={"passed": 0.25})),
        ],
        num_asked=5,
    )
    assert metrics == {
        "validation/unscored": 2,
        "validation/samples": 3,
        "validation/reward": 0.5,
        "validation/accuracy": pytest.approx(1 / 3),
        "validation/length_mean": 2,
        "validation/metrics/format": 0.5,
        "validation/metrics/passed": 0.25,
        "validation/domains/math/samples": 2,
        "validation/domains/math/reward": 0.75,
        "validation/domains/math/accuracy": 0.5,
        "validation/domains/math/length_mean": 2,
        "validation/domains/math/metrics/format": 0.5,
        "validation/domains/code/samples": 1,
        "validation/domains/code/reward": 0.0,
        "validation/domains/code/accuracy": 0.0,
        "validation/domains/code/length_mean": 2,
        "validation/domains/code/metrics/passed": 0.25,
    }


def test_a_validation_of_one_domain_is_the_whole_and_one_without_answers_claims_no_mean(build):
    one = validation_metrics([answered(build, "math", Reward(score=1.0))], num_asked=1)
    assert one["validation/accuracy"] == 1.0 and not [name for name in one if "domains" in name]
    assert validation_metrics([], num_asked=4) == {"validation/unscored": 4.0, "validation/samples": 0.0}
