"""Metric trackers by name. metrics.jsonl is written in any case."""

from __future__ import annotations

import itertools
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Protocol

from roll_async.observe.disk import Unwritable, writing
from roll_async.observe.outside import OutsideError, border
from roll_async.observe.progress import facts
from roll_async.observe.sample_dump import Row

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event

_FILES = itertools.count()
_RUN_TAG = "roll_async_run_id"
_NOT_IN_MLFLOW = re.compile(r"[^/\w.\- ]")


class Tracker(Protocol):
    """A destination of metrics. It is made for one branch of one run; after a step back the run makes a new one.
    Whatever it raises ends no run, but for a fault of the run's own disk: see `recorder.py`.
    """

    name: str
    """As in `tracking.track_with`."""
    keeps_history: bool
    """Whether a new one is to be given the steps that the run keeps, because it cannot take back the others."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def samples(self, step: int, picked: Sequence[Row]) -> None:
        """The best and the worst answer to a prompt of the step. It may come after the metrics of a later step."""

    def close(self) -> None: ...


class TensorboardTracker:
    """An event file under the run folder: one event a step, with all of its metrics. Written here and not by the thread
    of tensorboard's own writer, whose errors go to the console.
    """

    name = "tensorboard"
    keeps_history = True

    def __init__(self, folder: Path, options: Mapping[str, object], run: str) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.record_writer import RecordWriter

        # The number: two branches of a run may begin in the same second.
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}.{next(_FILES)}"
        self._path = folder / "tensorboard" / name
        with writing(self._path):
            self._path.parent.mkdir(exist_ok=True)
            self._file = open(self._path, "ab", buffering=0)  # a fault of the disk is raised by the write
        self._records = RecordWriter(self._file)
        # TensorBoard reads the format from the first record.
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if run:
            self._write(Event(step=0, wall_time=time.time(), summary=text_pb("run_id", run)))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=key, simple_value=value) for key, value in metrics.items()]
        self._write(Event(step=step, wall_time=time.time(), summary=Summary(value=values)))

    def samples(self, step: int, picked: Sequence[Row]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.plugins.text.summary_v2 import text_pb

        # It reads Markdown: what is indented is shown as it is.
        text = "\n\n".join(f"{name}\n\n" + indent(value, "    ") for name, value in _texts(picked))
        self._write(Event(step=step, wall_time=time.time(), summary=text_pb("samples", text)))

    def _write(self, event: Event) -> None:
        with writing(self._path):
            self._records.write(event.SerializeToString())

    def close(self) -> None:
        self._file.close()


def _taken(options: dict[str, object], name: str) -> Mapping[str, object]:
    """A map among the options, taken out of them; empty where there is none."""
    found = options.pop(name, None) or {}
    if not isinstance(found, Mapping):
        raise ValueError(f"{name} must be a map")
    return found


class WandbTracker:
    """Weights & Biases; WANDB_API_KEY is read by its own client. A resumed run goes on under its id. `options`: of
    `wandb.init`, with ROLL's `log_dir` (dir) and `api_key`.
    """

    name = "wandb"
    keeps_history = True

    def __init__(self, folder: Path, options: Mapping[str, object], run: str) -> None:
        import wandb

        given = {"name": folder.name, **({"id": run, "resume": "allow"} if run else {}), **options}
        # Popped in any case: `wandb.init` does not know the name log_dir.
        given.setdefault("dir", given.pop("log_dir", None) or str(folder))
        if key := given.pop("api_key", None):  # wandb.login would write it into the home folder
            given["settings"] = {"api_key": key, **_taken(given, "settings")}
        self._run, self._step = wandb.init(**given), 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step = step
        self._run.log(dict(metrics), step=step)

    def samples(self, step: int, picked: Sequence[Row]) -> None:
        import wandb

        table = wandb.Table(columns=["step", "what", "text"], data=[[step, *entry] for entry in _texts(picked)])
        self._run.log({"samples": table}, step=max(step, self._step))  # it takes nothing of a step that is over

    def close(self) -> None:
        self._run.finish()


class MlflowTracker:
    """MLflow; the tracking server is read from MLflow's own environment variables. A resumed run goes on in the MLflow
    run that has its id as tag.
    """

    name = "mlflow"
    keeps_history = True

    def __init__(self, folder: Path, options: Mapping[str, object], run: str) -> None:
        import mlflow

        self._mlflow = mlflow
        tag = f"tags.{_RUN_TAG} = '{run}'"
        known = mlflow.search_runs(filter_string=tag, max_results=1, output_format="list") if run else []
        if known:
            mlflow.start_run(run_id=known[0].info.run_id)
        elif run:
            tags = options.get("tags", {})
            assert isinstance(tags, Mapping)
            mlflow.start_run(**{**options, "tags": {**tags, _RUN_TAG: run}})
        else:
            mlflow.start_run(**options)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._mlflow.log_metrics({_mlflow_name(key): value for key, value in metrics.items()}, step=step)

    def samples(self, step: int, picked: Sequence[Row]) -> None:
        text = "\n\n".join(f"{name}\n{value}" for name, value in _texts(picked))
        self._mlflow.log_text(text, f"samples/step_{step:08d}.txt")

    def close(self) -> None:
        self._mlflow.end_run()


def _texts(picked: Sequence[Row]) -> list[tuple[str, str]]:
    """Prompt and answers under their names, whole."""
    names = ("best", "worst") if len(picked) > 1 else ("answer",)
    answers = [(f"{name}: {facts(row)}", str(row["response"])) for name, row in zip(names, picked, strict=True)]
    return [("prompt", str(picked[0]["prompt"])), *answers]


def _mlflow_name(key: str) -> str:
    """`validation/avg@8` becomes `validation.avg_at_8`: MLflow raises for a name with other than these characters."""
    return _NOT_IN_MLFLOW.sub("_", key.replace("/", ".").replace("@", "_at_"))


class SwanlabTracker:
    """SwanLab; SWANLAB_API_KEY is read by its own client. A resumed run goes on under its id where SwanLab can do that
    (mode online). `options`: of `swanlab.init`, with ROLL's `login_kwargs`, `experiment_name` (name) and `logdir`
    (log_dir).
    """

    name = "swanlab"
    keeps_history = True

    def __init__(self, folder: Path, options: Mapping[str, object], run: str) -> None:
        import swanlab

        given = {**({"id": run, "resume": "allow"} if run else {}), **options}
        given.setdefault("name", given.pop("experiment_name", None) or folder.name)
        given.setdefault("log_dir", given.pop("logdir", None) or str(folder / "swanlog"))
        if login := _taken(given, "login_kwargs"):
            swanlab.login(**login)
        # Its probe reads the command line from the kernel and writes it down, whatever secrets an override has.
        given["settings"] = {"probe": {"runtime": False}, **_taken(given, "settings")}
        self._run = swanlab.init(**given)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def samples(self, step: int, picked: Sequence[Row]) -> None:
        pass  # not told: the samples of the run's own folder are whole

    def close(self) -> None:
        self._run.finish()


class TrackioTracker:
    """Trackio; files under TRACKIO_DIR, or a Space of the Hugging Face hub (`space_id`). It knows a run by its name
    alone: without a `resume` of the user's own the run's id becomes part of it, so that a resumed run goes on and a new
    one does not. `options`: of `trackio.init`.
    """

    name = "trackio"
    keeps_history = True

    def __init__(self, folder: Path, options: Mapping[str, object], run: str) -> None:
        import trackio

        given = {"project": "roll_async", "name": folder.name, **options}
        if run and "resume" not in given:
            given |= {"name": f"{given['name']}-{run}", "resume": "allow"}
        self._trackio, self._run = trackio, trackio.init(**given)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({key: value for key, value in metrics.items() if key != "step"}, step=step)  # a name of its own

    def samples(self, step: int, picked: Sequence[Row]) -> None:
        pass  # not told: the samples of the run's own folder are whole

    def close(self) -> None:
        self._trackio.finish()


class StdoutTracker:
    """One line of all metrics per step."""

    name = "stdout"
    keeps_history = False

    def __init__(self, folder: Path, options: Mapping[str, object], run: str) -> None:
        pass

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        print(f"step {step}: " + " ".join(f"{key}={value:.5g}" for key, value in sorted(metrics.items())), flush=True)

    def samples(self, step: int, picked: Sequence[Row]) -> None:
        pass  # the screen has them

    def close(self) -> None:
        pass


TRACKERS: dict[str, Callable[[Path, Mapping[str, object], str], Tracker]] = {
    "tensorboard": TensorboardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "swanlab": SwanlabTracker,
    "trackio": TrackioTracker,
    "stdout": StdoutTracker,
}


def create_tracker(
    name: str, folder: Path, options: Mapping[str, object], run: str = "", shown: Callable[[str], str] = str
) -> Tracker:
    """Build a tracker. `run`: id of the run and its branch. `shown`: takes secrets out of what the tracker says, and
    out of the words of the command line, which it may write down. Raises ValueError naming the package that is missing,
    or with what the tracker says; Unwritable for a fault of the run's disk.
    """
    typed = sys.argv
    sys.argv = [shown(word) for word in typed]  # wandb's run has it
    try:
        with border(Unwritable, ImportError):
            return TRACKERS[name](folder, options, run)
    except ImportError as error:
        raise ValueError(f"tracking.track_with {name}: {error}; install it or choose another") from error
    except OutsideError as error:
        said = shown(str(error))
        remedy = "correct tracking.tracker_kwargs or choose another tracker"
        cause = error if said == str(error) else None  # the log shows causes
        raise ValueError(f"tracking.track_with {name}: cannot start: {said}; {remedy}") from cause
    finally:
        sys.argv = typed
