"""Trainer and engines on the same pretended devices, run by the launcher: real ranks and engines, turns and memory."""

import re

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
