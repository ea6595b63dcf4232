"""The real learner and collation over an actor that compares every tensor it is given with what the engines reported.

Invariant 13 by value, from the engine to the loss: tokens, masks, behaviour log-probs, versions, and advantages, which
are computed here once more, sample by sample. Imported by worlds that want it alone: it needs torch.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from math import isclose
from statistics import mean, stdev

from torch import Tensor

from roll_async.config.options.advantage_options import advantage_options_class
from roll_async.config.options.correction_options import CorrectionOptions
from roll_async.config.schema_algorithm import AlgorithmConfig
from roll_async.schema import Group
from roll_async.simulator.invariants import Watch
from roll_async.simulator.parts.text import Texts, expected_logprobs
from roll_async.simulator.scenario import Scenario
from roll_async.trainer.learner import Learner, LearnerOptions
from roll_async.trainer.protocol import PolicyRows, TokenRows
from roll_async.trainer.roles import LearnerParts

_EPSILON = 1e-6


def real_learner(
    scenario: Scenario, watch: Watch, make: type[Learner] | None = None
) -> Callable[[Sequence[Group], int], Awaitable[Mapping[str, float]]]:
    """What learns a batch; findings go to `watch`. `make`: a sub-class, which a test must find out."""
    queue, scheduler = scenario.queue, scenario.scheduler
    masks = queue.bound_versions if queue.policy.value == "token_mask" else None
    actor = ComparingActor(scenario, watch, masks)
    estimator = "remax" if scheduler.greedy_baseline else "grpo"
    algorithm = AlgorithmConfig(
        adv_estimator=estimator,
        proximal_logprobs="recompute",
        adv_options=advantage_options_class(estimator)(),
        correction=CorrectionOptions(weight_level="none"),
    )
    options = LearnerOptions(
        domains=("sim",),
        response_length=scheduler.sampling.max_new_tokens if scenario.worlds is None else scenario.worlds.max_context,
        algorithm=algorithm,
        mask_older_than=masks,
    )
    learner = (make or Learner)(LearnerParts(actor=actor), options)  # type: ignore[arg-type]

    async def learn(groups: Sequence[Group], step: int) -> Mapping[str, float]:
        actor.groups = groups
        return (await learner.learn(groups, step)).metrics

    return learn


class ComparingActor:
    """`trainer/protocol.py: TrainerGroup`, the part of it that a step uses."""

    def __init__(self, scenario: Scenario, watch: Watch, mask_older_than: int | None) -> None:
        self._scenario, self._watch, self._mask_older_than = scenario, watch, mask_older_than
        self.groups: Sequence[Group] = ()

    async def compute_logprobs(self, rows: TokenRows) -> Tensor:
        """Of the trainer's own policy: other numbers than the engines'."""
        return rows.mask * (-2.0 - rows.tokens % 7)

    async def update_policy(self, rows: PolicyRows, step: int) -> tuple[Mapping[str, float], None]:
        """Nothing is learned; every row is compared."""
        samples = [(group, sample) for group in self.groups for sample in group.samples]
        if len(samples) != len(rows.lengths):
            self._watch.report(13, f"step {step} trains {len(rows.lengths)} rows of {len(samples)} samples")
            return {}, None
        assert rows.proximal_logprobs is not None
        got = {
            "tokens": rows.tokens,
            "mask": rows.mask,
            "behaviour log-probs": rows.behaviour_logprobs,
            "proximal log-probs": rows.proximal_logprobs,
            "version lags": rows.version_lag,
            "advantages": rows.advantages,
        }
        for number, (group, sample) in enumerate(samples):
            expected = self._expected(group, number_of(group, sample.sample_id), step)
            size = int(rows.lengths[number])
            for name, tensor in got.items():
                row = tensor[number].tolist()
                if not _same(row[:size], expected[name]) or any(row[size:]):  # the padding must be 0
                    self._watch.report(
                        13, f"step {step}: {name} of sample {sample.sample_id} are {row}, expected {expected[name]}"
                    )
                    return {}, None
        return {"loss": 0.0}, None

    def _expected(self, group: Group, number: int, step: int) -> dict[str, list[float]]:
        """What a row must hold, by name of its tensor."""
        sample, sampling = group.samples[number], self._scenario.scheduler.sampling
        prompt, texts = sample.prompt_token_ids, self._scenario.texts
        ids, sampled = sample.response_token_ids, sample.loss_mask
        if isinstance(
            texts, Texts
        ):  # rows of a trajectory were compared with what the engines reported when they arrived
            ids, sampled = texts.whole(sample.sample_id, prompt, sampling.max_new_tokens, sampling.stop_strings)
        zeros = [0.0] * len(prompt)
        labels = [version for version, count in sample.version_runs for _ in range(count)]
        lags = [step - 1 - version for version in labels]
        oldest = self._mask_older_than
        mask = [bool(m) and (oldest is None or lag <= oldest) for m, lag in zip(sampled, lags, strict=True)]
        logprobs = expected_logprobs(sample.trajectory or sample.sample_id, len(prompt), sampled, sample.version_runs)
        advantage = self._advantage(group, number)
        return {
            "tokens": [*prompt, *ids],
            "mask": [*zeros, *mask],
            "behaviour log-probs": [*zeros, *logprobs],
            "proximal log-probs": [*zeros, *((-2.0 - t % 7) * m for t, m in zip(ids, sampled, strict=True))],
            "version lags": [*zeros, *(lag * m for lag, m in zip(lags, mask, strict=True))],
            "advantages": [*zeros, *(advantage * m for m in sampled)],
        }

    def _advantage(self, group: Group, number: int) -> float:
        """By hand: the lead over the greedy answer, or over the group's mean in standard deviations."""
        scores = [rows[0].reward.score for rows in group.trajectories if rows[0].reward is not None]
        mine = group.samples[number].reward
        assert mine is not None
        if group.baseline_score is not None:
            return mine.score - group.baseline_score
        if len(set(scores)) == 1:
            return 0.0
        return (mine.score - mean(scores)) / (stdev(scores) + _EPSILON)


def number_of(group: Group, sample_id: str) -> int:
    """Place of a sample in its group."""
    return next(i for i, sample in enumerate(group.samples) if sample.sample_id == sample_id)


def _same(row: Sequence[float], expected: Sequence[float]) -> bool:
    return len(row) == len(expected) and all(  # rows are float32
        a == b or isclose(a, b, abs_tol=1e-5) for a, b in zip(row, expected, strict=True)
    )
