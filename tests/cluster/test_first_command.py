"""The first command of the guide, typed on a machine without what it needs, and with the one option that runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("ray")

from tests.patience import patient

ROOT = Path(__file__).resolve().parents[2]


def typed(folder, *arguments, timeout):
    """(exit code, lines of stdout, lines of stderr) of the command in an empty folder."""
    script = str(ROOT / "examples" / "start_rlvr_pipeline.py")
    command = [sys.executable, script, "--config", "rlvr_config_async.yaml", *arguments]
    env = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=patient(timeout))
    return done.returncode, done.stdout.splitlines(), done.stderr.splitlines()


def test_it_says_in_one_line_what_it_needs_and_how_to_get_each(tmp_path):
    code, out, err = typed(tmp_path, timeout=60)
    assert code == 2 and out == [] and len(err) == 1
    (line,) = err
    wanted = (
        "model Qwen/Qwen2.5-7B (hf download Qwen/Qwen2.5-7B, or pretrain=FOLDER)",
        "data/math_deepmath_deal.jsonl does not exist; make it with: python tools/make_math_rows.py",
        "3 nodes with 8 + 8 + 8 GPUs, here: no GPU (RAY_ADDRESS=HOST:6379 of a cluster)",
        "on the CPU here, on the demo's model and data: --device cpu",
    )
    assert [part for part in wanted if part not in line] == []
    places = [line.index(part) for part in wanted]
    assert places == sorted(places), "model, data, devices, the way around them"


def test_a_cluster_that_is_joined_counts_its_own_devices(tmp_path, monkeypatch):
    from roll_async.commands.run import prepare
    from roll_async.config.api import ConfigError

    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(ConfigError) as raised:
        prepare(["--config", "rlvr_config_async.yaml"], "rlvr")
    errors = [str(d) for d in raised.value.diagnostics if d.is_error]
    assert len(errors) == 1 and "C204: actor_train.data_args.file_name" in errors[0] and "GPU" not in errors[0]


@pytest.mark.slow
def test_with_one_option_it_runs_here_on_the_assets_of_the_demo(demo_assets, tmp_path):
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "demo_assets").symlink_to(demo_assets)
    code, out, err = typed(tmp_path, "--device", "cpu", "max_steps=2", timeout=300)
    assert code == 0, "\n".join([*out, *err])
    run = tmp_path / "output" / "rlvr_config_async"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 2 and (run / "hf" / "config.json").is_file()
