"""One step's metrics from what the roles report. Keys as in docs_roll/metrics.md."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from math import isnan
from statistics import pstdev

from roll_async.buffer.freshness import BatchFreshness
from roll_async.buffer.states import QueueStats
from roll_async.observe.sample_dump import EVERY_GROUP, chosen_groups
from roll_async.pipelines.protocol import RunObserver
from roll_async.rollout.dispatch.server_counts import RequestSpan
from roll_async.rollout.rollouter import RollouterStats
from roll_async.schema import FinishReason, Group, Reward, Sample
from roll_async.trainer.protocol import StepReport
from roll_async.weight_sync.canary import CanaryReport, worst
from roll_async.weight_sync.protocol import SyncReport

_GROUP_COUNTS = (
    "admitted", "trained", "filtered", "dropped", "dropped_stale", "dropped_surplus", "failed", "buffered", "in_flight",
)  # fmt: skip
_COUNTS = ("trainer/optimizer_steps", "trainer/skipped_steps", "correction/num_tokens")
CORRECTION_OFF = {"correction/num_tokens": 0.0, "correction/kl": 0.0, "correction/ess": 1.0, "correction/rho_max": 1.0}
"""Metrics of a step in which no log-probs were compared: the actor made none, and none were recomputed."""


class StepClock:
    """Seconds of one step by activity; time of the running loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.time()
        self.spent: dict[str, float] = {}
        self.spans: list[tuple[str, float, float]] = []

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the time inside the block to `name`."""
        started = self._loop.time()
        try:
            yield
        finally:
            ended = self._loop.time()
            self.spent[name] = self.spent.get(name, 0.0) + ended - started
            self.spans.append((name, started, ended))

    @property
    def total_s(self) -> float:
        """Seconds since the step began."""
        return self._loop.time() - self._started


@dataclass(kw_only=True, slots=True)
class StepRecord:
    """What a step leaves to publish: filled phase by phase, and published once, also when a phase raised."""

    step: int
    groups: Sequence[Group]
    report: StepReport
    ages: BatchFreshness
    """As the queue says; until it has answered, as the groups alone say."""
    clock: StepClock
    sync: SyncReport | None = None
    """None = the step pushed nothing."""
    agreement: dict[str, float] = field(default_factory=dict)
    """What engines and trainer agree on: the canary of the push before, and log-probs of the step's own tokens."""
    validations: list[Mapping[str, float]] = field(default_factory=list)
    """Results that came since the last record, oldest first; empty ones where none had come."""

    @property
    def staleness(self) -> int:
        """Of the step: that of its oldest trained token."""
        # t - 1 - v: step t starts from the weights of version t - 1, and version v sampled the token. At most
        # M = max_versions by the proof in `config/staleness.py`; only policy token_mask batches older tokens, and
        # none of them in the loss. 0 with r = async_generation_ratio = 0 and k = trigger_parameter_sync_step = 1.
        return self.ages.max_versions


def trace_step(
    observer: RunObserver, record: StepRecord, requests: Sequence[RequestSpan], engines: Iterable[str]
) -> None:
    """The trace's spans of one training step, and of the requests that ended in it; an arrow from the trainer to each
    engine that was given weights.
    """
    for name, started, ended in record.clock.spans:
        observer.span("trainer", name, started, ended, step=record.step)
    # The last of them is the push; before it the canary of the push before is waited for.
    pushes = [span for span in record.clock.spans if span[0] == "weight_sync"][-1:] if record.sync is not None else []
    for _, started, ended in pushes:
        for engine in engines:
            version = f"weights of step {record.step}"
            observer.span(f"weights of {engine}", version, started, ended, arrow_from="trainer")
    for engine, sent_s, ended_s in sorted(requests, key=lambda span: span[1]):  # fewest slots in this order
        observer.span(engine, "request", sent_s, ended_s)
    for group in record.groups:
        observer.span("groups", f"group {group.group_id}", group.admitted_s, group.finished_s, trained_by=record.step)


