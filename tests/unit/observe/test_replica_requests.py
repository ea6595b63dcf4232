"""`roll-async scale` and the run it asks, without engines: what is answered, and what a wrong question says."""

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from contextlib import AsyncExitStack

import pytest

from roll_async.buffer.ledger import MemoryLedger
from roll_async.buffer.message_queue import MessageQueue
from roll_async.buffer.states import QueueOptions
from roll_async.cli import main
from roll_async.commands import scale
from roll_async.launch.scaling import follow_requests
from roll_async.observe.replica_requests import ReplicaRequests


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("{}")
    return tmp_path / "run"


def obeyed(folder, answers):
    """A run that answers in order; what it was asked."""
    asked, run = [], ReplicaRequests(folder)
    run.open()

    def follow():
        while answers:
            if (request := run.take()) is not None:
                asked.append(request.replicas if request.max_queue_size is None else request.max_queue_size)
                text, refused = answers.pop(0)
                run.answer(request, text, refused=refused)
            time.sleep(0.02)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    return asked, run


def test_the_run_answers_each_question_once(folder, capsys, monkeypatch):
    asked, run = obeyed(folder, [("1 -> 3 replicas", False), ("Ray has 2 CPUs", True)])
    assert main(["scale", str(folder), "--replicas", "3"]) == 0
    assert capsys.readouterr().out == "1 -> 3 replicas\n"
    assert main(["scale", str(folder), "--replicas", "40"]) == 2
    assert capsys.readouterr().err == "roll-async scale: Ray has 2 CPUs\n"
    assert asked == [3, 40] and run.take() is None
    asked, run = obeyed(folder, [("max_queue_size 64", False)])
    assert main(["scale", str(folder), "--max-queue-size", "64"]) == 0 and asked == [64]
    assert capsys.readouterr().out == "max_queue_size 64\n"
    monkeypatch.chdir(folder.parent)
    (folder.parent / "output").mkdir()
    folder.rename(folder.parent / "output" / "run")
    asked, _ = obeyed(folder.parent / "output" / "run", [("by its name", False)])
    assert main(["scale", "run", "--replicas", "2"]) == 0 and asked == [2]


def test_a_run_that_is_not_there_has_ended_or_was_killed_is_told_apart(folder, capsys, monkeypatch):
    def error(*args):
        assert main(["scale", *args]) == 2
        return capsys.readouterr().err

    nowhere = "no run 'nowhere': neither nowhere nor output/nowhere holds the config.yaml"
    assert nowhere in error("nowhere", "--replicas", "2")
    assert f"{folder} is not running: only a run under way has replicas" in error(str(folder), "--replicas", "2")
    assert "--replicas 0: a run needs at least 1" in error(str(folder), "--replicas", "0")
    assert "nothing to change: give --replicas N, --max-queue-size N, or both" in error(str(folder))
    run = ReplicaRequests(folder)
    run.open()
    monkeypatch.setattr(scale, "_ANSWER_WITHIN_S", 0.3)
    assert f"no answer within 0.3 s from process {os.getpid()} on host" in error(str(folder), "--replicas", "2")
    assert run.take() is None, "a question that nobody waits for any more is not obeyed later"
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    state = folder / "replicas" / "run.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "pid": int(gone.stdout)}))
    assert f"is not running: its process {gone.stdout.strip()} is gone" in error(str(folder), "--replicas", "2")
    run.close()
    assert "is not running" in error(str(folder), "--replicas", "2")


def test_a_run_gives_its_queue_the_bound_that_it_is_asked_for(folder):
    """Neither engines nor what starts them are touched for it."""

    async def go():
        queue = MessageQueue(
            QueueOptions(groups_per_batch=2, async_generation_ratio=3.0, max_queue_size=2), MemoryLedger()
        )
        queue.weights_held(0)
        ask = ReplicaRequests(folder).ask
        async with AsyncExitStack() as stack:
            await follow_requests(folder, None, None, queue, stack)
            assert await asyncio.to_thread(ask, 10.0, max_queue_size=5) == "max_queue_size 5"
            assert len(await queue.reserve(9)) == 5
            with pytest.raises(ValueError, match="max_queue_size 1 cannot hold .* give at least 2"):
                await asyncio.to_thread(ask, 10.0, max_queue_size=1)

    asyncio.run(go())
