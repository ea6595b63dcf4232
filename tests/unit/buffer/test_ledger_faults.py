"""Full, locked and corrupted ledgers, real files: a clear error, and no finished group lost without being named."""

import asyncio
import resource
import sqlite3
import subprocess
import sys

import pytest

from roll_async.buffer.errors import LedgerError
from roll_async.buffer.ledger import SqliteLedger
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