def batch_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """The part of a step's metrics that the batch alone determines."""
    trajectories = [rows for group in groups for rows in group.trajectories]
    # The first row of a trajectory carries its reward.
    rewards = [rows[0].reward for rows in trajectories if rows[0].reward is not None]
    lengths = [sum(sum(sample.loss_mask) for sample in rows) for rows in trajectories]
    return {
        **reward_metrics(groups),
        "reward/mean": mean([reward.score for reward in rewards]),
        "reward/min": min((reward.score for reward in rewards), default=0.0),
        "reward/max": max((reward.score for reward in rewards), default=0.0),
        "reward/accuracy": mean([accuracy(reward) for reward in rewards]),
        "reward/accuracy_complete": mean(
            [complete_accuracy(rows[0].reward, rows) for rows in trajectories if rows[0].reward is not None]
        ),
        "response/length_mean": mean(lengths),
        "response/length_std": pstdev(lengths) if lengths else 0.0,
        "response/length_max": float(max(lengths, default=0)),
        "response/truncated": mean([float(rows[-1].finish_reason is FinishReason.LENGTH) for rows in trajectories]),
    }


def reward_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Metrics of the rewards, as means over the samples that report them: `reward/metrics/NAME` and the seconds of
    scoring; with more than one domain also each domain's share of the batch, score and accuracy.
    """
    leads = [(g.prompt.domain, rows[0].reward) for g in groups for rows in g.trajectories]
    scored = [(domain, reward) for domain, reward in leads if reward is not None]
    seconds = [r.scoring_s for _, r in scored]
    metrics = {"time/scoring_mean_s": mean(seconds), "time/scoring_max_s": max(seconds, default=0.0)}
    # `acc` is published as reward/accuracy.
    for name in sorted({name for _, r in scored for name in r.metrics} - {"acc"}):
        metrics[f"reward/metrics/{name}"] = mean([r.metrics[name] for _, r in scored if name in r.metrics])
    domains = sorted({domain for domain, _ in scored})
    for domain in domains if len(domains) > 1 else ():
        rewards = [r for d, r in scored if d == domain]
        metrics[f"reward/domains/{domain}/share"] = len(rewards) / len(scored)
        metrics[f"reward/domains/{domain}/mean"] = mean([r.score for r in rewards])
        metrics[f"reward/domains/{domain}/accuracy"] = mean([accuracy(r) for r in rewards])
    return metrics


def step_metrics(
    record: StepRecord,
    queue: QueueStats,
    rollout: RollouterStats,
    before: RollouterStats | None,
    *,
    devices_per_engine: int = 1,
) -> dict[str, float]:
    """All metrics of one training step; keys of docs_roll/metrics.md. `before`: the rollouter's counters when the last
    step was published, None at the first: what is published of some is their growth since then.
    """
    report, ages, sync, spent = record.report, record.ages, record.sync, record.clock.spent
    busy_before, ratios_before = ({}, {}) if before is None else (before.busy_s_by_server, before.ratios)
    busy_s = {name: until - busy_before.get(name, 0.0) for name, until in rollout.busy_s_by_server.items()}
    num_generated = rollout.generated_tokens - (0 if before is None else before.generated_tokens)
    total = record.clock.total_s
    wait = spent.get("wait_batch", 0.0)
    return {
        **CORRECTION_OFF,
        **report.metrics,
        **batch_metrics(record.groups),
        "staleness/mean": ages.mean_versions,
        "staleness/max": float(record.staleness),
        "staleness/in_flight_share": ages.in_flight_share,
        "staleness/queue_share": ages.queue_share,
        "staleness/age_mean_s": ages.mean_age_s,
        "length_bias": queue.length_bias,
        **_length_audit(queue, rollout),
        **{f"groups/{name}": float(getattr(queue, name)) for name in _GROUP_COUNTS},
        **{f"groups/{name}": float(count) for name, count in rollout.judged.items()},
        "queue/memory_bytes": float(queue.memory_bytes),
        "rollout/engines": float(rollout.num_servers),
        "rollout/lost_engines": float(rollout.lost_servers),
        "rollout/returned_engines": float(rollout.returned_servers),
        "rollout/duplicate_share": rollout.duplicate_share,
        "rollout/retried": float(rollout.retried),
        "rollout/resumed": float(rollout.resumed),
        "rollout/late_results": float(rollout.late_results),
        "rollout/reward_outages": float(rollout.reward_outages),
        "rollout/reward_timeouts": float(rollout.reward_timeouts),
        "rollout/reward_errors": float(rollout.reward_errors),
        "rollout/tool_calls": float(rollout.tool_calls),
        "rollout/tool_failures": float(rollout.tool_failures),
        **rollout.source,
        "weights/version": float(queue.held_version or 0),
        "time/step_s": total,
        "time/wait_batch_s": wait,
        "time/train_s": report.train_s,
        "time/logprobs_s": report.logprobs_s,
        "time/weight_sync_s": spent.get("weight_sync", 0.0),
        **_push_metrics(sync),
        "time/pause_s": sync.pause_s if sync is not None else 0.0,
        "time/validation_s": spent.get("validation", 0.0),
        "time/save_s": spent.get("save", 0.0),
        "throughput/samples_per_s": report.num_samples / total,
        "throughput/tokens_per_s": report.num_tokens / total,
        **_trainer_waits(spent, ages, report, total),
        **_engine_shares(busy_s, total, rollout.num_servers),
        **ratio_metrics(rollout.ratios, ratios_before),
        **_token_time(record.groups),
        "engine/tokens_per_device_s": num_generated / (max(1, rollout.num_servers) * devices_per_engine) / total,
    }


def ratio_metrics(
    now: Mapping[str, tuple[float, float]], before: Mapping[str, tuple[float, float]]
) -> dict[str, float]:
    """Ratios of counters (part, whole): what was counted since `before` under its key, and all since the start with
    `run/` after the key's first part. A ratio to nothing is not published.

    Worked example: `agent/outcomes/solved` was (1, 4) and is (4, 8): `agent/outcomes/solved` is 3 / 4, and
    `agent/run/outcomes/solved` 4 / 8.
    """
    metrics = {}
    for key, (part, whole) in now.items():
        part_before, whole_before = before.get(key, (0.0, 0.0))
        if whole > whole_before:
            metrics[key] = (part - part_before) / (whole - whole_before)
        if whole:
            first, _, rest = key.partition("/")
            metrics[f"{first}/run/{rest}"] = part / whole
    return metrics


def _trainer_waits(
    spent: Mapping[str, float], ages: BatchFreshness, report: StepReport, total_s: float
) -> dict[str, float]:
    """Share of the step in which the actor's devices had no work, by cause."""
    wait = spent.get("wait_batch", 0.0)
    rewards = min(wait, ages.reward_wait_s)
    causes = {
        "rollouts": wait - rewards + report.turn_s,
        "rewards": rewards,
        "collation": report.collation_s,
        "roles": report.roles_s,
        "weights": spent.get("weight_sync", 0.0),
        "validation": spent.get("validation", 0.0),
        "checkpoint": spent.get("save", 0.0),
        "records": spent.get("record", 0.0),
    }
    idle = wait + report.turn_s
    return {"idle/trainer": idle / total_s, **{f"idle/trainer_{name}": s / total_s for name, s in causes.items()}}


