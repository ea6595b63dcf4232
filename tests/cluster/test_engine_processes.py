"""What an engine's processes leave: nothing when the replica is killed, and the cause when one of them cannot start."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.patience import patient

pytest.importorskip("vllm")
psutil = pytest.importorskip("psutil")

from test_engine_protocol import save_tokenizer, tiny_model

from roll_async.inference.processes import until_gone
from roll_async.inference.settings import EngineSettings
from roll_async.inference.vllm.engine import VllmEngine

REPLICA = """
import asyncio, sys, time
from roll_async.inference.processes import process_ids
from roll_async.inference.settings import EngineSettings
from roll_async.inference.vllm.engine import VllmEngine

if __name__ == "__main__":
    settings = EngineSettings(
        model_folder=sys.argv[1], dtype="fp32", device="cpu", max_model_len=64, max_running=4, tensor_parallel_size=2
    )
    asyncio.run(VllmEngine(settings).start())
    print("READY", *(f"{pid}:{created}" for pid, created in process_ids()), flush=True)
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_model(1, tied=True).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def test_a_killed_replica_takes_its_core_and_its_workers_with_it(model, tmp_path):
    script = tmp_path / "replica.py"
    script.write_text(REPLICA)
    replica = subprocess.Popen([sys.executable, str(script), str(model)], stdout=subprocess.PIPE, text=True)
    try:
        line = next(line for line in replica.stdout if line.startswith("READY"))
        processes = [(int(pid), float(created)) for pid, created in (p.split(":") for p in line.split()[1:])]
        working = [psutil.Process(pid).name() for pid, _ in processes]
        assert sum("Worker" in name for name in working) == 2 and len(processes) >= 4, working
    finally:
        os.kill(replica.pid, signal.SIGKILL)
        replica.wait()
    started, limit_s = time.monotonic(), patient(9)
    asyncio.run(until_gone(processes, timeout_s=limit_s))  # sooner than it would kill them itself
    assert time.monotonic() - started < limit_s


def test_what_stopped_a_process_of_the_engine_is_the_error_the_user_reads(model):
    settings = EngineSettings(
        model_folder=str(model), dtype="fp32", device="cpu", max_model_len=512, max_running=4,
        core_in_process=False, cpu_kv_cache_bytes=1 << 10,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="vLLM did not start: ValueError: .*cache blocks"):
        asyncio.run(VllmEngine(settings).start())
