"""Garbage collections while a process starts."""

import gc

import pytest

from roll_async.cluster.garbage import start_without_collections


@pytest.fixture(autouse=True)
def nothing_stays_frozen():
    yield
    gc.unfreeze()


def test_collections_rest_during_a_start_and_go_on_after_it_even_if_it_fails():
    with start_without_collections():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(OSError), start_without_collections():
        raise OSError("no such model")
    assert gc.isenabled()


def test_only_a_process_that_says_so_keeps_what_is_there_out_of_later_collections():
    frozen = gc.get_freeze_count()
    with start_without_collections():
        pass
    assert gc.get_freeze_count() == frozen
    with start_without_collections(settled=True):
        kept = [[] for _ in range(100)]
    assert gc.get_freeze_count() >= frozen + len(kept)
