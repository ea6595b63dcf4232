"""Trackers of others, each with its real package and without a network: what the recorder tells them is in their files,
step by step, and no secret is. Each runs in a process of its own: they take hold of the console and of exit.
"""

import json
import os
import sqlite3
import struct
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.patience import patient

ROOT = Path(__file__).resolve().parents[3]
SECRET = "s3cret" * 7
RUN = f"""
import sys
from functools import partial

from roll_async.config.api import load
from roll_async.config.secrets import shown_text
from roll_async.observe.progress import Screen
from roll_async.observe.recorder import REQUIRED_KEYS, Recorder
from roll_async.observe.run_folder import RunFolder
from roll_async.observe.run_record import RunRecord
from roll_async.observe.trackers import create_tracker

output, *overrides = sys.argv[1:]
tracking = load({str(ROOT / "configs/rlvr_config_async_cpu.yaml")!r}, overrides).tracking
folder = RunFolder(output, "run", RunRecord(run_id="3f9a61c2"))


def create(name):
    kwargs = tracking.kwargs_of(name)
    return create_tracker(name, folder.path, kwargs, folder.record.tracker_run, partial(shown_text, handed=kwargs))


create = {{name: partial(create, name) for name in tracking.track_with}}
recorder = Recorder(folder, [], Screen(4), logging_steps=1, create=create, samples_every=1)
answer = {{"group_id": 1, "prompt": "2+2=", "response": "it is 4", "ground_truth": "4", "finish_reason": "stop"}}
answer |= {{"loss_mask": [1], "version_runs": [[0, 1]], "score": 1.0}}
known = len(folder.read_metrics())
for step in (known + 1, known + 2):
    recorder.step(step, {{**dict.fromkeys(REQUIRED_KEYS, 0.5), "validation/sets/a-b/avg@8": 0.25 * step}})
    recorder.samples(step, [answer])
recorder.close()
"""
KWARGS = {
    "wandb": f"{{mode: offline, project: p, tags: [a], notes: n, api_key: {SECRET}}}",
    "swanlab": f"{{mode: offline, project: p, experiment_name: e, tags: [a], settings: {{api_key: {SECRET}}}}}",
    "trackio": "{project: p, group: g}",
    "mlflow": "{run_name: n, tags: {a: b}}",
}


def records(file: Path):
    """Of a log in LevelDB's format, which wandb and SwanLab write: blocks of 32 KiB with parts of records."""
    data, at, partial = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        partial += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield partial
            partial = b""


def told_wandb(folder: Path):
    module, found = import_module("wandb.proto.wandb_internal_pb2"), {}
    (file,) = {path.resolve() for path in folder.rglob("run-*.wandb")}
    for raw in records(file):
        record = module.Record.FromString(raw)
        for item in record.history.item:
            key = item.key or "/".join(item.nested_key)
            found.setdefault(record.history.step.num, {})[key] = json.loads(item.value_json)
    assert "3f9a61c2" in file.name
    return found


def told_swanlab(folder: Path):
    module, found = import_module("swanlab.proto.swanlab.record.v1.record_pb2"), {}
    (file,) = folder.rglob("run-*.swanlab")
    for raw in records(file):
        scalar = module.Record.FromString(raw).scalar
        if scalar.key and not scalar.key.startswith("__"):  # its own monitor's
            found.setdefault(scalar.step, {})[scalar.key] = scalar.value.number
    assert "3f9a61c2" in file.name
    return found


