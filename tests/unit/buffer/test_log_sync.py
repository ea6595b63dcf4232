"""When a finished group is on the disk: one call of the disk for many groups, beside the event loop."""

import asyncio
import errno
import os
import sqlite3
import time

import pytest

from roll_async.buffer import log_sync
from roll_async.buffer.errors import LedgerError
from roll_async.buffer.ledger import SqliteLedger
from roll_async.buffer.message_queue import MessageQueue
from roll_async.buffer.states import QueueOptions, ReleaseReason
from tests.patience import patient

DISK_S = patient(0.15)


class Disk:
    """A slow disk: when each of its calls began and ended."""

    def __init__(self, monkeypatch):
        self.calls, self.error = [], None
        self._fsync = os.fsync
        monkeypatch.setattr(log_sync.os, "fsync", self.sync)

    def sync(self, handle):
        began = time.monotonic()
        self._fsync(handle)
        time.sleep(DISK_S)
        if self.error:
            raise self.error
        self.calls.append((began, time.monotonic()))


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.sqlite"


def queue_of(path, **options):
    queue = MessageQueue(QueueOptions(groups_per_batch=8, async_generation_ratio=1.0), SqliteLedger(path, **options))
    queue.weights_held(0)
    return queue


def test_groups_that_finish_together_share_the_disk_and_the_loop_goes_on(disk, path, build):
    async def go():
        queue = queue_of(path)
        gaps, last = [], time.monotonic()

        async def tick():
            nonlocal last
            while True:
                await asyncio.sleep(0.001)
                gaps.append(time.monotonic() - last)
                last = time.monotonic()

        async def finish(number, slot):
            await asyncio.sleep(0.004 * number)
            written = time.monotonic()
            assert await queue.put(build.group(slot.group_id))
            now = time.monotonic()
            assert any(written <= began and ended <= now for began, ended in disk.calls), f"group {number} is not safe"

        ticking = asyncio.create_task(tick())
        await asyncio.gather(*(finish(i, slot) for i, slot in enumerate(await queue.reserve(16))))
        ticking.cancel()
        queue.close()
        assert len(disk.calls) <= 5, "16 groups within 60 ms, a call of 150 ms"
        assert sorted(gaps)[-2] < DISK_S / 2, "the loop waited for the disk"

    asyncio.run(go())


def test_what_the_filter_dropped_is_on_the_disk_as_well_and_what_is_only_asked_again_waits_for_nothing(disk, path):
    async def go():
        queue = queue_of(path)
        first, second = await queue.reserve(2)
        await queue.release(first.group_id, ReleaseReason.REQUEUED)
        assert not disk.calls
        await queue.release(second.group_id, ReleaseReason.FILTERED)
        assert len(disk.calls) == 1
        queue.close()

    asyncio.run(go())


@pytest.mark.parametrize(("fsync", "calls"), [("group", 1), ("step", 0), ("never", 0)])
def test_only_the_setting_group_waits_for_the_disk(disk, path, build, fsync, calls):
    async def go():
        queue = queue_of(path, fsync=fsync)
        (slot,) = await queue.reserve(1)
        await queue.put(build.group(slot.group_id))
        assert len(disk.calls) == calls
        queue.close()

    asyncio.run(go())


@pytest.mark.parametrize(("fsync", "synced"), [("group", True), ("step", True), ("never", False)])
def test_a_step_is_on_the_disk_before_it_counts(path, build, monkeypatch, fsync, synced):
    said, connect = [], sqlite3.connect

    def listened_to(*args, **kwargs):
        database = connect(*args, **kwargs)
        database.set_trace_callback(said.append)
        return database

    monkeypatch.setattr(sqlite3, "connect", listened_to)
    ledger = SqliteLedger(path, fsync=fsync)
    ledger.finished(build.group(0), 0, 0)
    said.clear()
    ledger.trained(1, [0])
    commit = said.index("COMMIT")
    assert ("PRAGMA synchronous=FULL" in said[:commit]) == synced
    assert ("PRAGMA synchronous=NORMAL" in said[commit:]) == synced
    ledger.close()


def test_a_disk_that_fails_is_one_readable_error_to_all_who_wait(disk, path, build):
    async def go():
        queue = queue_of(path)
        disk.error = OSError(errno.EIO, "Input/output error")
        puts = [queue.put(build.group(slot.group_id)) for slot in await queue.reserve(3)]
        found = await asyncio.gather(*puts, return_exceptions=True)
        assert all(isinstance(error, LedgerError) for error in found)
        assert "bringing finished groups to the disk failed" in str(found[0]) and str(path) in str(found[0])
        queue.close()

    asyncio.run(go())


def test_a_disk_that_does_not_answer_is_an_error_as_well(disk, path, build, monkeypatch):
    monkeypatch.setattr(log_sync, "LIMIT_S", DISK_S / 5)

    async def go():
        ledger = SqliteLedger(path)
        ledger.finished(build.group(0), 0, 0)
        with pytest.raises(LedgerError, match=rf"the disk has not answered for {DISK_S / 5:g} s; set ledger.path"):
            await ledger.durable()
        ledger.close()

    asyncio.run(go())


def test_a_ledger_that_is_closed_during_a_call_leaves_nobody_waiting_and_no_handle_open(disk, path, build):
    async def go():
        handles = len(os.listdir("/proc/self/fd"))
        ledger = SqliteLedger(path)
        ledger.finished(build.group(0), 0, 0)
        waiting = asyncio.create_task(ledger.durable())
        await asyncio.sleep(DISK_S / 5)
        ledger.close()
        await waiting
        await ledger.durable()
        assert len(disk.calls) == 1, "what closed the file has made it durable"
        assert len(os.listdir("/proc/self/fd")) <= handles  # fewer where garbage of another test goes

    asyncio.run(go())


def test_one_who_waits_no_longer_takes_nothing_from_the_others(disk, path, build):
    async def go():
        ledger = SqliteLedger(path)
        ledger.finished(build.group(0), 0, 0)
        gone, stays = asyncio.create_task(ledger.durable()), asyncio.create_task(ledger.durable())
        await asyncio.sleep(0)
        gone.cancel()
        await stays
        assert gone.cancelled() and len(disk.calls) == 1
        ledger.close()

    asyncio.run(go())
