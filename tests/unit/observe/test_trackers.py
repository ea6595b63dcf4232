"""Where metrics go besides metrics.jsonl."""

import re
import sys
from types import ModuleType, SimpleNamespace

import pytest

from roll_async.config.secrets import shown_override
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


SAMPLES = [
    {
        "prompt": "2+2=", "response": answer, "score": score, "finish_reason": "stop", "loss_mask": [1, 1],
        "version_runs": [[3, 2]],
    }
    for answer, score in (("# 4\n", 1.0), ("\x1b[31m<b>5</b>", 0.0))
]  # fmt: skip


def test_tensorboard_shows_samples_as_they_are(tmp_path):
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    tracker = create_tracker("tensorboard", tmp_path, {})
    tracker.samples(7, SAMPLES)
    tracker.close()
    found = reading.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    (event,) = found.Tensors("samples")
    (text,) = event.tensor_proto.string_val
    assert event.step == 7 and text.decode().splitlines() == [
        "prompt", "", "    2+2=", "", "best: score 1.000  version 3  2 tokens", "", "    # 4", "", "",
        "worst: score 0.000  version 3  2 tokens", "", "    \x1b[31m<b>5</b>",
    ]  # fmt: skip


def test_mlflow_keeps_samples_as_a_text_of_their_step(tmp_path, monkeypatch):
    mlflow, kept = FakeMlflow(), {}
    mlflow.log_text = lambda text, path: kept.update({path: text})
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    create_tracker("mlflow", tmp_path, {}).samples(7, SAMPLES[:1])
    assert kept == {"samples/step_00000007.txt": "prompt\n2+2=\n\nanswer: score 1.000  version 3  2 tokens\n# 4\n"}


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
    own = {"dir": str(tmp_path), "name": tmp_path.name}
    assert told == [
        {**own, "id": "3f9a61c2-1", "resume": "allow", "project": "p"},
        {**own, "id": "mine", "resume": "must"},
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


class FakeService(ModuleType):
    """Keeps what it is asked for; `init` gives itself as the run."""

    def __init__(self, name, error=None):
        super().__init__(name)
        self.options, self.logins, self.told, self.ended, self._error = None, [], [], 0, error

    def init(self, **options):
        if self._error is not None:
            raise self._error
        self.options = options
        return self

    def login(self, **options):
        self.logins.append(options)

    def log(self, metrics, step):
        self.told.append((step, metrics))

    def finish(self):
        self.ended += 1


def test_swanlab_takes_rolls_names_and_goes_on_under_the_id_of_the_run(tmp_path, monkeypatch):
    service = FakeService("swanlab")
    monkeypatch.setitem(sys.modules, "swanlab", service)
    rolls = {"login_kwargs": {"api_key": "k"}, "project": "p", "logdir": "d", "experiment_name": "e", "tags": ["a"]}
    tracker = create_tracker("swanlab", tmp_path, rolls, "3f9a61c2-1")
    tracker.log(3, {"step": 3, "reward/mean": 0.5})
    tracker.close()
    assert service.logins == [{"api_key": "k"}] and service.told == [(3, {"step": 3, "reward/mean": 0.5})]
    own = {"id": "3f9a61c2-1", "resume": "allow", "settings": {"probe": {"runtime": False}}}
    assert service.options == {**own, "project": "p", "log_dir": "d", "name": "e", "tags": ["a"]} and service.ended == 1
    create_tracker("swanlab", tmp_path, {"login_kwargs": None, "settings": {"probe": {"runtime": True}}})
    assert len(service.logins) == 1 and service.options == {
        "name": tmp_path.name, "log_dir": str(tmp_path / "swanlog"), "settings": {"probe": {"runtime": True}}
    }  # fmt: skip


def test_a_run_of_trackio_has_the_id_in_its_name_unless_the_user_says_how_to_resume(tmp_path, monkeypatch):
    service = FakeService("trackio")
    monkeypatch.setitem(sys.modules, "trackio", service)
    tracker = create_tracker("trackio", tmp_path, {"name": "mine"}, "3f9a61c2")
    tracker.log(3, {"step": 3, "reward/mean": 0.5})
    tracker.close()
    assert service.options == {"project": "roll_async", "name": "mine-3f9a61c2", "resume": "allow"}
    assert service.told == [(3, {"reward/mean": 0.5})] and service.ended == 1
    create_tracker("trackio", tmp_path, {"project": "p", "resume": "must"}, "3f9a61c2")
    assert service.options == {"project": "p", "name": tmp_path.name, "resume": "must"}


def test_the_key_of_wandb_goes_into_its_settings_and_not_into_the_home_folder(tmp_path, monkeypatch):
    service = FakeService("wandb")
    monkeypatch.setitem(sys.modules, "wandb", service)
    create_tracker("wandb", tmp_path, {"api_key": "k", "settings": {"console": "off"}, "log_dir": "d"})
    assert service.options["settings"] == {"api_key": "k", "console": "off"} and service.options["dir"] == "d"
    assert "api_key" not in service.options and service.logins == []
    create_tracker("wandb", tmp_path, {"api_key": None})
    assert service.options == {"name": tmp_path.name, "dir": str(tmp_path)}


@pytest.mark.parametrize("error", [RuntimeError("bad key s3cret"), SystemExit("bad key s3cret"), TypeError("s3cret")])
def test_what_a_tracker_says_when_it_cannot_start_is_one_error_without_secrets(tmp_path, monkeypatch, error):
    monkeypatch.setitem(sys.modules, "swanlab", FakeService("swanlab", error))
    with pytest.raises(ValueError, match="track_with swanlab: cannot start: .*<hidden>.*; correct") as raised:
        create_tracker("swanlab", tmp_path, {}, shown=lambda text: text.replace("s3cret", "<hidden>"))
    assert raised.value.__cause__ is None and raised.value.__suppress_context__, "the log shows causes"


def test_options_that_must_be_maps_are_refused_as_anything_else(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "swanlab", FakeService("swanlab"))
    with pytest.raises(ValueError, match="cannot start: ValueError: login_kwargs must be a map"):
        create_tracker("swanlab", tmp_path, {"login_kwargs": "k"})


def test_a_tracker_sees_the_command_line_without_its_secrets(tmp_path, monkeypatch):
    typed = ["run.py", "--config", "a.yaml", "max_steps=3", "tracking.tracker_kwargs.api_key=s3cret"]
    service, seen = FakeService("wandb"), []
    service.init = lambda **options: seen.extend(sys.argv)
    monkeypatch.setitem(sys.modules, "wandb", service)
    monkeypatch.setattr(sys, "argv", typed)
    create_tracker("wandb", tmp_path, {}, shown=shown_override)
    assert seen == [*typed[:4], "tracking.tracker_kwargs.api_key=<hidden>"] and sys.argv is typed
