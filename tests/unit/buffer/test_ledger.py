"""The durable log: every prompt is done, buffered or to be generated, never two of them, whatever was killed when."""

import asyncio
import json
import random
import sqlite3
import subprocess
import sys
from array import array

import pytest

from roll_async.buffer.errors import LedgerError
from roll_async.buffer.group_codec import decode_group, encode_group
from roll_async.buffer.ledger import SqliteLedger
from roll_async.buffer.message_queue import MessageQueue
from roll_async.buffer.states import QueueOptions, ReleaseReason
from roll_async.schema import ExpertRecord, FinishReason, Image, Reward, RewardStatus
from tests.patience import patient


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "ledger.sqlite")


def rich_group(build):
    images = (Image(data=b"\x89PNG\x00", grid=(1, 2)), Image(data=b"", grid=(3, 1)))
    prompt = build.prompt(ids=(1, 2, 3), text="6 * 7 = ?\n\u00fc", extra={"level": "3"}, images=images)
    tool = build.sample(
        prompt,
        (9, 8, 7),
        ((2, 1), (3, 2)),
        None,
        sample_id="b",
        loss_mask=b"\x01\x00\x01",
        behaviour_logprobs=array("f", [-0.1, 0.0, -2.7182817]),
        prompt_token_ids=array("i", [1, 2, 3, 4]),
        num_turns=2,
        finish_reason=FinishReason.LENGTH,
        reward=Reward(score=0.1, metrics={"acc": 1.0}, reason="because", scoring_s=0.25),
        experts=ExpertRecord(ids=array("B", range(6 * 4)), num_layers=2, top_k=2),
        teacher_logprobs=array("f", [-0.5, -1.0, -3.1415927]),
    )
    empty = build.sample(
        prompt,
        (),
        (),
        None,
        reward=Reward(score=0.0, status=RewardStatus.TIMEOUT),
        experts=ExpertRecord(ids=array("h", [300, 7, 0, 1]), num_layers=1, top_k=2),
    )
    return build.group(
        12, 2, prompt=prompt, samples=(build.sample(prompt), tool, empty), baseline_score=0.5, admitted_s=1.5
    )


def test_a_group_comes_back_equal_in_every_field(build):
    group = rich_group(build)
    assert decode_group(*encode_group(group)) == group
    assert (
        decode_group(*encode_group(build.group(samples=(build.sample(build.prompt(), score=None),)))).samples[0].reward
        is None
    )


def test_a_group_written_before_experts_teachers_and_images_were_recorded_can_be_read(build):
    header, block = encode_group(build.group())
    fields = json.loads(header)
    del fields["prompt"]["images"]
    for sample in fields["samples"]:
        del sample["experts"], sample["taught"]
    assert decode_group(json.dumps(fields), block) == build.group()


def test_a_truncated_block_is_refused(build):
    header, block = encode_group(rich_group(build))
    with pytest.raises(ValueError, match="block ends after"):
        decode_group(header, block[:-1])


def train_steps(ledger, build, *steps):
    """Steps of one group each; prompt and group carry the number of the step."""
    for step in steps:
        ledger.finished(build.group(step - 1, step - 1), step - 1, step - 1)
        ledger.trained(step, [step - 1])


def test_a_finished_group_survives_a_new_process(path, build):
    ledger = SqliteLedger(path)
    train_steps(ledger, build, 1, 2, 3)
    ledger.finished(rich_group(build), 5, 3)
    ledger.close()
    again = SqliteLedger(path)
    recovered = again.restore(3)
    ((stored),) = recovered.buffered
    assert (stored.prompt_index, stored.finished_version, stored.group) == (5, 3, rich_group(build))
    assert recovered.done == {0, 1, 2} and recovered.next_index == 6 and recovered.next_group_id == 13
    again.close()


def test_positions_are_done_buffered_or_open_relative_to_the_restored_step(path, build):
    ledger = SqliteLedger(path)
    for index in range(6):
        ledger.finished(build.group(index), index, 0)
    ledger.closed(6, 6, "filtered", "equal")
    ledger.closed(7, 7, "failed", "judge is down")
    ledger.trained(1, [0, 1])
    ledger.trained(2, [2, 3])
    ledger.reopened(5)
    ledger.close()

    def state(step):
        ledger = SqliteLedger(path)
        recovered = ledger.restore(step)
        ledger.close()
        return sorted(s.prompt_index for s in recovered.buffered), sorted(recovered.done), recovered.next_index

    assert state(2) == ([4], [0, 1, 2, 3, 6, 7], 8)
    assert state(1) == ([2, 3, 4], [0, 1, 6, 7], 8)
    assert state(0) == ([0, 1, 2, 3, 4], [6, 7], 8)
    with pytest.raises(LedgerError, match="no record of step 2"):
        state(2)  # what a restore took back stays taken back: that checkpoint belongs to weights that were given up


