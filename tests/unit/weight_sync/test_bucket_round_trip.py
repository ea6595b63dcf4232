"""What a receiver reads is what the sender had: over every transport that runs on a CPU, to the last bit."""

import logging
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from roll_async.weight_sync import shm
from roll_async.weight_sync.bucket import TensorSlot
from roll_async.weight_sync.digest import Digest, as_bytes
from roll_async.weight_sync.packing import pack, plan_buckets, size_of
from roll_async.weight_sync.transports import open_receiver, open_sender

CPU_TRANSPORTS = ["shm", "filesystem", "gloo"]


def some_tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(7, 5), (1,), (64, 33), (), (0, 4), (3, 2, 2), (257,)]
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    tensors = [
        (f"layer.{i}.{str(dtype)[6:]}", torch.randn(shape, generator=generator).to(dtype))
        for i, shape in enumerate(shapes)
        for dtype in dtypes
    ]
    return [*tensors, ("transposed", torch.randn(6, 4, generator=generator).t())]


def sender_of(tensors, transport="shm", bucket_bytes=1000, verify="full", previous=None, is_sender=True, folder=None):
    return open_sender(
        transport,
        tensors=lambda: iter(tensors),
        version=1,
        verify=verify,
        bucket_bytes=bucket_bytes,
        is_sender=is_sender,
        previous=previous,
        folder=folder,
    )


def send_all(sender, receiver, verify="full"):
    """({name: tensor}, digest) as a receiver ends up with them, read back only when all buckets have come."""
    digest, tensors, buckets = Digest(verify), {}, []
    while (bucket := sender.next_bucket()) is not None:
        buckets.append(bucket)
        for slot, raw, tensor in receiver.read(bucket):
            digest.update(slot, raw)
            tensors[slot.name] = tensor
    return tensors, digest.hexdigest(), buckets


@pytest.mark.parametrize("transport", CPU_TRANSPORTS)
@pytest.mark.parametrize("bucket_bytes", [64, 1000, 1 << 20])
def test_every_tensor_arrives_bit_by_bit_with_the_same_digest(transport, bucket_bytes, tmp_path):
    sent = some_tensors()
    sender = sender_of(sent, transport, bucket_bytes, folder=str(tmp_path / "sync"))
    receiver = open_receiver(transport)
    try:
        got, digest, buckets = send_all(sender, receiver)
    finally:
        receiver.close()
        sender.close()
    assert digest == sender.digest
    assert list(got) == [name for name, _ in sent]
    for name, tensor in sent:
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor)
    assert [b.index for b in buckets] == list(range(len(buckets)))
    for bucket in buckets:
        assert bucket.num_bytes <= bucket_bytes or len(bucket.slots) == 1
        assert all(s.offset % 16 == 0 for s in bucket.slots)


@pytest.mark.parametrize("transport", CPU_TRANSPORTS)
def test_the_next_version_reuses_the_sender_s_memory_and_two_receivers_read_it(transport, tmp_path):
    first = sender_of(some_tensors(1), transport, folder=str(tmp_path))
    receivers = [open_receiver(transport) for _ in range(2)]
    old = [send_all(first, receivers[0])]
    second = sender_of(some_tensors(2), transport, previous=first)
    assert second.writer is first.writer
    got = {}
    while (bucket := second.next_bucket()) is not None:
        for i, receiver in enumerate(receivers):
            for slot, _, tensor in receiver.read(bucket):
                got[i, slot.name] = tensor
    for receiver in receivers:
        receiver.close()
    second.close()
    assert len(old[0][0]) == len(some_tensors())
    for name, tensor in some_tensors(2):
        assert torch.equal(got[0, name], tensor) and torch.equal(got[1, name], tensor)