def _engine_shares(busy_s: Mapping[str, float], total_s: float, num_servers: int) -> dict[str, float]:
    """Share of the step in which a replica ran requests, by replica, and the idle share of all. A lost replica that ran
    nothing in the step does not count as idle; `rollout/engines` counts the live ones.
    """
    shares = {name: min(1.0, seconds / total_s) for name, seconds in busy_s.items()}
    num_there = max(num_servers, sum(share > 0 for share in shares.values()))
    idle = 1.0 - sum(shares.values()) / num_there if num_there else 1.0
    return {"idle/engines": idle, **{f"busy/{name}": share for name, share in shares.items()}}


def _token_time(groups: Sequence[Group]) -> dict[str, float]:
    """Seconds per sampled token of one answer, the wait for a place in the engine included."""
    samples = [sample for group in groups for sample in group.samples]
    tokens = sum(sum(sample.loss_mask) for sample in samples)
    seconds = sum(sample.generation_s for sample in samples)
    return {"engine/token_s": seconds / tokens} if tokens and seconds else {}


def _push_metrics(sync: SyncReport | None) -> dict[str, float]:
    """For a step with a push: what was sent. `time/weight_sync_s` is no measure of its rate: it contains the wait for
    the canary of the push before.
    """
    if sync is None:
        return {}
    metrics = {"weights/sent_bytes": float(sync.num_bytes), "weights/sent_share": sync.sent_share}
    if sync.transfer_s > 0:
        metrics["weights/gb_per_s"] = sync.num_bytes / sync.transfer_s / 1e9
    return metrics


