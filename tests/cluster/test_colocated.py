"""Trainer and engines on the same pretended devices, run by the launcher: real ranks and engines, turns and memory."""

import re
import sqlite3
from contextlib import closing

import pytest

pytest.importorskip("ray")
pytest.importorskip("megatron.core")


@pytest.fixture
def pretended(launcher, monkeypatch):
    """A launcher whose embedded Ray claims two GPUs."""
    monkeypatch.setenv("ROLL_ASYNC_PRETENDED_GPUS", "2")
    return launcher


def test_a_colocated_run_takes_turns_is_on_policy_validates_saves_and_goes_on_from_its_checkpoint(pretended):
    """Nested: two ranks on devices 0 and 1, one replica on device 0."""
    pytest.importorskip("vllm")
    shared = (
        "async_generation_ratio=0", "actor_train.device_mapping=[0, 1]", "actor_train.world_size=2",
        "actor_infer.device_mapping=[0]",
        "actor_train.strategy_args.strategy_config.tensor_model_parallel_size=2", "eval_steps=2", "val_batch_size=8",
    )  # fmt: skip
    code, output = pretended.run(*shared, "max_steps=3", "save_steps=2")
    assert code == 0, output
    metrics = pretended.metrics()
    assert [m["step"] for m in metrics] == [1, 2, 3] and "validation/accuracy" in metrics[1]
    for m in metrics:
        assert m["staleness/max"] == 0 and abs(m["correction/rho_max"] - 1) < 1e-3
    folder = pretended.output / "run"
    log = (folder / "run.log").read_text()
    assert "actor_train and actor_infer-0 take turns on devices [0, 1]" in log
    assert re.search(r"node 0 is \S+: GPUs \{0: '0', 1: '1'\}", log)
    assert {p.name for p in (folder / "checkpoints").iterdir()} == {"step_00000002", "step_00000003"}
    assert (folder / "hf" / "config.json").is_file()


def test_a_resident_run_generates_while_it_trains_and_trains_every_prompt_once_without_a_change_of_phase(pretended):
    pytest.importorskip("vllm")
    shared = ("actor_train.device_mapping=[0]", "actor_infer.device_mapping=[0]", "colocation=resident")
    code, output = pretended.run(*shared, "async_generation_ratio=1", "max_steps=4")
    assert code == 0, output
    metrics = pretended.metrics()
    assert [m["groups/trained"] for m in metrics] == [8, 16, 24, 32]
    assert max(m["staleness/mean"] for m in metrics) > 0, (
        "some of a batch was generated while the one before was trained"
    )
    assert max(m["staleness/max"] for m in metrics) == 1
    folder = pretended.output / "run"
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as ledger:
        steps = ledger.execute(
            "SELECT consumed_step FROM groups WHERE state = 'trained' ORDER BY prompt_index"
        ).fetchall()
    assert sorted(step for (step,) in steps) == [1] * 8 + [2] * 8 + [3] * 8 + [4] * 8
    assert "take turns" not in (folder / "run.log").read_text()
    first = metrics[0]
    engine = sum(first[f"start/actor_infer-0/{phase}_s"] for phase in ("process", "imports", "load"))
    assert first["start/total_s"] > engine > 0 and first["start/actor_train/wait_engines_s"] > 0
    assert "starting, " in output and "  start " in output


def test_devices_that_are_not_there_are_refused_before_any_role_starts(pretended):
    code, output = pretended.run(
        "async_generation_ratio=0", "actor_train.device_mapping=[0]", "actor_infer.device_mapping=[0, 1, 2]",
        "actor_infer.world_size=3", timeout=90,
    )  # fmt: skip
    assert code == 2 and "Traceback" not in output
    assert "device_mapping needs 1 node with 3 GPUs, and Ray has 1 node with 2 GPUs" in output


def test_the_fully_asynchronous_mode_refuses_shared_devices_with_the_remedy(pretended):
    code, output = pretended.run(
        "async_generation_ratio=0", "actor_train.device_mapping=[0]", "actor_infer.device_mapping=[0]",
        config="fully_async_cpu.yaml", script="fully_async_main.py", timeout=90,
    )  # fmt: skip
    assert code == 2 and "share devices" in output and "start_rlvr_pipeline.py" in output, output
