"""`roll-async scale` and the run it asks, without engines: what is answered, and what a wrong question says."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from roll_async.cli import main
from roll_async.commands import scale
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
                asked.append(request.replicas)
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
    assert "--replicas" in error(str(folder))
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