def told_trackio(folder: Path):
    with sqlite3.connect(folder / "trackio" / "p.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
    assert {name for name, _, _ in rows} == {"run-3f9a61c2"}
    return {step: json.loads(metrics) for _, step, metrics in rows}


def told_mlflow(folder: Path):
    """By its names, which have no @ and no /."""
    (run,), found = [path.parent.parent for path in (folder / "mlruns").rglob("roll_async_run_id")], {}
    assert (run / "tags/roll_async_run_id").read_text() == "3f9a61c2" and (run / "tags/a").read_text() == "b"
    for file in (run / "metrics").iterdir():
        for line in file.read_text().splitlines():
            _, value, step = line.split()
            found.setdefault(int(step), {})[file.name.replace("_at_", "@")] = float(value)
    assert "it is 4" in (run / "artifacts/samples/step_00000002.txt").read_text()
    return found


def started(tmp_path, *arguments):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "SWANLAB_", "TRACKIO_"))}
    env = {**kept, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "TRACKIO_DIR": str(tmp_path / "trackio")}
    env |= {"MLFLOW_TRACKING_URI": (tmp_path / "mlruns").as_uri(), "MLFLOW_ALLOW_FILE_STORE": "true"}
    env |= {"HOME": str(tmp_path / "home"), "WANDB_API_KEY": SECRET}
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path / "output"), *arguments],
        capture_output=True, text=True, env=env, cwd=tmp_path, timeout=patient(120),
    )  # fmt: skip
    assert SECRET not in done.stdout + done.stderr
    return done


@pytest.mark.slow
@pytest.mark.parametrize("name", KWARGS)
def test_a_run_without_a_network_is_in_the_files_of_a_tracker_and_its_secrets_are_not(name, tmp_path):
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed: pip install 'roll_async[{name}]'")
    (tmp_path / "home").mkdir()
    done = started(
        tmp_path, f"tracking.track_with=[stdout, {name}]", f"tracking.tracker_kwargs={{{name}: {KWARGS[name]}}}"
    )
    assert done.returncode == 0, done.stderr
    assert "tracker " not in done.stderr and done.stdout.count("validation/sets/a-b/avg@8=") == 2
    found = globals()[f"told_{name}"](tmp_path)
    metrics = [json.loads(line) for line in (tmp_path / "output/run/metrics.jsonl").read_text().splitlines()]
    for step, told in enumerate(metrics, start=1):
        assert told["validation/sets/a-b/avg@8"] == 0.25 * step
        spelled = (lambda key: key.replace("/", ".")) if name == "mlflow" else str
        wanted = {spelled(key): value for key, value in told.items() if isinstance(value, float) and key != "run_id"}
        assert len(wanted) > 30
        assert {key: found[step].get(key) for key in wanted} == pytest.approx(wanted)
    if name == "wandb":
        tables = [json.loads(path.read_text()) for path in tmp_path.rglob("*.table.json")]
        assert sorted(table["data"] for table in tables) == [
            [[step, "prompt", "2+2="], [step, "answer: score 1.000  version 0  1 tokens", "it is 4"]] for step in (1, 2)
        ]
    leaks = [path for path in tmp_path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert leaks == []


@pytest.mark.slow
def test_a_second_start_goes_on_in_the_run_that_trackio_has(tmp_path):
    pytest.importorskip("trackio")
    for _ in range(2):
        done = started(tmp_path, "tracking.track_with=trackio", "tracking.tracker_kwargs={project: p}")
        assert done.returncode == 0, done.stderr
    with sqlite3.connect(tmp_path / "trackio" / "p.db") as database:
        runs = database.execute("select count(distinct run_id), count(*) from metrics").fetchone()
    assert runs == (1, 4)


@pytest.mark.slow
def test_a_second_start_goes_on_in_the_run_that_mlflow_has(tmp_path):
    pytest.importorskip("mlflow")
    for _ in range(2):
        done = started(tmp_path, "tracking.track_with=mlflow", f"tracking.tracker_kwargs={KWARGS['mlflow']}")
        assert done.returncode == 0, done.stderr
    assert sorted(told_mlflow(tmp_path)) == [1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("wandb", "{mode: nowhere}"),
        ("swanlab", "{mode: nowhere}"),
        ("trackio", "{tags: [a]}"),
        ("mlflow", "{nowhere: 1}"),
    ],
)
def test_what_a_real_tracker_does_not_take_is_one_error_that_names_it(name, kwargs, tmp_path):
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    done = started(tmp_path, f"tracking.track_with={name}", f"tracking.tracker_kwargs={kwargs}")
    assert f"ValueError: tracking.track_with {name}: cannot start: " in done.stderr
    assert ("nowhere" if name != "trackio" else "tags") in done.stderr
