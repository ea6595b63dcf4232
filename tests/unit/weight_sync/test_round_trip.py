"""What a receiver reads is what the sender had: over every transport that runs on a CPU, to the last bit."""

import logging
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from roll_async.weight_sync.bucket import STAGED
from roll_async.weight_sync.layout import Cut, EngineLayout
from roll_async.weight_sync.transfer import TensorPart, plan_blocks, size_of
from roll_async.weight_sync.transport import shm
from roll_async.weight_sync.transport.transports import RECEIVERS, SENDERS, choose_transport

CPU_TRANSPORTS = sorted(STAGED)


@pytest.mark.parametrize("transport", CPU_TRANSPORTS)
@pytest.mark.parametrize("block_bytes", [64, 1000, 1 << 20])
def test_every_tensor_arrives_bit_by_bit_with_the_same_digest(transfers, transport, block_bytes):
    sent = transfers.tensors()
    sender = transfers.sender(sent, transport, version=3, block_bytes=block_bytes)
    (got,), (trainer, replica) = transfers.send_all([sender], [transfers.receiver(sender.plan)])
    assert trainer == replica
    assert got.keys() == sent.keys()
    for name, tensor in sent.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor)


@pytest.mark.parametrize("transport", CPU_TRANSPORTS)
def test_the_next_version_reuses_the_sender_s_memory_and_is_the_one_received(transfers, transport):
    first = transfers.sender({"a": torch.zeros(4)}, transport)
    (old,), before = transfers.send_all([first], [transfers.receiver(first.plan)])
    second = transfers.sender(transfers.tensors(2), transport, version=2, previous=first)
    assert second.writer is first.writer
    (got,), after = transfers.send_all([second], [transfers.receiver(second.plan)])
    assert all(torch.equal(got[name], tensor) for name, tensor in transfers.tensors(2).items())
    assert torch.equal(old["a"], torch.zeros(4)) or transport != "gloo"
    assert len(set(before)) == len(set(after)) == 1 and before != after


@pytest.mark.parametrize("transport", CPU_TRANSPORTS)
def test_two_trainer_ranks_fill_two_engine_ranks_and_each_gets_its_rows_only(transfers, transport):
    name, truth = "model.layers.0.mlp.up_proj.weight", torch.arange(64.0).view(16, 4)
    norm = torch.arange(5.0)
    layout = EngineLayout(tensor=2)
    halves = [Cut(dim=0, start=0, stop=8), Cut(dim=0, start=8, stop=16)]
    parts = [TensorPart(name=name, shape=(16, 4), cut=c, tensor=truth[c.start : c.stop]) for c in halves]
    senders = [
        transfers.sender([parts[0], TensorPart.whole("norm", norm)], transport, block_bytes=80, layout=layout),
        transfers.sender([parts[1]], transport, block_bytes=80, source=1, layout=layout),
    ]
    receivers = [transfers.receiver(senders[0].plan, rank) for rank in range(2)]
    got, (trainer, replica) = transfers.send_all(senders, receivers)
    assert trainer == replica and len(trainer.split(".")) == 2
    for rank, tensors in enumerate(got):
        assert torch.equal(tensors["norm"], norm) and tensors[name].shape == truth.shape
        rows = slice(8 * rank, 8 * rank + 8)
        assert torch.equal(tensors[name][rows], truth[rows])


@pytest.mark.parametrize("transport", CPU_TRANSPORTS)
def test_a_part_that_does_not_come_leaves_its_tensor_incomplete_and_the_digest_wrong(transfers, transport):
    sender = transfers.sender({"large": torch.arange(1000.0)}, transport, block_bytes=500)
    receiver = transfers.receiver(sender.plan)
    (got,), digests = transfers.send_all([sender], [receiver], damage=_drop(2))
    assert got == {} and receiver.incomplete == ["large"] and digests[0] != digests[1]


def _drop(index):
    """Buckets with this number lose their blocks."""

    def damage(bucket):
        if bucket.index == index:
            object.__setattr__(bucket, "blocks", ())

    return damage


@pytest.mark.parametrize("transport", ["shm", "filesystem"])
def test_a_byte_flipped_in_a_file_shows_as_a_wrong_digest(transfers, transport):
    def flip(bucket):
        if bucket.index == 1:
            (block,) = bucket.blocks
            with Path(block.location).open("r+b") as file:
                file.seek(block.slots[0].offset + 3)
                byte = file.read(1)[0]
                file.seek(-1, 1)
                file.write(bytes([byte ^ 1]))

    sender = transfers.sender(transfers.tensors(), transport)
    _, (trainer, replica) = transfers.send_all([sender], [transfers.receiver(sender.plan)], damage=flip)
    assert trainer != replica


@pytest.mark.parametrize("transport", ["shm", "filesystem"])
def test_what_a_receiver_writes_into_its_tensors_reaches_nobody_else(transfers, transport):
    sender = transfers.sender({"a": torch.zeros(8)}, transport)
    (bucket,) = transfers.buckets([sender])
    readers = [transfers.receiver(sender.plan) for _ in range(2)]
    readers[0].take(bucket)
    dict(readers[0].tensors())["a"].fill_(1.0)
    readers[1].take(bucket)
    assert torch.equal(dict(readers[1].tensors())["a"], torch.zeros(8))