def test_ranks_that_only_gather_exhaust_the_stream_and_write_nothing():
    taken = []

    def stream():
        for name, tensor in some_tensors():
            taken.append(name)
            yield name, tensor

    sender = open_sender("shm", tensors=stream, version=1, verify="none", bucket_bytes=500, is_sender=False)
    buckets = []
    while (bucket := sender.next_bucket()) is not None:
        buckets.append(bucket)
    assert sender.plan is None and sender.writer is None
    assert len(taken) == len(some_tensors()) and all(b.slots == () and b.num_bytes == 0 for b in buckets)
    leader = sender_of(some_tensors(), bucket_bytes=500)
    count = 0
    while leader.next_bucket() is not None:
        count += 1
    leader.close()
    assert count == len(buckets), "ranks must take part in the same number of gatherings"


@pytest.mark.parametrize("bucket_bytes", [1, 40, 333, 10_000])
def test_buckets_hold_all_tensors_in_order_without_overlap(bucket_bytes):
    tensors = some_tensors()
    planned = list(plan_buckets(iter(tensors), bucket_bytes))
    assert [slot.name for bucket in planned for slot, _ in bucket] == [name for name, _ in tensors]
    for bucket in planned:
        end = 0
        for slot, tensor in bucket:
            assert slot.offset >= end and slot.offset - end < 16
            assert slot.num_bytes == tensor.numel() * tensor.element_size()
            end = slot.offset + slot.num_bytes
        assert size_of(bucket) == end
        target = torch.full((end + 8,), 171, dtype=torch.uint8)
        pack(bucket, target)
        assert (target[end:] == 171).all()


def digest_of(tensors, verify):
    digest = Digest(verify)
    for name, tensor in tensors:
        data = as_bytes(tensor)
        slot = TensorSlot(
            name=name, dtype=str(tensor.dtype)[6:], shape=tuple(tensor.shape), offset=0, num_bytes=data.numel()
        )
        digest.update(slot, data)
    return digest.hexdigest()


def test_a_full_digest_sees_any_flipped_bit():
    hypothesis = pytest.importorskip("hypothesis")
    st = hypothesis.strategies
    tensors = some_tensors()
    sizes = [t.numel() * t.element_size() for _, t in tensors]
    wanted = digest_of(tensors, "full")

    @hypothesis.settings(max_examples=60, deadline=None)
    @hypothesis.given(st.integers(0, sum(sizes) - 1), st.integers(0, 7))
    def flip(position, bit):
        changed = []
        for (name, tensor), size in zip(tensors, sizes, strict=True):
            data = as_bytes(tensor).clone()
            if 0 <= position < size:
                data[position] ^= 1 << bit
            position -= size
            changed.append((name, data.view(tensor.dtype).reshape(tensor.shape)))
        assert digest_of(changed, "full") != wanted

    flip()


@pytest.mark.parametrize("verify", ["full", "sample"])
def test_swapped_stale_and_truncated_tensors_change_the_digest(verify):
    a, b = torch.randn(400, 100), torch.randn(400, 100)
    wanted = digest_of([("a", a), ("b", b)], verify)
    assert digest_of([("a", a), ("b", b)], verify) == wanted
    others = [
        [("a", b), ("b", a)],
        [("b", b), ("a", a)],
        [("a", a)],
        [("a", a), ("b", b), ("b", b)],
        [("a", a), ("b", torch.cat([b[:399], a[:1]]))],
        [("a", torch.cat([b[:1], a[1:]])), ("b", b)],
        [("a", a.reshape(100, 400)), ("b", b)],
        [("a", a + 1e-3), ("b", b)],
        [("a", a.view(torch.int32)), ("b", b)],
    ]
    for tensors in others:
        assert digest_of(tensors, verify) != wanted


def test_sample_reads_a_bounded_part_and_none_reads_nothing():
    a = torch.zeros(1 << 20)
    middle = a.clone()
    middle[1000] = 1  # between two windows
    assert digest_of([("a", a)], "sample") == digest_of([("a", middle)], "sample")
    assert digest_of([("a", a)], "none") == digest_of([("a", a + 1)], "none")
    assert digest_of([("a", a)], "none") != digest_of([("b", a)], "none")
    with pytest.raises(ValueError, match="full | sample | none"):
        Digest("some")


