"""Garbage collections while a process starts, and in its loop."""

import asyncio
import gc
import weakref

import pytest

from roll_async.cluster import gc_policy
from roll_async.cluster.gc_policy import defer_gc_during_startup


@pytest.fixture(autouse=True)
def nothing_stays_frozen():
    yield
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def everything_rests_again():
    yield
    gc.collect()
    gc.freeze()  # as tests/conftest.py left it


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(gc_policy, "_PASS_EVERY_S", 0.01)


class Pair:
    """Refers to itself: only a collection finds it."""

    def __init__(self):
        self.other = self


def test_collections_rest_during_a_start_and_go_on_after_it_even_if_it_fails():
    with defer_gc_during_startup():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(OSError), defer_gc_during_startup():
        raise OSError("no such model")
    assert gc.isenabled()


@pytest.mark.slow
def test_only_a_process_that_says_so_keeps_what_is_there_out_of_later_collections():
    gc.collect()  # Python 3.12 keeps what is immortal out of later ones, too
    frozen = gc.get_freeze_count()
    with defer_gc_during_startup():
        pass
    assert gc.get_freeze_count() == frozen

    async def settle():
        with defer_gc_during_startup(settled=True):
            return [[] for _ in range(100)]

    kept = asyncio.run(settle())
    assert gc.get_freeze_count() >= frozen + len(kept)


@pytest.mark.slow
def test_a_loop_looks_only_at_what_is_new_and_leaves_it_out_from_then_on():
    async def run():
        with defer_gc_during_startup(settled=True):
            frozen = gc.get_freeze_count()
        kept, unused = [Pair() for _ in range(100)], weakref.ref(Pair())
        await asyncio.sleep(0.1)
        return gc.get_freeze_count() - frozen, kept, unused() is None

    more, kept, collected = asyncio.run(run())
    assert more >= len(kept) and collected


@pytest.mark.slow
@pytest.mark.parametrize(("every_s", "found"), [(1800.0, False), (0.0, True)])
def test_what_became_garbage_after_it_was_left_out_is_found_when_everything_is_looked_at(monkeypatch, every_s, found):
    monkeypatch.setattr(gc_policy, "_EVERYTHING_EVERY_S", every_s)

    async def run():
        with defer_gc_during_startup(settled=True):
            kept = Pair()
        there = weakref.ref(kept)
        await asyncio.sleep(0.05)
        del kept
        await asyncio.sleep(0.05)
        return there() is None

    assert asyncio.run(run()) is found


@pytest.mark.slow
def test_roles_that_start_again_do_not_collect_twice_as_often(monkeypatch):
    passes = []

    async def run():
        for _ in range(3):
            with defer_gc_during_startup(settled=True):
                pass
        monkeypatch.setattr(gc, "collect", lambda *generation: passes.append(generation))
        await asyncio.sleep(0.105)

    asyncio.run(run())
    assert 0 < len(passes) <= 11
