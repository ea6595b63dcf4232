"""What a step says of its rewards."""

from array import array
from dataclasses import replace
from pathlib import Path

import pytest

from roll_async.pipelines.metrics import batch_metrics, reward_metrics
from roll_async.pipelines.validation import (
    HeldOut,
    Validation,
    held_out_sets,
    pass_at_k,
    validation_metrics,
)
from roll_async.schema import FinishReason, Reward, SamplingParams

CONFIG = Path(__file__).resolve().parents[3] / "configs" / "rlvr_config_async_cpu.yaml"


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
    assert batch_metrics(groups)["reward/accuracy"] == 0.5


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
    return prompt, (build.sample(prompt, reward=reward),)


def test_a_validation_reports_the_whole_and_each_of_several_domains(build):
    scored = [
        answered(build, "math", Reward(score=1.0, metrics={"acc": 1.0, "format": 1.0})),
        answered(build, "math", Reward(score=0.5, metrics={"acc": 0.0, "format": 0.0})),
        answered(build, "code", Reward(score=0.0, metrics={"passed": 0.25})),
    ]
    lost = [build.prompt(domain="code", ids=(i,)) for i in (8, 9)]
    metrics = validation_metrics(scored, [prompt for prompt, _ in scored] + lost, num_samples=1)
    assert metrics == {
        "validation/unscored": 2,
        "validation/samples": 3,
        "validation/reward": 0.5,
        "validation/accuracy": pytest.approx(1 / 3),
        "validation/accuracy_complete": pytest.approx(1 / 3),
        "validation/length_mean": 2,
        "validation/prompts": 2,
        "validation/truncated": 0,
        "validation/standard_error": pytest.approx(0.25),
        "validation/metrics/format": 0.5,
        "validation/metrics/passed": 0.25,
        "validation/domains/math/samples": 2,
        "validation/domains/math/reward": 0.75,
        "validation/domains/math/accuracy": 0.5,
        "validation/domains/math/accuracy_complete": 0.5,
        "validation/domains/math/length_mean": 2,
        "validation/domains/math/prompts": 1,
        "validation/domains/math/truncated": 0,
        "validation/domains/math/avg@2": 0.5,
        "validation/domains/math/pass@1": 0.5,
        "validation/domains/math/pass@2": 1.0,
        "validation/domains/math/metrics/format": 0.5,
        "validation/domains/code/samples": 1,
        "validation/domains/code/reward": 0.0,
        "validation/domains/code/accuracy": 0.0,
        "validation/domains/code/accuracy_complete": 0.0,
        "validation/domains/code/length_mean": 2,
        "validation/domains/code/prompts": 1,
        "validation/domains/code/truncated": 0,
        "validation/domains/code/metrics/passed": 0.25,
    }


def test_a_validation_of_one_domain_is_the_whole_and_one_without_answers_claims_no_mean(build):
    asked = [build.prompt(domain="math")]
    one = validation_metrics([answered(build, "math", Reward(score=1.0))], asked, num_samples=1)
    assert one["validation/accuracy"] == 1.0 and not [name for name in one if "domains" in name]
    assert validation_metrics([], asked, num_samples=4) == {"validation/unscored": 4.0, "validation/samples": 0.0}


