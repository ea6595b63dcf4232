"""The seam between the driver and the rollout process: answers, counters, errors, and what happens when it is silent or
dies. The process is real, the roles in it are the queue and two fakes.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import patient

pytest.importorskip("ray")
pytest.importorskip("psutil")

ROOT = Path(__file__).resolve().parents[2]

DRIVER = """
import asyncio, dataclasses, logging, signal
from array import array
from types import SimpleNamespace
import psutil
from roll_async.buffer.errors import EndOfData, StallError, TooManyFailures
from roll_async.buffer.ledger import MemoryLedger
from roll_async.buffer.message_queue import MessageQueue
from roll_async.buffer.states import QueueOptions
from roll_async.cluster.roles.rollout_process import RolloutProcess
from roll_async.cluster.runtime import ray_runtime
from roll_async.rollout.rollouter import RollouterStats
from roll_async.schema import FinishReason, Group, Prompt, Reward, Sample
from tests.patience import patient

PROMPTS = 5

def group(slot):
    prompt = Prompt(row_id=str(slot.prompt_index), token_ids=array("i", [1, 2]), domain="a", ground_truth="7")
    sample = Sample(
        sample_id="s", prompt_token_ids=prompt.token_ids, response_token_ids=array("i", [3]), loss_mask=b"\\x01",
        behaviour_logprobs=array("f", [-0.5]), version_runs=((slot.admitted_version, 1),),
        finish_reason=FinishReason.STOP, generation_s=0.0, reward=Reward(score=1.0),
    )
    now = asyncio.get_running_loop().time()
    return Group(
        group_id=slot.group_id, prompt=prompt, samples=(sample,), admitted_version=slot.admitted_version,
        admitted_s=now, finished_s=now,
    )

class Rollouter:
    def __init__(self, queue):
        self.queue, self.wanted = queue, asyncio.Event()
    async def run(self):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.produce())
    async def produce(self):
        done = 0
        while done < PROMPTS:
            for slot in await self.queue.reserve(1):
                await self.queue.put(group(slot))
                done += 1
        self.queue.end_of_data()
        await self.wanted.wait()
        raise TooManyFailures("one too many")
    async def pause(self):
        self.wanted.clear()
    async def resume(self):
        self.wanted.set()
    async def stop(self):
        pass
    def stats(self):
        zeros = {f.name: 0 for f in dataclasses.fields(RollouterStats) if f.type == "int"}
        return RollouterStats(**zeros, source={"engine/preemptions": 2.0})

class Synchronizer:
    def __init__(self, queue):
        self.queue, self.returning = queue, False
    async def push(self, version):
        self.queue.weights_held(version)
        self.returning = version == 1
        return f"report {version}"
    async def checked(self):
        return "canary"
    async def resync_returned(self, version):
        logging.getLogger("roll_async.here").warning("engine %d is back", version)
        self.returning = False
    def status(self):
        return "idle"

class Roles:
    async def build(self, order):
        queue = MessageQueue(QueueOptions(groups_per_batch=2, async_generation_ratio=1.0), MemoryLedger())
        queue.restore(order)
        return SimpleNamespace(
            queue=queue, rollouter=Rollouter(queue), synchronizer=Synchronizer(queue), validate=None
        )

async def start(stack):
    return Roles()

async def raised(work):
    try:
        await work
    except Exception as error:
        return error

async def main():
    silence_s = round(patient(3.0), 1)
    process = await RolloutProcess.start(start, log_files=[], silence_s=silence_s, rpc_timeout_s=100.0, env={})
    side = await process.build(0)
    queue, rollouter, synchronizer = side.queue, side.rollouter, side.synchronizer
    assert side.validate is None and queue.stats().admitted == 0
    running = asyncio.create_task(rollouter.run())
    asked = asyncio.create_task(queue.take_batch(1))
    await asyncio.sleep(0.5)
    asked.cancel()
    await asyncio.wait([asked])
    assert await synchronizer.push(0) == "report 0" and await synchronizer.checked() == "canary"
    first = await queue.take_batch(1)
    assert [g.prompt.row_id for g in first] == ["0", "1"], "a question that was taken back took no batch"
    assert (await queue.freshness(1)).mean_age_s >= 0
    await queue.step_trained(1)
    assert queue.stats().trained == 2, "counters come with the answer"
    source = rollouter.stats().source
    assert source["engine/preemptions"] == 2.0 and source["memory/rollout_peak_bytes"] > 2e7, source
    assert (await queue.checkpoint_state(1))["step"] == 1
    await synchronizer.push(1)
    async with asyncio.timeout(patient(3)):
        await synchronizer.wait_for_returned()
    await synchronizer.resync_returned(1)
    await queue.take_batch(2)
    await queue.step_trained(2)
    end = await raised(queue.take_batch(3))
    assert type(end) is EndOfData and end.leftovers == 1, repr(end)
    await rollouter.resume()
    failure = await raised(running)
    assert type(failure) is TooManyFailures and str(failure) == "one too many", repr(failure)

    host = next(p for p in psutil.Process().children(recursive=True) if "ray::RolloutHost" in " ".join(p.cmdline()))
    running = asyncio.create_task(rollouter.run())
    host.send_signal(signal.SIGSTOP)
    silent = await raised(running)
    assert type(silent) is StallError and f"rollout process: no answer for {silence_s:g} s" in str(silent), repr(silent)
    host.send_signal(signal.SIGCONT)
    host.kill()
    gone = await raised(queue.step_trained(3))
    assert isinstance(gone, ConnectionError) and "rollout process: process is gone" in str(gone), repr(gone)
    await process.close()
    print("all held", flush=True)

with ray_runtime(num_processes=1, env={}):
    asyncio.run(main())
"""


def test_answers_counters_and_errors_cross_and_a_silent_or_dead_process_is_noticed():
    done = subprocess.run(
        [sys.executable, "-c", DRIVER], cwd=ROOT, capture_output=True, text=True, timeout=patient(180)
    )
    assert "all held" in done.stdout, done.stdout + done.stderr
    assert "WARNING: engine 1 is back" in done.stderr, "warnings reach the console of the run"
