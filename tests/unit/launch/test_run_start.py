"""What a start does with what lies in its folder: nothing of a former run is lost, and nothing is mixed."""

import errno
import fcntl
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partialmethod
from pathlib import Path

import pytest

from roll_async.checkpoint.folders.manifest import write_manifest
from roll_async.checkpoint.run_checkpoints import RunCheckpoints, checkpoints_in
from roll_async.commands import runs
from roll_async.config.api import load
from roll_async.launch.run_start import checkpoints_of, go_back, how_to_continue, lock_run, open_run, restored_step
from roll_async.observe.run_record import FolderLock, RunRecord, is_locked, read_record, write_record


def config_in(folder, *overrides, resume=None):
    found = load("configs/rlvr_config_async_cpu.yaml", [f"output_dir={folder}", "exp_name=a", *overrides])
    return replace(found, checkpoint=replace(found.checkpoint, resume_from=resume))


def save(checkpoints, *steps):
    """As `pipelines/checkpoint.py` does, with a role that writes its manifest alone."""
    for step in steps:
        part = checkpoints.begin(step) / "actor_train"
        part.mkdir()
        write_manifest(part, {}, {"step": step})
        checkpoints.commit(step, ["actor_train"])
        checkpoints.prune()


def trained(config, last, saved=()):
    """A run that has metrics until `last`, checkpoints, a ledger, a picture and dumps."""
    config, folder, _ = open_run(config)
    go_back(config, folder, restored := restored_step(config, folder))
    for step in range(restored + 1, last + 1):
        folder.append_metrics({"step": step, "reward/mean": step / 10})
        if config.tracking.rollout_dump_dir:
            os.makedirs(config.tracking.rollout_dump_dir, exist_ok=True)
            open(f"{config.tracking.rollout_dump_dir}/step_{step:08d}.jsonl", "w").write(f"{folder.record.run_id}\n")
        (folder.path / "samples").mkdir(exist_ok=True)
        (folder.path / f"samples/step_{step:08d}.jsonl").write_text(f"{folder.record.run_id}\n")
    save(checkpoints_of(config, folder.record), *saved)
    (folder.path / "reward.png").write_text(f"until {last}")
    (folder.path / "ledger.sqlite").write_text(f"until {last}")
    return folder


def steps_in(folder):
    return [int(record["step"]) for record in folder.read_metrics()]


def test_a_start_that_does_not_resume_moves_the_former_run_away_whole_and_says_how_to_continue_it(tmp_path):
    first = trained(config_in(tmp_path), 4, [2, 4])
    config, second, notices = open_run(config_in(tmp_path))
    moved = tmp_path / "a.1"
    assert sorted(p.name for p in moved.iterdir()) == [
        "checkpoints", "ledger.sqlite", "metrics.jsonl", "reward.png", "run.json", "samples"
    ]  # fmt: skip
    assert second.record.run_id != first.record.run_id and read_record(moved).run_id == first.record.run_id
    assert [p.name for p in second.path.iterdir()] == ["run.json"]
    assert f"the former run {first.record.run_id} is now {moved}" in notices[0]
    assert "exp_name=a.1 checkpoint.resume_from=latest" in notices[0]
    again, folder, _ = open_run(config_in(tmp_path, "exp_name=a.1", resume="latest"))
    assert folder.record.run_id == first.record.run_id and restored_step(again, folder) == 4
    assert checkpoints_in(moved / "checkpoints").steps() == [2, 4]


def test_two_former_runs_are_kept_under_two_names_and_one_that_made_nothing_is_not(tmp_path):
    ids = [trained(config_in(tmp_path), 1).record.run_id for _ in range(2)]
    open_run(config_in(tmp_path))
    open_run(config_in(tmp_path))
    assert [read_record(tmp_path / name).run_id for name in ("a.1", "a.2")] == ids
    assert not (tmp_path / "a.3").exists()


