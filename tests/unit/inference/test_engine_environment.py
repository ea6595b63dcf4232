"""What an engine on a GPU inherits from the launcher's environment, and what would harm it."""

import ctypes
import os
import sys

import pytest

pytest.importorskip("psutil")

from roll_async.inference.settings import EngineSettings
from roll_async.inference.sglang import arguments as sglang_arguments
from roll_async.inference.vllm import arguments as vllm_arguments


@pytest.fixture
def inherited(monkeypatch):
    """What Megatron needs, and an allocator's options; taken back afterwards, like all that an engine sets."""
    for name in ("HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS", "VLLM_LOGGING_LEVEL"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:128")
    monkeypatch.setattr(vllm_arguments, "own_children", lambda: None)


def settings(**changes):
    return EngineSettings(model_folder="m", dtype="bf16", device="cuda", max_model_len=8, **changes)


@pytest.mark.parametrize("engine", [vllm_arguments, sglang_arguments], ids=["vllm", "sglang"])
def test_an_engine_drops_the_one_connection_that_megatron_needs(engine, inherited):
    engine.prepare_environment(settings())
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ


@pytest.mark.parametrize(
    ("sleep_level", "expected"),
    [(0, "expandable_segments:True,max_split_size_mb:128"), (1, "max_split_size_mb:128"), (2, "max_split_size_mb:128")],
)
@pytest.mark.parametrize("engine", [vllm_arguments, sglang_arguments], ids=["vllm", "sglang"])
def test_an_engine_that_sleeps_drops_expandable_segments_and_nothing_else(engine, inherited, sleep_level, expected):
    engine.prepare_environment(settings(sleep_level=sleep_level))
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == expected


def test_sglang_on_a_cpu_loads_no_nccl_also_where_torch_brings_it(inherited, monkeypatch):
    for name in ("SGLANG_USE_CPU_ENGINE", "TORCHDYNAMO_DISABLE", "SGLANG_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1")
    monkeypatch.setenv("SGLANG_NCCL_SO_PATH", "libc.so.6")  # as any that loads
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sglang_arguments, "refuse_unknown_release", lambda library: None)
    sglang_arguments.prepare_environment(EngineSettings(model_folder="m", dtype="fp32", device="cpu", max_model_len=8))
    with pytest.raises(OSError):
        ctypes.CDLL(os.environ["SGLANG_NCCL_SO_PATH"])