def test_a_step_that_was_saved_without_the_ledger_keeps_the_steps_before_it(path, build):
    """The rollout process died while the trainer finished step 3: the checkpoint knows it, the ledger does not."""
    ledger = SqliteLedger(path)
    train_steps(ledger, build, 1, 2)
    for index in (2, 3, 4):
        ledger.finished(build.group(index, 2), index, 2)
    ledger.closed(5, 5, "filtered", "equal")
    ledger.close()
    again = SqliteLedger(path)
    recovered = again.restore(3, {"next_index": 6, "open": [3, 4]})
    assert recovered.done == {0, 1, 2, 5} and recovered.filtered == 1
    assert [s.prompt_index for s in recovered.buffered] == [3, 4]
    again.close()
    rows = sqlite3.connect(path).execute("SELECT prompt_index, state, consumed_step FROM groups").fetchall()
    assert rows[:3] == [(0, "trained", 1), (1, "trained", 2), (2, "trained", 3)]


def test_a_group_whose_tokens_were_pruned_comes_again_when_an_older_step_is_restored(path, build):
    ledger = SqliteLedger(path)
    for index in range(4):
        ledger.finished(build.group(index), index, 0)
    ledger.trained(1, [0, 1])
    ledger.trained(2, [2, 3])
    ledger.prune(1)
    ledger.close()
    ledger = SqliteLedger(path)
    assert sorted(ledger.restore(1).done) == [0, 1]
    recovered = ledger.restore(0)
    assert [s.prompt_index for s in recovered.buffered] == [2, 3]
    assert recovered.done == frozenset(), "0 and 1 are neither done nor buffered: they are generated again"
    assert ledger.restore(0).done == frozenset()
    ledger.close()


def test_pruning_frees_the_tokens_of_consumed_groups_only(path, build):
    ledger = SqliteLedger(path)
    for index in range(3):
        ledger.finished(build.group(index), index, 0)
    ledger.trained(1, [0])
    ledger.prune(1)
    ledger.close()
    with sqlite3.connect(path) as database:
        kept = [index for (index,) in database.execute("SELECT prompt_index FROM tokens ORDER BY 1")]
        accounted = database.execute("SELECT count(*) FROM groups").fetchone()
    assert kept == [1, 2] and accounted == (3,)


@pytest.mark.slow
def test_a_second_process_is_kept_out_and_told_why(path, build):
    ledger = SqliteLedger(path)
    ledger.finished(build.group(), 0, 0)
    script = "import sys; from roll_async.buffer.ledger import SqliteLedger; SqliteLedger(sys.argv[1])"
    other = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, timeout=patient(30))
    assert other.returncode != 0 and "another run uses it" in other.stderr and path in other.stderr
    ledger.close()
    SqliteLedger(path).close()


def test_what_was_written_survives_a_kill(path):
    script = """
import os, sys
from array import array
from roll_async.buffer.ledger import SqliteLedger
from roll_async.schema import Group, Prompt
ledger = SqliteLedger(sys.argv[1])
for i in range(3):
    prompt = Prompt(row_id=str(i), token_ids=array("i", [1]), domain="math", ground_truth="")
    ledger.finished(Group(group_id=i, prompt=prompt, samples=(), admitted_version=0, admitted_s=0, finished_s=0), i, 0)
ledger.trained(1, [0])
os.kill(os.getpid(), 9)
"""
    killed = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, timeout=patient(30))
    assert killed.returncode == -9, killed.stderr
    ledger = SqliteLedger(path)
    recovered = ledger.restore(1)
    assert [s.prompt_index for s in recovered.buffered] == [1, 2] and recovered.done == {0}
    ledger.close()


def test_a_file_that_is_no_database_is_named_with_the_remedy(path):
    with open(path, "wb") as file:
        file.write(b"not a database at all" * 500)
    with pytest.raises(LedgerError, match="ledger.sqlite: opening failed.*move the file away"):
        SqliteLedger(path)


def test_a_damaged_group_is_named_by_its_prompt(path, build):
    ledger = SqliteLedger(path)
    ledger.finished(build.group(3), 3, 0)
    ledger.close()
    with sqlite3.connect(path) as database:
        database.execute("UPDATE tokens SET block = substr(block, 1, 5)")
    database.close()
    ledger = SqliteLedger(path)
    with pytest.raises(LedgerError, match="corrupted at prompt 3.*move the file away"):
        ledger.restore(0)
    ledger.close()


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises((LedgerError, OSError), match="file"):
        SqliteLedger(str(tmp_path / "file" / "ledger.sqlite"))


