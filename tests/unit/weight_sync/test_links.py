"""Links: chains of replicas, those that fail, and a device whose streams wait as CUDA's do."""

import asyncio
import queue
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from roll_async.weight_sync.changes import LastExport
from roll_async.weight_sync.digest import of_replica, of_trainer
from roll_async.weight_sync.layout import EngineLayout
from roll_async.weight_sync.transfer import BlockSender, Receiver, unpack
from roll_async.weight_sync.transport import links
from roll_async.weight_sync.transport.cuda_ipc import DeviceReader, DeviceWriter
from roll_async.weight_sync.transport.gloo import HostMedium
from roll_async.weight_sync.transport.links import LinkReader, LinkWriter
from tests.patience import patient

NAMES = ["r0", "r1", "r2", "r3"]


def chain(transfers, sender, names, ranks=1):
    """Receivers of replicas, each behind the one before it."""
    plans = [replace(sender.plan, replica=name, upstream=names[i - 1] if i else None) for i, name in enumerate(names)]
    return [[transfers.receiver(plan, rank) for rank in range(ranks)] for plan in plans]


def assert_equal(found, sent):
    assert found.keys() == sent.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in sent.items())


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(links, "CHUNK_BYTES", 256)


@pytest.mark.slow
def test_a_chain_of_replicas_holds_the_same_weights_and_the_trainer_sends_them_once(transfers, small_chunks):
    sent = transfers.tensors()
    sender = transfers.sender(sent, "gloo", layout=EngineLayout(tensor=2))
    replicas = chain(transfers, sender, NAMES, ranks=2)
    before = links.LinkServer._send
    served = []

    def counting(server, words, group, request):
        served.append(server.address)
        before(server, words, group, request)

    links.LinkServer._send = counting
    try:
        digests = asyncio.run(transfers.send_to_replicas([sender], replicas))
    finally:
        links.LinkServer._send = before
    assert len(set(digests)) == 1
    for ranks in replicas:
        assert_equal(dict(ranks[0].tensors()), sent)
    by_trainer = served.count(sender.writer._server.address)
    assert by_trainer * len(NAMES) == len(served), "each replica but the first is served by the one ahead"


def test_a_replica_behind_one_that_never_joined_pulls_from_the_trainer(transfers, small_chunks, monkeypatch):
    monkeypatch.setattr(links, "_UPSTREAM_WITHIN_S", 0.2)
    sender = transfers.sender(transfers.tensors(), "gloo")
    replicas = chain(transfers, sender, ["gone", "here"])[1:]
    (digest,) = asyncio.run(transfers.send_to_replicas([sender], replicas))
    assert digest == f"{sender.sent[0] % (1 << 128):032x}"


def test_a_replica_whose_predecessor_dies_in_the_middle_goes_on_with_the_trainer(transfers, small_chunks, caplog):
    sender = transfers.sender(transfers.tensors(), "gloo", block_bytes=600)
    (first,), (second,) = chain(transfers, sender, ["dies", "lives"])
    for bucket in transfers.buckets([sender]):
        taking = [threading.Thread(target=second.take, args=(bucket,))]
        if bucket.index < 2:
            taking.append(threading.Thread(target=first.take, args=(bucket,)))
        elif bucket.index == 2:
            first.close()
        for thread in taking:
            thread.start()
        for thread in taking:
            thread.join()
    assert second.digest == f"{sender.sent[0] % (1 << 128):032x}"
    assert "pulls from the trainer instead of its upstream replica" in caplog.text
    assert_equal(dict(second.tensors()), transfers.tensors())


def test_a_replica_whose_predecessor_died_before_it_joined_goes_on_with_the_trainer(transfers, small_chunks, caplog):
    sender = transfers.sender(transfers.tensors(), "gloo", block_bytes=600)
    (first,), (second,) = chain(transfers, sender, ["dies", "lives"])
    for bucket in transfers.buckets([sender]):
        if bucket.index == 0:
            first.take(bucket)
            first.close()
        second.take(bucket)
    assert second.digest == f"{sender.sent[0] % (1 << 128):032x}"
    assert "pulls from the trainer instead of its upstream replica" in caplog.text
    assert_equal(dict(second.tensors()), transfers.tensors())


def test_a_replica_whose_predecessor_falls_silent_goes_on_with_the_trainer(transfers, small_chunks, monkeypatch):
    """Its node lost its power: the connection stays open, and nothing comes."""
    monkeypatch.setattr(links, "_SILENT_S", 0.3)
    sent = transfers.tensors()
    sender = transfers.sender(sent, "gloo", block_bytes=600)
    replicas = chain(transfers, sender, ["silent", "lives"])
    before, awake = links.LinkServer._send, threading.Event()

    def silent(server, words, group, request):
        if server is not sender.writer._server:
            awake.wait(20)
        before(server, words, group, request)

    monkeypatch.setattr(links.LinkServer, "_send", silent)
    began = time.monotonic()
    asyncio.run(transfers.send_to_replicas([sender], replicas))
    awake.set()
    assert_equal(dict(replicas[1][0].tensors()), sent)
    assert time.monotonic() - began < patient(10)