def test_what_a_former_run_has_outside_of_its_folder_moves_along_and_is_found_again(tmp_path):
    outside = [f"checkpoint.output_dir={tmp_path}/kept", f"tracking.rollout_dump_dir={tmp_path}/dumps"]
    first = trained(config_in(tmp_path, *outside), 3, [2])
    second = trained(config_in(tmp_path, *outside), 1, [1])
    assert [p.name for p in sorted((tmp_path / "dumps.1").iterdir())] == [f"step_{n:08d}.jsonl" for n in (1, 2, 3)]
    assert (tmp_path / "kept.1" / "step_00000002").is_dir() and (tmp_path / "kept" / "step_00000001").is_dir()
    former = read_record(tmp_path / "a.1")
    assert former.places == (
        f"checkpoint.output_dir={tmp_path}/kept.1",
        f"tracking.rollout_dump_dir={tmp_path}/dumps.1",
    )
    again, folder, _ = open_run(config_in(tmp_path, "exp_name=a.1", *former.places, resume="latest"))
    assert restored_step(again, folder) == 2 and folder.record.run_id == first.record.run_id != second.record.run_id


def test_going_back_sets_checkpoints_metrics_dumps_ledger_and_picture_of_later_steps_aside(tmp_path, caplog):
    config = config_in(tmp_path, f"tracking.rollout_dump_dir={tmp_path}/a/dumps")
    trained(config, 6, [2, 4, 6])
    back = replace(
        config, checkpoint=replace(config.checkpoint, resume_from=str(tmp_path / "a/checkpoints/step_00000002"))
    )
    config, folder, _ = open_run(back)
    before = folder.record
    assert restored_step(config, folder) == 2 and go_back(config, folder, 2)
    into = tmp_path / "a/abandoned/1_after_step_2"
    assert f"what it made of later steps is in {into}" in caplog.text
    assert [p.name for p in sorted((into / "checkpoints").iterdir())] == ["step_00000004", "step_00000006"]
    for name in ("dumps", "samples"):
        assert [p.name for p in sorted((into / name).iterdir())] == [f"step_{n:08d}.jsonl" for n in (3, 4, 5, 6)]
        assert [p.name for p in sorted((tmp_path / "a" / name).iterdir())] == [f"step_{n:08d}.jsonl" for n in (1, 2)]
    assert len((into / "metrics.jsonl").read_text().splitlines()) == 6 and steps_in(folder) == [1, 2]
    assert (into / "reward.png").is_file() and not (folder.path / "reward.png").exists()
    assert (into / "ledger.sqlite").is_file() and (folder.path / "ledger.sqlite").is_file()
    assert checkpoints_of(config, folder.record).steps() == [2]
    assert (folder.record.run_id, folder.record.tracker_run) == (before.run_id, f"{before.run_id}-1")
    assert not go_back(config, folder, 2), "the second time there is nothing left"


@pytest.mark.parametrize("killed_at", ["reward.png", "hf", "hf_adapter", "metrics.partial"])
def test_a_run_that_is_killed_while_it_goes_back_leaves_nothing_of_later_steps_at_the_next_start(
    tmp_path, monkeypatch, killed_at
):
    folder = trained(config_in(tmp_path), 6, [2, 6])
    for name in ("hf", "hf_adapter"):
        (folder.path / name).mkdir()
    folder.update_record(exported_step=6)
    back = config_in(tmp_path, resume=str(tmp_path / "a/checkpoints/step_00000002"))

    def until_the_kill(path, target, move):
        if path.name == killed_at:
            raise KeyboardInterrupt
        return move(path, target)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        for kind in ("rename", "replace"):
            patched.setattr(Path, kind, partialmethod(until_the_kill, move=getattr(Path, kind)))
        go_back(back, open_run(back)[1], 2)
    folder = open_run(back)[1]
    assert go_back(back, folder, 2) and folder.record.exported_step == 0 and folder.last_step == 2
    assert [path.name for path in folder.path.iterdir() if path.name in ("reward.png", "hf", "hf_adapter")] == []
    folder.update_record(exported_step=6)
    assert go_back(back, folder, 2), "a model of a later step is enough"


