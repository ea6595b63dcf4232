import asyncio
import subprocess
import sys
import time

import pytest

psutil = pytest.importorskip("psutil")

from roll_async.inference.processes import process_ids, until_gone
from tests.patience import patient

SLEEPER = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.mark.slow
def test_a_start_waits_for_the_processes_that_were_there_before():
    async def go():
        child = subprocess.Popen(SLEEPER)
        ids = [p for p in process_ids() if p[0] == child.pid]
        assert ids
        waiting = asyncio.create_task(until_gone(ids, timeout_s=30))
        await asyncio.sleep(0.5)
        assert not waiting.done()
        child.kill()
        await waiting
        child.wait()

    asyncio.run(go())


def test_an_id_that_another_process_has_now_is_not_waited_for():
    started = time.monotonic()
    ids = [(pid, created - 100) for pid, created in process_ids()]
    asyncio.run(until_gone(ids, timeout_s=30))
    assert time.monotonic() - started < patient(5)


def test_what_does_not_end_is_named():
    child = subprocess.Popen(SLEEPER)
    try:
        ids = [p for p in process_ids() if p[0] == child.pid]
        with pytest.raises(RuntimeError, match=f"processes {child.pid} of the replica that died still run"):
            asyncio.run(until_gone(ids, timeout_s=0.3))
    finally:
        child.kill()
        child.wait()
