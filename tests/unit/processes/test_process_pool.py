"""Processes start, start again and end, whatever they do; which work they get is not here."""

import asyncio
import os
from pathlib import Path

import pytest

from roll_async.processes.pool import ProcessPool, Program
from tests.patience import patient

HERE = str(Path(__file__).parent)
ROOT = str(Path(__file__).parents[3])


def program(module="talking_program", **options):
    path = os.pathsep.join((HERE, ROOT))
    return Program(
        name="test",
        module=module,
        settings=options,
        environment=lambda: {"PATH": os.environ["PATH"], "PYTHONPATH": path},
        line_bytes=1000,
        start_timeout_s=patient(20.0),
    )


async def ended(process):
    """Its lines until its end."""
    lines, end = [], asyncio.Event()
    process.attach(lines.extend, end.set)
    async with asyncio.timeout(patient(20)):
        await end.wait()
    return lines


@pytest.mark.parametrize("forks", [False, True])
def test_a_process_that_writes_no_end_of_line_is_ended_at_the_bound(forks):
    async def work():
        pool = ProcessPool(program(), forks=forks)
        process = await pool.start()
        process.send([b"one\n", b"endless\n"])
        lines = await ended(process)
        await pool.close()
        return lines, process.problem

    assert asyncio.run(work()) == ([b'"one"'], "a line of more than 1000 bytes")


def test_what_a_process_says_before_it_is_ready_is_why_it_does_not_start():
    async def start(**options):
        pool = ProcessPool(program(**options))
        try:
            await pool.start()
        finally:
            await pool.close()

    with pytest.raises(RuntimeError, match="no licence"):
        asyncio.run(start(error="no licence"))
    with pytest.raises(RuntimeError, match="it ended with status 1"):
        asyncio.run(start(module="no_such_module"))


def test_a_process_is_started_again_until_one_starts_and_the_third_failure_is_told(run):
    class Failing(ProcessPool):
        failures = 4

        async def _start(self):
            self.failures -= 1
            if self.failures >= 0:
                raise OSError(f"{self.failures} to go")
            return "a process"

    async def work():
        pool, told, started = Failing(program()), [], asyncio.get_running_loop().create_future()
        pool.restart(started.set_result, told.append)
        return await started, told

    assert run(work()) == ("a process", ["no worker starts: 1 to go", "no worker starts: 0 to go"])
