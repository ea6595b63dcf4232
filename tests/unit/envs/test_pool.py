"""Worlds in worker processes: hung, crashing, raising ones harm nobody else."""

import asyncio
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from roll_async.config.user_code import FOLDERS_VARIABLE, search_beside
from roll_async.envs.pool import WorldPool, WorldWorker
from roll_async.envs.protocol import GraderFailed, WorldFailed
from roll_async.envs.registry import WorldSpec
from roll_async.envs.worker import Worlds
from tests.patience import patient

HERE = str(Path(__file__).parent)
HOSTILE = WorldSpec(env_type="hostile_worlds.Hostile", values={})


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.syspath_prepend(HERE)


def with_pool(work, **options):
    async def main():
        pool = WorldPool(**{"step_timeout_s": patient(1.0), **options})
        try:
            return await work(pool)
        finally:
            await pool.close()

    return asyncio.run(main())


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.slow
def test_a_hung_step_fails_in_time_and_its_process_ends_when_the_world_beside_it_has_ended():
    async def work(pool):
        hung, beside = pool.open(HOSTILE), pool.open(HOSTILE)
        pid = (await hung.reset(1)).info["pid"]
        assert (await beside.reset(2)).info["pid"] == pid
        started = time.monotonic()
        with pytest.raises(WorldFailed, match="took longer than"):
            await hung.step("hang")
        assert time.monotonic() - started < patient(3)
        assert (await beside.step("walk")).text == "did walk"
        fresh = pool.open(HOSTILE)
        assert (await fresh.reset(3)).info["pid"] != pid
        await hung.close()
        await beside.close()
        for _ in range(40):
            if gone(pid):
                break
            await asyncio.sleep(0.05)
        assert gone(pid) and pool.killed == 1

    with_pool(work)


@pytest.mark.slow
def test_a_process_that_dies_fails_its_worlds_and_raising_fails_only_its_own():
    async def work(pool):
        a, b = pool.open(HOSTILE), pool.open(HOSTILE)
        await asyncio.gather(a.reset(1), b.reset(2))
        with pytest.raises(WorldFailed, match="KeyError: 'no such thing'"):
            await a.step("raise")
        with pytest.raises(GraderFailed, match="the judge is away"):
            await a.step("ungradable")
        assert (await b.step("go")).reward == 0.5
        with pytest.raises(WorldFailed, match="worker process"):
            await a.step("die")
        with pytest.raises(WorldFailed):
            await b.step("go")

    with_pool(work)


@pytest.mark.parametrize("name", ["Hostile", "InLoop"])
@pytest.mark.slow
def test_an_odd_answer_is_used_or_refused_at_once_alike_in_the_loop_and_in_a_process(name):
    used = {"keys": {"(1, 2)": "\ufffd"}, "no info": {}, "bytes": {}, "numpy": {"solved": False}}
    refused = {
        "digits": (WorldFailed, "ValueError: an integer of"),
        "circle": (WorldFailed, "nested more than"),
        "no text": (WorldFailed, "TypeError: expected text, got None"),
        "short": (WorldFailed, "step must give .*, it gave 3 values"),
        "no tuple": (WorldFailed, "it gave NoneType"),
        "exit": (WorldFailed, r"SystemExit: 3 \[envs/hostile_worlds.py:\d+, in step\]"),
        "no reward": (GraderFailed, "the reward is None"),
        "word": (GraderFailed, "the reward is '1.0'"),
        "infinite": (GraderFailed, "the reward is inf"),
    }

    async def work(pool):
        world, beside = (pool.open(WorldSpec(env_type=f"hostile_worlds.{name}", values={})) for _ in range(2))
        await asyncio.gather(world.reset(1), beside.reset(2))
        started = time.monotonic()
        for action, info in used.items():
            found = await world.step(action)
            assert (found.info, found.ended, found.text.encode()[:1]) == (info, True, b"x"), action
        for action, (error, message) in refused.items():
            with pytest.raises(error, match=message):
                await world.step(action)
        if name == "Hostile":
            with pytest.raises(WorldFailed, match="are allowed"):
                await world.step("too much")
        assert time.monotonic() - started < 30 and (await beside.step("go")).text == "did go"
        assert pool.killed == 0

    with_pool(work, step_timeout_s=60)