def test_a_checkpoint_that_was_set_aside_can_be_gone_on_from_although_its_folder_moves(tmp_path):
    config = config_in(tmp_path)
    first = trained(config, 4, [2, 4])
    trained(config_in(tmp_path, resume=str(tmp_path / "a/checkpoints/step_00000002")), 3, [3])
    aside = tmp_path / "a/abandoned/1_after_step_2/checkpoints/step_00000004"
    config, folder, _ = open_run(config_in(tmp_path, resume=str(aside)))
    assert restored_step(config, folder) == 4 and config.checkpoint.resume_from.startswith(str(tmp_path / "a.1"))
    assert folder.record.parent["run_id"] == first.record.run_id != folder.record.run_id


def test_latest_is_the_newest_of_the_run_and_what_is_just_written_stays(tmp_path):
    """A run of 100 steps, gone back to 60: the numbers of the branch that was left are higher."""
    config = config_in(tmp_path, "checkpoint.max_to_keep=2")
    trained(config, 10, [6, 8, 10])
    back = config_in(tmp_path, "checkpoint.max_to_keep=2", resume=str(tmp_path / "a/checkpoints/step_00000008"))
    config, folder, _ = open_run(back)
    checkpoints = checkpoints_of(config, folder.record)  # the run is killed before it has set anything aside
    save(checkpoints, 9)
    assert checkpoints.steps() == [8, 9] and checkpoints.find("latest").name == "step_00000009"


def test_checkpoints_of_others_are_neither_latest_nor_pruned(tmp_path):
    theirs, ours = (RunCheckpoints(folder=tmp_path, max_to_keep=1, run_id=name) for name in ("theirs", "ours"))
    save(theirs, 50)
    with pytest.raises(ValueError, match=r"no checkpoint of this run; its newest is of run theirs: .*resume_from=.*50"):
        ours.find("latest")
    save(ours, 10, 20)
    assert (ours.steps(), theirs.steps()) == ([20], [50])
    with pytest.raises(ValueError, match="several runs .ours, theirs.; name one of its folders"):
        checkpoints_in(tmp_path)


def test_a_folder_of_an_earlier_version_is_a_foreign_run_until_its_checkpoint_is_adopted(tmp_path):
    config = config_in(tmp_path)
    save(RunCheckpoints(folder=tmp_path / "a/checkpoints"), 3, 5)
    (tmp_path / "a/metrics.jsonl").write_text("".join(json.dumps({"step": n}) + "\n" for n in range(1, 7)))
    named = tmp_path / "a/checkpoints/step_00000005"
    with pytest.raises(ValueError, match=f"an earlier version wrote it.*name it: checkpoint.resume_from={named}"):
        open_run(config_in(tmp_path, resume="latest"))
    config, folder, notices = open_run(config_in(tmp_path, resume=str(named)))
    assert f"{named} had no run id; it is one of run {folder.record.run_id} now" in notices
    assert restored_step(config, folder) == 5 and go_back(config, folder, 5) and steps_in(folder) == [1, 2, 3, 4, 5]
    assert checkpoints_of(config, folder.record).steps() == [5]


def test_two_runs_with_one_folder_of_checkpoints_are_refused_and_nothing_moves(tmp_path):
    shared = f"checkpoint.output_dir={tmp_path}/kept"
    trained(config_in(tmp_path, shared), 2, [2])
    trained(config_in(tmp_path, "exp_name=b"), 1)
    with pytest.raises(ValueError, match=r"checkpoint.output_dir .*kept: run \w+ has its checkpoints there.*choose"):
        open_run(config_in(tmp_path, "exp_name=b", shared))
    assert steps_of(tmp_path / "b") == [1] and not (tmp_path / "b.1").exists()


def steps_of(folder):
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_resumed_run_keeps_its_id_and_the_time_that_templates_see(tmp_path):
    config, folder, _ = open_run(config_in(tmp_path))
    folder.append_metrics({"step": 1})
    later, again, _ = open_run(config_in(tmp_path, resume="latest"))
    assert again.record.run_id == folder.record.run_id
    assert config.template_time == later.template_time == folder.record.started
    assert json.loads((folder.path / "metrics.jsonl").read_text())["run_id"] == folder.record.run_id
    fixed, _, _ = open_run(config_in(tmp_path, "template_time='2020-02-02T00:00:00'", resume="latest"))
    assert fixed.template_time == "2020-02-02T00:00:00"


