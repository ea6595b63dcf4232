"""Full, locked and corrupted ledgers, real files: a clear error, and no finished group lost without being named."""

import asyncio
import random
import resource
import shutil
import sqlite3
import subprocess
import sys
from collections import Counter

import pytest

from roll_async.buffer.errors import LedgerError
from roll_async.buffer.ledger import SqliteLedger, move_to_previous
from roll_async.buffer.message_queue import MessageQueue
from roll_async.buffer.states import QueueOptions
from tests.patience import patient

LONG = 4000


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "ledger.sqlite")


def fill_up(ledger):
    """As if the disk were full from now on."""
    (pages,) = ledger._db.execute("PRAGMA page_count").fetchone()
    ledger._db.execute(f"PRAGMA max_page_count={pages + 1}")


def test_a_full_disk_is_an_error_that_names_the_group_and_keeps_the_others(path, build):
    ledger = SqliteLedger(path)
    ledger.finished(build.group(0, length=LONG), 0, 0)
    fill_up(ledger)
    with pytest.raises(LedgerError, match=r"writing group 7 \(prompt 5\) failed: .*full; free space on its disk"):
        ledger.finished(build.group(7, length=LONG), 5, 0)
    ledger.trained(1, [0])  # what needs no room goes on
    ledger.close()
    again = SqliteLedger(path)
    recovered = again.restore(1)
    assert recovered.done == {0} and recovered.buffered == () and recovered.next_index == 1
    again.finished(build.group(7, length=LONG), 5, 0)
    again.close()


def test_a_group_that_could_not_be_written_is_not_buffered(run, path, build):
    async def go():
        ledger = SqliteLedger(path, fsync="step")
        queue = MessageQueue(QueueOptions(groups_per_batch=2), ledger)
        queue.weights_held(0)
        slots = await queue.reserve(2)
        await queue.put(build.group(slots[0].group_id, length=LONG))
        fill_up(ledger)
        with pytest.raises(LedgerError, match="writing group 1"):
            await queue.put(build.group(slots[1].group_id, length=LONG))
        stats = queue.stats()
        assert (stats.buffered, stats.in_flight) == (1, 1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await queue.take_batch(1)
        queue.close()

        queue = MessageQueue(QueueOptions(groups_per_batch=2), SqliteLedger(path, fsync="step"))
        queue.restore(0)
        queue.weights_held(0)
        assert queue.stats().buffered == 1
        assert [s.prompt_index for s in await queue.reserve(2)] == [1], "the lost one comes again"
        queue.close()

    run(go())


def test_a_file_that_may_not_grow_is_a_clear_error_and_keeps_what_was_written(path):
    script = """
import resource, signal, sys
from array import array
from roll_async.buffer.ledger import SqliteLedger
from roll_async.schema import Group, Prompt
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
ledger = SqliteLedger(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
for i in range(10000):
    prompt = Prompt(row_id=str(i), token_ids=array("i", range(20000)), domain="math", ground_truth="")
    ledger.finished(Group(group_id=i, prompt=prompt, samples=(), admitted_version=0, admitted_s=0, finished_s=0), i, 0)
    print(i, flush=True)
"""
    done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, timeout=patient(60))
    assert done.returncode == 1 and "LedgerError" in done.stderr and "free space on its disk" in done.stderr
    written = len(done.stdout.split())
    assert 0 < written and f"writing group {written} (prompt {written}) failed" in done.stderr
    ledger = SqliteLedger(path)
    assert [s.prompt_index for s in ledger.restore(0).buffered] == list(range(written))
    ledger.close()
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 1 << 20


@pytest.mark.slow
def test_a_ledger_that_another_program_holds_is_named_at_once(path, build):
    SqliteLedger(path).close()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(LedgerError, match="ledger.sqlite: opening failed: .*locked; another run uses it"):
        SqliteLedger(path)
    other.execute("ROLLBACK")
    other.close()
    SqliteLedger(path).close()