def canary_metrics(found: CanaryReport | None) -> dict[str, float]:
    """The difference between the log-probs of engines and trainer after a push."""
    if found is None:
        return {}
    metrics = {"weights/canary_alarms": float(len(found.alarms))}
    if found.difference:
        metrics["weights/canary_difference"] = worst(found.difference.values())
        metrics |= {f"weights/canary_difference_{depth}": value for depth, value in found.by_depth.items()}
    if found.moved is not None:
        metrics["weights/canary_moved"] = found.moved
    return metrics


def _length_audit(queue: QueueStats, rollout: RollouterStats) -> dict[str, float]:
    """Response lengths that were generated and not trained: finished samples by length, and aborted ones."""
    return {
        **{f"length_bias/dropped_le_{length}": float(n) for length, n in sorted(queue.dropped_by_length.items())},
        "length_bias/aborted_requests": float(rollout.aborted_requests),
        "length_bias/aborted_tokens": float(rollout.aborted_tokens),
    }


def merged_reports(reports: Sequence[StepReport]) -> StepReport:
    """Merges the reports of the parts of a step: means weighted by samples, times and counts added up, the largest of
    maxima and peaks.
    """
    if len(reports) == 1:
        return reports[0]
    metrics = {}
    # A dict, because a set would not keep the order of keys.
    for key in dict.fromkeys(key for r in reports for key in r.metrics):
        values = [(r.metrics[key], r.num_samples) for r in reports if key in r.metrics]
        if key in _COUNTS:
            metrics[key] = sum(value for value, _ in values)
        elif key.endswith(("_max", "_peak_bytes")):
            metrics[key] = max(value for value, _ in values)
        elif key.endswith("_min"):
            metrics[key] = min(value for value, _ in values)
        else:
            metrics[key] = sum(value * n for value, n in values) / sum(n for _, n in values)
    return StepReport(
        metrics=metrics,
        logprobs_s=sum(r.logprobs_s for r in reports),
        train_s=sum(r.train_s for r in reports),
        collation_s=sum(r.collation_s for r in reports),
        roles_s=sum(r.roles_s for r in reports),
        turn_s=sum(r.turn_s for r in reports),
        num_samples=sum(r.num_samples for r in reports),
        num_tokens=sum(r.num_tokens for r in reports),
        advantages=tuple(row for r in reports for row in r.advantages),
        trainer_logprobs=_of_all_parts([r.trainer_logprobs for r in reports]),
        entropies=_of_all_parts([r.entropies for r in reports]),
    )


def _of_all_parts(parts: Sequence[tuple[array, ...]]) -> tuple[array, ...]:
    """Rows are matched by their place: of a step in parts, all parts have them, or none is told."""
    return tuple(row for part in parts for row in part) if all(parts) else ()