def files_of(writer):
    return [f.path for f in writer._files]


def test_shared_files_are_private_to_the_user_and_gone_after_close():
    sender = sender_of(some_tensors())
    receiver = open_receiver("shm")
    got, _, buckets = send_all(sender, receiver)
    paths = files_of(sender.writer)
    assert len(paths) == len(buckets) > 2
    assert all(p.stat().st_mode & 0o777 == 0o600 and p.name.startswith(shm.FILE_PREFIX) for p in paths)
    sender.close()
    assert not any(p.exists() for p in paths)
    assert torch.equal(got["transposed"], dict(some_tensors())["transposed"]), "a receiver keeps what it has mapped"


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="needs a folder in which no file can be made")
def test_a_folder_without_room_is_left_for_the_next_one_and_without_one_the_error_says_what_to_do(tmp_path, caplog):
    full, planned = Path("/proc"), next(plan_buckets(iter(some_tensors()), 1 << 20))
    writer = shm.FileWriter(folders=(full, tmp_path))
    with caplog.at_level(logging.WARNING):
        location, data = writer.write(0, planned, size_of(planned))
    assert Path(location).parent == tmp_path and len(data) >= size_of(planned)
    assert "/proc has" in caplog.text and f"going on in {tmp_path}" in caplog.text
    writer.close()
    with pytest.raises(ValueError, match="/proc has .* needs .* enlarge it"):
        shm.FileWriter(folders=(full,)).write(0, planned, size_of(planned))


def test_a_killed_receiver_leaves_nothing_and_the_sender_goes_on():
    sender = sender_of(some_tensors())
    bucket = sender.next_bucket()
    script = (
        "import sys, os, pickle; from roll_async.weight_sync.transports import open_receiver;"
        "bucket = pickle.loads(bytes.fromhex(sys.argv[1]));"
        "views = list(open_receiver('shm').read(bucket)); print(len(views), flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", script, pickle.dumps(bucket).hex()], capture_output=True, text=True)
    assert done.returncode == -9 and int(done.stdout) == len(bucket.slots)
    got, digest, _ = send_all(sender_of(some_tensors(), previous=sender), open_receiver("shm"))
    sender.close()
    assert len(got) == len(some_tensors())


def test_a_receiver_that_hangs_up_does_not_disturb_another_over_gloo():
    sender = sender_of(some_tensors(), "gloo")
    gone, stays = open_receiver("gloo"), open_receiver("gloo")
    bucket = sender.next_bucket()
    list(gone.read(bucket))
    gone._group = None  # the connection drops without a goodbye, as when its process is killed
    seen = {slot.name for slot, _, _ in stays.read(bucket)}
    while (bucket := sender.next_bucket()) is not None:
        seen |= {slot.name for slot, _, _ in stays.read(bucket)}
    stays.close()
    sender.close()
    assert seen == {name for name, _ in some_tensors()}


def test_a_bucket_that_was_overwritten_is_refused_over_gloo():
    sender = sender_of(some_tensors(), "gloo", bucket_bytes=200)
    receiver = open_receiver("gloo")
    first = sender.next_bucket()
    sender.next_bucket()
    sender.next_bucket()
    with pytest.raises(RuntimeError, match="newer one took its place"):
        list(receiver.read(first))
    receiver.close()
    sender.close()


def test_closing_the_gloo_sender_ends_its_accepting_thread():
    sender = sender_of(some_tensors(), "gloo")
    accepting = [t for t in threading.enumerate() if t.name == "weight receivers" and t.is_alive()]
    assert accepting
    sender.close()
    for thread in accepting:
        thread.join(timeout=5)
        assert not thread.is_alive()
