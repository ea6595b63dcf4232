"""Dynamic sampling (DAPO, arXiv 2503.14476): a group is judged the moment all its samples are scored."""

from __future__ import annotations

from dataclasses import dataclass

from roll_async.algorithms.group_variance import group_verdict
from roll_async.algorithms.overlong import OverlongShaping
from roll_async.config.schema import PipelineConfig
from roll_async.rollout.group_source import GroupFate, GroupOutcome
from roll_async.schema import Group, Sample


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupFilter:
    """Which groups carry a signal (`algorithm.filter_groups`)."""

    metric: str = "score"
    variance_threshold: float = 1e-8
    singletons: str = "keep"
    shaping: OverlongShaping | None = None
    """The overlong penalty in the metric seq_final_reward; None = off."""

    @classmethod
    def of(cls, config: PipelineConfig, shaping: OverlongShaping | None = None) -> GroupFilter | None:
        """As the config has it; None = every group is kept."""
        groups = config.algorithm.filter_groups
        if not groups.enable:
            return None
        return cls(
            metric=groups.metric,
            variance_threshold=groups.variance_threshold,
            singletons=groups.singletons,
            shaping=shaping,
        )

    def judge(self, group: Group) -> GroupOutcome:
        """The variance test, on the metric the config names; a trajectory counts once, however many rows it has."""
        try:
            values = [metric_of(rows[0], self.metric, self.shaping) for rows in group.trajectories]
        except KeyError as missing:
            reason = f"filter_groups.metric {missing} is not reported by the reward, or by the world of an agent"
            return GroupOutcome(fate=GroupFate.FAILED, reason=reason)
        verdict = group_verdict(values, variance_threshold=self.variance_threshold, singletons=self.singletons)
        fate = GroupFate.KEPT if verdict == "keep" else GroupFate.FILTERED
        return GroupOutcome(fate=fate, group=group, reason=verdict, verdict=verdict)


def metric_of(sample: Sample, name: str, shaping: OverlongShaping | None = None) -> float:
    """The number that `filter_groups.metric` names: `score` as the reward gave it, `seq_reward` and `seq_final_reward`
    shifted, scaled and with the overlong penalty, or any number the reward reports. Raises KeyError for a number it
    does not report.
    """
    assert sample.reward is not None
    if name in ("seq_reward", "seq_final_reward"):
        score = sample.reward.score
        return score if shaping is None else shaping.shaped(score, sum(sample.loss_mask))
    return sample.reward.score if name == "score" else sample.reward.metrics[name]