def test_damage_anywhere_in_the_file_is_found_and_named_or_touches_no_group(path, build, tmp_path):
    groups = [build.group(index, length=LONG) for index in range(4)]
    ledger = SqliteLedger(path)
    for index, group in enumerate(groups):
        ledger.finished(group, index, 0)
    ledger.close()
    whole, found = (tmp_path / "ledger.sqlite").read_bytes(), 0
    for where in range(0, len(whole), 7919):
        damaged = tmp_path / f"damaged{where}"
        damaged.write_bytes(whole[:where] + b"\xa5" * 3000 + whole[where + 3000 :])
        try:
            ledger = SqliteLedger(damaged)
            try:
                assert [s.group for s in ledger.restore(0).buffered] == groups
            finally:
                ledger.close()
        except LedgerError as error:
            assert f"damaged{where}" in str(error) and "move the file away" in str(error)
            found += 1
    assert found > 10


def test_a_truncated_file_is_found_and_named(path, build):
    ledger = SqliteLedger(path)
    for index in range(4):
        ledger.finished(build.group(index, length=LONG), index, 0)
    ledger.close()
    with open(path, "r+b") as file:
        file.truncate(20_000)

    def use():
        damaged = SqliteLedger(path)
        try:
            damaged.restore(0)
        finally:
            damaged.close()

    with pytest.raises(LedgerError, match="ledger.sqlite.*move the file away"):
        use()


def a_run(path, build):
    """Eight steps begun, seven trained, with verdicts, pruning and groups that wait; the position of step 5."""
    ledger, index, waiting = SqliteLedger(path), 0, []
    ledger.remember({"prompts": "0123abcd", "seed": "42"})
    for step in range(1, 9):
        for _ in range(4):
            ledger.finished(build.group(index, step - 1, length=40), index, step - 1)
            waiting.append(index)
            index += 1
        ledger.closed(index, index, "failed" if step == 3 else "filtered", "equal rewards")
        index += 1
        if step > 1:
            ledger.trained(step - 1, waiting[:3])
            waiting = waiting[3:]
        if step in (3, 5):
            ledger.prune(step - 1)
    ledger.close()
    trained, verdicts = [i for i in range(19) if i % 5 != 4][:15], range(4, 35, 5)  # of step 5 and before step 6
    return {"step": 5, "next_index": 35, "open": sorted({*range(35)} - {*trained, *verdicts})}


def restored(path, state, *, can_rebuild=False):
    """(accounting, fingerprint) after step 5."""
    ledger = SqliteLedger(path, fsync="never", can_rebuild=can_rebuild)
    try:
        return ledger.restore(5, state), ledger.fingerprint()
    finally:
        ledger.close()


def change(path, *statements):
    with sqlite3.connect(path) as database:
        for statement in statements:
            database.execute(statement)
    database.close()


@pytest.mark.slow
@pytest.mark.parametrize("can_rebuild", [True, False])
def test_a_bit_that_flips_has_no_effect_or_is_regenerated_with_a_warning_or_refused(
    tmp_path, build, caplog, can_rebuild
):
    """400 bits: half of them anywhere, half among those that say which group is whose."""
    state = a_run(tmp_path / "whole", build)
    whole = (tmp_path / "whole").read_bytes()
    true, path, rng = restored(tmp_path / "whole", state), tmp_path / "ledger", random.Random(7)
    rows = [at for at in range(len(whole)) if whole[at] and b"\x07\x08\x09" not in whole[at - 2 : at + 200]]
    found = Counter()
    for number in range(400):
        bit = 8 * rng.choice(rows) + rng.randrange(8) if number % 2 else rng.randrange(8 * len(whole))
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        for old in tmp_path.glob("ledger*"):
            old.unlink()
        path.write_bytes(flipped)
        caplog.clear()
        try:
            accounting = restored(path, state, can_rebuild=can_rebuild)
        except LedgerError as error:
            assert str(path) in str(error) and "away" in str(error), bit
            found["refused"] += 1
            continue
        if accounting != true:
            assert len(caplog.messages) == 1 and "generated again" in caplog.text, bit
            assert accounting[0].done == true[0].done and all(s in true[0].buffered for s in accounting[0].buffered), (
                bit
            )
        found["regenerated" if caplog.messages else "no effect"] += 1
    assert found["no effect"] > 50 and found["regenerated" if can_rebuild else "refused"] > 50, found


