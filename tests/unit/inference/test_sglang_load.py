"""What SGLang's scheduler leaves in shared memory, and what the outputs of its requests add."""

from types import SimpleNamespace

import pytest

from roll_async.inference.sglang.load import SglangLoadReader


class Snapshots:
    """SGLang's reader of the scheduler's last snapshot; None before the first one."""

    def __init__(self):
        self.last = None

    def read(self, rank):
        assert rank == 0
        return self.last

    def leave(self, running, used):
        self.last = SimpleNamespace(num_running_reqs=running, num_used_tokens=used)


@pytest.fixture
def snapshots():
    return Snapshots()


@pytest.fixture
def reader(snapshots):
    return SglangLoadReader(SimpleNamespace(load_snapshot_reader=snapshots), total_tokens=1000)


def test_before_the_first_snapshot_the_cache_is_empty_and_requests_wait(reader):
    for num_requests in (0, 5):
        running, kv = reader.read(num_requests)
        assert (running, kv.total_tokens, kv.free_tokens) == (0, 1000, 1000)


def test_the_cache_is_that_of_the_last_snapshot_and_empty_without_requests(reader, snapshots):
    snapshots.leave(running=3, used=400)
    running, kv = reader.read(5)
    assert (running, kv.free_tokens) == (3, 600)
    snapshots.leave(running=3, used=1100)
    assert reader.read(2)[0] == 2 and reader.read(2)[1].free_tokens == 0
    assert reader.read(0)[1].free_tokens == 1000, "the last ones were aborted, and no step has told of it"


def test_retractions_and_prefix_hits_grow_with_the_outputs_of_each_request(reader):
    first = {"num_retractions": 1, "prompt_tokens": 300, "cached_tokens": 200}
    reader.add({}, first)
    reader.add(first, {**first, "num_retractions": 3})
    reader.add(first, {})
    kv = reader.read(1)[1]
    assert (kv.preemptions, kv.prefix_asked_tokens, kv.prefix_hit_tokens) == (3, 300, 200)
