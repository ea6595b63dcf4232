"""The part of tools/gpu_suite.py that no machine without a GPU runs: what it asks the demo for, and reads from it."""

import itertools
import sys
from pathlib import Path

import pytest

from roll_async.config.api import load
from roll_async.launch.checks.gate import unsupported

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import gpu_suite

STEP = {"time/step_s": 2.0, "time/train_s": 1.0, "time/weight_sync_s": 0.5}


def step(k3=1e-4, rho_max=1.1, **times):
    return {**STEP, "correction/k3": k3, "correction/rho_max": rho_max, **times}


def test_the_overrides_of_the_demo_make_a_config_that_is_supported():
    config = load(str(ROOT / "configs" / gpu_suite.DEMO_CONFIG), gpu_suite.demo_overrides("somewhere", 5))
    assert not unsupported(config)
    assert config.actor_train.device_mapping == config.actor_infer.device_mapping == (0,)
    assert (config.max_steps, config.output_dir, config.exp_name) == (5, "somewhere", "gpu_demo")
    assert config.actor_train.model_args.dtype == config.actor_infer.model_args.dtype == "bf16"


def test_a_resident_run_is_a_config_that_is_supported_and_its_speed_is_that_of_the_steps_after_the_second():
    config = load(
        str(ROOT / "configs" / gpu_suite.DEMO_CONFIG), [*gpu_suite.demo_overrides("somewhere", 5), *gpu_suite.RESIDENT]
    )
    assert not unsupported(config) and config.colocation == "resident"
    assert config.samples_per_batch == gpu_suite.SAMPLES

    def run(seconds, oldest):
        times = itertools.accumulate([100, 50, *[seconds] * 3])
        return [step(step=i, time_s=t, **{"staleness/max": oldest}) for i, t in enumerate(times, start=1)]

    line = gpu_suite.resident_line(run(2, 0), run(1, 1))
    assert (line["value"], line["samples_per_s"], line["staleness_max"], line["ok"]) == (2.0, 256.0, 1, True)
    assert not gpu_suite.resident_line(run(1, 0), run(2, 1))["ok"]
    assert not gpu_suite.resident_line(run(2, 0), run(1, 2))["ok"]


def test_times_leave_out_the_first_step_where_there_is_another():
    first, second = step(**{"time/step_s": 60.0}), step()
    assert gpu_suite.demo_lines([first, second])[0]["value"] == 2.0
    alone = gpu_suite.demo_lines([first])[0]
    assert (alone["value"], alone["steps"], alone["ok"]) == (60.0, 1, True)
    assert [line["ok"] for line in gpu_suite.demo_lines([])] == [False]


def test_the_engines_disagreement_counts_whatever_its_sign():
    def agrees(**found):
        return gpu_suite.demo_lines([step(**found), step()])[1]["ok"]

    assert agrees()
    assert not agrees(k3=gpu_suite.K3_BUDGET * 1.01)
    assert not agrees(rho_max=gpu_suite.RHO_MAX_BUDGET * 1.01)


@pytest.mark.slow
def test_a_command_that_fails_or_takes_too_long_is_told_about():
    def run(code, limit_s=30.0):
        return gpu_suite.finish([sys.executable, "-c", code], limit_s)

    assert run("print(7)") == "7\n"
    assert run("import sys; sys.exit('no room')") == {"exit_code": 1, "output": "no room\n"}
    found = run("import time; print('begun', flush=True); time.sleep(60)", 0.5)
    assert found["timed_out_after_s"] == 0.5
