"""What every test stands on: the logger that runs turn to their own files is anybody's again."""

import gc
import logging

import pytest


@pytest.fixture(autouse=True)
def heard_by_caplog():
    """caplog listens at the root. `RunFolder.open_log` keeps a process's records to the files of its run, for good, and
    SGLang sets the level of the root logger.
    """
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("roll_async").propagate = True


def pytest_collection_finish():
    """Later collections leave out the hundreds of thousands of objects of imported libraries and collected tests."""
    gc.collect()
    gc.freeze()
