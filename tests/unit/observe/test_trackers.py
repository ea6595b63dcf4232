"""Where metrics go besides metrics.jsonl."""

import re
import sys
from types import ModuleType, SimpleNamespace

import pytest

from roll_async.observe.trackers import create_tracker


class FakeMlflow(ModuleType):
    """Refuses the names that MLflow refuses."""

    def __init__(self):
        super().__init__("mlflow")
        self.logged = []

    def start_run(self, **options):
        self.options = options

    def log_metrics(self, metrics, step):
        refused = [name for name in metrics if not re.fullmatch(r"[/\w.\- ]*", name)]
        if refused:
            raise RuntimeError(f"Invalid value {refused} for parameter 'metrics[0].name' supplied")
        self.logged.append((step, metrics))

    def end_run(self):
        self.ended = True


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
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="track_with wandb: .*install it or choose another"):
        create_tracker("wandb", tmp_path, {})


def test_a_resumed_run_goes_on_in_wandb_under_its_id(tmp_path, monkeypatch):
    told = []
    wandb = ModuleType("wandb")
    wandb.init = lambda **options: told.append(options)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    create_tracker("wandb", tmp_path, {"project": "p"}, "3f9a61c2-1")
    create_tracker("wandb", tmp_path, {"id": "mine", "resume": "must"}, "3f9a61c2-1")
    assert told == [
        {"dir": str(tmp_path), "id": "3f9a61c2-1", "resume": "allow", "project": "p"},
        {"dir": str(tmp_path), "id": "mine", "resume": "must"},
    ]


def test_a_resumed_run_goes_on_in_the_mlflow_run_that_has_its_id(tmp_path, monkeypatch):
    mlflow, started = FakeMlflow(), []
    known = SimpleNamespace(info=SimpleNamespace(run_id="of mlflow"))
    mlflow.search_runs = lambda *, filter_string, **_: [known] if "'seen'" in filter_string else []
    mlflow.start_run = lambda **options: started.append(options)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    create_tracker("mlflow", tmp_path, {"run_name": "one", "tags": {"a": "b"}}, "new")
    create_tracker("mlflow", tmp_path, {"run_name": "one"}, "seen")
    assert started == [{"run_name": "one", "tags": {"a": "b", "roll_async_run_id": "new"}}, {"run_id": "of mlflow"}]


def test_mlflow_gets_every_metric_under_a_name_that_it_takes(tmp_path, monkeypatch):
    mlflow = FakeMlflow()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    tracker = create_tracker("mlflow", tmp_path, {"run_name": "one"})
    tracker.log(3, {"validation/avg@8": 0.25, "validation/sets/a-b/pass@1": 0.5, "policy/k1+": 1.0, "time_s": 2.0})
    tracker.close()
    names = {"validation.avg_at_8": 0.25, "validation.sets.a-b.pass_at_1": 0.5, "policy.k1_": 1.0, "time_s": 2.0}
    assert mlflow.logged == [(3, names)] and mlflow.options == {"run_name": "one"} and mlflow.ended
