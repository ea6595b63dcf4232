"""Checkpoints of a run: nothing has its final name before all of it is there, and the loop goes on meanwhile."""

import asyncio
import errno
import itertools
import json
import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from roll_async.checkpoint import run_checkpoints
from roll_async.checkpoint.folders import manifest
from roll_async.checkpoint.folders.manifest import check_files, fingerprint, read_manifest, replaced, write_manifest
from roll_async.checkpoint.run_checkpoints import RunCheckpoints
from roll_async.observe.sample_dump import SampleDump
from roll_async.pipelines.checkpoint import LoopCheckpoint, restore_loop


class KeptState:
    """What a checkpoint sees of a learner."""

    def __init__(self, state):
        self.state = state

    def export_state(self):
        return self.state

    def restore_state(self, state):
        self.state = state


class Role:
    """A group of ranks whose save in the background ends when the test says so."""

    def __init__(self, problem=None):
        self.may_end, self.problem, self.files = asyncio.Event(), problem, []

    async def save(self, folder, step, state, *, background=False):
        Path(folder).mkdir()
        (Path(folder) / "state.bin").write_bytes(state)
        write_manifest(Path(folder), {"state.bin": fingerprint(Path(folder) / "state.bin")}, {"step": step})
        self.files.append(folder)
        if not background:
            self.may_end.set()

    async def finish_save(self):
        await self.may_end.wait()
        if self.problem is not None:
            raise self.problem

    async def export_hf(self, folder):
        Path(folder).mkdir()

    async def load(self, folder):
        return (Path(folder) / "state.bin").read_bytes()


class Queue:
    def __init__(self):
        self.safe = []

    async def checkpoint_state(self, step):
        return {"position": 7}

    async def checkpointed(self, step):
        self.safe.append(step)


def parts(tmp_path, *, background, keep=0, problem=None, samples=None, **checkpoint):
    config = SimpleNamespace(
        checkpoint=SimpleNamespace(async_save=background, save_hf_model=True, resume_from="latest", **checkpoint)
    )
    roles = {"actor_train": Role(problem), "critic": Role()}
    learner = KeptState({"token_kl_coef": 0.25})
    checkpoints = RunCheckpoints(folder=tmp_path / "checkpoints", max_to_keep=keep)
    queue = Queue()
    saver = LoopCheckpoint(config, roles, learner, queue, checkpoints, samples)
    return SimpleNamespace(
        saver=saver, roles=roles, queue=queue, checkpoints=checkpoints, config=config, learner=learner
    )


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_save_holds_all_roles_and_restores_the_loop(tmp_path):
    async def scenario():
        run = parts(tmp_path, background=False)
        await run.saver.save(4)
        folder = run.checkpoints.folder_of(4)
        assert names(folder) == ["actor_train", "critic", "hf"] and names(folder.parent) == ["step_00000004"]
        assert run.queue.safe == [4]
        run.learner.state = {}
        assert await restore_loop(run.config, run.roles, run.learner, run.checkpoints) == (4, {"position": 7})
        assert run.learner.state == {"token_kl_coef": 0.25}

    asyncio.run(scenario())


def test_samples_are_on_the_disk_before_a_checkpoint_after_which_they_are_not_dumped_again(tmp_path):
    may_decode, seen = threading.Event(), []

    def decode(rows):
        may_decode.wait(10)
        return ["text" for _ in rows]

    class SeesTheDump(Role):
        async def save(self, folder, step, state, *, background=False):
            seen.append(names(tmp_path / "samples"))
            await super().save(folder, step, state, background=background)

    async def scenario():
        samples = SampleDump({tmp_path / "samples": 1}, decode)
        run = parts(tmp_path, background=False, samples=samples)
        run.roles["actor_train"] = SeesTheDump()
        row = {"group_id": 0, "trajectory": "", "score": 0.0, "prompt_token_ids": [1], "response_token_ids": [2]}
        samples.write(4, lambda num_groups: [row])
        asyncio.get_running_loop().call_later(0.05, may_decode.set)
        await run.saver.save(4)
        samples.close()

    asyncio.run(scenario())
    assert seen == [["step_00000004.jsonl"]]


def test_in_the_background_the_loop_goes_on_and_the_name_comes_last(tmp_path):
    async def scenario():
        run = parts(tmp_path, background=True)
        await run.saver.save(1)
        await asyncio.sleep(0.01)
        assert run.checkpoints.steps() == [] and run.queue.safe == []
        assert names(run.checkpoints.folder) == ["step_00000001.tmp"]
        run.roles["actor_train"].may_end.set()
        await asyncio.sleep(0.01)
        assert run.checkpoints.steps() == []  # the critic is not done
        run.roles["critic"].may_end.set()
        await run.saver.finish()
        assert run.checkpoints.steps() == [1] and run.queue.safe == [1]

    asyncio.run(scenario())