@pytest.mark.slow
def test_a_process_that_says_no_answer_fails_its_worlds_at_once_and_ends_with_what_they_started():
    async def work(pool):
        world = pool.open(HOSTILE)
        await world.reset(1)
        child = int((await world.step("spawn")).text)
        with pytest.raises(WorldFailed, match="it said what is no answer: JSONDecodeError"):
            await world.step("babble")
        return child

    child = with_pool(work, step_timeout_s=60)
    assert gone(child) or Path(f"/proc/{child}/stat").read_text().split()[2] == "Z"


def test_worlds_that_sleep_in_one_process_do_not_wait_for_one_another():
    async def work(pool):
        spec = WorldSpec(env_type="hostile_worlds.Hostile", values={"sleep_s": 0.3})
        worlds = [pool.open(spec) for _ in range(8)]
        pids = {(await w.reset(i)).info["pid"] for i, w in enumerate(worlds)}
        assert len(pids) == 1
        started = time.monotonic()
        await asyncio.gather(*(w.step("x") for w in worlds))
        assert time.monotonic() - started < patient(1.2)

    with_pool(work, step_timeout_s=20)


@pytest.mark.slow
def test_async_worlds_run_in_the_loop_and_time_out_there():
    async def work(pool):
        world = pool.open(WorldSpec(env_type="hostile_worlds.Slow", values={}))
        await world.reset(0)
        assert (await world.step("0.01")).ended
        with pytest.raises(WorldFailed, match=r"longer than [\d.]+ s"):
            await world.step("30")
        assert pool.num_workers == 0

    with_pool(work)


def test_closing_the_pool_leaves_no_process():
    async def work(pool):
        world = pool.open(HOSTILE)
        return (await world.reset(0)).info["pid"]

    assert gone(with_pool(work))


def test_a_world_that_cannot_be_made_fails_its_trajectory_and_not_the_run():
    async def work(pool):
        with pytest.raises(WorldFailed, match="OSError: no display"):
            await pool.open(WorldSpec(env_type="hostile_worlds.Unmade", values={})).reset(0)

    with_pool(work)


@pytest.mark.parametrize("name", ["Clings", "ClosesSlowly"])
def test_nobody_waits_for_a_world_to_close_and_what_it_raises_harms_nobody(name, caplog):
    async def work(pool):
        world = pool.open(WorldSpec(env_type=f"hostile_worlds.{name}", values={}))
        await world.reset(0)
        started = time.monotonic()
        pool.close_soon(world)
        assert time.monotonic() - started < patient(0.5)
        await asyncio.sleep(0.3)

    with_pool(work, step_timeout_s=0.2)
    assert "did not close" in caplog.text


@pytest.mark.slow
def test_a_process_whose_world_does_not_close_takes_no_other_and_ends_after_the_world_beside_it():
    async def work(pool):
        hung = pool.open(WorldSpec(env_type=HOSTILE.env_type, values={"close_hangs": True}))
        beside = pool.open(HOSTILE)
        pid = (await hung.reset(1)).info["pid"]
        await beside.reset(2)
        pool.close_soon(hung)
        for _ in range(30):
            assert (await beside.step("walk")).info["pid"] == pid
            await asyncio.sleep(patient(0.1))
        assert pool.killed == 1 and (await pool.open(HOSTILE).reset(3)).info["pid"] != pid
        await beside.close()
        while not gone(pid):
            await asyncio.sleep(0.05)

    with_pool(work)