def test_a_receiver_that_hangs_up_does_not_disturb_another(transfers):
    sender = transfers.sender(transfers.tensors(), "gloo")
    gone, stays = (transfers.receiver(sender.plan) for _ in range(2))
    for bucket in transfers.buckets([sender]):
        if bucket.index == 0:
            gone.take(bucket)
            gone.close()
        stays.take(bucket)
    assert stays.digest == f"{sender.sent[0] % (1 << 128):032x}"


def test_a_block_that_was_overwritten_is_refused(transfers):
    sender = transfers.sender(transfers.tensors(), "gloo", block_bytes=200)
    first, *_ = (bucket for bucket, _ in zip(transfers.buckets([sender]), range(4), strict=False))
    with pytest.raises(RuntimeError, match="newer one took its place"):
        transfers.receiver(sender.plan).take(first)


def test_closing_both_ends_leaves_no_thread(transfers):
    before = set(threading.enumerate())
    sender = transfers.sender(transfers.tensors(), "gloo")
    replicas = chain(transfers, sender, ["a", "b"])
    asyncio.run(transfers.send_to_replicas([sender], replicas))
    transfers.close()
    deadline = time.monotonic() + patient(5)
    while left := {t for t in set(threading.enumerate()) - before if "asyncio" not in t.name}:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def test_closing_waits_for_no_server_s_next_look_because_engines_stand_still_meanwhile(transfers):
    sender = transfers.sender(transfers.tensors(), "gloo")
    replicas = chain(transfers, sender, ["a", "b", "c", "d"])
    asyncio.run(transfers.send_to_replicas([sender], replicas))
    started = time.monotonic()
    transfers.close()
    assert time.monotonic() - started < patient(0.5)  # each of five servers took up to 0.5


class Stream:
    """Operations of a device, in order."""

    def __init__(self):
        self._queue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self):
        while (operation := self._queue.get()) is not None:
            operation()

    def enqueue(self, operation):
        self._queue.put(operation)

    def synchronize(self, timeout=5.0):
        reached = threading.Event()
        self.enqueue(reached.set)
        assert reached.wait(timeout), "the stream waits for another process"

    def close(self):
        self.enqueue(None)
        self._thread.join(5)


class StreamGroup:
    """A group that obeys CUDA's rule: an operation is queued on the current stream, and `wait` holds no thread."""

    def __init__(self, group, current):
        self._group, self._current = group, current

    def send(self, tensors, rank, tag):
        return self._queue(self._group.send, tensors, rank, tag)

    def recv(self, tensors, rank, tag):
        return self._queue(self._group.recv, tensors, rank, tag)

    def _queue(self, operation, *args):
        self._current().enqueue(lambda: operation(*args).wait())
        return self

    def wait(self):
        pass


class StreamMedium(HostMedium):
    """Host memory that behaves like a device."""

    keeps_memory = False

    def __init__(self, *, lanes=True):
        self.default, self._local, self._lanes = Stream(), threading.local(), lanes

    def current(self):
        return getattr(self._local, "stream", self.default)

    def group(self, store, rank, timeout):
        return StreamGroup(super().group(store, rank, timeout), self.current)

    @contextmanager
    def transfer_stream(self):
        if not self._lanes:
            yield
            return
        self._local.stream = stream = Stream()
        try:
            yield
            stream.synchronize()
        finally:
            del self._local.stream
            stream.close()

    def synchronize(self):
        self.default.synchronize()


def push_beside_a_computing_trainer(transfers, medium):
    """(digest sent, digest received, longest time that the trainer's own work took) of a push from and to devices."""
    plan = transfers.sender({}, "gloo").plan
    sender = BlockSender(transfers.whole(transfers.tensors()), plan, 500, LinkWriter(medium), LastExport(), source=0)
    receiver = Receiver(plan, LinkReader(StreamMedium(), plan, 0), LastExport(), keeps_memory=False)
    longest = 0.0
    for bucket in transfers.buckets([sender]):
        started = time.monotonic()
        medium.default.enqueue(lambda: time.sleep(0.01))
        medium.default.synchronize()
        longest = max(longest, time.monotonic() - started)
        receiver.take(bucket)
    receiver.close()
    sender.close()
    return f"{sender.sent[0] % (1 << 128):032x}", receiver.digest, longest


@pytest.mark.slow
def test_no_transfer_is_pending_on_the_trainer_s_default_stream_while_it_computes(transfers):
    """A receive that waits there holds back all that the trainer computes next: so `nccl` once hung."""
    sent, received, longest = push_beside_a_computing_trainer(transfers, StreamMedium())
    assert sent == received and longest < patient(1.0)


