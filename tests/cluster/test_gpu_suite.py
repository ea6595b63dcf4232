"""tools/gpu_suite.py without a GPU: the trainer's comparison runs on a tiny shape, the suite itself is skipped."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

import megatron_cases as cases

from tests.patience import patient

ROOT = Path(__file__).resolve().parents[2]


def suite(*arguments, timeout=300):
    command = [sys.executable, str(ROOT / "tools" / "gpu_suite.py"), *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=patient(timeout))


@pytest.mark.slow
def test_both_sides_of_the_trainer_comparison_run_and_start_at_the_same_loss():
    done = suite("--only", "trainer", "--shape", "tiny", "--device", "cpu", "--steps", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    about, *sides, ratio = (json.loads(x) for x in done.stdout.splitlines())
    assert about["megatron-core"] and about["transformers"]
    assert [line["name"].split("/")[-1] for line in sides] == ["megatron", "transformers"]
    assert ratio["value"] == pytest.approx(sides[0]["value"] / sides[1]["value"], abs=1e-3)
    assert ratio["first_loss_difference"] < 1e-4
    for line in sides:
        assert line["peak_gb"] > 0 and line["last_loss"] < line["first_loss"]
        assert line["layers"] and line["optimizer"] and "float32 main weights" in line["precision"]


@pytest.mark.slow
def test_the_small_cases_run(rank_pool, tmp_path):
    found = rank_pool.run(cases.cases_of_the_gpu_suite, 1, folder=tmp_path)[0]
    moe, resume = found["moe"], found["resume"]
    assert moe["ok"] and moe["losses"][-1] < moe["losses"][0]
    assert resume["ok"] and resume["resumed"] == resume["losses"][2:]  # exact on the CPU
    offload = found["offload"]
    assert offload["ok"] and offload["bitwise"] and offload["value"] == offload["held"] > 1e6
    assert found["engine"] == {"ok": True, "skipped": "the package transformer_engine is not installed"}


@pytest.mark.slow
def test_a_case_of_two_ranks_runs_by_its_command():
    done = suite("--only", "tensor2", "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    _, line = (json.loads(x) for x in done.stdout.splitlines())
    assert line["name"] == "gpu/tensor2" and line["ok"] and 0 < line["value"] < line["budget"] < line["tokens"]


@pytest.mark.slow
def test_cases_of_transports_and_of_the_record_of_experts_run_their_way_on_a_cpu():
    done = suite("--only", "ipc", "--only", "nccl", "--only", "experts", "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    _, ipc, nccl, experts = (json.loads(x) for x in done.stdout.splitlines())
    assert (ipc["transport"], nccl["transport"]) == ("shm", "gloo")
    assert all(line["ok"] and line["bitwise"] and line["digest_equal"] and line["bytes"] > 1e7 for line in (ipc, nccl))
    assert experts["ok"] and experts["engine"] == "hf_infer" and experts["value"] > 100


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sleep", "fp8", "pushes", "adapters"])
def test_a_case_with_an_engine_runs_its_way_on_a_cpu(name):
    """engine2 is the run of tests/cluster/test_adapter_push.py on two ranks, on other devices."""
    pytest.importorskip("vllm")
    done = suite("--only", name, "--device", "cpu", "--limit", "280")
    assert done.returncode == 0, done.stdout + done.stderr
    _, line = (json.loads(x) for x in done.stdout.splitlines())
    assert line["ok"] and "skipped" not in line
    assert line["same_tokens"] if name == "sleep" else 0 < line["value"] < line["budget"]


def test_without_a_gpu_the_suite_says_so_and_succeeds():
    done = suite("--only", "trainer")
    assert (done.returncode, done.stdout) == (0, "skipped: no CUDA device\n")


@pytest.mark.slow
def test_every_line_of_the_trip_runs_on_a_cpu_and_one_table_is_printed(tmp_path):
    limit = int(patient(280))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable, "TRIP_LIMIT_S": str(limit)}
    command = ["bash", str(ROOT / "tools" / "gpu_trip.sh"), "cpu", str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=limit + 60)
    assert done.returncode == 0 and done.stderr == "", done.stdout + done.stderr
    head, _, _, _, *rows = done.stdout.splitlines()
    assert head.startswith("device cpu, torch ")
    named = [row.split(" | ")[0].removeprefix("| ") for row in rows]
    sides = ["gpu/trainer/tiny/64/megatron", "gpu/trainer/tiny/64/transformers", "gpu/trainer/tiny/64"]
    assert named == ["gpu/attention", "logprobs_memory", "logprobs_time", *sides]
    assert "kernel row_by_row" in rows[0] and "launches" in rows[3] and rows[5].endswith("| True |")


def test_a_case_with_an_engine_has_the_time_of_its_start_beside_its_own(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import gpu_engine_cases
    import gpu_suite

    limits = []
    monkeypatch.setattr(gpu_suite, "play", lambda script, arguments, limit_s: limits.append(limit_s) or {"ok": True})
    for name in ("moe", "pushes", "experts"):
        list(gpu_suite.case(argparse.Namespace(limit=150, device="cpu"), name))
    assert limits == [150, 210, 210]
    assert gpu_engine_cases.CASES.keys() == {"ipc", "nccl", *gpu_suite.WITH_AN_ENGINE}
