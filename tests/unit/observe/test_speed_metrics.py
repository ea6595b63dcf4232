"""Memory of processes and use of GPUs, and that both reach metrics.jsonl."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from roll_async.observe.machine import Gpus, peak_bytes
from roll_async.observe.progress import Screen
from roll_async.observe.recorder import REQUIRED_KEYS, Recorder
from roll_async.observe.run_folder import RunFolder
from roll_async.rollout.dispatch.server_counts import ServerCounts


class FakeNvml:
    """Two GPUs whose use is set by the test; handles are their numbers."""

    class NVMLError(Exception):
        pass

    def __init__(self, count=2):
        self.count, self.busy, self.used, self.fails = count, [0, 0], [0, 0], False

    def nvmlInit(self):
        if not self.count:
            raise self.NVMLError("no driver")

    def nvmlDeviceGetCount(self):
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetUtilizationRates(self, handle):
        if self.fails:
            raise self.NVMLError("GPU is lost")
        return SimpleNamespace(gpu=self.busy[handle], memory=0)

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(used=self.used[handle], total=100)


def process(proc, pid, peak_kb, *children):
    task = proc / str(pid) / "task" / str(pid)
    task.mkdir(parents=True)
    (proc / str(pid) / "status").write_text(f"Name:\tx\nVmHWM:\t  {peak_kb} kB\nVmRSS:\t 1 kB\n")
    (task / "children").write_text(" ".join(map(str, children)) + " ")


def test_the_peak_of_a_process_is_that_of_its_descendants_too(tmp_path):
    for pid, peak_kb, *children in ((7, 100, 8, 9), (8, 20, 10), (9, 3), (10, 4, 11), (12, 5000)):
        process(tmp_path, pid, peak_kb, *children)
    assert peak_bytes(tmp_path, 7) == 127 * 1024, "11 has ended, 12 is another's"
    assert peak_bytes(tmp_path, 99) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_child_process_counts_while_it_lives():
    before = peak_bytes()
    script = "x = bytearray(200_000_000); print('made', flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout.readline()
    during = peak_bytes()
    child.communicate(b"\n")
    assert before > 1_000_000 and during > before + 190_000_000 and peak_bytes() < during


def test_the_use_of_gpus_is_a_mean_since_the_last_question_and_their_memory_a_peak():
    nvml = FakeNvml()
    gpus = Gpus(nvml)
    assert gpus.metrics() == {}, "nothing was asked yet"
    for busy, used in (((100, 0), (10, 5)), ((50, 0), (30, 5))):
        nvml.busy, nvml.used = busy, used
        gpus.sample()
    assert gpus.metrics() == {
        "gpu/utilisation": 0.375, "gpu/0/utilisation": 0.75, "gpu/1/utilisation": 0.0,
        "gpu/0/peak_memory_bytes": 30.0, "gpu/1/peak_memory_bytes": 5.0,
    }  # fmt: skip
    nvml.busy, nvml.used = (0, 20), (1, 1)
    gpus.sample()
    assert gpus.metrics()["gpu/1/utilisation"] == 0.2
    nvml.fails = True
    gpus.sample()
    assert gpus.metrics() == {}, "a GPU that does not tell ends the questions, not the run"
    assert list(Gpus(FakeNvml(), [1])._handles) == [1]
    with pytest.raises(FakeNvml.NVMLError):
        Gpus(FakeNvml(count=0))


def test_gpus_are_asked_in_a_thread_that_ends():
    nvml = FakeNvml()
    gpus = Gpus(nvml)
    gpus.start()
    gpus.close()
    assert not gpus._thread.is_alive()


def test_memory_of_the_driver_and_use_of_gpus_are_in_every_record(tmp_path):
    gpus = Gpus(FakeNvml())
    recorder = Recorder(RunFolder(str(tmp_path), "run"), [], Screen(1), logging_steps=1, gpus=gpus)
    gpus.sample()
    recorder.step(1, dict.fromkeys([*REQUIRED_KEYS, "reward/mean"], 0.0))
    recorder.close()
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    metrics = json.loads(line)
    assert metrics["gpu/utilisation"] == 0.0 and metrics["memory/driver_peak_bytes"] > 1_000_000


def test_the_memory_of_the_largest_replica_is_published_and_stays_when_it_is_gone():
    def link(peak):
        load = None if peak is None else SimpleNamespace(kv=None, peak_bytes=peak)
        return SimpleNamespace(name="e", load=load, busy_until_s=lambda now_s: 0.0)

    counts = ServerCounts()

    def published(*peaks):
        return dict(counts.stats(queued=0, now_s=0.0, links=map(link, peaks)).engines)

    assert published(None) == published(0) == {}
    assert published(5, 8, None) == {"memory/engine_peak_bytes": 8.0}
    assert published(6) == {"memory/engine_peak_bytes": 8.0}
