"""The fully asynchronous mode: the loops of `rlvr.py` with `async_generation_ratio` > 0, and its statistics.

    FullyAsyncMain (roll_async/commands/fully_async.py)
        Rollouter --groups--> MessageQueue --batches--> FullyAsyncTrainer --weights--> ParameterSynchronizer --+
            ^                                                                                                  |
            +--------------------------------------------------------------------------------------------------+

What differs from RLVR: the trainer publishes `fully_async/*` at every step, and `health.py` monitors the roles.
"""

from __future__ import annotations

from collections.abc import Mapping

from roll_async.pipelines.health import trainer_stats
from roll_async.pipelines.metrics import StepRecord
from roll_async.pipelines.rlvr import TrainLoop


class FullyAsyncTrainer(TrainLoop):
    """Takes batches (or parts of them) from the MessageQueue as soon as they may be taken; it waits for the rollout
    nowhere else.

    Sub-class it and override `compute_custom_metrics(batch)` to publish metrics of your own; hand the class to
    `FullyAsyncMain`.
    """

    def _mode_metrics(self, record: StepRecord) -> Mapping[str, float]:
        """Every metric of the mode, under `fully_async/`; listed in docs_roll/metrics.md. Counts are in samples."""
        queue, rollouter = self._queue.stats(), self._rollouter.stats()
        status, ages, sync = self._synchronizer.status(), record.ages, record.sync
        trainer, per_group = trainer_stats(self, status), self._plan.samples_per_group
        values: dict[str, float] = {
            "global_steps": trainer.global_steps,
            "processed_samples": trainer.processed_samples,
            "current_param_version": trainer.current_param_version,
            "param_sync_count": trainer.param_sync_count,
            "sync_failures": trainer.sync_failures,
            "sync_s": sync.total_s if sync is not None else 0.0,
            "engines_stopped_s": sync.stopped_s if sync is not None else 0.0,
            "total_generated_samples": rollouter.total_generated_samples,
            "generation_errors": rollouter.generation_errors,
            "param_sync_requests": rollouter.param_sync_requests,
            "dropped_stale_samples": queue.dropped_stale * per_group,
            "avg_sample_age": ages.mean_age_s,
            "max_sample_age": ages.max_age_s,
            "stale_samples_ratio": ages.stale_group_share,
            "queue_size": queue.buffered * per_group,
            "queue_memory_bytes": queue.memory_bytes,
            "total_produced": (queue.trained + queue.training + queue.buffered + queue.dropped_stale) * per_group,
            "total_consumed": queue.trained * per_group,
            "dropped_samples": queue.dropped * per_group,
        }
        tokens = max(1, sum(ages.tokens_by_versions.values()))
        for lag, count in ages.tokens_by_versions.items():
            values[f"token_share_version_lag_{lag}"] = count / tokens
        return {f"fully_async/{name}": float(value) for name, value in values.items()}