@pytest.mark.parametrize(
    "fault",
    [
        "DELETE FROM groups WHERE consumed_step = 4",
        "DELETE FROM groups WHERE state = 'failed'",
        "DELETE FROM groups WHERE prompt_index = 21",
        "DELETE FROM steps WHERE step = 3",
        "DELETE FROM steps WHERE step = 7",
        "DELETE FROM sums WHERE name = 'steps'",
        "UPDATE groups SET state = 'trained' WHERE prompt_index = 26",
        "UPDATE groups SET consumed_step = 6 WHERE prompt_index = 0",
        "UPDATE groups SET after_step = 6 WHERE prompt_index = 4",
        "UPDATE groups SET newest_version = 0 WHERE prompt_index = 21",
        "UPDATE groups SET finished_version = 7 WHERE prompt_index = 21",
        "UPDATE groups SET group_id = 77 WHERE prompt_index = 21",
        "UPDATE groups SET prompt_index = 77 WHERE prompt_index = 21",
        "UPDATE facts SET value = '43' WHERE name = 'seed'",
    ],
)
def test_rows_that_the_run_did_not_write_are_refused_or_taken_from_the_checkpoint(tmp_path, build, caplog, fault):
    path = tmp_path / "ledger.sqlite"
    state = a_run(path, build)
    change(path, fault)
    table = fault.split()[1 + fault.startswith("DELETE")].replace("sums", "steps")
    with pytest.raises(LedgerError, match=rf"{path} is damaged: .*table {table} .*; move the file away"):
        restored(path, None)
    accounting, fingerprint = restored(path, state, can_rebuild=True)
    assert accounting.done == set(range(35)) - set(state["open"]) and accounting.buffered == () and fingerprint == {}
    assert len(caplog.messages) == 1 and f"it is now {path}.damaged, finished groups are gener" in caplog.text


def test_samples_of_another_group_are_not_trained_for_it(tmp_path, build):
    path = tmp_path / "ledger.sqlite"
    state = a_run(path, build)
    change(
        path,
        "DELETE FROM tokens WHERE prompt_index = 21",
        "UPDATE tokens SET prompt_index = 21 WHERE prompt_index = 22",
    )
    with pytest.raises(LedgerError, match="corrupted at prompt 21: its samples are those of group 22, not of 21"):
        restored(path, state)
    assert not {21, 22} & {s.prompt_index for s in restored(path, state, can_rebuild=True)[0].buffered}


def test_samples_that_are_gone_are_generated_again_with_a_warning(tmp_path, build, caplog):
    path = tmp_path / "ledger.sqlite"
    state = a_run(path, build)
    change(path, "DELETE FROM tokens WHERE prompt_index IN (21, 22)")
    assert not {21, 22} & {s.prompt_index for s in restored(path, state)[0].buffered}
    assert "2 finished groups have no samples any more" in caplog.text


@pytest.mark.parametrize(
    ("differs", "said"),
    [
        (
            lambda open_: [i for i in open_ if i != 21],
            r"the checkpoint of step 5 is done with prompts 21, which the led",
        ),
        (lambda open_: [0, 1, *open_], r"prompts 0, 1 are trained, which the checkpoint of step 5 has open"),
    ],
)
def test_a_ledger_that_contradicts_its_checkpoint_is_refused_or_rebuilt(tmp_path, build, caplog, differs, said):
    path = tmp_path / "ledger.sqlite"
    state = a_run(path, build)
    state["open"] = differs(state["open"])
    with pytest.raises(LedgerError, match=rf"{path}: {said}.*; move the file away"):
        restored(path, state)
    accounting, _ = restored(path, state, can_rebuild=True)
    assert accounting.done == set(range(35)) - set(state["open"])
    assert len(caplog.messages) == 1 and (tmp_path / "ledger.sqlite.damaged").exists()


