import asyncio
import json
import logging
import logging.config
import os
from pathlib import Path

import pytest

from roll_async.inference.backends import MemoryMoved, started
from roll_async.inference.vllm.failure import first_exception, start_errors

WORKER = """\
WorkerProc failed to start.
Traceback (most recent call last):
  File "multiproc_executor.py", line 924, in worker_main
    worker = WorkerProc(*args, **kwargs)
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 594.00 MiB.
GPU 0 has a total capacity of 79.19 GiB
EngineCore failed to start.
"""
CORE = """\
EngineCore failed to start.
Traceback (most recent call last):
  File "core.py", line 1500, in run_engine_core
    raise e from None
Exception: WorkerProc initialization failed due to an exception in a background process.
"""
CHAINED = """\
Traceback (most recent call last):
  File "a.py", line 1, in load
KeyError: 'model.layers.0'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "b.py", line 1, in load
RuntimeError: cannot load
"""


def test_the_first_process_that_failed_tells_the_cause_and_not_those_that_noticed():
    cause = first_exception(WORKER + CORE)
    assert cause.startswith("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 594.00 MiB.\nGPU 0 has")
    assert "WorkerProc initialization" not in cause


def test_of_a_chain_of_exceptions_the_first_is_the_cause():
    assert first_exception(CHAINED) == "KeyError: 'model.layers.0'"


def test_a_process_that_was_killed_logs_nothing():
    assert first_exception("") is None and first_exception("ERROR: something\n") is None


def test_a_process_that_started_may_log_errors_when_the_log_of_the_start_is_gone():
    logger = logging.getLogger("vllm")
    before = list(logger.handlers), logger.level, logger.propagate
    try:
        with start_errors():
            config = json.loads(Path(os.environ["VLLM_LOGGING_CONFIG_PATH"]).read_text())
            logging.config.dictConfig(config)  # as every process of vLLM does when it imports it
        logger.error("a step failed")
    finally:
        for handler in logger.handlers:
            handler.close()
        logger.handlers, logger.level, logger.propagate = before


@pytest.mark.parametrize("logged", [WORKER + CORE, ""])
def test_a_start_that_fails_says_what_was_logged_first_or_else_what_vllm_says(logged):
    with pytest.raises(RuntimeError) as raised, start_errors():
        config = json.loads(Path(os.environ["VLLM_LOGGING_CONFIG_PATH"]).read_text())
        Path(config["handlers"]["file"]["filename"]).write_text(logged)
        raise OSError("a process has ended")
    cause = "torch.OutOfMemoryError: CUDA out of memory" if logged else "OSError: a process has ended"
    assert str(raised.value).startswith(f"vLLM did not start: {cause}")
    assert "VLLM_LOGGING_CONFIG_PATH" not in os.environ


class Starting:
    """An engine whose first starts find that memory moved."""

    failures = 0
    starts = 0

    async def start(self):
        Starting.starts += 1
        if Starting.starts <= Starting.failures:
            with start_errors():
                raise AssertionError("Error in memory profiling. Initial free memory 1 GiB, current free memory 2 GiB.")


@pytest.mark.parametrize(("failures", "ends"), [(0, 1), (1, 2), (2, 3), (3, None)])
def test_a_start_during_which_another_process_changed_the_memory_is_tried_again_and_not_for_ever(failures, ends):
    Starting.failures, Starting.starts = failures, 0
    first = Starting()
    starting = started(first, Starting, wait_s=0.0)
    if ends is None:
        with pytest.raises(MemoryMoved, match="vLLM did not start: AssertionError: Error in memory profiling"):
            asyncio.run(starting)
    else:
        engine = asyncio.run(starting)
        assert (engine is first) == (failures == 0), "what failed is not started again"
    assert Starting.starts == (ends or 3)


def test_a_start_that_fails_otherwise_is_not_tried_again():
    class Broken:
        async def start(self):
            with start_errors():
                raise RuntimeError("no such kernel")

    with pytest.raises(RuntimeError, match="no such kernel") as told:
        asyncio.run(started(Broken(), Broken, wait_s=60.0))
    assert not isinstance(told.value, MemoryMoved)
