"""Staleness of the trained groups and where it arose, and whether their choice was biased by response length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from roll_async.config.staleness import staleness
from roll_async.schema import FinishReason, Group, Sample, WeightVersion


def response_lengths(group: Group) -> list[int]:
    """Response tokens per sample."""
    return [len(sample.response_token_ids) for sample in group.samples]


def finished_lengths(group: Group) -> list[int]:
    """Response tokens of the samples that were not aborted."""
    return [len(s.response_token_ids) for s in group.samples if s.finish_reason is not FinishReason.ABORT]


def length_bucket(length: int) -> int:
    """Smallest power of two that is not below `length`: 1, 2, 4, 8 ..."""
    return 1 << max(0, length - 1).bit_length()


def group_bytes(group: Group) -> int:
    """Bytes of the token arrays of a group: ids and log-probs 4 each, loss mask 1, recorded experts 1 or 2 each; and of
    the files of its images.
    """
    size = 4 * len(group.prompt.token_ids) + sum(len(image.data) for image in group.prompt.images)
    for sample in group.samples:
        shared = sample.prompt_token_ids is group.prompt.token_ids  # an equal array of its own takes memory again
        size += 9 * len(sample.response_token_ids) + (0 if shared else 4 * len(sample.prompt_token_ids))
        if sample.experts is not None:
            size += sample.experts.ids.itemsize * len(sample.experts.ids)
    return size


def trained_tokens_by_version(sample: Sample) -> Counter[WeightVersion]:
    """Tokens with loss mask 1, by the weight version that sampled them."""
    counts: Counter[WeightVersion] = Counter()
    position = 0
    for version, count in sample.version_runs:
        counts[version] += sample.loss_mask.count(1, position, position + count)
        position += count
    return +counts  # the + drops versions without a trained token


def newest_trained_version(group: Group) -> WeightVersion | None:
    """Version of the newest token with loss mask 1; None without one."""
    return max((v for sample in group.samples for v in trained_tokens_by_version(sample)), default=None)


def newest_version(group: Group) -> WeightVersion | None:
    """Version of the newest token of the group, masked tokens included; None without tokens."""
    return max((version for sample in group.samples for version, _ in sample.version_runs), default=None)


@dataclass(kw_only=True, slots=True)
class LengthAudit:
    """Response lengths of generated and of trained samples: shows a bias against long answers.

    An aborted answer is at least as long as its tokens so far: its length is censored. Without these the mean would be
    too low, because an early stop aborts the long ones.
    """

    generated_samples: int = 0
    """Finished samples."""
    generated_tokens: int = 0
    """Tokens of the finished samples."""
    trained_samples: int = 0
    trained_tokens: int = 0
    dropped_by_length: Counter[int] = field(default_factory=Counter)
    finished: Counter[int] = field(default_factory=Counter)
    """Finished samples by length."""
    censored: Counter[int] = field(default_factory=Counter)
    """Aborted samples, by their length at that time."""
    _mean: float | None = None

    def generated(self, group: Group) -> None:
        """Add its finished samples, and those that were aborted."""
        lengths = finished_lengths(group)
        self.generated_samples += len(lengths)
        self.generated_tokens += sum(lengths)
        self.finished.update(lengths)
        self.censored.update(len(s.response_token_ids) for s in group.samples if s.finish_reason is FinishReason.ABORT)
        self._mean = None

    def trained(self, group: Group) -> None:
        lengths = response_lengths(group)
        self.trained_samples += len(lengths)
        self.trained_tokens += sum(lengths)

    def dropped(self, group: Group) -> None:
        self.dropped_by_length.update(length_bucket(length) for length in response_lengths(group))

    @property
    def mean_generated(self) -> float:
        """Mean length of the model's answers; the remainder of an aborted answer is estimated from answers of at least
        its length (the area under the Kaplan-Meier curve). 0 without finished samples.
        """
        if self._mean is None:
            self._mean = censored_mean(self.finished, self.censored)
        return self._mean


def censored_mean(finished: Mapping[int, int], censored: Mapping[int, int]) -> float:
    """Mean of values of which some are censored, that is known to be larger than a number only (Kaplan-Meier, up to the
    largest value).

    Worked example: finished 1, 3, 3 and one aborted at 2. Of 4, 1 ends at 1 and 3/4 go on; of the 2 left after the
    abort both end at 3: 1 + 3/4 * (3 - 1) = 2.5.
    """
    at_risk = sum(finished.values()) + sum(censored.values())
    mean, share, before = 0.0, 1.0, 0
    if not sum(finished.values()):
        return 0.0
    for value in sorted({*finished, *censored}):
        mean += share * (value - before)
        ended = finished.get(value, 0)
        share *= 1 - ended / at_risk  # those aborted at this length still were at risk here
        at_risk -= ended + censored.get(value, 0)
        before = value
    return mean


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchFreshness:
    """Staleness of one batch, over all tokens of loss mask 1, those that policy token_mask takes out included."""

    mean_versions: float
    max_versions: int
    in_flight_share: float
    """Share of the staleness that arose while the group was generated, 0..1; 0 when nothing is stale."""
    queue_share: float
    """Share that arose while the finished group waited for the trainer."""
    stale_group_share: float
    """Share of the groups older than soft_versions; without soft_versions, of those with any stale token."""
    mean_age_s: float
    """Seconds from admission to the moment the step took the group, mean over groups."""
    max_age_s: float
    tokens_by_versions: dict[int, int]
    """Trained tokens by staleness in versions."""
    reward_wait_s: float
    """Of the trainer's wait for the batch, the seconds in which all of its answers were generated: only scores were
    missing.
    """

    @classmethod
    def without_queue(cls, groups: Sequence[Group], *, step: int, now_s: float) -> BatchFreshness:
        """Measured from the groups alone, for a step whose queue was lost: they count as finished under the newest
        version that sampled one of their tokens, and as taken now.
        """
        newest = [max((v for s in g.samples for v, _ in s.version_runs), default=step - 1) for g in groups]
        return cls.measure(
            groups,
            newest,
            step=step,
            asked_s=[now_s] * len(groups),
            taken_s=[now_s] * len(groups),
            soft_versions=None,
        )

    @classmethod
    def measure(
        cls,
        groups: Sequence[Group],
        finished_versions: Sequence[WeightVersion],
        *,
        step: int,
        asked_s: Sequence[float],
        taken_s: Sequence[float],
        soft_versions: int | None,
    ) -> BatchFreshness:
        """`finished_versions`: version the engines held when each group finished; `asked_s`: loop time at which the
        step began to wait for it; `taken_s`: at which it took it, so that the training itself does not count as age.
        """
        by_versions: Counter[int] = Counter()
        in_flight = queue = 0
        for group, finished in zip(groups, finished_versions, strict=True):
            for sample in group.samples:
                for version, count in trained_tokens_by_version(sample).items():
                    lag = staleness(step=step, version=version)
                    by_versions[lag] += count
                    # Versions pushed since the group finished: never more than the lag, whose rest arose in flight.
                    waited = min(lag, max(0, staleness(step=step, version=finished)))
                    queue += count * waited
                    in_flight += count * (lag - waited)
        tokens, age = sum(by_versions.values()), in_flight + queue
        ages_s = [taken - group.admitted_s for group, taken in zip(groups, taken_s, strict=True)]
        soft = 0 if soft_versions is None else soft_versions
        stale = [
            g for g in groups if g.oldest_version is not None and staleness(step=step, version=g.oldest_version) > soft
        ]
        return cls(
            mean_versions=age / max(1, tokens),
            max_versions=max(by_versions, default=0),
            in_flight_share=in_flight / age if age else 0.0,
            queue_share=queue / age if age else 0.0,
            stale_group_share=len(stale) / max(1, len(groups)),
            mean_age_s=sum(ages_s) / max(1, len(ages_s)),
            max_age_s=max(ages_s, default=0.0),
            tokens_by_versions=dict(sorted(by_versions.items())),
            reward_wait_s=_reward_wait_s(groups, asked_s, taken_s),
        )


def _reward_wait_s(groups: Sequence[Group], asked_s: Sequence[float], taken_s: Sequence[float]) -> float:
    """Groups of one part of a step have both times in common: it would have been taken when its last answer was there.

    Worked example: a part asked for at 10 s and taken at 15 s, whose last token came at 12 s, waited 3 s for scores.
    """
    generated: dict[tuple[float, float], float] = {}
    for group, asked, taken in zip(groups, asked_s, taken_s, strict=True):
        last = group.finished_s if group.generated_s is None else group.generated_s
        generated[asked, taken] = max(asked, last, generated.get((asked, taken), asked))
    return sum(max(0.0, taken - last) for (_, taken), last in generated.items())
