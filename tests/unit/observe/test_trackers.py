"""Where metrics go besides metrics.jsonl."""

import pytest

from roll_async.observe.trackers import create_tracker


def test_tensorboard_reads_every_metric_of_every_step(tmp_path):
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    tracker = create_tracker("tensorboard", tmp_path, {})
    steps = [{"reward/mean": 0.25 * step, "time/step_s": 1.0 + step} for step in (1, 2, 3)]
    for step, metrics in enumerate(steps, start=1):
        tracker.log(step, metrics)
        found = reading.EventAccumulator(str(tmp_path / "tensorboard"))
        found.Reload()  # a step can be looked at as soon as it is told
        assert found.Scalars("reward/mean")[-1].step == step
    tracker.close()
    for name in steps[0]:
        assert [(s.step, s.value) for s in found.Scalars(name)] == [(i, m[name]) for i, m in enumerate(steps, start=1)]


def test_an_unknown_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(ValueError, match="track_with wandb: .*install it or choose another"):
        create_tracker("wandb", tmp_path, {})