def test_the_next_save_waits_for_the_one_before_and_old_ones_go(tmp_path):
    async def scenario():
        run = parts(tmp_path, background=True, keep=2)
        for role in run.roles.values():
            role.may_end.set()
        for step in (1, 2, 3):
            await run.saver.save(step)
        await run.saver.close(None, None, None)
        assert run.checkpoints.steps() == [2, 3] and run.queue.safe == [1, 2, 3]

    asyncio.run(scenario())


def test_a_save_that_failed_in_the_background_is_raised_by_the_next_one_and_never_gets_its_name(tmp_path):
    async def scenario():
        run = parts(tmp_path, background=True, problem=OSError(28, "No space left on device"))
        await run.saver.save(1)
        run.roles["actor_train"].may_end.set()
        await asyncio.sleep(0.01)
        with pytest.raises(OSError, match="No space left"):
            await run.saver.save(2)
        assert run.checkpoints.steps() == [] and run.queue.safe == []

    asyncio.run(scenario())


def test_a_failed_run_leaves_the_save_under_way_behind_and_the_next_run_clears_it(tmp_path):
    async def scenario():
        run = parts(tmp_path, background=True)
        await run.saver.save(1)
        await run.saver.close(RuntimeError, RuntimeError("a role failed"), None)
        assert names(run.checkpoints.folder) == ["step_00000001.tmp"]
        again = parts(tmp_path, background=False)
        assert await restore_loop(again.config, again.roles, again.learner, again.checkpoints) == (0, None)
        await again.saver.save(2)
        assert names(again.checkpoints.folder) == ["step_00000002"]

    asyncio.run(scenario())


def test_a_named_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match="resume_from .*nowhere: no such folder"):
        RunCheckpoints(folder=tmp_path).find(str(tmp_path / "nowhere"))


def test_a_manifest_finds_missing_truncated_and_changed_files(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / name).write_bytes(name.encode() * 100)
    files = {name: fingerprint(tmp_path / name) for name in ("a", "b", "c")}
    write_manifest(tmp_path, files, {"step": 3})
    manifest = read_manifest(tmp_path)
    assert manifest["step"] == 3 and manifest["files"] == files
    check_files(tmp_path, files)
    (tmp_path / "b").write_bytes(b"b" * 99)
    with pytest.raises(ValueError, match="b is truncated: 99 of 100 bytes"):
        check_files(tmp_path, files)
    (tmp_path / "b").write_bytes(b"x" * 100)
    with pytest.raises(ValueError, match="b was changed"):
        check_files(tmp_path, files)
    (tmp_path / "b").unlink()
    with pytest.raises(ValueError, match="b is missing"):
        check_files(tmp_path, files)


def test_a_manifest_that_is_cut_or_of_something_else_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is not a checkpoint of roll_async"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text('{"format": "roll')
    with pytest.raises(ValueError, match="truncated or not JSON"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({"format": "other"}))
    with pytest.raises(ValueError, match="manifest of something else"):
        read_manifest(tmp_path)


def test_every_file_is_on_disk_before_a_checkpoint_gets_its_name(tmp_path, monkeypatch):
    checkpoints = RunCheckpoints(folder=tmp_path / "checkpoints")
    staging = checkpoints.begin(7)
    (staging / "hf").mkdir()
    for name in ("state.bin", "hf/config.json"):
        (staging / name).write_text("x")
    on_disk = []
    for module in (manifest, run_checkpoints):
        monkeypatch.setattr(module, "sync", lambda path: on_disk.append(str(path)))
    rename = os.rename

    def renamed(source, target):
        assert {str(p) for p in (staging, *staging.rglob("*"))} == set(on_disk)
        rename(source, target)

    monkeypatch.setattr(os, "rename", renamed)
    assert (checkpoints.commit(7, []) / "hf" / "config.json").is_file()
    assert on_disk[-1] == str(tmp_path / "checkpoints")


def test_a_checkpoint_that_is_half_removed_is_none_and_goes_with_the_next_save(tmp_path, monkeypatch):
    checkpoints = RunCheckpoints(folder=tmp_path, max_to_keep=1)

    def killed(folder):
        raise KeyboardInterrupt

    for step in (1, 2, 3):
        checkpoints.begin(step)
        checkpoints.commit(step, [])
        with monkeypatch.context() as patched, suppress(KeyboardInterrupt):
            patched.setattr(shutil, "rmtree", killed)
            checkpoints.prune()
        assert checkpoints.steps() == [step]
    checkpoints.begin(4)
    assert names(tmp_path) == ["step_00000003", "step_00000004.tmp"]


def test_of_a_checkpoint_that_is_a_link_the_link_is_pruned_also_after_a_kill(tmp_path):
    checkpoints = RunCheckpoints(folder=tmp_path / "kept", max_to_keep=1)
    for name in ("step_00000001", "step_00000007.tmp"):
        (tmp_path / "disk" / name).mkdir(parents=True)
        (tmp_path / "kept").mkdir(exist_ok=True)
        (tmp_path / "kept" / name).symlink_to(tmp_path / "disk" / name)
    for step in (8, 9):
        checkpoints.begin(step)
        checkpoints.commit(step, [])
        checkpoints.prune()
    assert names(tmp_path / "kept") == ["step_00000009"]
    assert names(tmp_path / "disk") == ["step_00000001", "step_00000007.tmp"]


