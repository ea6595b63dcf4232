"""What a run needs that is not here is said in one line, where nobody else is to say it."""

from pathlib import Path

import pytest

pytest.importorskip("ray")

from roll_async.config.api import load
from roll_async.launch.checks import needs
from roll_async.launch.checks.devices import Card
from roll_async.launch.checks.needs import needs_elsewhere
from roll_async.observe.machine import gpus_here

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
SEVEN = load(CONFIGS / "rlvr_config_async.yaml")


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No cluster is joined, and no GPUs are pretended."""
    for name in ("RAY_ADDRESS", "ROLL_ASYNC_PRETENDED_GPUS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(needs, "gpus_here", lambda: 8)


def test_devices_are_named_with_those_that_are_here(monkeypatch):
    said = needs_elsewhere(SEVEN)
    assert said is not None and "3 nodes with 8 + 8 + 8 GPUs, here: 1 node with 8 GPUs (RAY_ADDRESS=" in said
    small = load(
        CONFIGS / "rlvr_config_async.yaml", ["actor_train.device_mapping=0-3", "actor_infer.device_mapping=4-7"]
    )
    assert needs_elsewhere(small) is None, "what else is missing has lines of its own"
    monkeypatch.setattr(needs, "gpus_here", lambda: 4)
    assert "1 node with 8 GPUs, here: 1 node with 4 GPUs" in str(needs_elsewhere(small))


def test_a_model_in_a_folder_and_data_that_is_there_are_not_named(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text("")
    given = [f"pretrain={tmp_path}/model", f"actor_train.data_args.file_name={tmp_path}/rows.jsonl"]
    said = str(needs_elsewhere(load(CONFIGS / "rlvr_config_async.yaml", given)))
    assert "model" not in said.partition("or see it run")[0] and "file_name" not in said and "GPUs" in said


def test_nothing_is_said_without_devices_or_where_ray_has_the_count(monkeypatch):
    assert needs_elsewhere(load(CONFIGS / "rlvr_config_async_cpu.yaml")) is None
    monkeypatch.setenv("ROLL_ASYNC_PRETENDED_GPUS", "2")
    assert needs_elsewhere(SEVEN) is None
    monkeypatch.delenv("ROLL_ASYNC_PRETENDED_GPUS")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert needs_elsewhere(SEVEN) is None
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setattr(needs, "gpus_here", lambda: None)
    assert needs_elsewhere(SEVEN) is None


def test_agents_are_not_offered_an_option_that_they_do_not_have():
    said = needs_elsewhere(load(CONFIGS / "dapo_qwen2.5_32b.yaml"))
    assert "--device cpu" in str(said)
    agents = load(
        CONFIGS / "agent_val_frozen_lake_async.yaml", ["num_gpus_per_node=16", "actor_infer.device_mapping=8-15"]
    )
    assert "GPUs" in str(needs_elsewhere(agents)) and "--device cpu" not in str(needs_elsewhere(agents))


def test_devices_are_counted_by_their_files_and_by_what_this_process_may_see(tmp_path, monkeypatch):
    assert gpus_here(tmp_path) == 0
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert gpus_here(tmp_path) == 3
    for visible, count in (("", 0), ("1", 1), ("0,2", 2)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert gpus_here(tmp_path) == count
    (tmp_path / "kfd").touch()
    assert gpus_here(tmp_path) is None


def test_what_is_wrong_with_the_devices_here_is_the_line(monkeypatch):
    line = "0, GPU-a, Tesla V100, 580.1, 7.0, 32768, 4"
    monkeypatch.setattr(needs, "cards_here", lambda: [Card.of(line.replace("0,", f"{i},", 1)) for i in range(8)])
    small = load(
        CONFIGS / "rlvr_config_async.yaml", ["actor_train.device_mapping=0-3", "actor_infer.device_mapping=4-7"]
    )
    assert "device 0 (Tesla V100) computes no bf16" in str(needs_elsewhere(small))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES is empty" in str(needs_elsewhere(small))