def test_pass_at_k_is_the_share_of_draws_with_a_right_sample():
    from itertools import combinations

    for right in range(6):
        samples = [1] * right + [0] * (5 - right)
        for k in range(1, 6):
            draws = list(combinations(samples, k))
            assert pass_at_k(5, right, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_samples_of_one_prompt_and_rows_of_one_question_are_one_unit_of_the_error(build):
    import statistics

    verdicts = {(1,): [1, 1, 1, 0], (2,): [0, 0, 0, 0], (3,): [1, 0, 0, 0]}
    samples = []
    for tokens, accs in verdicts.items():
        for number, acc in enumerate(accs):
            prompt = replace(build.prompt(), row_id=f"{tokens}-{number}", token_ids=array("i", tokens))
            sample = build.sample(prompt, reward=Reward(score=2.0 * acc, metrics={"acc": float(acc)}))
            row = replace(sample, finish_reason=FinishReason.LENGTH) if number == 0 else sample
            samples.append((prompt, (row,)))
    metrics = validation_metrics(samples, [prompt for prompt, _ in samples], num_samples=1)
    means = [0.75, 0.0, 0.25]
    assert metrics["validation/prompts"] == 3 and metrics["validation/truncated"] == 0.25
    assert metrics["validation/avg@4"] == pytest.approx(1 / 3) == metrics["validation/pass@1"]
    assert metrics["validation/pass@2"] == pytest.approx((1 + 0 + 0.5) / 3)
    assert metrics["validation/pass@4"] == pytest.approx(2 / 3)
    assert metrics["validation/standard_error"] == pytest.approx(statistics.stdev(means) / 3**0.5)


def drawn_names(metrics):
    return {name.removeprefix("validation/") for name in metrics if "@" in name}


def test_a_question_in_two_rows_renames_nothing_and_enters_with_all_of_its_samples(build):
    asked = [build.prompt(row_id=str(row), ids=(question,)) for row, question in enumerate((1, 2, 3, 3))]
    right = {"0": (1, 0, 0, 0), "1": (0, 0, 0, 0), "2": (0, 0, 0, 0), "3": (0, 0, 0, 1)}
    samples = [(prompt, (build.sample(prompt, score=float(x)),)) for prompt in asked for x in right[prompt.row_id]]
    metrics = validation_metrics(samples, asked, num_samples=4)
    assert drawn_names(metrics) == {"avg@4", "pass@1", "pass@2", "pass@4"}
    assert metrics["validation/avg@4"] == pytest.approx((1 / 4 + 0 + 1 / 8) / 3)
    assert metrics["validation/pass@4"] == pytest.approx((1 + 0 + pass_at_k(8, 1, 4)) / 3)
    once = validation_metrics(samples[::4], asked, num_samples=1)
    assert once["validation/prompts"] == 3 and not drawn_names(once), "one sample of most questions is no average"


def test_lost_samples_leave_the_names_and_their_question_leaves_pass_at_k(build):
    asked = [build.prompt(row_id=str(question), ids=(question,)) for question in (1, 2)]
    samples = [(p, (build.sample(p, score=float(p is asked[0])),)) for p in asked for _ in range(6)]
    metrics = validation_metrics(samples[:-1], asked, num_samples=6)
    assert drawn_names(metrics) == {"avg@6", "pass@1", "pass@2", "pass@4", "pass@6"}
    assert (metrics["validation/pass@4"], metrics["validation/pass@6"]) == (0.5, 1.0)
    assert drawn_names(validation_metrics(samples[:5], asked, num_samples=6)) == {"avg@6", "pass@1", "pass@2", "pass@4"}


def test_a_trajectory_is_as_long_as_its_sampled_tokens_in_all_rows_and_cut_where_its_last_row_is(build):
    prompt = build.prompt()
    called = build.sample(prompt, ids=(7, 8, 9), loss_mask=bytes((1, 0, 1)))
    metrics = validation_metrics([(prompt, (called,))], [prompt], num_samples=1)
    assert metrics["validation/length_mean"] == 2 and metrics["validation/truncated"] == 0
    cut = build.sample(prompt, ids=(7, 8, 9), finish_reason=FinishReason.LENGTH)
    for rows, truncated in (((called, cut), 1), ((cut, called), 0)):
        metrics = validation_metrics([(prompt, rows)], [prompt], num_samples=1)
        assert (metrics["validation/length_mean"], metrics["validation/truncated"]) == (5, truncated)
        assert metrics["validation/samples"] == 1


def test_worlds_whose_tasks_have_no_tokens_are_told_apart_by_their_seeds(build):
    samples = []
    for seed, accs in ((7, [1, 0]), (8, [0, 0])):
        for acc in accs:
            prompt = replace(build.prompt(), row_id=f"FrozenLake/{seed}", token_ids=array("i"))
            samples.append((prompt, (build.sample(prompt, reward=Reward(score=float(acc))),)))
    metrics = validation_metrics(samples, [samples[0][0], samples[2][0]], num_samples=2)
    assert metrics["validation/prompts"] == 2 and metrics["validation/pass@2"] == 0.5


def test_each_held_out_prompt_is_sampled_as_often_as_the_config_says(build):
    import asyncio

    from roll_async.config.api import load

    keys = {"eval_steps": 5, "validation.generating_args.num_return_sequences": 3}
    config = load(CONFIG, overrides=[f"{k}={v}" for k, v in keys.items()])
    sets = held_out_sets(config.validation_sampling, {"": [build.prompt(), build.prompt()]})
    assert sets[0].samples == 3

    class Source:
        async def validate(self, prompts, sampling, *, name):
            assert isinstance(sampling, SamplingParams)
            return [answered(build, "math", Reward(score=float(i % 3 == 0))) for i, _ in enumerate(prompts)]

    class Engines:
        def yield_validation(self, yields):
            assert not yields

    metrics = asyncio.run(Validation(sets, Source(), Engines(), lambda: 0)(5))
    assert metrics["validation/samples"] == 6 and metrics["validation/unscored"] == 0
    assert metrics["validation/accuracy"] == pytest.approx(1 / 3)


def test_a_set_of_the_config_has_its_own_files_or_the_main_ones_and_its_own_sampling():
    from roll_async.config.api import load

    greedy, sampled = "generating_args: {temperature: 0}", "{temperature: 0.7, num_return_sequences: 4}"
    sets = f"{{more: {{data_args: {{file_name: more.jsonl}}, {greedy}}}, sampled: {{generating_args: {sampled}}}}}"
    config = load(CONFIG, overrides=["eval_steps=5", f"validation.sets={sets}"])
    sets = held_out_sets(config.validation_sampling, dict.fromkeys(config.validation_sampling, ()))
    assert {s.name: (s.samples, s.sampling.temperature) for s in sets} == {
        "": (1, config.validation.generating_args.temperature),
        "more": (1, 0.0),
        "sampled": (4, 0.7),
    }
    assert {s.sampling.max_new_tokens for s in sets} == {config.response_length}
    files = {name: data.file_name for name, (_, data) in config.validation.data.items()}
    assert files["more"] == ("more.jsonl",) and files["sampled"] == files[""] != files["more"]


def test_each_set_has_its_sampling_and_its_metrics_and_counts_one_version_alone(build):
    import asyncio

    greedy, sampled = (SamplingParams(max_new_tokens=9, temperature=t) for t in (0.0, 0.6))
    asked, yielded = {}, []

    class Source:
        async def validate(self, prompts, sampling, *, name):
            asked[name] = (len(prompts), sampling.temperature)
            runs = ((7, 1), (8, 1)) if "aime" in name else ((7, 2),)
            kept = ((7, 2),)
            return [(p, (build.sample(p, runs=runs if i == 1 else kept),)) for i, p in enumerate(prompts)]

    class Engines:
        def yield_validation(self, yields):
            yielded.append(yields)

    sets = [HeldOut("", [build.prompt()] * 3, greedy), HeldOut("aime", [build.prompt()], sampled, 4)]
    metrics = asyncio.run(Validation(sets, Source(), Engines(), lambda: 7, yields=True)(7))
    assert asked == {"validation.7": (3, 0.0), "validation.7.aime": (4, 0.6)} and yielded == [True, False]
    assert metrics["validation/samples"] == 3 and metrics["validation/version"] == 7
    assert metrics["validation/sets/aime/samples"] == 3 and metrics["validation/sets/aime/unscored"] == 1
    assert metrics["validation/other_version"] == 1 and "validation/sets/aime/pass@2" in metrics
