"""Devices that a run cannot use are named in one line, with what to do, before anything starts."""

from pathlib import Path

import pytest

from roll_async.config.api import load
from roll_async.launch.checks.devices import Card, device_problem

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
ONE_RANK_EACH = [
    "actor_train.device_mapping=[0]",
    "actor_train.strategy_args.strategy_config.tensor_model_parallel_size=1",
    "actor_train.strategy_args.strategy_config.sequence_parallel=false",
    "actor_infer.strategy_args.strategy_config.tensor_parallel_size=1",
]
TWO = load(
    CONFIGS / "rlvr_config_async.yaml", [*ONE_RANK_EACH, "actor_infer.device_mapping=[1]", "num_gpus_per_node=2"]
)
SHARED = load(
    CONFIGS / "rlvr_config_async.yaml",
    [*ONE_RANK_EACH, "actor_infer.device_mapping=[0]", "num_gpus_per_node=1", "async_generation_ratio=0"],
)
H200 = "{}, GPU-{}7f2e-11, NVIDIA H200, {}, {}, 143771, {}"


def cards(*, driver="580.65.06", capability="9.0", used=(600, 4)):
    lines = (H200.format(i, "ab"[i], driver, capability, held) for i, held in enumerate(used))
    return [Card.of(line) for line in lines]


def test_devices_that_are_free_new_enough_and_named_rightly_are_taken():
    for visible in (None, "0,1", "1,0", "GPU-a7f2e-11,GPU-b7", "MIG-3c0,MIG-4d1", "MIG-GPU-a/1/0,1"):
        assert device_problem(TWO, cards(), visible, "13.0") is None, visible
    assert device_problem(TWO, cards(driver="535.104.05"), None, "12.8") is None
    assert device_problem(TWO, [], "", "13.0") is None, "nothing is known of them here"
    on_cpu = load(CONFIGS / "rlvr_config_async_cpu.yaml")
    assert device_problem(on_cpu, cards(driver="470.1"), "", "13.0") is None


@pytest.mark.parametrize(
    ("visible", "said"),
    [
        ("", "CUDA_VISIBLE_DEVICES is empty and hides the 2 devices of this machine; unset it"),
        (" , ", "is empty"),
        ("0,2", "CUDA_VISIBLE_DEVICES=0,2: 2 is no device of this machine; there are 0 or GPU-a7f2e-11, 1 or"),
        ("GPU-c", "GPU-c is no device"),
        ("GPU-", "GPU- is not clear; there are 0 or GPU-a"),
        ("all", "all is no device"),
        ("1,1", "CUDA_VISIBLE_DEVICES=1,1 names a device twice"),
    ],
)
def test_names_that_cuda_would_read_otherwise_than_they_are_meant_are_refused(visible, said):
    found = device_problem(TWO, cards(), visible, "13.0")
    assert said in found and "\n" not in found


def test_a_card_that_cannot_compute_so_is_named_with_its_remedy():
    assert "actor_train.model_args.dtype=bf16, and device 0 (NVIDIA H200) computes no bf16" in device_problem(
        TWO, cards(capability="7.5"), None, "13.0"
    )
    old = device_problem(TWO, cards(driver="570.86.15"), None, "13.0")
    assert old.startswith("the driver 570.86.15 of device 0 (NVIDIA H200) is older than torch's CUDA 13.0 takes (580")
    busy = device_problem(TWO, cards(used=(4, 40960)), None, "13.0")
    assert busy.startswith("other processes hold 40.0 of 140 GiB of device 1 (NVIDIA H200), as another run does")
    assert device_problem(SHARED, cards(used=(4, 40960)), None, "13.0") is None
    assert "device 1" in device_problem(SHARED, cards(used=(4, 40960)), "1", "13.0")