def test_a_step_is_recorded_with_its_groups_or_not_at_all(path, build):
    ledger = SqliteLedger(path)
    ledger.finished(build.group(0), 0, 0)
    with pytest.raises(LedgerError, match="writing step 1"):
        ledger.trained(1, [0, "x" * 10, object()])
    recovered = ledger.restore(0)
    assert [s.prompt_index for s in recovered.buffered] == [0] and recovered.done == frozenset()
    ledger.close()


@pytest.mark.parametrize("fsync", ["group", "step", "never"])
def test_every_fsync_setting_gives_the_same_content(path, build, fsync):
    ledger = SqliteLedger(path, fsync=fsync)
    ledger.finished(build.group(0), 0, 0)
    ledger.trained(1, [0])
    ledger.close()
    ledger = SqliteLedger(path)
    assert ledger.restore(1).done == {0}
    ledger.close()


def test_reasons_of_failed_prompts_can_be_read_back(path):
    ledger = SqliteLedger(path)
    ledger.closed(4, 9, "failed", "judge is down" * 1000)
    ledger.close()
    with sqlite3.connect(path) as database:
        ((state, reason),) = database.execute("SELECT state, reason FROM groups")
    assert state == "failed" and reason.startswith("judge is down") and len(reason) == 2000


async def soon(work):
    """The result of `work` when it is there at once, else None."""
    task = asyncio.ensure_future(work)
    await asyncio.sleep(0.1)
    return task.result() if task.done() or not task.cancel() else None


def reopen(path, step, held):
    queue = MessageQueue(QueueOptions(groups_per_batch=2, async_generation_ratio=1.0), SqliteLedger(path, fsync="step"))
    queue.restore(step)
    queue.weights_held(held)
    return queue


def test_a_restored_queue_holds_what_was_finished_and_asks_only_for_what_was_not(run, path, build):
    async def go():
        queue = reopen(path, 0, 0)
        slots = await queue.reserve(4)
        for slot in (slots[0], slots[1], slots[3]):
            await queue.put(build.group(slot.group_id, prompt=build.prompt(row_id=str(slot.prompt_index))))
        await queue.take_batch(1)
        await queue.step_trained(1)
        queue.close()

        queue = reopen(path, 1, 1)
        stats = queue.stats()
        assert (stats.buffered, stats.requeued_prompts, stats.in_flight) == (1, 1, 0)
        again = await queue.reserve(3)
        assert [(s.prompt_index, s.attempt) for s in again] == [(2, 1), (4, 0), (5, 0)]
        for slot in again:
            await queue.put(build.group(slot.group_id, 1, prompt=build.prompt(row_id=str(slot.prompt_index))))
        rows = {g.prompt.row_id for g in await queue.take_batch(2)}
        assert rows == {"3", "2"}
        queue.close()

    run(go())


def test_groups_of_weights_that_no_longer_exist_or_are_too_old_are_generated_again(run, path, build):
    async def go():
        ledger = SqliteLedger(path)
        train_steps(ledger, build, 1, 2, 3)
        for index, version in ((3, 0), (4, 1), (5, 2), (6, 3)):
            ledger.finished(build.group(index, version), index, version)
        ledger.close()
        queue = reopen(path, 2, 2)  # step 3 starts from version 2, the bound is 1; prompt 2 was trained by step 3
        assert [g.prompt.row_id for g in await queue.take_batch(3)] == ["row2", "row4"]
        assert (queue.stats().buffered, queue.stats().requeued_prompts) == (1, 1), "prompt 5; prompt 3"
        queue.weights_held(3)
        assert [s.prompt_index for s in await queue.reserve(3)] == [3, 6, 7]
        queue.close()

    run(go())


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_killed_when_every_prompt_is_trained_filtered_or_failed_exactly_once(run, path, build, seed):
    rng = random.Random(seed)
    fates: dict[int, list[str]] = {}

    async def live(step, until):
        """From a checkpoint of `step` to a kill at a random moment; returns (last checkpoint, fates since)."""
        queue, saved, since, flying = reopen(path, step, step), step, [], []
        saved_fates, filtered = [], []
        current = step
        for _ in range(rng.randint(5, 60)):
            if current == until:
                break
            flying += await soon(queue.reserve(rng.randint(1, 3))) or []
            if flying and rng.random() < 0.8:
                slot = flying.pop(rng.randrange(len(flying)))
                dice = rng.random()
                if dice < 0.1:
                    await queue.release(slot.group_id, ReleaseReason.REQUEUED)
                elif dice < 0.25:
                    await queue.release(slot.group_id, ReleaseReason.FILTERED)
                    filtered.append((current, slot.prompt_index))
                else:
                    prompt = build.prompt(row_id=str(slot.prompt_index))
                    await queue.put(build.group(slot.group_id, slot.admitted_version, prompt=prompt))
            batch = await soon(queue.take_batch(current + 1))
            if batch is not None:
                current += 1
                since += [int(g.prompt.row_id) for g in batch]
                await queue.step_trained(current)
                queue.weights_held(current)
                if rng.random() < 0.4:
                    await queue.checkpointed(current)
                    saved, saved_fates, since = current, saved_fates + since, []
        queue.close()
        for decided_after, index in filtered:
            if decided_after <= saved:  # a later verdict is about weights that the kill took back
                fates.setdefault(index, []).append("filtered")
        return saved, saved_fates

    async def go():
        step = 0
        for _ in range(200):
            step, trained = await live(step, 12)
            for index in trained:
                fates.setdefault(index, []).append("trained")
            if step == 12:
                break
        return step

    run(go())
    assert fates and all(len(fate) == 1 for fate in fates.values()), {i: f for i, f in fates.items() if len(f) > 1}
    with sqlite3.connect(path) as database:
        states = dict(database.execute("SELECT prompt_index, state FROM groups"))
    assert all(states[index] == fate[0] for index, fate in fates.items() if fate[0] == "filtered")


