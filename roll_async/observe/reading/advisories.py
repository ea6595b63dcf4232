"""What stands out in the metrics of a run, and what to do about it: plain rules on the newest steps. The run's own
warning of a flat reward (`recorder.py`) is by the rule of this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

Rows = Sequence[Mapping[str, float]]
_NEWEST = 20
_ENOUGH = 5
"""Steps before anything is said of their means."""
FLAT_STEPS = 3
"""Steps whose answers all have one score before that is worth a word."""


def flat_reward(metrics: Rows) -> float | None:
    """The reward of the newest steps if it is flat: all their answers have one score, or their means are the same to
    0.001. None if it is not, or if there are fewer than FLAT_STEPS, or _ENOUGH for their means.
    """
    newest = metrics[-_NEWEST:]
    scores = [row[key] for row in newest for key in ("reward/min", "reward/max") if key in row]
    means = [row["reward/mean"] for row in newest if "reward/mean" in row]
    if len(scores) >= 2 * FLAT_STEPS and min(scores) == max(scores):
        return scores[0]
    return means[-1] if len(means) >= _ENOUGH and max(means) - min(means) < 1e-3 else None


def advisories(metrics: Rows, config: Mapping[str, object]) -> list[dict[str, str]]:
    """`title` and `advice` of each rule that fires. `config`: values by their full key."""
    newest = metrics[-_NEWEST:]

    def mean(key: str, default: float = 0.0) -> float:
        values = [row[key] for row in newest if key in row]
        return sum(values) / len(values) if values else default

    found = list(_of_reward(metrics, newest, mean))
    if len(metrics) >= _ENOUGH:
        found += [*_of_time(mean), *_of_policy(mean, config)]
    return [{"title": title, "advice": advice} for title, advice in found]


Mean = Callable[..., float]


def _of_reward(metrics: Rows, newest: Rows, mean: Mean) -> Iterator[tuple[str, str]]:
    if (reward := flat_reward(metrics)) is not None:
        yield (
            f"The reward is flat at {reward:.3f}",
            "Read some answers below: does the reward find what it looks for? Groups whose answers all score the same "
            "teach nothing; easier prompts, a partial score or a higher temperature give them something to compare.",
        )
    elif len(metrics) >= 2 * _NEWEST and any("reward/mean" in row for row in newest):
        first = [row["reward/mean"] for row in metrics[:_NEWEST] if "reward/mean" in row]
        if first and mean("reward/mean") < sum(first) / len(first) - 0.05:
            yield (
                "The reward is lower than at the start",
                "Compare correction/kl and trainer/grad_norm with the first steps; lower the learning rate, or go back "
                "to a checkpoint before the fall.",
            )
    if len(metrics) < _ENOUGH:
        return
    truncated = mean("response/truncated")
    if truncated > 0.2:
        yield (
            f"{truncated:.0%} of the answers are cut at the length limit",
            "Raise response_length, or teach shorter answers (algorithm.overlong_buffer); a cut answer has no end to "
            "score.",
        )
    filtered, trained = (
        newest[-1].get(key, 0) - newest[0].get(key, 0) for key in ("groups/filtered", "groups/trained")
    )
    if filtered > trained > 0:
        yield (
            f"{filtered / (filtered + trained):.0%} of the groups are filtered out",
            "They cost generation and teach nothing: choose prompts that are neither solved nor hopeless, use "
            "prompt_pool, or more samples a group.",
        )


def _of_time(mean: Mean) -> Iterator[tuple[str, str]]:
    if mean("idle/trainer") > 0.5:
        cause = "scores" if mean("idle/trainer_rewards") > mean("idle/trainer_rollouts") else "answers"
        more = "more reward workers" if cause == "scores" else "more engines, shorter answers"
        yield (
            f"The trainer waits {mean('idle/trainer'):.0%} of the time for {cause}",
            f"Give it {more}, or a larger async_training.staleness.max_versions; `roll-async simulate` tells what "
            "another split of the devices would bring.",
        )
    if mean("idle/engines") > 0.5:
        yield (
            f"The engines are idle {mean('idle/engines'):.0%} of the time",
            "Training is the bottleneck: move devices from actor_infer to actor_train, or raise "
            "async_generation_ratio so that generation may run further ahead.",
        )


def _of_policy(mean: Mean, config: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    bound = config.get("async_training.staleness.max_versions")
    if isinstance(bound, int) and bound > 1 and mean("staleness/max") > bound - 0.5:
        yield (
            f"Staleness is at its bound of {bound} versions",
            "Generation stops there and engines wait. Lower async_generation_ratio, or raise "
            "async_training.staleness.max_versions and watch correction/ess.",
        )
    if mean("correction/ess", 1.0) < 0.7:
        yield (
            f"Effective sample size {mean('correction/ess'):.2f}: much of each batch counts little",
            "The answers are of another policy than the one that is trained: lower the staleness or the learning rate.",
        )
    if mean("weights/canary_alarms") > 0 or mean("weights/lag_zero_alarm") > 0:
        yield (
            "Engines and trainer disagree about the same tokens",
            "run.log names the suspect: precision, kernels, or weights that did not arrive; "
            "weight_sync.on_mismatch: stop ends such a run.",
        )