def test_without_streams_of_their_own_transfers_would_be_read_before_they_are_there(transfers):
    """The model of streams can fail: what the lanes are for."""
    medium = StreamMedium(lanes=False)
    plan = transfers.sender({}, "gloo").plan
    parts = transfers.whole({"a": torch.ones(100_000)})
    sender = BlockSender(parts, plan, 1 << 20, LinkWriter(StreamMedium()), LastExport(), source=0)
    receiver = Receiver(plan, LinkReader(medium, plan, 0), LastExport(), keeps_memory=False)
    computed = threading.Event()
    medium.default.enqueue(computed.wait)  # the engine computes
    for bucket in transfers.buckets([sender]):
        receiver.take(bucket)
    assert receiver.digest != f"{sender.sent[0] % (1 << 128):032x}"
    computed.set()
    medium.default.synchronize()
    receiver.close()
    sender.close()


def test_a_relay_keeps_a_whole_bucket_of_several_trainer_ranks_for_the_replica_after_it(transfers, monkeypatch, caplog):
    """On devices, where it does not keep everything: four ranks, and a second replica that is a bucket behind."""
    monkeypatch.setattr(links, "_UPSTREAM_WITHIN_S", 0.5)
    plan = transfers.sender({}, "gloo").plan
    truth = {f"w{rank}": torch.randn(2, 300) for rank in range(4)}
    senders = [
        BlockSender(transfers.whole({name: tensor}), plan, 1200, LinkWriter(StreamMedium()), LastExport(), source=rank)
        for rank, (name, tensor) in enumerate(truth.items())
    ]
    plans = [replace(plan, replica="first"), replace(plan, replica="second", upstream="first")]
    first, second = (Receiver(p, LinkReader(StreamMedium(), p, 0), LastExport(), keeps_memory=False) for p in plans)
    num_blocks = 0
    for bucket in transfers.buckets(senders):
        first.take(bucket)
        second.take(bucket)
        num_blocks += len(bucket.blocks)
    assert num_blocks == 8 and first.digest == second.digest == of_trainer([s.sent for s in senders])
    assert_equal(dict(second.tensors()), truth)
    assert "instead of its upstream replica" not in caplog.text
    for end in (second, first, *senders):
        end.close()


class SameMemory:
    """Reads a block in the memory of its writer, as a handle of device memory would."""

    def __init__(self, memory):
        self._memory = memory

    def read(self, block, rank):
        yield from unpack(block, self._memory[block.location], rank)

    def close(self):
        pass


@pytest.mark.parametrize(("here", "pulled"), [("gpu0", 0), ("gpu1", 3)])
def test_roles_that_share_devices_read_their_own_device_in_place_and_pull_the_rest(transfers, here, pulled):
    plan = transfers.sender({}, "gloo").plan
    memory, pulls = {}, []

    def handle(data):
        memory[f"handle{len(memory)}"] = data
        return f"handle{len(memory) - 1}"

    class Counting(LinkReader):
        def read(self, block, rank):
            pulls.append(block.location)
            yield from super().read(block, rank)

    writer = DeviceWriter(LinkWriter(HostMedium()), device="gpu0", handle=handle)
    sender = BlockSender(transfers.whole({"a": torch.arange(100.0)}), plan, 150, writer, LastExport(), source=0)
    reader = DeviceReader(Counting(HostMedium(), plan, 0), SameMemory(memory), device=here)
    receiver = Receiver(plan, reader, LastExport(), keeps_memory=False)
    for bucket in transfers.buckets([sender]):
        receiver.take(bucket)
    assert_equal(dict(receiver.tensors()), {"a": torch.arange(100.0)})
    assert len(pulls) == pulled
    receiver.close()
    sender.close()


def test_engine_ranks_of_one_device_read_the_same_memory_in_place_and_each_takes_what_it_keeps(transfers):
    """Two replicas of two tensor-parallel ranks, all on the device of the trainer rank: nothing is sent."""
    plan = transfers.sender({}, "gloo", layout=EngineLayout(tensor=2)).plan
    name, truth, memory = "model.layers.0.mlp.up_proj.weight", torch.arange(64.0).view(16, 4), {}

    def handle(data):
        memory[f"handle{len(memory)}"] = data
        return f"handle{len(memory) - 1}"

    class Never(LinkReader):
        def read(self, block, rank):
            raise AssertionError("it lies on this device")

    writer = DeviceWriter(LinkWriter(HostMedium()), device="gpu0", handle=handle)
    parts = transfers.whole({name: truth, "norm": torch.ones(5)})
    sender = BlockSender(parts, plan, 80, writer, LastExport(), source=0)
    ranks = [0, 1, 0, 1]
    receivers = [
        Receiver(
            plan,
            DeviceReader(Never(HostMedium(), plan, rank), SameMemory(memory), device="gpu0"),
            LastExport(),
            rank=rank,
            keeps_memory=False,
        )
        for rank in ranks
    ]
    for bucket in transfers.buckets([sender]):
        for receiver in receivers:
            receiver.take(bucket)
    for rank, receiver in zip(ranks, receivers, strict=True):
        got, rows = dict(receiver.tensors()), slice(8 * rank, 8 * rank + 8)
        assert torch.equal(got[name][rows], truth[rows]) and torch.equal(got["norm"], torch.ones(5))
    for pair in (receivers[:2], receivers[2:]):
        assert of_replica(r.digest for r in pair) == of_trainer([sender.sent])
    for end in (*receivers, sender):
        end.close()
