"""A role process that hangs: found after `fault.rpc_timeout`, named, and the run ends at once with nothing left. The
processes and Ray are real; what hangs is stopped by a signal, so it can not even be asked to end.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import patient

pytest.importorskip("ray")
psutil = pytest.importorskip("psutil")

ROOT = Path(__file__).resolve().parents[2]

DRIVER = """
import asyncio, os, signal, sys, time
import psutil, ray
from roll_async.buffer.errors import RoleGone, StallError
from roll_async.cluster.roles.engine_group import EngineReplica, RayEngineClient
from roll_async.cluster.reaper import MARKER_VARIABLE, marked_processes
from roll_async.cluster.runtime import ray_runtime, session_folder, wait_names_free
from roll_async.cluster.roles.trainer_group import RankCalls, RayTrainerGroup
from roll_async.commands.run import exit_code
from roll_async.weight_sync.transport.shm import FileWriter
from tests.patience import patient

@ray.remote(num_cpus=0)
class Rank:
    def update_policy(self, rows, step):
        if step == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        return {"pid": float(os.getpid())}
    def compute_values(self, rows):
        return 1
    def close(self):
        pass

@ray.remote(num_cpus=0)
class Engine:
    async def load(self):
        await asyncio.sleep(1000)

async def raised(work):
    try:
        await work
    except (StallError, ConnectionError) as error:
        return error

async def main():
    healthy, hung, other = Rank.remote(), Rank.remote(), Rank.remote()
    group = RayTrainerGroup("actor_train", [healthy, hung], bucket_bytes=1, rpc_timeout_s=patient(30.0))
    await group._all(RankCalls.update_policy, None, 1)
    limit_s = group._rpc_timeout_s = round(patient(1.5), 1)
    # The first rank is asked for something that it can do, the second for something that stops it.
    error = await raised(group._each(RankCalls.update_policy, [(None, 1), (None, 2)]))
    expected = f"actor_train rank 1: update_policy did not return within {limit_s:g} s (fault.rpc_timeout)"
    assert type(error) is StallError and str(error) == expected, repr(error)
    began = time.monotonic()
    again = await raised(group.save("folder", 1, b""))
    assert type(again) is StallError and str(again) == expected, repr(again)

    engine = RayEngineClient("actor_infer-0", [Engine.remote()], ["127.0.0.1"], rpc_timeout_s=limit_s)
    silent = await raised(engine.load())
    assert type(silent) is ConnectionError and "actor_infer-0: load did not return" in str(silent), repr(silent)
    engine.kill()

    critic = RayTrainerGroup("critic", [other], bucket_bytes=1, rpc_timeout_s=patient(30.0))
    ray.kill(other)
    gone = await raised(critic._all(RankCalls.compute_values, None))
    assert type(gone) is RoleGone and "critic rank 0: process is gone" in str(gone), repr(gone)
    assert type(await raised(critic.save("folder", 1, b""))) is RoleGone
    await group.close()
    await critic.close()
    assert time.monotonic() - began < limit_s + patient(2.5), "nobody waits for what hangs"
    for _ in range(3):  # as a run that starts its roles again
        named = Rank.options(name="actor_train-0").remote()
        await named.close.remote()
        ray.kill(named)
        await wait_names_free()
    raise error

try:
    with ray_runtime(num_processes=3, env={}):
        writer = FileWriter()  # of a sender that can not clean up
        writer._room(0, 4096)
        (file,) = writer._files
        try:
            asyncio.run(main())
        finally:
            left = marked_processes(os.environ[MARKER_VARIABLE], [str(session_folder())])
            print("pids", *(p.pid for p in left), flush=True)
            print("file", file.path, flush=True)
except BaseException as error:
    print(repr(error))
    sys.exit(exit_code(error))
"""


def test_a_hung_rank_is_named_after_its_deadline_and_nobody_waits_for_it_again():
    done = subprocess.run(
        [sys.executable, "-c", DRIVER], cwd=ROOT, capture_output=True, text=True, timeout=patient(120), env=os.environ
    )
    assert done.returncode == 4, done.stdout + done.stderr
    pids = [int(pid) for pid in done.stdout.split("\n")[0].split()[1:]]
    assert len(pids) > 3 and not Path(done.stdout.split("\n")[1].split()[1]).exists()
    assert [p for p in pids if psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE] == []