def test_a_close_waits_for_the_whole_reset(tmp_path, monkeypatch):
    monkeypatch.setattr("roll_async.envs.worker._STEP_ENDS_S", 0.05)
    values, (_, theirs) = {"path": str(tmp_path / "said")}, socket.socketpair()
    worlds = Worlds(theirs)
    reset = {"id": 1, "world": 7, "op": "reset", "seed": 0, "env_type": "hostile_worlds.Slowly", "values": values}
    begun = threading.Thread(target=worlds.handle, args=(json.dumps(reset).encode(),))
    begun.start()
    while not (tmp_path / "said").exists():
        time.sleep(0.01)
    worlds.handle(json.dumps({"id": 2, "world": 7, "op": "close"}).encode())
    begun.join()
    assert (tmp_path / "said").read_text() == "begins ends closed "


def test_a_world_that_is_cancelled_is_closed_when_what_it_does_has_ended(tmp_path):
    async def work(pool):
        for name in ("reset", "step"):
            path = tmp_path / name
            world = pool.open(WorldSpec(env_type="hostile_worlds.Slowly", values={"path": str(path)}))
            if name == "step":
                await world.reset(0)
                path.unlink()
            doing = asyncio.create_task(world.reset(0) if name == "reset" else world.step(""))
            while not path.exists():
                await asyncio.sleep(0.01)
            doing.cancel()
            await world.close()
            assert path.read_text() == "begins ends closed ", name

    with_pool(work, step_timeout_s=20)


@pytest.mark.slow
def test_a_world_whose_step_waits_for_its_close_is_closed_and_one_that_does_not_close_is_killed(tmp_path):
    path = tmp_path / "said"

    async def close_in_step(pool, name):
        world = pool.open(WorldSpec(env_type=f"hostile_worlds.{name}", values={"path": str(path)}))
        await world.reset(0)
        path.unlink(missing_ok=True)
        step = asyncio.create_task(world.step(""))
        while not path.exists():
            await asyncio.sleep(0.01)
        step.cancel()
        await world.close()
        return pool.killed

    assert with_pool(lambda pool: close_in_step(pool, "WaitsForItsClose"), step_timeout_s=60) == 0
    assert path.read_text() == "begins closed "
    assert with_pool(lambda pool: close_in_step(pool, "WaitsForItsClose"), step_timeout_s=0.5) == 1


def test_a_reset_that_begins_after_the_close_of_its_world_makes_none(tmp_path):
    values, (ours, theirs) = {"path": str(tmp_path / "said")}, socket.socketpair()
    worlds = Worlds(theirs)
    worlds.handle(json.dumps({"id": 1, "world": 7, "op": "close"}).encode())
    reset = {"id": 2, "world": 7, "op": "reset", "seed": 0, "env_type": "hostile_worlds.Slowly", "values": values}
    worlds.handle(json.dumps(reset).encode())
    answers = [json.loads(line) for line in ours.recv(9999).splitlines()]
    assert answers[0] == {"id": 1} and "is closed" in answers[1]["error"] and not (tmp_path / "said").exists()


def test_a_worker_that_does_not_start_takes_no_further_world():
    class Broken(WorldWorker):
        async def _start(self):
            raise OSError("too many open files")

    kinds = [Broken, WorldWorker]

    async def work(pool):
        with pytest.raises(WorldFailed, match="did not start: too many open files"):
            await pool.open(HOSTILE).reset(0)
        assert (await pool.open(HOSTILE).reset(1)).text == "seed 1"

    with_pool(work, step_timeout_s=20, worker=lambda *parts: kinds.pop(0)(*parts))


def test_a_world_beside_the_config_is_found_by_its_worker(tmp_path, monkeypatch):
    (tmp_path / "world_of_mine.py").write_text(
        "class Mine:\n    def reset(self, seed):\n        return f'seed {seed}', {}\n"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv(FOLDERS_VARIABLE, "")
    search_beside(tmp_path / "mine.yaml")

    async def work(pool):
        return (await pool.open(WorldSpec(env_type="world_of_mine.Mine", values={})).reset(7)).text

    assert with_pool(work) == "seed 7"