def test_a_ledger_of_an_earlier_version_opens_and_is_protected_from_then_on(tmp_path, build):
    path = tmp_path / "ledger.sqlite"
    state = a_run(path, build)
    before = path.read_bytes()
    change(path, "DROP TABLE sums", "PRAGMA user_version = 2")
    old = path.read_bytes()
    accounting = restored(path, state)
    (tmp_path / "new").write_bytes(before)
    assert accounting == restored(tmp_path / "new", state) and len(accounting[0].buffered) == 9
    change(path, "DELETE FROM groups WHERE prompt_index = 0")
    with pytest.raises(LedgerError, match="table groups has"):
        restored(path, state)
    path.write_bytes(old)
    change(path, "DELETE FROM groups WHERE prompt_index IN (0, 1)")
    with pytest.raises(
        LedgerError, match="the checkpoint of step 5 is done with prompts 0, 1, which the ledger has open"
    ):
        restored(path, state)
    path.write_bytes(old)
    change(path, "DELETE FROM steps WHERE step = 3")
    with pytest.raises(LedgerError, match="step 4 is recorded, and step 3 is not"):
        restored(path, state)


def test_steps_that_a_ledger_lacks_because_it_took_a_position_are_no_damage(tmp_path, build):
    path = tmp_path / "ledger.sqlite"
    ledger = SqliteLedger(path)
    ledger.restore(4, {"next_index": 8, "open": [7]})
    ledger.finished(build.group(9, 4), 7, 4)
    ledger.trained(5, [7])
    ledger.close()
    assert SqliteLedger(path).restore(5, {"next_index": 8, "open": []}).done == set(range(8))


def test_a_fresh_run_moves_a_damaged_ledger_away(tmp_path):
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(b"not a database" * 1000)
    assert move_to_previous(path) == tmp_path / "ledger.sqlite.previous" and not path.exists()


@pytest.mark.parametrize("where", [None, 17, 24, 0.5, 0.999])
def test_a_log_that_can_be_read_in_part_only_is_said(tmp_path, build, caplog, where):
    """What a killed process leaves: file and log. `where`: the byte, or its place in the whole, that has changed."""
    living = SqliteLedger(tmp_path / "living")
    for index in range(9):
        living.finished(build.group(index), index, 0)
    log = bytearray((tmp_path / "living-wal").read_bytes())
    if where is not None:
        log[where if isinstance(where, int) else int(where * len(log))] ^= 1
    (tmp_path / "ledger-wal").write_bytes(log)
    shutil.copy(tmp_path / "living", tmp_path / "ledger")
    living.close()
    ledger = SqliteLedger(tmp_path / "ledger")
    kept = [s.prompt_index for s in ledger.restore(0).buffered]
    ledger.close()
    assert kept == list(range(len(kept))) and (len(kept) == 9) == (where is None)
    assert ("its log breaks off" in caplog.text) == (where is not None)
    caplog.clear()
    SqliteLedger(tmp_path / "ledger").close()
    assert not caplog.messages


def test_a_log_that_began_again_is_whole(tmp_path, build, caplog):
    """Behind the records of this round are those of an earlier one, which are in the file."""
    living = SqliteLedger(tmp_path / "living")
    for index in range(9):
        living.finished(build.group(index), index, 0)
    living._db.execute("PRAGMA wal_checkpoint(RESTART)")
    living.finished(build.group(9), 9, 0)
    for name in ("living", "living-wal"):
        shutil.copy(tmp_path / name, tmp_path / name.replace("living", "ledger"))
    living.close()
    ledger = SqliteLedger(tmp_path / "ledger")
    assert len(ledger.restore(0).buffered) == 10 and not caplog.messages
    ledger.close()