def sample_rows(
    groups: Sequence[Group],
    advantages: Sequence[array] = (),
    trainer_logprobs: Sequence[array] = (),
    entropies: Sequence[array] = (),
    num_groups: int = EVERY_GROUP,
) -> list[dict[str, object]]:
    """Samples as plain JSON values, for a dump, of as many of the groups as `chosen_groups` takes. `advantages`,
    `trainer_logprobs`, `entropies`: of `StepReport` of the step that trained them; none = nothing was trained, none
    were made.
    """
    samples = [(group, sample) for group in groups for sample in group.samples]
    none = [None] * len(samples)
    kept = chosen_groups({group.group_id: group.mean_score for group in groups}, num_groups)
    return [
        {
            "group_id": group.group_id,
            "sample_id": sample.sample_id,
            "replica": sample.replica,
            "row_id": group.prompt.row_id,
            "domain": group.prompt.domain,
            "ground_truth": group.prompt.ground_truth,
            "images": len(group.prompt.images),
            "score": None if sample.reward is None else sample.reward.score,
            "reward_metrics": {} if sample.reward is None else dict(sample.reward.metrics),
            "finish_reason": sample.finish_reason.value,
            "num_turns": sample.num_turns,
            "trajectory": sample.trajectory,
            "outcome": None if sample.outcome is None else sample.outcome.value,
            "advantage": _mean_advantage(sample, trained_with, 0, len(sample.loss_mask)),
            "advantages": _differing(sample, trained_with),
            "turns": [
                asdict(turn)
                | {"advantage": _mean_advantage(sample, trained_with, turn.start, turn.start + turn.num_tokens)}
                for turn in sample.turns
            ],
            "version_runs": [list(run) for run in sample.version_runs],
            "loss_mask": list(sample.loss_mask),
            "prompt_token_ids": sample.prompt_token_ids.tolist(),
            "response_token_ids": sample.response_token_ids.tolist(),
            "behaviour_logprobs": [round(value, 6) for value in sample.behaviour_logprobs],
            "trainer_logprobs": None if logprobs is None else [round(value, 6) for value in logprobs],
            "entropies": _known(entropy),
        }
        for (group, sample), trained_with, logprobs, entropy in zip(
            samples, advantages or none, trainer_logprobs or none, entropies or none, strict=True
        )
        if group.group_id in kept
    ]


def _known(values: array | None) -> list[float | None] | None:
    """None in place of NaN, which is no JSON; None alone where nothing else is there."""
    found = [None if isnan(value) else round(value, 6) for value in values or ()]
    return found if any(value is not None for value in found) else None


def _differing(sample: Sample, advantages: array | None) -> list[float] | None:
    """Advantage of each token of the response, 0 where it was not sampled; None where all of them have the same."""
    if advantages is None or len({a for a, sampled in zip(advantages, sample.loss_mask, strict=True) if sampled}) < 2:
        return None
    return [round(a, 6) if sampled else 0.0 for a, sampled in zip(advantages, sample.loss_mask, strict=True)]


def _mean_advantage(sample: Sample, advantages: array | None, start: int, end: int) -> float | None:
    """Over the sampled tokens of a part of the response; None where there are none, or nothing was trained."""
    if advantages is None:
        return None
    sampled = [advantages[i] for i in range(start, end) if sample.loss_mask[i]]
    return round(mean(sampled), 6) if sampled else None


def accuracy(reward: Reward) -> float:
    """The accuracy that the reward reports, else whether the score is above 0."""
    return reward.metrics.get("acc", float(reward.score > 0))


def complete_accuracy(reward: Reward, rows: Sequence[Sample]) -> float:
    """The accuracy of an answer that ended by itself and outside a thought, 0 of another one."""
    ended = rows[-1].finish_reason is FinishReason.STOP and not reward.metrics.get("unfinished_thought")
    return accuracy(reward) if ended else 0.0


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def custom_numbers(found: object) -> dict[str, float]:
    """What `compute_custom_metrics` gave. Raises TypeError for what is not a number."""
    if not isinstance(found, Mapping | None):
        raise TypeError(f"compute_custom_metrics gave {type(found).__name__}, not numbers by name")
    for name, value in (found or {}).items():
        if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
            raise TypeError(f"compute_custom_metrics: {name} is {repr(value)[:50]}, not a number")
    return {str(name): float(value) for name, value in (found or {}).items()}