def test_the_header_of_a_group_is_readable_by_other_tools(build):
    header, _ = encode_group(build.group(3, 1))
    assert json.loads(header)["samples"][0]["version_runs"] == [[1, 2]]


def position(step, next_index, still_open):
    return {"step": step, "next_index": next_index, "open": still_open}


@pytest.mark.parametrize("damage", ["lost", "damaged", "torn group"])
def test_the_position_in_the_checkpoint_suffices_whatever_became_of_the_ledger(tmp_path, build, damage):
    path = tmp_path / "ledger.sqlite"
    if damage == "damaged":
        path.write_bytes(b"not a database" * 1000)
    elif damage == "torn group":
        ledger = SqliteLedger(path)
        ledger.finished(build.group(0), 0, 0)
        ledger._db.execute("UPDATE tokens SET block = x'00'")
        ledger.close()
    if damage == "damaged":
        with pytest.raises(LedgerError):
            SqliteLedger(path)
    ledger = SqliteLedger(path, can_rebuild=True)
    found = ledger.restore(2, position(2, 6, [1, 4]))
    assert found.done == {0, 2, 3, 5} and found.next_index == 6 and found.buffered == ()
    assert (tmp_path / "ledger.sqlite.damaged").exists() == (damage == "damaged")
    ledger.finished(build.group(9), 1, 2)
    ledger.close()
    again = SqliteLedger(path, can_rebuild=True).restore(2, position(2, 6, [1, 4]))
    assert again.done == {0, 2, 3, 5} and [s.prompt_index for s in again.buffered] == [1], "once"


def test_a_step_that_was_saved_without_the_ledger_is_taken_from_the_checkpoint(tmp_path, build):
    """The rollout process died between learning and recording: its file holds the groups as finished."""
    ledger = SqliteLedger(tmp_path / "ledger.sqlite")
    for index in range(4):
        ledger.finished(build.group(index), index, 0)
    ledger.trained(1, [0, 1])
    found = ledger.restore(2, position(2, 6, [4, 5]))
    assert found.done == {0, 1, 2, 3} and found.buffered == ()


def test_verdicts_outside_the_position_of_a_checkpoint_stay(tmp_path, build):
    """A group filtered after the position was taken is not generated a second time (simulate --seed 1000681)."""
    ledger = SqliteLedger(tmp_path / "ledger.sqlite")
    for index in range(2):
        ledger.finished(build.group(index), index, 0)
    ledger.closed(5, 5, "filtered", "equal rewards")
    ledger.trained(1, [0, 1])
    ledger.closed(6, 6, "failed", "the scorer is down")
    assert ledger.restore(2, position(2, 5, [4])).done == {0, 1, 2, 3, 5, 6}


def test_a_ledger_remembers_what_its_groups_depend_on(tmp_path):
    ledger = SqliteLedger(tmp_path / "ledger.sqlite")
    assert ledger.fingerprint() == {}
    ledger.remember({"seed": "42", "samples per group": "8"})
    ledger.close()
    assert SqliteLedger(tmp_path / "ledger.sqlite").fingerprint() == {"seed": "42", "samples per group": "8"}