@pytest.mark.parametrize("transport", ["shm", "filesystem"])
def test_files_are_private_and_gone_after_close_but_no_received_tensor_is(transfers, transport):
    sender = transfers.sender(transfers.tensors(), transport)
    paths = []
    (got,), _ = transfers.send_all(
        [sender], [transfers.receiver(sender.plan)], damage=lambda bucket: paths.append(Path(bucket.blocks[0].location))
    )
    assert len(paths) > 2
    assert all(p.stat().st_mode & 0o777 == 0o600 and p.name.startswith(shm.FILE_PREFIX) for p in paths)
    sender.close()
    assert not any(p.exists() for p in paths)
    assert torch.equal(got["transposed"], transfers.tensors()["transposed"])


def test_shared_files_carry_the_marker_of_the_run_so_that_the_reaper_finds_them(transfers, monkeypatch):
    monkeypatch.setenv("ROLL_ASYNC_RUN", "run7")
    (bucket,) = transfers.buckets([transfers.sender({"a": torch.zeros(1)})])
    assert Path(bucket.blocks[0].location).name.startswith("roll_async-run7-")


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="needs a folder in which no file can be made")
def test_a_folder_without_room_is_left_for_the_next_one_and_without_one_the_error_says_what_to_do(
    transfers, tmp_path, caplog
):
    planned = next(plan_blocks(transfers.whole(transfers.tensors()), EngineLayout(), 1 << 20))
    writer = shm.FileWriter(folders=(Path("/proc"), tmp_path))
    with caplog.at_level(logging.WARNING):
        location, data = writer.write(0, planned, size_of(planned))
    assert Path(location).parent == tmp_path and len(data) >= size_of(planned)
    assert "/proc has" in caplog.text and f"continuing in {tmp_path}" in caplog.text
    writer.close()
    with pytest.raises(ValueError, match="/proc has .* needs .* enlarge it"):
        shm.FileWriter(folders=(Path("/proc"),)).write(0, planned, size_of(planned))
    with pytest.raises(ValueError, match=f"{tmp_path} has [0-9]+ MiB free.*one copy of the weights"):
        shm.FileWriter(folders=(tmp_path,)).write(0, [], 1 << 60)


@pytest.mark.slow
def test_a_killed_receiver_leaves_nothing_and_the_sender_goes_on(transfers):
    sender = transfers.sender(transfers.tensors())
    block = sender.next_block()
    script = (
        "import sys, os, pickle; from roll_async.weight_sync.transport.shm import FileReader;"
        "block = pickle.loads(bytes.fromhex(sys.argv[1]));"
        "views = list(FileReader().read(block, 0)); print(len(views), flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", script, pickle.dumps(block).hex()], capture_output=True, text=True)
    assert done.returncode == -9 and int(done.stdout) == len(block.slots)
    again = transfers.sender(transfers.tensors(), previous=sender)
    (got,), (trainer, replica) = transfers.send_all([again], [transfers.receiver(again.plan)])
    assert trainer == replica and len(got) == len(transfers.tensors())


def test_the_folder_transport_asks_for_a_folder(transfers):
    transfers.folder = None
    with pytest.raises(ValueError, match="filesystem needs a folder"):
        transfers.sender({}, "filesystem")


def test_senders_and_receivers_have_the_same_names():
    assert set(SENDERS) == set(RECEIVERS) >= STAGED


def choose(wanted, trainer=None, engines=None, per_node=8, **options):
    places = {"trainer_devices": trainer, "engine_devices": engines, "num_gpus_per_node": per_node}
    return choose_transport(wanted, **places, **options)[0]


def test_auto_takes_the_devices_own_ways_where_there_are_devices_and_host_memory_elsewhere():
    assert choose("auto") == "shm"
    assert choose("auto", [0, 1], [2, 3]) == "nccl"
    assert choose("auto", range(8), range(8, 16)) == "nccl"
    assert choose("auto", [0], [0]) == "cuda_ipc"
    assert choose("auto", range(8), range(4, 8)) == "cuda_ipc", "nested mappings share some devices"
    assert choose("auto", range(8), None) == "shm"
    assert choose("auto", range(16), None) == "gloo"


def test_an_engine_whose_front_end_takes_the_weights_in_gets_them_in_host_memory():
    assert choose("auto", [0], [1], front_end="it has stages") == "shm"
    assert choose("auto", range(8), range(8, 16), front_end="it has stages") == "gloo"
    with pytest.raises(ValueError, match="nccl: it has stages; use auto"):
        choose("nccl", [0], [1], front_end="it has stages")


@pytest.mark.parametrize(
    ("wanted", "trainer", "engines", "message"),
    [
        ("carrier_pigeon", [0], [1], "is not one of auto"),
        ("nccl", None, None, "transport nccl needs"),
        ("nccl", [0, 1], [1, 2], r"share devices \[1\]"),
        ("cuda_ipc", [0], [1], "transport cuda_ipc: .* share no device"),
        ("cuda_ipc", None, [1], "transport cuda_ipc needs"),
        ("shm", range(8), range(8, 16), "lie on nodes"),
    ],
)
def test_a_transport_that_cannot_connect_these_devices_is_refused(wanted, trainer, engines, message):
    with pytest.raises(ValueError, match=message):
        choose(wanted, trainer, engines)


@pytest.mark.parametrize(
    ("wanted", "trainer", "engines"),
    [
        ("nccl", [0, 1], [2, 3]),
        ("cuda_ipc", [0, 1], [0]),
        ("shm", [0], [1]),
        ("gloo", [0], [9]),
        ("filesystem", [0], [9]),
    ],
)
def test_a_transport_that_can_connect_them_is_taken_as_configured(wanted, trainer, engines):
    assert choose(wanted, trainer, engines) == wanted
