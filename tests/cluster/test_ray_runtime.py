"""Embedded Ray: loopback only, and nothing is left behind however the driver ends. Each driver is a process of its
own.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.patience import patient

psutil = pytest.importorskip("psutil")
pytest.importorskip("ray")

ROOT = Path(__file__).resolve().parents[2]

DRIVER = """
import os, sys, time
import psutil, ray
from roll_async.cluster.reaper import MARKER_VARIABLE, marked_processes
from roll_async.cluster.runtime import ray_runtime, session_folder

@ray.remote
class Role:
    def where(self):
        import subprocess
        self.child = subprocess.Popen(["sleep", "600"])  # an engine's own child process
        return os.environ["ROLE"], os.getpid(), self.child.pid

before = dict(os.environ)
with ray_runtime(num_processes=2, env={"ROLE": "a"}):
    role = Role.options(runtime_env={"env_vars": {"ROLE": "b"}}).remote()
    name, pid, child = ray.get(role.where.remote())
    folder = str(session_folder())
    ours = {p.pid for p in marked_processes(os.environ[MARKER_VARIABLE], [folder])} | {pid, child}
    listening = [c for c in psutil.net_connections("tcp") if c.status == "LISTEN"]
    open_ports = [c.laddr.ip for c in listening if c.pid in ours | {os.getpid()}]
    idle = [p for p in ours if "ray::IDLE" in " ".join(psutil.Process(p).cmdline())]
    print(name, *sorted(ours - {os.getpid()}), "|", *sorted(set(open_ports)), "|", len(idle), flush=True)
    if sys.argv[1] == "hang":
        time.sleep(600)
print(*sorted(k for k in before.keys() | os.environ.keys() if before.get(k) != os.environ.get(k)), flush=True)
"""


def start(mode: str) -> subprocess.Popen:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    env.pop("RAY_ADDRESS", None)
    return subprocess.Popen([sys.executable, "-c", DRIVER, mode], stdout=subprocess.PIPE, text=True, env=env)


def alive(pids: list[int]) -> list[int]:
    return [p for p in pids if psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE]


def wait_gone(pids: list[int], seconds: float) -> list[int]:
    deadline = time.monotonic() + patient(seconds)
    while (left := alive(pids)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


@pytest.fixture(params=["end", "hang"])
def driver(request):
    process = start(request.param)
    process.mode = request.param
    yield process
    process.kill()
    process.wait()


def test_a_driver_starts_no_idle_worker_ends_with_all_it_started_and_opens_no_port_to_the_network(driver):
    line = driver.stdout.readline()
    role, *rest = line.split("|")[0].split()
    pids = [int(p) for p in rest]
    assert role == "b" and len(pids) >= 5
    assert set(line.split("|")[1].split()) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    assert int(line.split("|")[2]) == 0, "Ray started workers beforehand that no role can use"
    if driver.mode == "hang":
        os.kill(driver.pid, signal.SIGKILL)
    assert driver.wait(patient(60)) == (0 if driver.mode == "end" else -signal.SIGKILL)
    assert wait_gone(pids, 20) == []


def test_what_ray_was_told_is_put_back_so_that_the_process_may_join_many_machines_later():
    driver = start("end")
    output, _ = driver.communicate(timeout=patient(120))
    assert driver.returncode == 0
    first, changed = output.splitlines()
    of_ray = {"PYTHONBREAKPOINT", "RAY_USAGE_STATS_ENABLED"}
    assert "|" in first and set(changed.split()) <= of_ray


def test_an_address_where_no_cluster_answers_is_refused_at_once_with_the_remedy(monkeypatch):
    from roll_async.cluster.runtime import ray_runtime

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and does not listen: connections are refused
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        started = time.monotonic()
        with (
            pytest.raises(ValueError, match=f"RAY_ADDRESS={address}: no Ray cluster answers there .*unset RAY_ADDRESS"),
            ray_runtime(num_processes=1, env={}),
        ):
            pass
    assert time.monotonic() - started < patient(5)