def test_a_second_process_is_refused_by_the_lock_and_changes_nothing(tmp_path):
    config = config_in(tmp_path)
    folder = trained(config, 2, [2])
    with ExitStack() as held:
        lock_run(config, held)
        before = {str(p): p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
        with pytest.raises(ValueError, match=rf"exp_name .*a is in use by process {os.getpid()} on .* since"):
            lock_run(config, held)
        assert {str(p): p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before
        assert is_locked(folder.path)
    assert not is_locked(folder.path)
    FolderLock(folder.path, "exp_name").close()


def test_a_run_is_locked_under_its_name_and_that_of_the_folder_which_it_is_a_link_to(tmp_path):
    (tmp_path / "disk").mkdir()
    trained(config_in(tmp_path / "disk"), 1)
    (tmp_path / "out").symlink_to(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "disk/a")
    linked, straight = config_in(tmp_path / "out", "exp_name=link"), config_in(tmp_path / "disk")
    for config, other in ((linked, straight), (straight, linked)):
        with ExitStack() as held:
            lock_run(config, held)
            with pytest.raises(ValueError, match="is in use by process"):
                lock_run(other, held)
            assert is_locked(tmp_path / "link") and is_locked(tmp_path / "disk/a")
        assert not is_locked(tmp_path / "link") and not is_locked(tmp_path / "disk/a")
    with ExitStack() as held:
        lock_run(linked, held)
        open_run(linked)  # the link becomes link.1
        assert not (tmp_path / "link").is_symlink() and is_locked(tmp_path / "link")
        assert not is_locked(tmp_path / "link.1")
        lock_run(config_in(tmp_path, "exp_name=link.1", resume="latest"), held)  # the former run goes on beside it


@pytest.mark.parametrize(
    ("places", "message"),
    [
        (
            {"checkpoint.output_dir": "a"},
            "checkpoint.output_dir .*/a: exp_name is the same place; choose another check",
        ),
        (
            {"checkpoint.output_dir": "c", "tracking.rollout_dump_dir": "./c"},
            "rollout_dump_dir .*/c: checkpoint.output_",
        ),
        (
            {"checkpoint.output_dir": "c", "tracking.rollout_dump_dir": "link"},
            "rollout_dump_dir .*/c: checkpoint.output_",
        ),
    ],
)
def test_two_keys_of_one_place_are_refused_before_anything_is_locked(tmp_path, places, message):
    (tmp_path / "link").symlink_to(tmp_path / "c")
    with ExitStack() as held, pytest.raises(ValueError, match=message):
        lock_run(config_in(tmp_path, *(f"{key}={tmp_path}/{name}" for key, name in places.items())), held)
    assert [path.name for path in tmp_path.iterdir()] == ["link"]


def test_a_link_to_a_folder_in_a_place_of_others_is_locked_under_its_own_name(tmp_path, monkeypatch):
    (tmp_path / "disk/me").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk/me")
    opened = os.open

    def as_user(path, *args):
        if str(path).startswith(f"{tmp_path}/disk/.") and args[0] & os.O_RDWR:
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(path, *args)

    theirs = FolderLock(tmp_path / "disk/me", "exp_name")
    monkeypatch.setattr(os, "open", as_user)  # root may write everywhere
    with ExitStack() as held, pytest.raises(ValueError, match="disk/me: cannot be written"):  # their run is alive
        lock_run(config_in(tmp_path, "exp_name=link"), held)
    theirs.close()
    with ExitStack() as held:
        lock_run(config_in(tmp_path, "exp_name=link"), held)
        with pytest.raises(ValueError, match="is in use by process"):
            lock_run(config_in(tmp_path, "exp_name=link"), held)
    with pytest.raises(ValueError, match="disk/me: cannot be written: Permission denied"):
        lock_run(config_in(tmp_path / "disk", "exp_name=me"), ExitStack())


def test_a_start_that_made_nothing_leaves_no_lock_and_one_that_came_between_holds_its_own(tmp_path, monkeypatch):
    config, flock = config_in(tmp_path), fcntl.flock
    with ExitStack() as first, ExitStack() as second:
        lock_run(config, first)
        # The second opens the file while the first still has it, and gets the lock of a file that is gone by then.
        monkeypatch.setattr(fcntl, "flock", lambda *args: (first.close(), flock(*args)))
        lock_run(config, second)
        monkeypatch.undo()
        with pytest.raises(ValueError, match="is in use by process"):
            lock_run(config, second)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_an_explicit_folder_of_checkpoints_is_locked_too(tmp_path):
    shared = f"checkpoint.output_dir={tmp_path}/kept"
    with ExitStack() as held:
        lock_run(config_in(tmp_path, shared), held)
        with pytest.raises(ValueError, match="checkpoint.output_dir .*kept is in use by process"):
            lock_run(config_in(tmp_path, "exp_name=b", shared), held)


@pytest.mark.slow
def test_a_second_start_beside_a_running_one_ends_with_exit_code_2_before_anything_heavy_is_imported(tmp_path):
    with ExitStack() as held:
        lock_run(config_in(tmp_path), held)
        typed = "import sys, time; from roll_async.commands.run import run_command; began = time.monotonic();"
        typed += "code = run_command(sys.argv[1:], pipeline=None);"
        typed += "assert not {'torch', 'ray', 'transformers'} & set(sys.modules); sys.exit(code)"
        arguments = ["--config", "rlvr_config_async_cpu.yaml", f"output_dir={tmp_path}", "exp_name=a"]
        began = time.monotonic()
        done = subprocess.run([sys.executable, "-c", typed, *arguments], capture_output=True, text=True)
        assert time.monotonic() - began < 20
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "is in use by process" in done.stderr


def test_runs_lists_every_run_with_its_state(tmp_path, capsys):
    config = config_in(tmp_path)
    first = trained(config, 4, [4])
    first.update_record(state="finished")
    second = trained(config, 2)
    third = trained(config_in(tmp_path, "exp_name=b"), 0)
    third.update_record(state="failed", reason="RuntimeError: lost")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "metrics.jsonl").write_text('{"step": 7, "reward/mean": 0.25}\n')
    (tmp_path / "glued").mkdir()
    (tmp_path / "glued" / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "rew{"step": 2}\n')
    with ExitStack() as held:
        lock_run(config_in(tmp_path, "exp_name=b"), held)
        third.update_record(state="running", reason="")
        runs.command.main([str(tmp_path)], standalone_mode=False)
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()[1:]]
    assert [(name, id, steps, reward, state) for name, id, _, steps, reward, state in rows] == [
        ("a", second.record.run_id, "2", "0.200", "killed"),
        ("a.1", first.record.run_id, "4", "0.400", "finished"),
        ("b", third.record.run_id, "0", "-", "running"),
        ("glued", "?", "?", "-", rows[3][-1]),
        ("old", "-", "7", "0.250", "-"),
    ]
    assert "metrics.jsonl:2 is damaged (" in rows[3][-1]
    assert runs.command.main([str(tmp_path / "none")], standalone_mode=False) == 2
    assert runs.command.main([str(tmp_path / "a")], standalone_mode=False) == 2
    assert f"a is a run: `roll-async runs {tmp_path}` lists it" in capsys.readouterr().err


def test_the_command_that_continues_is_the_one_that_was_typed(tmp_path):
    typed = ("python", "examples/x.py", "--config", "a b.yaml", "max_steps=20", "checkpoint.resume_from=latest")
    record = RunRecord(command=typed)
    assert how_to_continue(config_in(tmp_path), record) == (
        "python examples/x.py --config 'a b.yaml' max_steps=20 checkpoint.resume_from=latest"
    )


def test_a_record_that_cannot_be_read_is_one_line_with_a_remedy(tmp_path):
    (tmp_path / "run.json").write_text('{"run_id": "x"')
    with pytest.raises(ValueError, match="run.json is damaged .*restore it, or move the folder away"):
        read_record(tmp_path)


def test_a_record_of_a_newer_version_is_read_without_what_it_adds(tmp_path):
    write_record(tmp_path, RunRecord(run_id="3f9a61c2", command=("a", "b")))
    known = read_record(tmp_path)
    path = tmp_path / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"of_a_newer_version": 1}))
    assert read_record(tmp_path) == known
