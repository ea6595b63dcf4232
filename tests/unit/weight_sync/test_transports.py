"""The shared round trip of every transport that runs without a GPU, and the choice between them."""

from pathlib import Path

import pytest
import torch

from roll_async.weight_sync.digest import Digest
from roll_async.weight_sync.shm import FileWriter
from roll_async.weight_sync.transports import RECEIVERS, SENDERS, STAGED, choose_transport, open_receiver, open_sender

HOST_TRANSPORTS = sorted(STAGED)


def weights(seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embedding": (40, 8), "up": (16, 8), "norm": (8,), "bias": (3,)}
    return {name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in shapes.items()}


class Trainer:
    """The sending side over several versions."""

    def __init__(self, transport, folder):
        self.transport, self.folder, self.sender, self.writers = transport, str(folder), None, []

    def start(self, tensors, version=1, verify="full"):
        self.sender = open_sender(
            self.transport,
            tensors=lambda: iter(tensors.items()),
            version=version,
            verify=verify,
            bucket_bytes=300,
            is_sender=True,
            previous=self.sender,
            folder=self.folder,
        )
        return self.sender


@pytest.fixture(params=HOST_TRANSPORTS)
def trainer(request, tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    trainer = Trainer(request.param, tmp_path / "weights")
    yield trainer
    if trainer.sender is not None:
        trainer.sender.close()


def receive(sender, verify="full", damage=None):
    """(tensors, digest) as an engine sees them; all buckets are held until the end, as a staged engine does."""
    reader, digest, found = open_receiver(sender.plan.transport), Digest(verify), {}
    while (bucket := sender.next_bucket()) is not None:
        if damage is not None:
            damage(bucket)
        for slot, raw, tensor in reader.read(bucket):
            digest.update(slot, raw)
            found[slot.name] = tensor
    copies = {name: tensor.clone() for name, tensor in found.items()}
    reader.close()
    return copies, digest.hexdigest()


def test_a_version_arrives_whole_in_several_buckets_and_both_digests_agree(trainer):
    sent = weights(1)
    sender = trainer.start(sent, version=3)
    assert (sender.plan.version, sender.plan.transport) == (3, trainer.transport)
    found, digest = receive(sender)
    assert list(found) == list(sent)
    assert all(torch.equal(found[name], sent[name]) for name in sent)
    assert digest == sender.digest


def test_the_next_version_uses_the_same_memory_and_is_the_one_received(trainer):
    first = trainer.start(weights(1))
    receive(first)
    second = trainer.start(weights(2), version=2)
    assert second.writer is first.writer
    found, digest = receive(second)
    assert all(torch.equal(found[name], tensor) for name, tensor in weights(2).items())
    assert digest == second.digest != first.digest


def test_a_larger_version_after_a_smaller_one_fits(trainer):
    receive(trainer.start({"a": torch.zeros(4)}))
    large = {"a": torch.arange(1000.0), "b": torch.ones(3)}
    found, _ = receive(trainer.start(large, version=2))
    assert torch.equal(found["a"], large["a"]) and torch.equal(found["b"], large["b"])


def test_two_receivers_of_one_version_get_the_same(trainer):
    sender = trainer.start(weights(1))
    readers = [open_receiver(trainer.transport) for _ in range(2)]
    digests = [Digest("full") for _ in readers]
    while (bucket := sender.next_bucket()) is not None:
        for reader, digest in zip(readers, digests, strict=True):
            for slot, raw, _ in reader.read(bucket):
                digest.update(slot, raw)
    for reader in readers:
        reader.close()
    assert {d.hexdigest() for d in digests} == {sender.digest}


def test_what_a_receiver_writes_into_its_tensors_reaches_nobody_else(trainer):
    sender = trainer.start({"a": torch.zeros(8)})
    bucket = sender.next_bucket()
    readers = [open_receiver(trainer.transport) for _ in range(2)]
    ((_, _, tensor),) = readers[0].read(bucket)
    tensor.fill_(1.0)
    ((_, _, untouched),) = readers[1].read(bucket)
    assert torch.equal(untouched, torch.zeros(8))
    for reader in readers:
        reader.close()


def test_a_rank_that_does_not_send_gathers_everything_and_publishes_nothing():
    gathered = []

    def stream():
        for name, tensor in weights(1).items():
            gathered.append(name)
            yield name, tensor

    options = {"version": 1, "verify": "full", "bucket_bytes": 100}
    sender = open_sender("shm", tensors=stream, is_sender=False, **options)
    count = 0
    while (bucket := sender.next_bucket()) is not None:
        assert bucket.location == "" and bucket.slots == () and bucket.num_bytes == 0
        count += 1
    assert sender.plan is None and gathered == list(weights(1)) and count > 1
    sender.close()


@pytest.mark.parametrize("transport", ["shm", "filesystem"])
def test_a_byte_flipped_in_a_file_shows_as_a_wrong_digest(transport, tmp_path):
    trainer = Trainer(transport, tmp_path)
    sender = trainer.start(weights(1))

    def flip(bucket):
        if bucket.index == 1:
            with Path(bucket.location).open("r+b") as file:
                file.seek(bucket.slots[0].offset + 3)
                byte = file.read(1)[0]
                file.seek(-1, 1)
                file.write(bytes([byte ^ 1]))

    _, digest = receive(sender, damage=flip)
    assert digest != sender.digest
    sender.close()


@pytest.mark.parametrize("transport", ["shm", "filesystem"])
def test_closing_the_sender_removes_its_files_but_no_received_tensor(transport, tmp_path):
    trainer = Trainer(transport, tmp_path)
    sender = trainer.start({"a": torch.arange(100.0)})
    bucket = sender.next_bucket()
    ((_, _, tensor),) = open_receiver(transport).read(bucket)
    assert Path(bucket.location).exists()
    sender.close()
    assert not Path(bucket.location).exists()
    assert torch.equal(tensor, torch.arange(100.0))


def test_shared_files_carry_the_marker_of_the_run_so_that_the_reaper_finds_them(monkeypatch, tmp_path):
    monkeypatch.setenv("ROLL_ASYNC_RUN", "run7")
    sender = Trainer("shm", tmp_path).start({"a": torch.zeros(1)})
    bucket = sender.next_bucket()
    assert Path(bucket.location).name.startswith("roll_async-run7-")
    sender.close()


def test_weights_larger_than_every_folder_are_refused_with_what_is_free(tmp_path):
    folders = (tmp_path / "first", tmp_path / "second")
    for folder in folders:
        folder.mkdir()
    writer = FileWriter(folders=folders)
    with pytest.raises(ValueError, match=f"{folders[1]} has [0-9]+ MiB free.*one copy of the weights"):
        writer.write(0, [], 1 << 60)
    assert [list(folder.iterdir()) for folder in folders] == [[], []]


def test_the_folder_transport_asks_for_a_folder():
    with pytest.raises(ValueError, match="filesystem needs a folder"):
        open_sender("filesystem", tensors=lambda: iter(()), version=1, verify="full", bucket_bytes=1, is_sender=True)


def test_senders_and_receivers_have_the_same_names():
    assert set(SENDERS) == set(RECEIVERS) >= STAGED


def choose(wanted, trainer=None, engines=None, per_node=8):
    return choose_transport(wanted, trainer_devices=trainer, engine_devices=engines, num_gpus_per_node=per_node)[0]


def test_auto_takes_shared_memory_on_one_host_and_tcp_across_hosts():
    assert choose("auto") == "shm"
    assert choose("auto", [0, 1], [2, 3]) == "shm"
    assert choose("auto", [0], [0]) == "shm"
    assert choose("auto", range(8), range(8, 16)) == "gloo"


@pytest.mark.parametrize(
    ("wanted", "trainer", "engines", "message"),
    [
        ("carrier_pigeon", [0], [1], "is not one of auto"),
        ("nccl", None, None, "transport nccl needs"),
        ("nccl", [0, 1], [1, 2], r"share devices \[1\]"),
        ("cuda_ipc", [0], [1], "transport cuda_ipc: .* device"),
        ("cuda_ipc", [0, 1], [0, 1], "transport cuda_ipc: .* device"),
        ("shm", range(8), range(8, 16), "lie on nodes"),
    ],
)
def test_a_transport_that_cannot_connect_these_devices_is_refused(wanted, trainer, engines, message):
    with pytest.raises(ValueError, match=message):
        choose(wanted, trainer, engines)


@pytest.mark.parametrize(
    ("wanted", "trainer", "engines"),
    [("nccl", [0, 1], [2, 3]), ("cuda_ipc", [0], [0]), ("shm", [0], [1]), ("gloo", [0], [9]), ("filesystem", [0], [9])],
)
def test_a_transport_that_can_connect_them_is_taken_as_configured(wanted, trainer, engines):
    assert choose(wanted, trainer, engines) == wanted
