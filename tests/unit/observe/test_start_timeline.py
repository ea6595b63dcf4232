"""What a start tells of itself: phases as metrics and spans, lines while it goes on, a row of the closing table."""

import asyncio
import json
import re
import threading
from pathlib import Path

import pytest

from roll_async.observe.progress import Screen
from roll_async.observe.recorder import REQUIRED_KEYS, Recorder
from roll_async.observe.report import summary
from roll_async.observe.run_folder import RunFolder
from roll_async.observe.trace import TOLD_EVERY_S, StartTimeline, Trace, started_beside, starting
from tests.patience import patient

ROOT = Path(__file__).resolve().parents[3]


async def two_roles():
    async def role(name, *phases):
        for phase in phases:
            with starting(name, phase):
                await asyncio.sleep(0.01)

    await asyncio.gather(role("actor_train", "process", "load"), role("actor_infer-0", "process", "imports", "load"))


def test_roles_that_start_side_by_side_have_phases_of_their_own_and_the_total_is_not_their_sum():
    with StartTimeline().current() as start:
        asyncio.run(two_roles())
    phases = start.take()
    found = start.metrics(phases)
    assert set(found) == {"start/total_s"} | {
        f"start/{role}/{phase}_s"
        for role, phases in {
            "actor_train": ("process", "load"),
            "actor_infer-0": ("process", "imports", "load"),
        }.items()
        for phase in phases
    }
    assert all(seconds > 0 for seconds in found.values())
    first, last = min(begin for *_, begin, _ in phases), max(end for *_, end in phases)
    assert found["start/total_s"] >= last - first
    trainer, engine = ([p for p in phases if p[0] == role] for role in ("actor_train", "actor_infer-0"))
    assert max(trainer[0][2], engine[0][2]) < min(trainer[-1][3], engine[-1][3]), "side by side"


def test_what_a_process_tells_of_its_own_phases_takes_the_place_of_the_one_that_the_driver_saw():
    own = StartTimeline()
    with own.current():
        for phase in ("join", "model"):
            with starting("", phase):
                pass
    with StartTimeline().current() as start, starting("actor_train", "load") as parts:
        parts.update(own.seconds() | {"model": 2.0, "optimizer": 0.5})
    (*_, end), (*_, began, ended) = start.phases[0], start.phases[1]
    assert [phase for _, phase, _, _ in start.phases] == ["optimizer", "model", "join"] and (began, ended) != (0, 0)
    seconds = start.metrics(start.phases)
    assert seconds["start/actor_train/model_s"] == pytest.approx(2.0)
    assert ended == pytest.approx(end - 0.5), "they follow each other, and the last one ends with the call"


def test_phases_of_another_process_of_the_machine_are_added_and_a_thread_of_its_own_notes_none():
    with StartTimeline().current() as start:
        started_beside([("actor_infer-0", "load", 1.0, 3.0)])
        thread = threading.Thread(target=lambda: starting("alone", "load").__enter__())
        thread.start()
        thread.join()
    assert start.metrics(start.take())["start/actor_infer-0/load_s"] == 2.0 and len(start.phases) == 1


def test_a_replica_that_joins_the_running_run_is_none_of_its_start_and_a_second_start_has_its_own():
    start = StartTimeline()
    with start.current():
        asyncio.run(two_roles())
        assert len(start.take()) == 5 and start.take() == ()
        with starting("actor_infer-1", "load"):
            pass
        assert start.take() == ()
        start.begin()
        with starting("actor_train", "load"):
            pass
    assert [phase[:2] for phase in start.take()] == [("actor_train", "load")]


def test_a_start_says_what_is_under_way_and_for_how_long_and_is_silent_once_it_is_over():
    lines, said = [], threading.Event()

    def tell(line):
        lines.append(line)
        said.set()

    assert TOLD_EVERY_S < 5
    with StartTimeline().current(tell, every_s=0.01) as start:
        with starting("actor_train", "load"), starting("actor_infer-0", "imports"):
            assert said.wait(patient(5))
        assert start.line() == ""
    assert lines[0] == "starting, 0 s: actor_train load 0 s, actor_infer-0 imports 0 s"


def test_the_first_step_after_a_start_has_its_metrics_its_spans_and_a_row_of_the_closing_table(tmp_path):
    start, trace = StartTimeline(), Trace(tmp_path / "trace.json")
    folder = RunFolder(str(tmp_path), "run")
    recorder = Recorder(folder, [], Screen(3), logging_steps=1, trace=trace, start=start)
    with start.current():
        asyncio.run(two_roles())
    for step in (1, 2):
        recorder.step(step, dict.fromkeys(REQUIRED_KEYS, 0.0))
    recorder.close()
    first, second = folder.read_metrics()
    assert first["start/total_s"] > 0 and not any(key.startswith("start/") for key in second)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = {event["name"] for event in events if event.get("cat") == "start"}
    assert spans == {f"actor_train {p}" for p in ("process", "load")} | {
        f"actor_infer-0 {p}" for p in ("process", "imports", "load")
    }
    first |= {"start/total_s": 9.0, "start/actor_train/process_s": 1.0, "start/actor_train/load_s": 6.0}
    said = summary([first, second], [("model", "/a/folder/" + "x" * 90)])
    row = "start 9 s: actor_train 7 (process 1, load 6); actor_infer-0 0 (process 0, imports 0, load 0) model /a"
    assert row in " ".join(said.split())
    *told, path = said.splitlines()
    assert max(map(len, told)) <= 100 and path.endswith("x" * 90), "a path can be copied as a whole"
    assert "  start " not in summary([second], [])


def test_every_phase_that_a_start_names_is_documented():
    documented, package = (ROOT / "docs_roll" / "metrics.md").read_text(), (ROOT / "roll_async").rglob("*.py")
    calls = re.findall(r'(?:starting\([^()]*|_told\()"(\w+)"[,)]', "".join(path.read_text() for path in package))
    assert {"ray", "placement", "load", "first_push", "read"} <= set(calls)
    assert [phase for phase in sorted(set(calls)) if f"`{phase}`" not in documented] == []