@pytest.mark.parametrize(("ends_at", "left"), [(0, ["former"]), (1, []), (2, ["new"])])
def test_a_folder_written_anew_is_whole_or_absent_wherever_its_writer_ends(tmp_path, monkeypatch, ends_at, left):
    def write(name):
        with replaced(tmp_path / "hf") as folder:
            (folder / name).touch()

    write("former")
    renames, rename = itertools.count(), os.rename

    def until_the_end(source, target):
        if next(renames) == ends_at:
            raise KeyboardInterrupt
        rename(source, target)

    with monkeypatch.context() as patched, suppress(KeyboardInterrupt):
        patched.setattr(os, "rename", until_the_end)
        write("new")
    assert [path.name for path in tmp_path.glob("hf/*")] == left
    write("next")
    assert names(tmp_path) == ["hf"] and names(tmp_path / "hf") == ["next"]


def test_a_folder_written_anew_leaves_the_copies_that_a_user_made_of_the_former_one(tmp_path):
    for name in ("first", "second"):
        with replaced(tmp_path / "hf") as folder:
            (folder / name).touch()
        shutil.copytree(tmp_path / "hf", tmp_path / "hf.old", dirs_exist_ok=True)
    assert names(tmp_path / "hf.old") == ["first", "second"]


@pytest.mark.parametrize("closed", [False, True])  # the folder around it: nothing can be made there
def test_a_folder_that_cannot_be_renamed_is_emptied_and_filled(tmp_path, monkeypatch, closed):
    goal, link = tmp_path / "disk" / "model", tmp_path / "run" / "hf"
    for folder in (goal, link.parent):
        folder.mkdir(parents=True)
    (goal / "former").touch()
    goal.chmod(0o2777)  # of a volume, and maybe another user's
    link.symlink_to(goal)
    rename = os.rename

    def of_a_mount_point(source, target):
        if source == goal:
            raise OSError(errno.EBUSY, "Device or resource busy")
        rename(source, target)

    monkeypatch.setattr(os, "rename", of_a_mount_point)
    monkeypatch.setattr(os, "access", lambda path, mode: not closed)
    with replaced(link) as folder:
        (folder / "new").touch()
        assert folder.parent == (link if closed else goal).parent
    assert names(link) == ["new"] and names(link.parent) == ["hf"] and names(goal.parent) == ["model"]
    assert goal.stat().st_mode & 0o7777 == 0o2777


def test_a_file_of_that_name_stays_and_what_the_disk_does_not_take_is_removed(tmp_path, monkeypatch):
    (tmp_path / "hf").touch()
    with pytest.raises(NotADirectoryError, match="hf"), replaced(tmp_path / "hf"):
        pass
    (tmp_path / "hf").unlink()

    def full(path):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(manifest, "sync", full)
    with pytest.raises(OSError, match="quota"), replaced(tmp_path / "hf") as folder:
        (folder / "new").touch()
    assert names(tmp_path) == []


def test_of_a_folder_that_cannot_get_its_name_the_former_keeps_it_and_an_error_names_the_new_one(tmp_path, monkeypatch):
    (tmp_path / "hf" / "former").mkdir(parents=True)
    rename = os.rename

    def of_a_failing_disk(source, target):
        if source == tmp_path / "hf.tmp":
            raise OSError(errno.EIO, "Input/output error", str(source), None, str(target))
        rename(source, target)

    monkeypatch.setattr(os, "rename", of_a_failing_disk)
    with pytest.raises(OSError, match=r"Input/output error: .*hf\.tmp' -> .*hf'"):
        with replaced(tmp_path / "hf") as folder:
            (folder / "new").touch()
    assert names(tmp_path / "hf") == ["former"] and names(tmp_path / "hf.tmp") == ["new"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda part: shutil.rmtree(part), "manifest.json is missing"),
        (lambda part: (part / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda part: (part / "state.bin").unlink(), "state.bin is missing or not"),
        (lambda part: (part / "state.bin").write_bytes(b"x"), "state.bin is missing or not"),
        (lambda part: write_manifest(part, {}, {"step": 3}), "holds step 3, not step 4"),
    ],
)
def test_a_checkpoint_that_a_role_wrote_elsewhere_gets_no_name_and_the_one_before_stays(tmp_path, damage, message):
    async def scenario():
        run = parts(tmp_path, background=True)
        await run.saver.save(4)
        before = run.checkpoints.folder_of(4)
        before.mkdir()
        damage(Path(run.roles["critic"].files[-1]))
        for role in run.roles.values():
            role.may_end.set()
        with pytest.raises(RuntimeError, match=message):
            await run.saver.finish()
        assert before.is_dir() and names(before) == [] and run.queue.safe == []

    asyncio.run(scenario())
